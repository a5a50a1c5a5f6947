"""The reading checks: every object's bytes once through the pipeline, digested and looked at."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa

from hicachectl.backends.base import Status
from hicachectl.checks.sizes import oversized_severity
from hicachectl.findings import findings
from hicachectl.formats.expectation import expected_objects
from hicachectl.pipeline import DEFAULT_BUFFER_BYTES, Loaded, Pipeline, Task, batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy.typing as npt

    from hicachectl.backends.base import Store
    from hicachectl.checks.values import ValueChecker, ValueIssue
    from hicachectl.deployments import AffixTable
    from hicachectl.formats.profile import Profile
    from hicachectl.inventory import IntArray, Inventory

DIGEST_BYTES = 32

# Tasks are small enough that the bytes are still in the processor's cache when they are worked
# on, and large enough that small objects are worked on together.
_TASK_BYTES = 8 << 20
_TASK_OBJECTS = 256
# Objects of one kind are read together within a window of the listing, so that a run that is cut
# short has seen whole pages and not one rank's objects alone.
_WINDOW_OBJECTS = 8192

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

    rows: [n] int64, the objects to read. digest: [n] bool, which of them to digest. checkers: by
    affix id, for objects of `sizes[affix]` bytes. device: what digests and checks in place of the
    processor.
    """

    rows: IntArray
    digest: npt.NDArray[np.bool_]
    checkers: Mapping[int, ValueChecker]
    sizes: IntArray
    buffer_bytes: int = DEFAULT_BUFFER_BYTES
    jobs: int | None = None
    deadline: float | None = None
    device: Device | None = None


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

    on_read is told the bytes of each task as it is done. Raises StoreUnavailable, and UsageError
    when one object is larger than the buffer.
    """
    count = len(inventory.objects)
    result = ReadingResult(
        digests=np.zeros((count, DIGEST_BYTES), dtype=np.uint8),
        versions=np.zeros((count, len(store.version_fields)), dtype=np.uint64),
        digested=np.zeros(count, dtype=np.bool_),
    )
    if not len(plan.rows):
        return result
    wants_digest = np.zeros(count, dtype=np.bool_)
    wants_digest[plan.rows] = plan.digest
    pipeline: Pipeline[_Done] = Pipeline(
        store,
        inventory.objects,
        _tasks(inventory, plan),
        lambda loaded: _work(loaded, inventory, plan, wants_digest),
        buffer_bytes=plan.buffer_bytes,
        jobs=_jobs(store, plan),
        deadline=plan.deadline,
    )
    for done in pipeline:
        _gather(result, done, wants_digest, store.scheme)
        on_read(int(done.loaded.task.capacities.sum()))
    result.complete = pipeline.complete
    return result


def _jobs(store: Store, plan: ReadingPlan) -> int | None:
    """Count the threads: those that wait for a device do not read meanwhile."""
    if plan.jobs is not None or plan.device is None:
        return plan.jobs
    return store.limits.parallel_reads + plan.device.lanes


def _tasks(inventory: Inventory, plan: ReadingPlan) -> Iterator[Task]:
    """Cut the rows into tasks of objects of one affix and size."""
    rows, most_objects, most_bytes = plan.rows, _TASK_OBJECTS, _TASK_BYTES
    if plan.device is not None:
        most_objects, most_bytes = plan.device.most_objects, plan.device.slab_bytes
    listed = inventory.objects.column("nbytes").fill_null(0).to_numpy()
    for start in range(0, len(rows), _WINDOW_OBJECTS):
        window = rows[start : start + _WINDOW_OBJECTS]
        affixes, sizes = inventory.affix_ids[window], listed[window]
        order = np.lexsort((sizes, affixes))
        window, affixes, sizes = window[order], affixes[order], sizes[order]
        changes = np.flatnonzero((np.diff(affixes) != 0) | (np.diff(sizes) != 0)) + 1
        for part, part_sizes in zip(
            np.split(window, changes), np.split(sizes, changes), strict=True
        ):
            yield from batches(part, part_sizes, most_objects=most_objects, most_bytes=most_bytes)


def _work(
    loaded: Loaded, inventory: Inventory, plan: ReadingPlan, wants_digest: npt.NDArray[np.bool_]
) -> _Done:
    """Digest and check one task's objects; runs in a reader thread."""
    rows = loaded.task.rows
    ok = loaded.read.ok
    affix = int(inventory.affix_ids[rows[0]])
    checker = plan.checkers.get(affix)
    if checker is not None and loaded.task.capacities[0] != plan.sizes[affix]:
        checker = None
    if plan.device is not None:
        examined = plan.device.examine(loaded, ok & wants_digest[rows], checker)
        if examined is not None:
            return _Done(loaded, *examined)
    return _Done(
        loaded, _digests(loaded, np.flatnonzero(ok & wants_digest[rows])), _issues(loaded, checker)
    )


def _digests(loaded: Loaded, wanted: IntArray) -> npt.NDArray[np.uint8]:
    """Digest some objects of a task: [n, 32], zeros for the others."""
    from blake3 import blake3

    digests = np.zeros((len(loaded.task.rows), DIGEST_BYTES), dtype=np.uint8)
    joined = b"".join([blake3(content).digest() for content in loaded.contents(wanted)])
    digests[wanted] = np.frombuffer(joined, dtype=np.uint8).reshape(len(wanted), DIGEST_BYTES)
    return digests


def _issues(loaded: Loaded, checker: ValueChecker | None) -> list[ValueIssue]:
    """Check the values of a task's objects, as far as they could be read."""
    ok = loaded.read.ok
    if checker is None or not ok.any():
        return []
    if ok.all():
        return checker.check(loaded.block())
    places = np.flatnonzero(ok)
    issues = checker.check(loaded.block()[places])
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
    elif status is Status.SHORT:
        result.report("truncated", "error", row, f"{now} bytes when read, {listed} when listed")
    else:
        severity = oversized_severity(scheme)
        result.report("oversized", severity, row, f"{now} bytes when read, {listed} when listed")
