"""`hicachectl explain`: what a finding or a reason means, and what to do."""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import partial
from textwrap import TextWrapper
from typing import TYPE_CHECKING, Any, TypedDict

import click

from hicachectl.checks.codes import SEVERITIES, Code
from hicachectl.checks.reasons import HITS, PLUGIN, SGLANG, Reason, reasons
from hicachectl.checks.registry import codes
from hicachectl.cli.command import Command
from hicachectl.cli.options import output_options
from hicachectl.cli.parameters import Parsed, argument

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hicachectl.text.tables import Screen

_TITLES = {
    "meaning": "Meaning:",
    "effect": "Effect:",
    "remedy": "Remedy:",
    "cost": "Cost:",
    "afterwards": "Then:",
}
SOURCES = {
    SGLANG: "counted by SGLang",
    PLUGIN: "counted by the plug-in",
    HITS: "found by hicachectl hits",
}


# A line must not end within quotes: a shell would take the break as a part of the word.
_QUOTED = re.compile(r'"[^"]*"')
_SPACE = "\0"


class CodeRow(TypedDict):
    """Row of a finding code; None for what does not apply."""

    code: str
    severity: str
    exceptions: str | None
    meaning: str
    effect: str
    remedy: str
    cost: str | None
    afterwards: str | None
    command: str | None


class ReasonRow(TypedDict):
    """Row of a reason; None for what does not apply."""

    reason: str
    source: str
    counters: list[str]
    meaning: str
    effect: str
    remedy: str
    command: str | None


class ExplainDocument(TypedDict):
    """Document of `explain`."""

    codes: list[CodeRow]
    reasons: list[ReasonRow]


def _explained() -> tuple[Code | Reason, ...]:
    return (*codes(), *reasons())


def _named(text: str) -> tuple[Code | Reason, ...]:
    """Return the code and the reason of a name, of which `-` and `_` are alike.

    Raises ValueError for an unknown name, with a close one.
    """
    known: dict[str, list[Code | Reason]] = {}
    for one in _explained():
        known.setdefault(_folded(one.name), []).append(one)
    name = _folded(text.strip())
    if name not in known:
        close = [known[one][0].name for one in get_close_matches(name, known, n=1)]
        meant = f"did you mean {close[0]}? All" if close else "all"
        raise ValueError(
            f"{text!r} is no finding code and no reason; {meant} names: hicachectl explain"
        )
    return tuple(known[name])


def _folded(name: str) -> str:
    return name.lower().replace("_", "-")


_NAME = Parsed("name", _named, lambda: [one.name for one in _explained()])


@click.command("explain", cls=Command)
@argument("named", metavar="[NAME]", type=_NAME, required=False)
@output_options
@click.pass_context
def command(ctx: click.Context, /, named: tuple[Code | Reason, ...] | None, **options: Any) -> None:
    """Explain what a finding or a reason means, and what to do.

    NAME is a finding code of verify, or a reason why a server did not use tokens of its store: one
    that SGLang or its plug-in counts, or that hits prints. explain says what is wrong, what a
    server does, and what to do, with the command; for a finding, also what that costs. Without
    NAME, it lists all codes and all reasons.

    hicachectl-findings(7) has the same texts.

    Examples:
      hicachectl explain
      hicachectl explain missing-pool
      hicachectl explain below_threshold
      hicachectl explain digest-mismatch --format json
    """
    import pyarrow as pa

    from hicachectl.cli.output import write_report
    from hicachectl.text.jsontext import schema_of

    chosen = _explained() if named is None else named
    tables = {
        "codes": pa.Table.from_pylist(
            [_code_row(one) for one in chosen if isinstance(one, Code)], schema_of(CodeRow)
        ),
        "reasons": pa.Table.from_pylist(
            [_reason_row(one) for one in chosen if isinstance(one, Reason)], schema_of(ReasonRow)
        ),
    }
    rows = pa.concat_tables(tables.values(), promote_options="default")
    lines = _list if named is None else partial(_each, named)
    write_report(ctx, tables, rows, "", lines)


def _code_row(code: Code) -> dict[str, Any]:
    """Return the row of a code; None for what does not apply."""
    return {
        "code": code.name,
        "severity": code.severity,
        "exceptions": code.exceptions or None,
        **{title: text or None for title, text in code.explanation().items()},
    }


def _reason_row(reason: Reason) -> dict[str, Any]:
    """Return the row of a reason; None for what does not apply."""
    return {
        "reason": reason.name,
        "source": reason.source,
        "counters": list(reason.counters),
        **{title: text or None for title, text in reason.explanation().items()},
    }


def _list(screen: Screen) -> Iterator[str]:
    """Yield a line for each code, the worst severity first, then a line for each reason."""
    import pyarrow as pa

    from hicachectl.text.tables import table_lines

    ordered = sorted(codes(), key=lambda code: (-SEVERITIES.index(code.severity), code.name))
    listed = {
        "severity": [code.severity for code in ordered],
        "code": [code.name for code in ordered],
        "meaning": [_first_sentence(code.meaning) for code in ordered],
    }
    yield from table_lines(pa.table(listed), screen)
    yield ""
    listed = {
        "source": [reason.source for reason in reasons()],
        "reason": [reason.name for reason in reasons()],
        "meaning": [_first_sentence(reason.meaning) for reason in reasons()],
    }
    yield from table_lines(pa.table(listed), screen)


def _first_sentence(text: str) -> str:
    return text.split(". ", maxsplit=1)[0].split(": ", maxsplit=1)[0].rstrip(".")


def _each(named: tuple[Code | Reason, ...], _screen: Screen) -> Iterator[str]:
    """Yield explanations."""
    for number, one in enumerate(named):
        if number:
            yield ""
        if isinstance(one, Code):
            head = "; ".join(filter(None, (one.severity, one.exceptions)))
            yield from _one(f"{one.name}: {head}", one.explanation())
        else:
            yield from _one(f"{one.name}: {SOURCES[one.source]}", one.explanation(), one.counters)


def _one(head: str, texts: dict[str, str], counters: Iterable[str] = ()) -> Iterator[str]:
    """Yield an explanation."""
    # Commands are never divided.
    wrapped = TextWrapper(
        80, subsequent_indent=" " * 10, break_on_hyphens=False, break_long_words=False
    )
    yield head
    for name, title in _TITLES.items():
        if texts.get(name):
            yield ""
            whole = _QUOTED.sub(lambda found: found[0].replace(" ", _SPACE), texts[name])
            yield from (line.replace(_SPACE, " ") for line in wrapped.wrap(f"{title:10}{whole}"))
    for number, counter in enumerate(counters):
        if not number:
            yield ""
        yield f"{'' if number else 'Counters:':10}{counter}"
    if texts["command"]:
        yield ""
        yield f"  {texts['command']}"
