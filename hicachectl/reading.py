"""The reading checks: every object's bytes once through the pipeline, digested and looked at."""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa

from hicachectl.backends.arena import ALIGNMENT
from hicachectl.backends.base import Status
from hicachectl.checks.sizes import UNKNOWN_SIZE, oversized_severity
from hicachectl.findings import findings
from hicachectl.forking import Children, Tickets
from hicachectl.formats.expectation import expected_objects
from hicachectl.pacing import Pace
from hicachectl.pipeline import DEFAULT_BUFFER_BYTES, Loaded, Pipeline, Task, batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import numpy.typing as npt

    from hicachectl.backends.base import Store
    from hicachectl.checks.values import ValueChecker, ValueIssue
    from hicachectl.deployments import AffixTable
    from hicachectl.formats.profile import Profile
    from hicachectl.inventory import IntArray, Inventory

    Window = tuple[int, int]

DIGEST_BYTES = 32

# Tasks are small enough that the bytes are still in the processor's cache when they are worked
# on, and large enough that what a task costs beside them is little: with half of it two threads
# read 20% less, with a quarter 40%.
_TASK_BYTES = 16 << 20
_TASK_OBJECTS = 256
# Objects of one kind are read together within a window of the listing, so that a run that is cut
# short has seen whole pages and not one rank's objects alone. Where the store says how they lie,
# windows follow that: a window is a stretch of each file.
_WINDOW_OBJECTS = 8192
_LEAST_WINDOW_OBJECTS = 1024
# Of how many objects a store is asked at once whether they are still there.
_ASKED_OBJECTS = 4096
# From how many objects on, and up to which size of them, forked processes read faster than
# threads: below, the forks cost more than they bring; above, threads wait for copies and BLAKE3,
# which are done without the GIL.
_FORK_OBJECTS = 4096
_FORK_MEAN_BYTES = 256 << 10
_MOST_PROCESSES = 8
_TELL_SECONDS = 0.05

_SEVERITIES = {"all-zero": "warning"}


