"""Text of a verification report: findings by code, deployment and age, and how to mend them."""

from __future__ import annotations

import re
import textwrap
import time
from dataclasses import dataclass
from shlex import quote
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.checks.codes import (
    BELOW,
    DESPITE,
    MODEL,
    OPTIONS,
    SERVER,
    SEVERITIES,
    STORE,
    TIME,
    following_command,
    is_removal,
    is_repair,
    next_steps,
)
from hicachectl.checks.registry import code_named
from hicachectl.formats.keys.labels import label_name, label_sizes, label_text
from hicachectl.formats.objects import AXES
from hicachectl.text.tables import table_lines
from hicachectl.text.terminal import escape_controls, shortened
from hicachectl.text.units import counted, exact, human_age, human_size
from hicachectl.text.vocabulary import DEADLINE

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from hicachectl.checks.codes import Code
    from hicachectl.results import Shown
    from hicachectl.text.tables import Screen
    from hicachectl.verification.part_result import Refusal


_REPAIR = ("--repair", "quarantine")
_SIZE, _PROFILE, _DESTINATION = "SIZE", "FILE", "DST"
_GIVEN, _TARGET, _SERVER = "--profile", "--to-profile", "--server"
# A label of `keys.labels` whose model name is not escaped.
# Characters that a label escapes or marks, so that --model cannot take the name as it stands.
_ESCAPED = re.compile(r"[\s%?]")


