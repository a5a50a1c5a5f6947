"""`hicachectl explain`: what a finding, a reason or a check of `doctor` means, and what to do."""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import partial
from textwrap import TextWrapper
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

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


# No line ends within quotes, because in a copied command, the break would be part of the word.
_QUOTED = re.compile(r'"[^"]*"')
_SPACE = "\0"


class CodeRow(TypedDict):
    """Row of a finding code. Texts that do not apply to the code are None."""

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
    """Row of a reason. A command that does not apply to the reason is None."""

    reason: str
    source: str
    counters: list[str]
    meaning: str
    effect: str
    remedy: str
    command: str | None


class DoctorCheckRow(TypedDict):
    """Row of a check of `doctor`."""

    check: str
    group: str
    meaning: str


class ExplainDocument(TypedDict):
    """Document of `explain`."""

    codes: list[CodeRow]
    reasons: list[ReasonRow]
    checks: list[DoctorCheckRow]


class DoctorCheck(NamedTuple):
    """A check of `doctor`, as its man page explains it.

    group: one of `doctor.checks.GROUPS`.
    """

    name: str
    group: str
    meaning: str


# Sections of hicachectl-doctor(1) with a text for each check, and the group of the checks.
_SECTIONS = {
    "CHECKS OF A SERVER": "server",
    "THE SAME STORE": "same-store",
    "CHECKS OF THE STORE": "store",
    "CHECKS OF REQUESTS": "requests",
    "LIVE COUNTERS": "live",
}
_RUNBOOK = "NO HITS in hicachectl-runbooks(7) says what to do; hicachectl-doctor(1) has all checks."


def doctor_checks() -> Iterator[DoctorCheck]:
    """Yield the checks of `doctor`; two groups can have checks of the same name."""
    from hicachectl.cli.prose import Item, prose

    for title, group in _SECTIONS.items():
        for block in prose("hicachectl-doctor")[title]:
            if not isinstance(block, Item):
                continue
            for name in block.term.split(", "):
                # One item of the page is about all reasons, and names no check.
                if " " not in name and name != "reasons":
                    yield DoctorCheck(name, group, " ".join(block.text.split()))


def _explained() -> tuple[Code | Reason | DoctorCheck, ...]:
    return (*codes(), *reasons(), *doctor_checks())


def _named(text: str) -> tuple[Code | Reason | DoctorCheck, ...]:
    """Return the code, the reason and the checks of a name. `-` and `_` count as equal.

    Raises ValueError for an unknown name; the message suggests a similar one.
    """
    known: dict[str, list[Code | Reason | DoctorCheck]] = {}
    for one in _explained():
        known.setdefault(_folded(one.name), []).append(one)
    name = _folded(text.strip())
    if name not in known:
        close = [known[one][0].name for one in get_close_matches(name, known, n=1)]
        meant = f"did you mean {close[0]}? For" if close else "for"
        raise ValueError(
            f"{text!r} is no finding code, reason or check; {meant} all names, run hicachectl "
            "explain"
        )
    return tuple(known[name])


def _folded(name: str) -> str:
    return name.lower().replace("_", "-")


_NAME = Parsed("name", _named, lambda: {one.name for one in _explained()})


@click.command("explain", cls=Command)
@argument("named", metavar="[NAME]", type=_NAME, required=False)
@output_options
@click.pass_context
def command(
    ctx: click.Context, /, named: tuple[Code | Reason | DoctorCheck, ...] | None, **options: Any
) -> None:
    """Explain what a finding, a reason or a check means, and what to do.

    NAME is a finding code of verify, a check of doctor, or a reason why a server did not use tokens
    of its store. SGLang and the plug-in count such reasons, and hits prints them. explain says what
    is wrong, what a server does, what to do, and which command to run. For a finding, it also says
    what the remedy costs. Without NAME, explain lists all names.

    hicachectl-findings(7) has the same texts of findings and reasons, and hicachectl-doctor(1) has
    the texts of checks.

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
        "checks": pa.Table.from_pylist(
            [_check_row(one) for one in chosen if isinstance(one, DoctorCheck)],
            schema_of(DoctorCheckRow),
        ),
    }
    rows = pa.concat_tables(tables.values(), promote_options="default")
    lines = _list if named is None else partial(_each, named)
    write_report(ctx, tables, rows, "", lines)


def _code_row(code: Code) -> dict[str, Any]:
    """Return the row of a code."""
    return {
        "code": code.name,
        "severity": code.severity,
        "exceptions": code.exceptions or None,
        **{title: text or None for title, text in code.explanation().items()},
    }


def _reason_row(reason: Reason) -> dict[str, Any]:
    """Return the row of a reason."""
    return {
        "reason": reason.name,
        "source": reason.source,
        "counters": list(reason.counters),
        **{title: text or None for title, text in reason.explanation().items()},
    }


def _check_row(check: DoctorCheck) -> dict[str, Any]:
    """Return the row of a check of `doctor`."""
    return {"check": check.name, "group": check.group, "meaning": check.meaning}


def _list(screen: Screen) -> Iterator[str]:
    """Yield a line for each code, the worst severity first, each reason, and each check."""
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
    yield ""
    checks = list(doctor_checks())
    listed = {
        "group": [check.group for check in checks],
        "check": [check.name for check in checks],
        "meaning": [_first_sentence(check.meaning) for check in checks],
    }
    yield from table_lines(pa.table(listed), screen)


def _first_sentence(text: str) -> str:
    return text.split(". ", maxsplit=1)[0].split(": ", maxsplit=1)[0].rstrip(".")


def _each(named: tuple[Code | Reason | DoctorCheck, ...], _screen: Screen) -> Iterator[str]:
    """Yield the lines of explanations."""
    for number, one in enumerate(named):
        if number:
            yield ""
        if isinstance(one, Code):
            head = "; ".join(filter(None, (one.severity, one.exceptions)))
            yield from _one(f"{one.name}: {head}", one.explanation())
        elif isinstance(one, DoctorCheck):
            texts = {"meaning": one.meaning, "remedy": _RUNBOOK, "command": ""}
            yield from _one(
                f"{one.name}: a check of hicachectl doctor, in its group {one.group}", texts
            )
        else:
            yield from _one(f"{one.name}: {SOURCES[one.source]}", one.explanation(), one.counters)


def _one(head: str, texts: dict[str, str], counters: Iterable[str] = ()) -> Iterator[str]:
    """Yield the lines of one explanation."""
    # No line ends within a word, such as an option of a command.
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