class Device(Protocol):
    """Digests and checks objects somewhere else than in the processor."""

    names: tuple[str, ...]
    slab_bytes: int  # of objects that it takes at once
    most_objects: int
    lanes: int  # threads that it keeps busy besides those that read

    def examine(
        self, loaded: Loaded, wanted: npt.NDArray[np.bool_], checker: ValueChecker | None
    ) -> tuple[npt.NDArray[np.uint8], list[ValueIssue]] | None:
        """Give digests [n, 32] of the wanted objects and issues of all; None: it cannot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingPlan:
    """What to read and what to do with it.

    rows: [n] int64, the objects to read. capacities: [n] int64, how many bytes of each. digest:
    [n] bool, which of them to digest. checkers: by affix id, for objects of `sizes[affix]` bytes,
    the last entry of foreign keys. jobs: how many threads, or processes, read. confirm: so that no
    writer can have interfered, see `Store.read_confirmed`. device: what digests and checks
    in place of the processor.
    """

    rows: IntArray
    capacities: IntArray
    digest: npt.NDArray[np.bool_]
    checkers: Mapping[int, ValueChecker]
    sizes: IntArray
    buffer_bytes: int = DEFAULT_BUFFER_BYTES
    bytes_per_second: int | None = None
    jobs: int | None = None
    deadline: float | None = None
    confirm: bool = False
    device: Device | None = None

    def without(self, left_out: npt.NDArray[np.bool_]) -> ReadingPlan:
        """Plan the same but for some of the rows, [n] bool."""
        return self._picked(~left_out) if left_out.any() else self

    def only(self, chosen: npt.NDArray[np.bool_]) -> ReadingPlan:
        """Plan some of the rows, [n] bool, to be confirmed."""
        return replace(self._picked(chosen), confirm=True)

    def ordered(self, places: IntArray | None) -> ReadingPlan:
        """Plan the same in the order of places, [objects]; as it is where there are none."""
        if places is None:
            return self
        return self._picked(np.argsort(places[self.rows], kind="stable"))

    def _picked(self, chosen: npt.NDArray[np.bool_] | IntArray) -> ReadingPlan:
        return replace(
            self,
            rows=self.rows[chosen],
            capacities=self.capacities[chosen],
            digest=self.digest[chosen],
        )


@dataclass(slots=True)
class ReadingResult:
    """What reading found.

    digests: [objects, 32] uint8 of the whole inventory, and versions: [objects, fields] uint64 of
    what was digested, valid where `digested`. gone: objects that vanished since they were listed.
    bytes_read: of whole objects. complete: whether all were reached before the deadline.
    """

    digests: npt.NDArray[np.uint8]
    versions: npt.NDArray[np.uint64]
    digested: npt.NDArray[np.bool_]
    gone: int = 0
    bytes_read: int = 0
    complete: bool = True
    _issues: dict[tuple[str, str], list[tuple[int, str]]] = field(default_factory=dict)

    def report(self, code: str, severity: str, row: int, detail: str) -> None:
        """Note one finding about an object."""
        self._issues.setdefault((code, severity), []).append((row, detail))

    @property
    def has_issues(self) -> bool:
        """Whether anything was reported."""
        return bool(self._issues)

    def take_notes(self) -> list[Any]:
        """Give all but the arrays, in JSON's types, and forget it: for `add_notes` elsewhere."""
        issues = [[code, severity, noted] for (code, severity), noted in self._issues.items()]
        notes = [self.bytes_read, self.gone, self.complete, issues]
        self.bytes_read, self.gone, self._issues = 0, 0, {}
        return notes

    def add_notes(self, bytes_read: int, gone: int, complete: bool, issues: list[Any]) -> None:
        """Add what another reader of the same objects noted."""
        self.bytes_read += bytes_read
        self.gone += gone
        self.complete &= complete
        for code, severity, noted in issues:
            for row, detail in noted:
                self.report(code, severity, row, detail)

    def suspects(self) -> IntArray:
        """List the rows that something was reported of, rising."""
        rows = {row for noted in self._issues.values() for row, _ in noted}
        return np.array(sorted(rows), dtype=np.int64)

    def replace(self, rows: IntArray, again: ReadingResult) -> None:
        """Let what a second reading of some rows found stand in the place of the first."""
        redone = set(rows.tolist())
        for kind, noted in self._issues.items():
            self._issues[kind] = [note for note in noted if note[0] not in redone]
        self._issues = {kind: noted for kind, noted in self._issues.items() if noted}
        self.gone += again.gone
        for kind, noted in again._issues.items():
            self._issues.setdefault(kind, []).extend(noted)
        for name in ("digests", "versions", "digested"):
            getattr(self, name)[rows] = getattr(again, name)[rows]

    def findings(self, inventory: Inventory) -> Iterator[pa.Table]:
        """Give the noted findings, each kind in the order of the objects."""
        from hicachectl.listing import object_rows

        for (code, severity), noted in self._issues.items():
            noted.sort()
            objects = object_rows(inventory, np.array([row for row, _ in noted], dtype=np.int64))
            yield findings(
                code,
                severity,
                keys=objects.column("key").combine_chunks(),
                pages=objects.column("page"),
                pools=objects.column("pool").cast(pa.string()),
                parts=objects.column("part").cast(pa.string()),
                detail=pa.array([detail for _, detail in noted]),
            )


@dataclass(frozen=True, slots=True, eq=False)
class _Done:
    loaded: Loaded
    digests: npt.NDArray[np.uint8]
    issues: list[ValueIssue]

    def without(self, gone: npt.NDArray[np.bool_]) -> _Done:
        """Give the same, but for objects that were gone, [n] bool."""
        if not gone.any():
            return self
        self.loaded.read.statuses[gone] = Status.GONE
        return replace(self, issues=[issue for issue in self.issues if not gone[issue.index]])


def value_checkers(
    table: AffixTable, profile: Profile | None, scheme: str
) -> dict[int, ValueChecker]:
    """Make a checker for each affix that the profile accounts for; none of an inferred profile."""
    if profile is None or profile.inferred:
        return {}
    from hicachectl.checks.values import ValueChecker

    expected = expected_objects(profile, scheme)
    checkers = {
        affix: ValueChecker(expected[table.member_ids[affix]], profile)
        for affix, deployment in enumerate(table.deployment_ids)
        if deployment >= 0 and table.deployments[deployment].profile is profile
    }
    return {affix: checker for affix, checker in checkers.items() if checker.applies}


