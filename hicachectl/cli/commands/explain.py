"""`hicachectl explain`: what a finding means, and how to mend it."""

from __future__ import annotations

from difflib import get_close_matches
from functools import partial
from textwrap import TextWrapper
from typing import TYPE_CHECKING, Any, TypedDict

import click

from hicachectl.checks.codes import SEVERITIES, Code
from hicachectl.checks.registry import codes
from hicachectl.cli.command import Command
from hicachectl.cli.options import output_options
from hicachectl.cli.parameters import Parsed, argument

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from hicachectl.text.tables import Screen

_TITLES = ("meaning", "effect", "remedy", "cost")


class CodeRow(TypedDict):
    """Row of a finding code; None for what does not apply."""

    code: str
    severity: str
    exceptions: str | None
    meaning: str
    effect: str
    remedy: str
    cost: str | None
    command: str | None


class ExplainDocument(TypedDict):
    """Document of `explain`."""

    codes: list[CodeRow]


def _code_of(text: str) -> Code:
    """Return a finding code. Raises ValueError for an unknown one, with close ones and the list."""
    known = {code.name: code for code in codes()}
    name = text.strip().lower().replace("_", "-")
    if name not in known:
        close = get_close_matches(name, known, n=1)
        meant = f"did you mean {close[0]}? Give" if close else "give"
        raise ValueError(f"{text!r} is no finding code; {meant} one of {', '.join(known)}")
    return known[name]


_CODE = Parsed("code", _code_of, lambda: [code.name for code in codes()])


@click.command("explain", cls=Command)
@argument("code", metavar="[CODE]", type=_CODE, required=False)
@output_options
@click.pass_context
def command(ctx: click.Context, /, code: Code | None, **options: Any) -> None:
    """Explain what a finding means, and how to mend it.

    CODE is a finding code of verify. explain says what is wrong, what a server does with it, how to
    mend it, with the command, and what that costs. Without CODE, it lists all codes.

    hicachectl-findings(7) has the same texts.

    Examples:
      hicachectl explain
      hicachectl explain missing-pool
      hicachectl explain digest-mismatch --format json
    """
    from hicachectl.cli.output import write_report

    rows = _rows(codes() if code is None else (code,))
    lines = _list if code is None else partial(_one, code)
    write_report(ctx, {"codes": rows}, rows, "codes", lines)


def _rows(chosen: tuple[Code, ...]) -> pa.Table:
    """Return a row for each code, in strings; null for what does not apply."""
    import pyarrow as pa

    from hicachectl.text.jsontext import schema_of

    rows = [
        {
            "code": code.name,
            "severity": code.severity,
            "exceptions": code.exceptions or None,
            **{title: text or None for title, text in code.explanation().items()},
        }
        for code in chosen
    ]
    return pa.Table.from_pylist(rows, schema=schema_of(CodeRow))


def _list(screen: Screen) -> Iterator[str]:
    """Yield a line for each code, the worst severity first."""
    import pyarrow as pa

    from hicachectl.text.tables import table_lines

    ordered = sorted(codes(), key=lambda code: (-SEVERITIES.index(code.severity), code.name))
    yield from table_lines(
        pa.table(
            {
                "severity": [code.severity for code in ordered],
                "code": [code.name for code in ordered],
                "meaning": [_first_sentence(code.meaning) for code in ordered],
            }
        ),
        screen,
    )


def _first_sentence(text: str) -> str:
    return text.split(". ", maxsplit=1)[0].split(": ", maxsplit=1)[0].rstrip(".")


def _one(code: Code, _screen: Screen) -> Iterator[str]:
    """Yield the explanation of a code."""
    texts = code.explanation()
    # Commands are never divided.
    wrapped = TextWrapper(
        80, subsequent_indent=" " * 10, break_on_hyphens=False, break_long_words=False
    )
    yield f"{code.name}: {'; '.join(filter(None, (code.severity, code.exceptions)))}"
    for title in _TITLES:
        if texts[title]:
            yield ""
            yield from wrapped.wrap(f"{title.capitalize() + ':':10}{texts[title]}")
    if texts["command"]:
        yield ""
        yield f"  {texts['command']}"