class Mending(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of a run's command line that suggested commands reuse.

    program: words before the name of the command.
    store: store, as the user gave it.
    destination: destination of copies.
    options: words of the run's options that a suggested command repeats.
    profiled: whether the run had a profile.
    deletes: whether objects of the store can be deleted.
    quarantine: quarantine directory of repairs; empty for the default directory of the store.
    model: model name of the profile, as in keys; empty without a profile.
    sizes: sizes of the profile by axis, as in keys; empty without a profile.
    stamped: whether the run writes a stamp.
    repair_codes: codes that the run's repair takes in addition to errors.
    """

    program: tuple[str, ...] = ("hicachectl",)
    store: str = STORE
    destination: str = _DESTINATION
    options: tuple[str, ...] = ()
    profiled: bool = True
    deletes: bool = True
    quarantine: str = ""
    model: str = ""
    sizes: dict[str, int] = {}
    stamped: bool = False
    repair_codes: tuple[str, ...] = ()

    def command(self, template: str, deployment: str | None = None) -> str:
        """Return a shell command, made from the template of a code.

        template: command with placeholders such as STORE and OPTIONS.
        deployment: label of the deployment with the findings; None if several have them, or none.
        """
        words = self._named(template.split()[1:], deployment)
        if not self.deletes and (words[0] == "rm" or _REPAIR[0] in words):
            words = ["migrate", STORE, _DESTINATION]
        repairs = _REPAIR[0] in words
        said: list[str] = []
        had = False  # whether the run had the option, so that OPTIONS repeats it
        for word in words:
            if word.startswith("--"):
                had = word in self.options and OPTIONS in words
            if had:
                continue
            if word == STORE:
                said.append(quote(self.store))
            elif word == _DESTINATION:
                said.append(quote(self.destination))
            elif word == OPTIONS:
                said += map(quote, self.options)
                said += [] if self.profiled or not repairs else ["--profile", "FILE"]
            elif word == _PROFILE and said[-1] in (_GIVEN, _TARGET) and _GIVEN in self.options:
                said.append(quote(self.options[self.options.index(_GIVEN) + 1]))
            else:
                said.append(word)
        if repairs and self.quarantine:
            said += ["--quarantine", quote(self.quarantine)]
        return " ".join([*map(quote, self.program), *said])

    def commands(
        self,
        code: Code,
        severity: str,
        deployment: str | None = None,
        written_ns: int | None = None,
    ) -> list[str]:
        """Return the commands that mend findings of a code.

        If there are two, the command that loses no page comes first.
        severity: least severity of the findings.
        deployment: see `command`.
        written_ns: latest time of an object with such a finding, Unix nanoseconds; None if unknown.
        """
        template = code.mending_command(severity)
        if written_ns is not None:
            template = template.replace(TIME, exact(written_ns))
        commands = [self.command(template, deployment)] if template else []
        if code.alternative and self.deletes:
            first = len(commands) if is_removal(code.alternative) else 0
            commands.insert(first, self.command(code.alternative))
        return commands

    def next_steps(self, oldest_ns: int | None, *, doubtful: bool = False) -> tuple[str, str]:
        """Return the next steps for the servers after wrong pages were removed.

        oldest_ns: mtime of the earliest removed object, Unix nanoseconds; None if the store keeps
            no times.
        doubtful: whether the removed pages may have been right.
        """
        template = following_command(timed=oldest_ns is not None)
        if not self.model:
            template = template.replace(f" --model {MODEL}", "")
        command = self.command(template)
        if oldest_ns is not None:
            command = command.replace(TIME, exact(oldest_ns))
        server = SERVER
        if _SERVER in self.options:
            server = quote(self.options[self.options.index(_SERVER) + 1].rstrip("/"))
        return next_steps(command, server=server, timed=oldest_ns is not None, doubtful=doubtful)

    def _named(self, words: list[str], deployment: str | None) -> list[str]:
        """Return words with MODEL replaced, and SIZE replaced by the sizes of the deployment.

        deployment: label of the deployment that gives the model and sizes; None for the profile's
            deployment.
        """
        name = label_name(deployment) if deployment else self.model
        sizes = label_sizes(deployment) if deployment else {}
        if not name or _ESCAPED.search(name) or MODEL not in words:
            return words
        named = [quote(name) if word == MODEL else word for word in words]
        stated = {axis: size for axis, size in sizes.items() if axis in AXES}
        others = any(self.sizes.get(axis) != size for axis, size in stated.items())
        if _SIZE in words and others:
            at = named.index(_SIZE) - 1
            chosen = [word for axis, size in stated.items() for word in (f"--{axis}", str(size))]
            named[at : at + 2] = chosen
        return named


_HOUR, _DAY = 3600, 86400
# Bounds between the classes of age, in seconds.
AGE_BOUNDS = np.array([_HOUR, _DAY, 7 * _DAY, 30 * _DAY])
AGE_CLASSES = ("under 1 h", "1 h to 1 d", "1 to 7 d", "7 to 30 d", "over 30 d")
_UNKNOWN = -1
_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class FindingGroup:
    """Findings with one severity, code, deployment and class of age.

    age: ages of the youngest and the oldest object, as in `ls`; empty if the store keeps no times.
    age_class: index in AGE_CLASSES; None if the age is unknown.
    examples: key and detail of the first findings.
    written_ns: time of the youngest object, Unix nanoseconds; None if unknown.
    """

    severity: str
    code: str
    deployment: str | None
    age: str
    age_class: int | None
    count: int
    examples: tuple[tuple[str | None, str], ...]
    written_ns: int | None = None


def group_findings(found: pa.Table, now: float) -> list[FindingGroup]:
    """Return groups of findings: the worst severity first, and within a severity the largest first.

    Python code runs for each group, not for each finding.
    found: findings in the columns of `checks.findings.PLACED_SCHEMA`.
    now: Unix seconds.
    """
    if not len(found):
        return []
    written_ns = found.column("written_ns").fill_null(0).to_numpy()
    known = written_ns != 0
    ages = np.where(known, np.maximum(0, int(now) - written_ns // 10**9), _UNKNOWN)
    classes = np.where(~known, _UNKNOWN, np.searchsorted(AGE_BOUNDS, ages, side="right"))
    kinds = classes + 1
    for name in ("severity", "code", "deployment"):
        numbers, distinct = _numbered(found.column(name))
        kinds = kinds * distinct + numbers
    order = np.argsort(kinds, kind="stable")
    starts = np.flatnonzero(np.diff(kinds[order], prepend=-1))
    counts = np.diff(starts, append=len(order))
    youngest, oldest = (f.reduceat(ages[order], starts) for f in (np.minimum, np.maximum))
    latest = np.maximum.reduceat(written_ns[order], starts)
    groups = []
    for number, start in enumerate(starts.tolist()):
        rows = order[start : start + min(_EXAMPLES, counts[number])]
        first = found.take(rows).to_pylist()
        of_group = int(classes[rows[0]])
        groups.append(
            FindingGroup(
                severity=first[0]["severity"],
                code=first[0]["code"],
                deployment=first[0]["deployment"],
                age=_age(int(youngest[number]), int(oldest[number])),
                age_class=None if of_group == _UNKNOWN else of_group,
                count=int(counts[number]),
                examples=tuple((row["key"], row["detail"]) for row in first),
                written_ns=int(latest[number]) or None,
            )
        )
    return sorted(
        groups, key=lambda g: (-SEVERITIES.index(g.severity), -g.count, g.code, g.deployment or "")
    )


def _numbered(column: pa.ChunkedArray) -> tuple[npt.NDArray[np.int64], int]:
    """Return a number for each value of a column, and how many different values there are.

    Equal values have equal numbers. Null is a value.
    """
    encoded = pc.dictionary_encode(column.combine_chunks(), null_encoding="encode")
    return encoded.indices.to_numpy().astype(np.int64), len(encoded.dictionary)


def _age(youngest: int, oldest: int) -> str:
    if youngest == _UNKNOWN:
        return ""
    ends = dict.fromkeys((human_age(youngest), human_age(oldest)))
    return "-".join(ends)


# A terminal shows at least this many characters of a key.
_LEAST_KEY = 24
# A terminal shows at most this many lines of an example.
_MOST_LINES = 8


def report_lines(
    document: dict[str, Any],
    placed: pa.Table,
    mending: Mending,
    shown: Shown,
    screen: Screen,
    doubted: Mapping[str, Refusal],
) -> Iterator[str]:
    """Yield the lines of the `table` format: the findings, how to mend them, then the sums.

    placed: findings in the columns of `checks.findings.PLACED_SCHEMA`.
    doubted: why repairs would be refused, as in `VerifyFacts`.
    """
    if len(placed) and shown.every:
        yield from table_lines(placed.select(["severity", "code", "key", "detail"]), screen)
    elif len(placed):
        groups = group_findings(placed, time.time())
        yield from _group_lines(groups, shown.limit, screen)
        # A run that repaired no page did not do what the commands say: the user may have declined.
        repaired = document["repaired"] > 0 and not document.get("repair_refused")
        done = document.get("dry_run") is False and repaired
        many = {
            name for name, count in document["counts"].items() if 2 * count >= document["objects"]
        }
        yield from _mending_lines(groups, mending, doubted, many, done=done)
    yield sum_line(document)


def sum_line(document: dict[str, Any], unasked: Sequence[str] = ()) -> str:
    """Return the sums of a report as one line: bytes read, findings, and checks that did not run.

    unasked: checks that nobody asked for. The line names them with the checks that could not run.
    """
    pages = counted(document["pages"], "page")
    in_flight = f", {document['in_flight']} in flight" if document["in_flight"] else ""
    gone = f", {document['gone']} vanished during the run" if document["gone"] else ""
    read = ""
    if document["bytes_read"]:
        part = document["sampled"] < document["pages"]
        share = f" ({document['sampled']} of {pages})" if part else ""
        read = f", {human_size(document['bytes_read'])} read{share}"
    cut = {None: "", DEADLINE: ", time limit reached"}.get(
        document["stopped_by"], f", stopped: {document['stopped_by']}"
    )
    fixed = f"; {counted(document['repaired'], 'page')} repaired" if document["repaired"] else ""
    return (
        f"{counted(document['objects'], 'object')}, {pages}{in_flight}{gone}, "
        f"{human_size(document['bytes'])}{read}{cut}: {_verdict(document, unasked)}{fixed}"
    )


def _group_lines(groups: list[FindingGroup], limit: int, screen: Screen) -> Iterator[str]:
    """Yield a line for each group, followed by the lines of its examples."""
    some = groups[:limit]
    table = pa.table(
        {
            "severity": [group.severity for group in some],
            "code": [group.code for group in some],
            "deployment": pa.array(
                [group.deployment and label_text(group.deployment) for group in some], pa.string()
            ),
            ">age": [group.age or "-" for group in some],
            ">count": [str(group.count) for group in some],
        }
    )
    head, *lines = table_lines(table, screen)
    yield head
    for group, line in zip(some, lines, strict=True):
        yield line
        for key, detail in group.examples:
            yield from _example_lines(key or "", escape_controls(detail), screen.width)
        if (more := group.count - len(group.examples)) > 0:
            yield f"  and {more} more"
    if left := groups[limit:]:
        count = sum(group.count for group in left)
        yield (
            f"and {counted(len(left), 'group')} with {counted(count, 'finding')}; --limit shows "
            "more groups, --all-findings every finding"
        )


def _example_lines(key: str, detail: str, width: int | None) -> Iterator[str]:
    """Yield the lines of an example. On a terminal, a long key is shortened.

    An example of more than _MOST_LINES lines ends with an ellipsis.
    width: characters of a terminal line; None if the output is no terminal.
    """
    if width is None:
        yield "  " + "  ".join(filter(None, (escape_controls(key), detail)))
        return
    key = shortened(key, max(width - len(detail) - 4, _LEAST_KEY))
    yield from textwrap.wrap(
        "  ".join(filter(None, (key, detail))),
        max(width, _LEAST_KEY),
        initial_indent="  ",
        subsequent_indent="    ",
        break_on_hyphens=False,
        max_lines=_MOST_LINES,
        placeholder=" …",
    )


def _mending_lines(
    groups: list[FindingGroup],
    mending: Mending,
    doubted: Mapping[str, Refusal],
    many: Collection[str],
    *,
    done: bool,
) -> Iterator[str]:
    """Yield how to mend the findings: each command once, with the codes that it mends.

    doubted: why repairs would be refused, as in `VerifyFacts`.
    many: codes that at least half of the objects have.
    done: whether the run has repaired the pages with errors or with `repair_codes`.
    """
    steps: dict[str, dict[str, None]] = {}
    kinds: dict[tuple[str, str, str | None], int | None] = {}
    for group in groups:
        kinds.setdefault((group.code, group.severity, group.deployment), group.written_ns)
    for (name, severity, deployment), written_ns in kinds.items():
        code = code_named(name)
        repairs = is_repair(code.mending_command(severity)) and not code.remedy
        if done and repairs and (severity == "error" or name in mending.repair_codes):
            continue
        commands = mending.commands(code, severity, deployment, written_ns)
        commands[-1:-1] = _condition(code, written_ns) if mending.deletes else ()
        if repairs and mending.deletes:
            refused = doubted.get("") or doubted.get(name if severity != "error" else "")
            if refused is not None:
                commands = [*_doubt_lines(refused), *map(_despite, commands)]
            elif code.doubts and name in many:
                commands = [_many_text(code), *commands]
        said = "\n  ".join(commands) or code.next_step
        if mending.stamped and name == "stamp-mismatch":
            said = "nothing to do, because this run compared with the old stamp and wrote a new one"
        steps.setdefault(f"  {said}", {})[name] = None
    if steps:
        yield ""
        yield "To mend (hicachectl explain CODE has the meaning, the risk and the cost):"
    for step, names in steps.items():
        # Codes that share a step have the same alternative.
        choice = _choice(code_named(next(iter(names)))) if mending.deletes else ""
        yield f"{', '.join(names)}{choice}:"
        yield from map(escape_controls, step.splitlines())
    yield ""


def _choice(code: Code) -> str:
    """Return how the two commands of a code differ; "" for one command."""
    if not code.alternative:
        return ""
    if is_removal(code.alternative):
        return " (quarantine the pages, or free their space; rm has no undo)"
    return " (convert the pages, or remove them; rm has no undo)"


def _condition(code: Code, written_ns: int | None) -> Iterator[str]:
    """Yield a line on when to run the command of a code, if it can remove pages that servers use.

    written_ns: latest time of an object with such a finding, Unix nanoseconds; None if unknown.
    """
    if code.command and (code.misleads or code.alternative):
        said = code.remedy.format(command=BELOW)
        if written_ns is not None:
            said = said.replace(TIME, exact(written_ns))
        yield f"{said[:1].upper()}{said[1:]}:"


def _doubt_lines(refused: Refusal) -> Iterator[str]:
    """Yield why a repair would be refused, and the steps before it."""
    settings = code_named(refused.code).doubts
    yield (
        f"A repair without {DESPITE} is refused, because {refused.text}. Probably the pages are "
        "right, and the profile or the launch options of the servers are wrong."
    )
    yield (
        "First compare the profile with hicachectl profile --server. To use the pages, launch the "
        f"servers with the settings of the servers that wrote the pages; compare {settings}. If "
        "the pages are of no use, repair them with:"
    )


def _many_text(code: Code) -> str:
    """Return a warning before a repair that removes most pages."""
    return (
        f"Most objects have {code.name}, probably because servers with another setting wrote them. "
        f"To use the pages, launch the servers with that setting; compare {code.doubts}. If the "
        "pages are of no use, repair them with:"
    )


def _despite(command: str) -> str:
    return command if DESPITE in command.split() else f"{command} {DESPITE}"


def _verdict(document: dict[str, Any], unasked: Sequence[str]) -> str:
    """Return the number of findings for each code, and the checks that did not run."""
    found = ", ".join(f"{count} {code}" for code, count in document["counts"].items())
    skipped = document["skipped_checks"]
    if skipped == ["everything"]:
        return found or "nothing was checked"
    left_out = f"; not checked: {', '.join([*unasked, *skipped])}"
    left_out *= bool(unasked or skipped)
    return (found or "no findings") + left_out