def read_objects(
    store: Store,
    inventory: Inventory,
    plan: ReadingPlan,
    *,
    on_read: Callable[[int], None] = lambda nbytes: None,
) -> ReadingResult:
    """Read the planned objects, digest and check them.

    Many small objects are read in forked processes, where the store allows it. on_read is told
    bytes as they are done. Raises StoreUnavailable, and UsageError when one object is larger than
    the buffer.
    """
    count = len(inventory.objects)
    result = ReadingResult(
        digests=_shared_zeros((count, DIGEST_BYTES), np.dtype(np.uint8)),
        versions=_shared_zeros((count, len(store.version_fields)), np.dtype(np.uint64)),
        digested=_shared_zeros((count,), np.dtype(np.bool_)),
    )
    if not len(plan.rows):
        return result
    reader = _Reader(store, inventory, plan, result)
    processes = reader.processes
    if processes == 1 or not reader.read_forked(processes, on_read):
        reader.read(on_read)
    return result


def readable_sizes(inventory: Inventory, expected: IntArray) -> IntArray:
    """Say what to read of each object: the listed size, else the one expected of its affix.

    UNKNOWN_SIZE where there is neither: such an object cannot be read.
    """
    listed = inventory.objects.column("nbytes").fill_null(UNKNOWN_SIZE).to_numpy()
    sizes: IntArray = np.where(
        listed == UNKNOWN_SIZE, expected[inventory.affix_ids], listed
    ).astype(np.int64)
    return sizes


