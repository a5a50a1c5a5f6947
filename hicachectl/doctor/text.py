"""The checks of `doctor` for people, and its verdict in one sentence."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from hicachectl.doctor.checks import FAIL, OK, UNKNOWN, WARN, ordered
from hicachectl.text.terminal import message_text
from hicachectl.text.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicachectl.doctor.checks import Check
    from hicachectl.text.tables import Screen

_COLOURS = {FAIL: "31", WARN: "33", UNKNOWN: "36", OK: "32"}
_LEAST_WIDTH = 60


def check_lines(
    checks: Sequence[Check], screen: Screen, unchecked: Sequence[str] = ()
) -> Iterator[str]:
    """Yield the lines of the `table` format. The worst check comes first, the verdict last.

    unchecked: see `verdict_text`.
    """
    several = len({check.server for check in checks if check.server}) > 1
    status, group, name = (
        max((len(getattr(check, column)) for check in checks), default=0)
        for column in ("status", "group", "name")
    )
    indent = " " * (status + 2)
    for check in ordered(checks):
        colour = _COLOURS[check.status] if screen.colour else ""
        head = f"{check.status:<{status}}  {check.group:<{group}}  {check.name:<{name}}  "
        detail = f"{check.server}: {check.detail}" if several and check.server else check.detail
        lines = list(_wrapped(head, detail, " " * len(head), screen))
        if colour:
            lines[0] = f"\x1b[{colour}m{lines[0][:status]}\x1b[0m{lines[0][status:]}"
        yield from lines
        if check.evidence:
            yield from _wrapped(indent, check.evidence, indent, screen)
        if check.next:
            # Not wrapped, so that a copied command is one line.
            yield f"{indent}next: {message_text(check.next)}"
    yield message_text(verdict_text(checks, unchecked))


def verdict_text(checks: Sequence[Check], unchecked: Sequence[str] = ()) -> str:
    """Return the verdict: the first cause and the next command.

    unchecked: things that were not checked, each with the option that makes `doctor` check it. A
        verdict without a cause names them.
    """
    found = ordered(checks)
    first = found[0] if found else None
    if first is None or first.status == OK:
        text = f"ok: {counted(len(found), 'check')} found no cause of lost hits"
        return f"{text}. Not checked: {', '.join(unchecked)}" if unchecked else text
    label = {FAIL: FAIL, WARN: WARN, UNKNOWN: "No cause found, but not all is known"}[first.status]
    text = f"{label}: {first.detail}"
    return f"{text}; next: {first.next}" if first.next else text


def _wrapped(head: str, text: str, indent: str, screen: Screen) -> Iterator[str]:
    """Yield the lines of a text after a head. The text is made safe to show.

    On a terminal, the lines fit its width.
    """
    line = message_text(text)
    if screen.width is None or len(head) + len(line) <= screen.width:
        yield head + line
        return
    yield from textwrap.wrap(
        line,
        max(screen.width, _LEAST_WIDTH),
        initial_indent=head,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
