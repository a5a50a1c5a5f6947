"""Read objects once through the pipeline, and digest, check and compare them."""

from __future__ import annotations

import mmap
import os
import time
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa

from hicachectl.backends.arena import ALIGNMENT, place
from hicachectl.backends.base import Status
from hicachectl.backends.capabilities import Confirm, Digesting, Spreads
from hicachectl.backends.concurrency import MOST_CALLS
from hicachectl.checks.catalogs import Digested, compare, digested_objects
from hicachectl.checks.evidence import QUARTILES
from hicachectl.checks.findings import object_findings
from hicachectl.checks.registry import code_named
from hicachectl.checks.sizes import oversized_rule
from hicachectl.formats.catalog import DIGEST_BYTES
from hicachectl.formats.wording import over_buffer
from hicachectl.io.forking import SharedCounter, Workers
from hicachectl.io.pipeline import Pace, Pipeline
from hicachectl.io.reads import ReadingProcesses
from hicachectl.verification.part_result import ReadCounts
from hicachectl.verification.reading_plan import (
    TASK_BYTES,
    places_of,
    tasks_of,
    unwritten,
    windows_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import numpy.typing as npt

    from hicachectl.backends.base import Store
    from hicachectl.checks.registry import ValueIssue
    from hicachectl.checks.values import ValueChecker
    from hicachectl.device.checker import DeviceChecker
    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.io.pipeline import Loaded
    from hicachectl.pages.inventory import Inventory
    from hicachectl.verification.reading_plan import ReadingChoice, ReadingPlan, Window
    from hicachectl.verification.request import VerifyRequest

# A query for the existence of objects is sent when this many objects wait for it.
_ASKED_OBJECTS = 4096
# From this number of objects on, forked processes are faster than threads, if the mean size of the
# objects is at most _FORK_MEAN_BYTES. With fewer objects, the forks take longer than they save. The
# work on small objects is mostly Python code, which only one thread at a time can run. The work on
# larger objects is mostly copies and BLAKE3, which run without Python's lock.
_FORK_OBJECTS = 4096
_FORK_MEAN_BYTES = 256 << 10
# Under a rate limit lower than this, one process reads. Several processes, each with its share of
# the rate, would end at different times.
_FORK_RATE = 64 << 20
_MOST_PROCESSES = 8
# Processes for each processor, if many calls at once make the store faster. With fewer processes,
# more threads wait for the same Python lock, and each wait costs two switches between threads.
_WAITING_PROCESSES = 4
# Most processes that read for a device. Such a process only copies, so it keeps a processor busy.
_MOST_DEVICE_READERS = 16
# A forked process reports to its parent after this time, but after each task if it has findings.
_TELL_SECONDS = 0.05
# Finding code for each status of a failed read, and the detail if the store gives no reason. If
# this detail is "", the finding has the detail of the code.
_FAILED = {
    Status.ERROR: ("unreadable", "the store cannot read the object"),
    Status.DAMAGED: ("digest-mismatch", "the store reports damaged bytes"),
    Status.FOREIGN: ("identity-mismatch", "the store reports another identity"),
    Status.UNREACHABLE: ("no-replica", ""),
}


_ARRAYS = ("digests", "versions", "digested", "tried", "whole", "identified", "quartiles")


@dataclass(slots=True)
class ReadingResult:
    """Digests and findings of a reading.

    Arrays have a row for each object of the inventory.
    digests: [objects, 32] uint8, valid where `digested`.
    versions: [objects, fields] uint64, values of the store's version fields, valid where
        `digested`.
    digested: [objects] bool, whether the object was digested.
    tried: [objects] bool, whether a read was tried and found the object.
    whole: [objects] bool, whether the object was read whole.
    identified: [objects] bool, whether the store compared the object's identity or digest.
    quartiles: [objects, 3] uint16, see `checks.changes`; zeros for an object without quartiles.
    """

    digests: npt.NDArray[np.uint8]
    versions: npt.NDArray[np.uint64]
    digested: npt.NDArray[np.bool_]
    tried: npt.NDArray[np.bool_]
    whole: npt.NDArray[np.bool_]
    identified: npt.NDArray[np.bool_]
    quartiles: npt.NDArray[np.uint16]
    counts: ReadCounts = field(default_factory=ReadCounts)
    # A tuple for each finding: the code, the row of the object, the detail, and the severity rule.
    _issues: list[tuple[str, int, str, str | None]] = field(default_factory=list)

    def report(self, code: str, row: int, detail: str, rule: str | None = None) -> None:
        """Note a finding about an object.

        row: row of the object in the inventory.
        rule: name of the rule that gives the finding's severity; None for the code's own severity.
        """
        self._issues.append((code, row, detail, rule))

    @property
    def has_issues(self) -> bool:
        """Whether anything was reported."""
        return bool(self._issues)

    def take_notes(self) -> list[Any]:
        """Return the counts and findings as JSON types, and reset both.

        A forked process sends them to its parent, which calls `add_notes`.
        """
        notes = [msgspec.structs.asdict(self.counts), self._issues]
        self.counts, self._issues = ReadCounts(), []
        return notes

    def add_notes(self, counts: dict[str, Any], issues: list[Any]) -> None:
        """Add the notes of another reader of the same objects."""
        self.counts += ReadCounts(**counts)
        for issue in issues:
            self.report(*issue)

    def suspects(self, code: str | None = None) -> IntArray:
        """Return the rows with findings of a code, ascending. code: None for any code."""
        rows = {row for name, row, _, _ in self._issues if code in (None, name)}
        return np.array(sorted(rows), dtype=np.int64)

    def replace(self, rows: IntArray, again: ReadingResult) -> None:
        """Replace the results of some rows by the results of a second reading."""
        redone = set(rows.tolist())
        self._issues = [issue for issue in self._issues if issue[1] not in redone] + again._issues
        self.counts.gone += again.counts.gone
        for name in _ARRAYS:
            getattr(self, name)[rows] = getattr(again, name)[rows]

    def findings(self, inventory: Inventory) -> Iterator[pa.Table]:
        """Yield the noted findings, sorted by object within each code and rule."""
        kinds: dict[tuple[str, str | None], list[tuple[int, str]]] = defaultdict(list)
        for code, row, detail, rule in self._issues:
            kinds[code, rule].append((row, detail))
        for (code, rule), noted in kinds.items():
            noted.sort()
            rows = np.array([row for row, _ in noted], dtype=np.int64)
            details = pa.array([detail for _, detail in noted])
            yield object_findings(inventory, rows, code, details, rule=rule)


@dataclass(frozen=True, slots=True, eq=False)
class _Done:
    loaded: Loaded
    digests: npt.NDArray[np.uint8]
    issues: list[ValueIssue]
    quartiles: npt.NDArray[np.uint16]

    def without(self, gone: npt.NDArray[np.bool_]) -> _Done:
        """Return the results of the task with vanished objects marked as gone.

        gone: [n] bool, whether the object has vanished.
        """
        if not gone.any():
            return self
        self.loaded.read.statuses[gone] = Status.GONE
        return replace(self, issues=[issue for issue in self.issues if not gone[issue.index]])


def read_objects(
    store: Store,
    inventory: Inventory,
    plan: ReadingPlan,
    *,
    on_read: Callable[[int], None] = lambda nbytes: None,
) -> ReadingResult:
    """Read, digest and check the planned objects.

    Many small objects are read in forked processes, if the store can be used after a fork.
    on_read: takes the bytes of each task that has ended.
    Raises StoreUnavailable, and UsageError if an object exceeds the buffer.
    """
    count = len(inventory.objects)
    result = ReadingResult(
        digests=_shared_zeros((count, DIGEST_BYTES), np.dtype(np.uint8)),
        versions=_shared_zeros((count, len(store.traits.version_fields)), np.dtype(np.uint64)),
        digested=_shared_zeros((count,), np.dtype(np.bool_)),
        tried=_shared_zeros((count,), np.dtype(np.bool_)),
        whole=_shared_zeros((count,), np.dtype(np.bool_)),
        identified=_shared_zeros((count,), np.dtype(np.bool_)),
        quartiles=_shared_zeros((count, len(QUARTILES)), np.dtype(np.uint16)),
    )
    if not len(plan.rows):
        return result
    reader = _Reader(store, inventory, plan, result)
    processes = reader.processes
    if processes == 1 or not reader.read_forked(processes, on_read):
        reader.read(on_read)
    return result


def compare_with_catalog(
    store: Store, request: VerifyRequest, inventory: Inventory, reading: ReadingResult
) -> Digested:
    """Return the digested objects of a reading, compared with the request's catalog, if any."""
    rows = np.flatnonzero(reading.digested if request.compares_catalog else ())
    fields = store.traits.version_fields
    found = digested_objects(inventory, rows, reading.versions[rows], fields, reading.digests[rows])
    if request.catalog is None:
        return found
    return compare(request.catalog, found, request.identity or fields)


def read_chosen(
    store: Store,
    request: VerifyRequest,
    inventory: Inventory,
    choice: ReadingChoice,
    on_read: Callable[[int, int], None],
    remark: Callable[[str], None],
) -> tuple[ReadingResult, tuple[str, ...]]:
    """Read the chosen objects, and return the results and the names of the devices.

    The names are () if the CPU checked. If the store can tell damage from a race with a writer,
    objects with findings are read again, and only the second results count.
    on_read: takes the bytes of each task that has ended, and the bytes of all tasks.
    remark: takes each remark about the run.
    """
    total = int(choice.plan.capacities.sum())
    with _device(store, request, inventory, choice.plan, remark) as (device, processes):
        plan = replace(choice.plan, device=device, processes=processes)
        hollow = unwritten(store, inventory, plan)
        reading = read_objects(
            store, inventory, plan.without(hollow), on_read=lambda n: on_read(n, total)
        )
        if isinstance(store, Confirm):
            digested = compare_with_catalog(store, request, inventory, reading)
            suspects = np.union1d(reading.suspects(), digested.mismatched)
            again = plan.only(np.isin(plan.rows, suspects))
            reading.replace(again.rows, read_objects(store, inventory, again))
    reading.counts.objects_read += int(hollow.sum())
    for row in plan.rows[hollow].tolist():
        reading.report("unwritten-page", row, code_named("unwritten-page").detail)
    for row in choice.huge.tolist():
        nbytes = inventory.objects.column("nbytes")[row].as_py()
        reading.report("unreadable", row, f"not read: {over_buffer(nbytes, request.buffer_bytes)}")
    return reading, () if device is None else tuple(device.names)


@contextmanager
def _device(
    store: Store,
    request: VerifyRequest,
    inventory: Inventory,
    plan: ReadingPlan,
    remark: Callable[[str], None],
) -> Iterator[tuple[DeviceChecker | None, ReadingProcesses | None]]:
    """Open the device, and the processes that read for it, until the block ends.

    The device is None if the CPU checks. The processes are None if threads read.
    """
    if not len(plan.rows) or not (plan.checkers or plan.digest.any()):
        yield None, None
        return
    from hicachectl.device.devices import open_checker

    largest = int(plan.capacities.argmax())
    key = inventory.objects.column("key")[int(plan.rows[largest])].as_py()
    with ExitStack() as exits:
        # A fork is safe only before CUDA starts threads of its own.
        processes = _device_readers(store, request, inventory, plan)
        if processes is not None:
            exits.enter_context(processes)
        device = exits.enter_context(
            open_checker(
                request.devices,
                device_bytes=request.device_bytes,
                buffer_bytes=request.buffer_bytes,
                largest=int(plan.capacities[largest]),
                largest_name=key.decode(errors="backslashreplace"),
                remark=remark,
            )
        )
        if device is None and processes is not None:
            processes.close()
        yield device, None if device is None else processes
        if device is not None and device.failure is not None:
            remark(f"The CPU did the rest: {device.failure}")


def _device_readers(
    store: Store, request: VerifyRequest, inventory: Inventory, plan: ReadingPlan
) -> ReadingProcesses | None:
    """Start the processes that read for a device. Return None if threads should read."""
    from hicachectl.device.devices import CPU, cuda_started

    processors = len(os.sched_getaffinity(0))
    count = min(processors, _MOST_DEVICE_READERS, plan.jobs or MOST_CALLS, len(plan.rows))
    if request.devices == (CPU,) or not store.limits.forkable or count < 2 or cuda_started():
        return None
    _, needed = place(plan.capacities)
    buffer_bytes = min(request.buffer_bytes, max(needed, ALIGNMENT))
    try:
        return ReadingProcesses(store, inventory.objects, count, buffer_bytes=buffer_bytes)
    except OSError:
        return None


def _shared_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return an array of zeros that forked processes share."""
    count = int(np.prod(shape))
    memory = mmap.mmap(-1, max(1, count * dtype.itemsize))
    return np.frombuffer(memory, dtype=dtype, count=count).reshape(shape)


class _Reader:
    """One reading, in threads or in forked processes. It fills the arrays of a `ReadingResult`."""

    def __init__(
        self, store: Store, inventory: Inventory, plan: ReadingPlan, result: ReadingResult
    ) -> None:
        self._store = store
        self._inventory = inventory
        in_pieces = isinstance(store, Digesting) and not plan.confirm
        plan = replace(plan.ordered(places_of(inventory)), in_pieces=in_pieces)
        self._plan = plan
        self._result = result
        self._sizes = plan.capacities
        self._wants_digest = np.zeros(len(inventory.objects), dtype=np.bool_)
        self._wants_digest[plan.rows] = plan.digest
        self._noted = np.zeros(len(inventory.objects), dtype=np.bool_)
        self._noted[plan.rows] = plan.noted

    @property
    def processes(self) -> int:
        """Number of processes that read; 1 if threads of this process read."""
        count, nbytes = len(self._sizes), int(self._sizes.sum())
        if not self._store.limits.forkable or count < _FORK_OBJECTS:
            return 1
        if self._plan.device is not None:  # CUDA does not survive a fork
            return 1
        if nbytes > count * _FORK_MEAN_BYTES:
            return 1
        limit = self._plan.bytes_per_second
        if limit is not None and limit < _FORK_RATE:
            return 1
        wanted = processors = len(os.sched_getaffinity(0))
        if isinstance(self._store, Spreads) and self._store.concurrency.highest() > 2 * processors:
            wanted *= _WAITING_PROCESSES
        wanted = min(wanted, _MOST_PROCESSES, self._plan.jobs or MOST_CALLS)
        # The processes share the buffer, and the share of each must be large enough for any task.
        fit = self._plan.buffer_bytes // max(int(self._sizes.max()) + ALIGNMENT, 2 * TASK_BYTES)
        return max(1, min(wanted, fit))

    def read(self, on_read: Callable[[int], None]) -> None:
        """Read in threads of this process."""
        windows = windows_of(len(self._plan.rows))
        for nbytes in self._read(self._pipeline(windows, self._plan.jobs)):
            on_read(nbytes)

    def read_forked(self, processes: int, on_read: Callable[[int], None]) -> bool:
        """Read in forked processes. Return False if the system refuses to fork."""
        windows = windows_of(len(self._plan.rows), readers=processes)
        try:
            tickets = SharedCounter()
        except OSError:
            return False
        # The pipeline is made before the fork, so that all processes share the table of keys.
        pipeline = self._pipeline(tickets.deal(windows), 1, share=processes)

        def work(send: Callable[[Any], None]) -> None:
            if isinstance(self._store, Spreads):
                self._store.concurrency.share(processes)
            unsent, sent_at = 0, time.monotonic()
            for nbytes in self._read(pipeline):
                unsent += nbytes
                now = time.monotonic()
                if self._result.has_issues or now - sent_at > _TELL_SECONDS:
                    send([unsent, *self._result.take_notes()])
                    unsent, sent_at = 0, now
            send([unsent, *self._result.take_notes()])

        try:
            children = Workers(processes, work)
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
        inventory, plan = self._inventory, self._plan
        waiting = 0
        if plan.device is not None and (plan.processes is not None or jobs is None):
            waiting = plan.device.lanes  # threads that wait for the device do not read
        return Pipeline(
            self._store,
            inventory.objects,
            tasks_of(plan, inventory, windows),
            self._work,
            buffer_bytes=plan.buffer_bytes // share,
            jobs=jobs,
            deadline=plan.deadline,
            pace=None if plan.bytes_per_second is None else Pace(plan.bytes_per_second // share),
            identify=self._identify and not self._store.traits.identifies_by_exists,
            confirm=plan.confirm,
            processes=plan.processes,
            waiting=waiting,
        )

    @property
    def _identify(self) -> bool:
        return bool(self._plan.digest.any())

    def _read(self, pipeline: Pipeline[_Done]) -> Iterator[int]:
        """Gather the results of tasks. Yield the bytes of each task."""
        asks = self._identify and self._store.traits.identifies_by_exists
        for done in self._still_there(pipeline) if asks else pipeline:
            self._gather(done)
            yield int(done.loaded.task.capacities.sum())
        self._result.counts.complete = pipeline.complete

    def _still_there(self, tasks: Iterable[_Done]) -> Iterator[_Done]:
        """Yield the results of tasks, with vanished objects marked as gone.

        One query asks for the objects of many tasks.
        """
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
        if not tasks:
            return
        rows = np.concatenate([done.loaded.task.rows for done in tasks])
        existing = self._store.exists(self._inventory.take(rows, ["key"]))
        start = 0
        for done in tasks:
            end = start + len(done.loaded.task.rows)
            yield done.without(~existing[start:end])
            start = end

    def _work(self, loaded: Loaded) -> _Done:
        """Digest and check the objects of one task, in a thread of the pipeline."""
        plan, rows = self._plan, loaded.task.rows
        wanted = loaded.read.ok & self._wants_digest[rows]
        quartiles = self._quartiles(loaded)
        if loaded.digests is not None:
            return _Done(loaded, loaded.digests, [], quartiles)
        if plan.device is not None:  # a task for a device has objects of one affix
            affix = self._known_affix(loaded, 0)
            expected, checker = plan.expected.get(affix), plan.checkers.get(affix)
            if checker is not None or wanted.any():
                examined = plan.device.examine(loaded, wanted, expected, checker)
                if examined is not None:
                    return _Done(loaded, *examined, quartiles)
        issues: list[ValueIssue] = []
        for checker, places in self._checked(loaded, loaded.read.ok):
            issues += checker.check(loaded.block(), places)
        return _Done(loaded, _digests(loaded, np.flatnonzero(wanted)), issues, quartiles)

    def _quartiles(self, loaded: Loaded) -> npt.NDArray[np.uint16]:
        """Return the quartiles of a task's objects: [n, 3], zeros if the object is not noted."""
        found = np.zeros((len(loaded.task.rows), len(QUARTILES)), dtype=np.uint16)
        noted = loaded.read.ok & self._noted[loaded.task.rows]
        if noted.any():
            for checker, places in self._checked(loaded, noted):
                if checker.quartiles is not None:
                    found[places] = checker.quartiles(loaded.block(), places)
        return found

    def _checked(
        self, loaded: Loaded, chosen: BoolArray
    ) -> Iterator[tuple[ValueChecker, IntArray]]:
        """Yield each checker of a task, with the places of the chosen objects that it checks."""
        rows = loaded.task.rows
        if self._plan.checkers:
            edges = np.flatnonzero(np.diff(self._inventory.affix_ids[rows])) + 1
            for start, stop in pairwise([0, *edges.tolist(), len(rows)]):
                checker = self._plan.checkers.get(self._known_affix(loaded, start))
                places = start + np.flatnonzero(chosen[start:stop])
                if checker is not None and len(places):
                    yield checker, places

    def _known_affix(self, loaded: Loaded, index: int) -> int:
        affix = int(self._inventory.affix_ids[loaded.task.rows[index]])
        return self._plan.known_affix(affix, int(loaded.task.capacities[index]))

    def _gather(self, done: _Done) -> None:
        result, rows, read = self._result, done.loaded.task.rows, done.loaded.read
        ok, counts = read.ok, result.counts
        result.tried[rows] = read.statuses != Status.GONE
        result.whole[rows] = ok
        result.identified[rows] = read.statuses == Status.FOREIGN
        counts.objects_read += len(rows)
        counts.bytes_read += int(read.nbytes[ok].sum())
        if read.compared is not None:
            result.identified[rows] |= ok & read.compared
            counts.compared += int((ok & read.compared).sum())
            counts.undigested += int((ok & ~read.compared).sum())
        if read.unranked is not None:
            counts.unranked += int((ok & read.unranked).sum())
        wanted = ok & self._wants_digest[rows]
        result.digests[rows[wanted]] = done.digests[wanted]
        result.versions[rows[wanted]] = read.versions[wanted]
        result.digested[rows[wanted]] = True
        result.quartiles[rows] = done.quartiles
        counts.gone += int((read.statuses == Status.GONE).sum())
        for issue in done.issues:
            result.report(issue.code, int(rows[issue.index]), issue.detail)
        for index in np.flatnonzero(~ok & (read.statuses != Status.GONE)).tolist():
            self._report_unread(done.loaded, index)

    def _report_unread(self, loaded: Loaded, index: int) -> None:
        row, status = int(loaded.task.rows[index]), Status(loaded.read.statuses[index])
        if status in _FAILED:
            code, why = _FAILED[status]
            why = loaded.read.errors.get(index, why) or code_named(code).detail
            self._result.report(code, row, why)
            return
        now, listed = int(loaded.read.nbytes[index]), int(loaded.task.capacities[index])
        detail = f"{now} bytes when read, but {listed} bytes when listed"
        if status is Status.SHORT:
            self._result.report("truncated", row, detail)
        else:
            self._result.report("oversized", row, detail, oversized_rule(self._store.grammar))


def _digests(loaded: Loaded, wanted: IntArray) -> npt.NDArray[np.uint8]:
    """Return the digests of a task's objects: [n, 32], zeros for objects that are not wanted.

    wanted: places of the objects in the task.
    """
    from blake3 import blake3

    digests = np.zeros((len(loaded.task.rows), DIGEST_BYTES), dtype=np.uint8)
    if not len(wanted):
        return digests
    joined = b"".join([blake3(content).digest() for content in loaded.contents(wanted)])
    digests[wanted] = np.frombuffer(joined, dtype=np.uint8).reshape(len(wanted), DIGEST_BYTES)
    return digests