def _shared_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Make an array that forked processes share: what they write to it is seen here."""
    count = int(np.prod(shape))
    memory = mmap.mmap(-1, max(1, count * dtype.itemsize))
    return np.frombuffer(memory, dtype=dtype, count=count).reshape(shape)


class _Reader:
    """One reading: in threads of this process, or in forked ones that share its result."""

    def __init__(
        self, store: Store, inventory: Inventory, plan: ReadingPlan, result: ReadingResult
    ) -> None:
        self._store = store
        self._inventory = inventory
        self._plan = plan = plan.ordered(_places(inventory))
        self._result = result
        self._sizes = plan.capacities
        self._wants_digest = np.zeros(len(inventory.objects), dtype=np.bool_)
        self._wants_digest[plan.rows] = plan.digest

    @property
    def processes(self) -> int:
        """How many processes to read in; 1 where threads of this one do as well.

        Small objects cost more Python than copying, and threads take turns at Python.
        """
        count, nbytes = len(self._sizes), int(self._sizes.sum())
        if not self._store.limits.forkable or count < _FORK_OBJECTS:
            return 1
        if self._plan.device is not None:  # CUDA does not outlive a fork
            return 1
        if nbytes > count * _FORK_MEAN_BYTES:
            return 1
        wanted = self._plan.jobs or min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)
        # Each has its share of the buffer, which must hold any task.
        fit = self._plan.buffer_bytes // max(int(self._sizes.max()) + ALIGNMENT, 2 * _TASK_BYTES)
        return max(1, min(wanted, fit))

    def read(self, on_read: Callable[[int], None]) -> None:
        """Read in threads of this process."""
        windows = _windows(len(self._plan.rows), least=_WINDOW_OBJECTS)
        jobs, device = self._plan.jobs, self._plan.device
        if jobs is None and device is not None:  # threads that wait for it do not read meanwhile
            jobs = self._store.limits.parallel_reads + device.lanes
        for nbytes in self._read(self._pipeline(windows, jobs)):
            on_read(nbytes)

    def read_forked(self, processes: int, on_read: Callable[[int], None]) -> bool:
        """Read in forked processes; False when the system has none for us."""
        windows = _windows(len(self._plan.rows), least=_LEAST_WINDOW_OBJECTS, readers=processes)
        try:
            tickets = Tickets()
        except OSError:
            return False
        # Made before the fork, so that its table of keys is one for all.
        pipeline = self._pipeline(tickets.deal(windows), 1, share=processes)

        def work(send: Callable[[Any], None]) -> None:
            unsent, sent_at = 0, time.monotonic()
            for nbytes in self._read(pipeline):
                unsent += nbytes
                now = time.monotonic()
                if self._result.has_issues or now - sent_at > _TELL_SECONDS:
                    send([unsent, *self._result.take_notes()])
                    unsent, sent_at = 0, now
            send([unsent, *self._result.take_notes()])

        try:
            children = Children(processes, work)
        except OSError:
            return False
        finally:
            tickets.close()
        with children:
            for nbytes, *notes in children:
                self._result.add_notes(*notes)
                on_read(nbytes)
        return True

    def _pipeline(
        self, windows: Iterable[Window], jobs: int | None, *, share: int = 1
    ) -> Pipeline[_Done]:
        inventory, plan, wants_digest = self._inventory, self._plan, self._wants_digest
        return Pipeline(
            self._store,
            inventory.objects,
            _tasks(plan, inventory, windows),
            lambda loaded: _work(loaded, inventory, plan, wants_digest),
            buffer_bytes=plan.buffer_bytes // share,
            jobs=jobs,
            deadline=plan.deadline,
            pace=None if plan.bytes_per_second is None else Pace(plan.bytes_per_second // share),
            identify=self._identify and not self._store.identifies_by_exists,
            confirm=plan.confirm,
        )

    @property
    def _identify(self) -> bool:
        return bool(self._plan.digest.any())

    def _read(self, pipeline: Pipeline[_Done]) -> Iterator[int]:
        """Gather the results of the tasks, and give the bytes of each."""
        asks = self._identify and self._store.identifies_by_exists
        for done in self._still_there(pipeline) if asks else pipeline:
            _gather(self._result, done, self._wants_digest, self._store.grammar)
            yield int(done.loaded.task.capacities.sum())
        self._result.complete = pipeline.complete

    def _still_there(self, tasks: Iterable[_Done]) -> Iterator[_Done]:
        """Ask the store about the objects of many tasks at once, while others are read."""
        waiting: list[_Done] = []
        count = 0
        for done in tasks:
            waiting.append(done)
            count += len(done.loaded.task.rows)
            if count >= _ASKED_OBJECTS:
                yield from self._without_gone(waiting)
                waiting, count = [], 0
        yield from self._without_gone(waiting)

    def _without_gone(self, tasks: list[_Done]) -> Iterator[_Done]:
        """Let objects that are gone by now be so in the results of tasks."""
        if not tasks:
            return
        rows = np.concatenate([done.loaded.task.rows for done in tasks])
        there = self._store.exists(self._inventory.take(rows, ["key"]))
        start = 0
        for done in tasks:
            end = start + len(done.loaded.task.rows)
            yield done.without(~there[start:end])
            start = end


def _windows(count: int, *, least: int, readers: int = 1) -> list[Window]:
    """Cut the listing into windows, smaller ones to the end: readers are then done together."""
    windows = []
    start = 0
    while start < count:
        size = min(_WINDOW_OBJECTS, max(least, (count - start) // (2 * readers)))
        windows.append((start, min(start + size, count)))
        start += size
    return windows


def _places(inventory: Inventory) -> IntArray | None:
    """Say where objects lie, each in its file: [objects]; None where the store does not say."""
    if "locator" not in inventory.objects.column_names:
        return None
    places: IntArray = inventory.objects.column("locator").fill_null(0).to_numpy()
    return places


def _tasks(plan: ReadingPlan, inventory: Inventory, windows: Iterable[Window]) -> Iterator[Task]:
    """Cut the rows of each window into tasks of objects of one size, and of one affix or file.

    Where the store says how objects lie, those that do so next to each other are read together,
    such as the K and V of a page on 3FS; in memory those of each affix follow one another.
    """
    affix_ids, places = inventory.affix_ids, _places(inventory)
    most_objects, most_bytes = _TASK_OBJECTS, min(_TASK_BYTES, plan.buffer_bytes // 2)
    kinds = np.arange(len(inventory.table.affixes) + 1)
    if plan.device is not None:
        most_objects, most_bytes = plan.device.most_objects, plan.device.slab_bytes
    elif places is not None:
        kinds = _prefix_ids(inventory)
    for start, stop in windows:
        window, window_sizes = plan.rows[start:stop], plan.capacities[start:stop]
        kind = kinds[affix_ids[window]]
        order = np.lexsort((window if places is None else places[window], window_sizes, kind))
        window, kind, window_sizes = window[order], kind[order], window_sizes[order]
        changes = np.flatnonzero((np.diff(kind) != 0) | (np.diff(window_sizes) != 0)) + 1
        for part, part_sizes in zip(
            np.split(window, changes), np.split(window_sizes, changes), strict=True
        ):
            for task in batches(part, part_sizes, most_objects=most_objects, most_bytes=most_bytes):
                by_affix = np.argsort(affix_ids[task.rows], kind="stable")
                yield replace(task, rows=task.rows[by_affix])


def _prefix_ids(inventory: Inventory) -> IntArray:
    """Give a number to what keys begin with, by affix id: on 3FS, which file they mean."""
    prefixes = [prefix for prefix, _ in inventory.table.affixes]
    ids = {prefix: number for number, prefix in enumerate(dict.fromkeys(prefixes))}
    return np.array([*(ids[prefix] for prefix in prefixes), len(ids)], dtype=np.int64)


def _work(
    loaded: Loaded, inventory: Inventory, plan: ReadingPlan, wants_digest: npt.NDArray[np.bool_]
) -> _Done:
    """Digest and check one task's objects; runs in a reader thread."""
    rows = loaded.task.rows
    wanted = loaded.read.ok & wants_digest[rows]
    if plan.device is not None:  # its tasks are of one affix
        examined = plan.device.examine(loaded, wanted, _checker(loaded, inventory, plan, 0))
        if examined is not None:
            return _Done(loaded, *examined)
    issues: list[ValueIssue] = []
    if plan.checkers:
        edges = np.flatnonzero(np.diff(inventory.affix_ids[rows])) + 1
        for start, stop in pairwise([0, *edges.tolist(), len(rows)]):
            checker = _checker(loaded, inventory, plan, start)
            issues += _issues(loaded, checker, start, stop)
    return _Done(loaded, _digests(loaded, np.flatnonzero(wanted)), issues)


