"""The command line of an SGLang server: its flags, and what a list of arguments states.

Source: SGLang srt/server_args.py :: ServerArgs.add_cli_args.
"""

from __future__ import annotations

import json
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

from hicachectl.formats.errors import UsageError
from hicachectl.formats.models.recorded import recorded
from hicachectl.formats.releases import NEWEST_SGLANG

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence


@cache
def server_parser() -> argparse.ArgumentParser:
    """Return a parser of SGLang's flags: values are text, and flags not given are absent.

    It takes abbreviations as SGLang's does: `--tp` is `--tp-size`.
    """
    import argparse

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise UsageError(message.removeprefix("argument "))

    parser = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    for flag in recorded().flags:
        if flag.values != 0:
            parser.add_argument(*flag.names, nargs=flag.values)
        elif any(name.startswith("--no-") for name in flag.names):
            parser.add_argument(flag.names[0], action=argparse.BooleanOptionalAction)
        else:
            parser.add_argument(*flag.names, action="store_true")
    return parser


def parse_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the fields of ServerArgs that arguments state; values are text, switches booleans.

    Raises UsageError for flags that SGLang lacks, with the nearest that it has.
    """
    found, others = server_parser().parse_known_args(list(arguments))
    if others:
        raise UsageError("; ".join(_unknown(word) for word in others if word.startswith("-"))
                         or f"{others[0]!r:.80} belongs to no flag; leave it out")  # fmt: skip
    return vars(found)


def _unknown(word: str) -> str:
    flag = word.split("=", 1)[0]
    known = [name for flag in recorded().flags for name in flag.names]
    near = get_close_matches(flag.replace("_", "-"), known, n=1)
    hint = f"did you mean {near[0]}?" if near else "leave it out if another release has it"
    named = f"{flag:.80}" if flag.isascii() and flag.isprintable() else f"{flag!r:.80}"
    return f"SGLang {NEWEST_SGLANG} has no flag {named}; {hint}"


def config_arguments(document: Mapping[str, Any]) -> list[str]:
    """Return the arguments that a file of SGLang's --config stands for.

    Source: srt/utils/server_args_config_parser.py :: ConfigArgumentMerger. Raises UsageError for a
    flag that such a file cannot have.
    """
    arguments: list[str] = []
    names = {flag: {name.removeprefix("--") for name in flag.names} for flag in recorded().flags}
    switches = {x for flag, spelt in names.items() if flag.values == 0 for x in spelt}
    refused = {x for flag, spelt in names.items() if not flag.in_config for x in spelt}
    for key, value in document.items():
        name = str(key).replace("_", "-")
        if name in refused:
            raise UsageError(
                f"{key}: SGLang does not take this flag from a config file; give it in the command"
            )
        if isinstance(value, bool) and name in switches:
            arguments += [f"--{key}"] if value else []
        elif isinstance(value, bool):
            arguments += [f"--{key}", str(value).lower()]
        elif isinstance(value, list):
            arguments += [f"--{key}", *map(str, value)] if value else []
        else:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            arguments += [f"--{key}", text]
    return arguments
