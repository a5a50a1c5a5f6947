"""What commands do to files and to the network, as hicachectl-security(7) states it."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

VERBS = ("reads", "writes", "removes")
USES = {"connects": "connects to", "listens": "listens"}


class Row(NamedTuple):
    """The places and services that a command, or a command with some options, uses.

    words: words of the command and its options.
    places: names of places by verb, or of services by use.
    """

    words: tuple[str, ...]
    places: dict[str, list[str]]


class Access(NamedTuple):
    """The tables of `access.toml`.

    system: paths of the system that any command may read.
    options: for each option, the verb for what commands do with the place that it names.
    network: rows by kind of store, with services by a key of `USES`.
    """

    system: list[str]
    commands: list[Row]
    options: dict[str, str]
    network: dict[str, list[Row]]


@cache
def access() -> Access:
    """Read the tables."""
    file = files("hicachectl.cli.manpages").joinpath("texts", "access.toml")
    tables: dict[str, Any] = tomllib.loads(file.read_text("utf-8"))
    network = {kind: _rows(table) for kind, table in tables["network"].items()}
    commands = _rows(tables["commands"])
    return Access(tables["system"]["reads"], commands, tables["options"], network)


def _rows(table: dict[str, dict[str, list[str]]]) -> list[Row]:
    return [Row(tuple(words.split()), places) for words, places in table.items()]