def _checker(
    loaded: Loaded, inventory: Inventory, plan: ReadingPlan, index: int
) -> ValueChecker | None:
    """Give what checks an object of a task; None where it is not of the size for that."""
    affix = int(inventory.affix_ids[loaded.task.rows[index]])
    fits = affix in plan.checkers and loaded.task.capacities[index] == plan.sizes[affix]
    return plan.checkers[affix] if fits else None


def _digests(loaded: Loaded, wanted: IntArray) -> npt.NDArray[np.uint8]:
    """Digest some objects of a task: [n, 32], zeros for the others."""
    from blake3 import blake3

    digests = np.zeros((len(loaded.task.rows), DIGEST_BYTES), dtype=np.uint8)
    if not len(wanted):
        return digests
    joined = b"".join([blake3(content).digest() for content in loaded.contents(wanted)])
    digests[wanted] = np.frombuffer(joined, dtype=np.uint8).reshape(len(wanted), DIGEST_BYTES)
    return digests


def _issues(
    loaded: Loaded, checker: ValueChecker | None, start: int, stop: int
) -> list[ValueIssue]:
    """Check the values of objects from `start` to `stop` of a task, as far as they were read."""
    places = start + np.flatnonzero(loaded.read.ok[start:stop])
    if checker is None or not len(places):
        return []
    block = loaded.block()
    whole = len(places) == stop - start
    issues = checker.check(block[start:stop] if whole else block[places])
    return [replace(issue, index=int(places[issue.index])) for issue in issues]


def _gather(
    result: ReadingResult, done: _Done, wants_digest: npt.NDArray[np.bool_], scheme: str
) -> None:
    rows, read = done.loaded.task.rows, done.loaded.read
    ok = read.ok
    result.bytes_read += int(read.nbytes[ok].sum())
    wanted = ok & wants_digest[rows]
    result.digests[rows[wanted]] = done.digests[wanted]
    result.versions[rows[wanted]] = read.versions[wanted]
    result.digested[rows[wanted]] = True
    result.gone += int((read.statuses == Status.GONE).sum())
    for issue in done.issues:
        severity = _SEVERITIES.get(issue.code, "error")
        result.report(issue.code, severity, int(rows[issue.index]), issue.detail)
    for index in np.flatnonzero(~ok & (read.statuses != Status.GONE)).tolist():
        _report_unread(result, done.loaded, index, scheme)


def _report_unread(result: ReadingResult, loaded: Loaded, index: int, scheme: str) -> None:
    """Say why an object could not be read whole."""
    row, status = int(loaded.task.rows[index]), Status(loaded.read.statuses[index])
    now, listed = int(loaded.read.nbytes[index]), int(loaded.task.capacities[index])
    if status is Status.ERROR:
        result.report("unreadable", "error", row, loaded.read.errors.get(index, "cannot be read"))
    elif status is Status.UNREACHABLE:  # a miss for servers too
        result.report("no-replica", "warning", row, loaded.read.errors.get(index, "out of reach"))
    elif status is Status.SHORT:
        result.report("truncated", "error", row, f"{now} bytes when read, {listed} when listed")
    else:
        severity = oversized_severity(scheme)
        result.report("oversized", severity, row, f"{now} bytes when read, {listed} when listed")
