"""What commands do to files and to the network, as hicachectl-security(7) states it."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

VERBS = ("reads", "writes", "removes")
USES = {
    "lists": "to list or pin",
    "removes": "to remove",
    "moves": "to read or write",
    "listens": "listens",
}


class Row(NamedTuple):
    """The places that a command reads, writes and removes, or does so with some options.

    words: words of the command and its options.
    places: names of places by verb.
    """

    words: tuple[str, ...]
    places: dict[str, list[str]]


class Access(NamedTuple):
    """The tables of `access.toml`.

    system: paths of the system that any command may read.
    options: verb by option, for what all commands do with its value.
    network: services by kind of store, then by a key of `USES`.
    """

    system: list[str]
    commands: list[Row]
    options: dict[str, str]
    network: dict[str, dict[str, list[str]]]


@cache
def access() -> Access:
    """Read the tables."""
    file = files("hicachectl.cli.manpages").joinpath("texts", "access.toml")
    tables: dict[str, Any] = tomllib.loads(file.read_text("utf-8"))
    rows = [Row(tuple(words.split()), places) for words, places in tables["commands"].items()]
    return Access(tables["system"]["reads"], rows, tables["options"], tables["network"])
