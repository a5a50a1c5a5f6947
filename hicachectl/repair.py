"""Carry out a repair plan: page groups leave a store for its quarantine, or for good.

Each batch of groups has a durable record before anything of it moves; a run that finds the
record of one that was killed finishes it.
"""

from __future__ import annotations

import errno
import os
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa

from hicachectl.deployments import UNRESOLVED
from hicachectl.formats.errors import StoreUnavailable, UsageError
from hicachectl.formats.keys.resolve import ANCHOR_POOL
from hicachectl.quarantine import (
    Batch,
    Facts,
    Mode,
    Record,
    Run,
    Shape,
    Slot,
    TakenGroup,
    TakenObject,
    batches,
    lock_run,
    runs,
    sweep,
)
from hicachectl.relocation import OUT_OF_SPACE, copy_objects
from hicachectl.removal import Deleting, MovingOut, Standing, Work, look, take_away

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

    from hicachectl.backends.base import Mover, Store
    from hicachectl.backends.urls import Config
    from hicachectl.deployments import Deployment, Member
    from hicachectl.groups import PageGroups
    from hicachectl.inventory import IntArray, Inventory
    from hicachectl.planning import RepairPlan

BATCH_OBJECTS = 1024  # about what a killed run leaves to be finished
SETTLE_SECONDS = 1.0  # longer than a server takes from a page's sidecars to its anchor
LIVE_SECONDS = 300.0  # a store that was written to so recently has a writer

# What a group lacks: none of its objects is unwanted once nothing is lacking any more.
STRUCTURAL_CODES = frozenset({"missing-pool", "missing-part", "missing-rank", "orphan-sidecar"})

REMOVED = "removed"
GONE = "gone"  # it had vanished before we came
KEPT = "kept"  # a server has rewritten what was wrong with it
IN_FLIGHT = "in-flight"  # removed; a server is writing it anew
FAILED = "failed"

ROWS = pa.schema(
    [
        ("page", pa.string()),
        ("model", pa.string()),
        ("tag", pa.string()),
        ("objects", pa.int64()),
        ("nbytes", pa.int64()),
        ("state", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class RepairOutcome:
    """What a repair did.

    repaired: groups taken away. quarantined, deleted: objects. gone: objects that had vanished.
    kept: groups left alone, since a server had rewritten what was wrong. nbytes: taken away.
    failed: (key or place, message). remaining: groups that should have gone and are still there.
    rows: page, model, tag, objects, nbytes and state of each group that was tried.
    quarantine: where the objects are; None where nothing is kept.
    """

    repaired: int = 0
    quarantined: int = 0
    deleted: int = 0
    gone: int = 0
    kept: int = 0
    nbytes: int = 0
    failed: tuple[tuple[str, str], ...] = ()
    remaining: int = 0
    rows: pa.Table = field(default_factory=ROWS.empty_table)
    quarantine: str | None = None


def run_repair(
    store: Store,
    inventory: Inventory,
    groups: PageGroups,
    plan: RepairPlan,
    *,
    mode: Mode,
    quarantine: str | None = None,
    config: Config | None = None,
    dry_run: bool = False,
    digests: Mapping[bytes, str] | None = None,
    settle_seconds: float = SETTLE_SECONDS,
    on_progress: Callable[[int], None] = lambda groups: None,
) -> RepairOutcome:
    """Take the groups of a plan out of the store.

    inventory: with the column `version` where the store has versions, so that objects rewritten
    since the scan are told from damaged ones. mode delete keeps nothing; its quarantine then has
    only the records of what is being done. digests: BLAKE3 of keys, where known.
    settle_seconds: how long to watch a store with a writer for pages it has half written.
    on_progress is told how many groups were dealt with. Raises UsageError on a quarantine that
    cannot be one, StoreUnavailable; what happens to one object is in the outcome.
    """
    directory = quarantine_directory(store, quarantine, config)
    if directory is None and mode == "quarantine":
        raise UsageError(f"{store.url}: name a directory for its objects: --quarantine DIR")
    planner = _Planner(inventory, groups, plan, digests or {})
    if dry_run:
        return _rehearse(planner, mode, directory)
    newest_ns = int(groups.newest_ns.max()) if len(groups) else 0
    live = newest_ns > time.time_ns() - int(LIVE_SECONDS * 1e9)
    with _Worker(store, directory, mode) as worker:
        for planned in planner.batches():
            worker.work(planned)
            on_progress(len(planned))
            if worker.full:
                break
        if live:
            worker.settle(settle_seconds)
        return worker.outcome(untried=len(planner) - worker.tried)


def finish_unfinished(
    store: Store, quarantine: str | None = None, *, config: Config | None = None
) -> RepairOutcome:
    """Complete what runs that were killed had begun on this store.

    To be called before the scan by every run that removes something. What another process is
    working on is left to it. Raises FormatError on a damaged record, StoreUnavailable.
    """
    outcome = RepairOutcome()
    directory = quarantine_directory(store, quarantine, config)
    for run in runs(directory) if directory is not None else ():
        lock = lock_run(run)
        if lock is None:
            continue
        try:
            for batch in _unfinished(run, store, directory):
                with _Worker(store, directory, batch.record.mode) as worker:
                    worker.finish(batch)
                    outcome = _added(outcome, worker.outcome())
            sweep(run)
        finally:
            os.close(lock)
    return outcome


def count_unfinished(
    store: Store, quarantine: str | None = None, *, config: Config | None = None
) -> int:
    """Count the groups that `finish_unfinished` would complete."""
    directory = quarantine_directory(store, quarantine, config)
    return sum(
        len(batch.record.groups)
        for run in (runs(directory) if directory is not None else ())
        for batch in _unfinished(run, store, directory)
    )


def quarantine_directory(
    store: Store, quarantine: str | None, config: Config | None = None
) -> Path | None:
    """Return where a store's quarantine is: the one named, else the one beside the store.

    None where none is named and the store has no place. Raises UsageError where it cannot be.
    """
    from hicachectl.backends.urls import parse_url

    beside = store.side_directory()
    if quarantine is None:
        return None if beside is None else beside / "quarantine"
    url = parse_url(quarantine, config)
    path = Path(url.path)
    if url.scheme != "file" or (path.exists() and not path.is_dir()):
        raise UsageError(f"--quarantine {quarantine}: must be a directory")
    if beside is not None and os.path.realpath(path) == os.path.realpath(beside.parent):
        raise UsageError(f"--quarantine {quarantine}: is the store itself")
    return path


def _unfinished(run: Path, store: Store, directory: Path | None) -> Iterator[Batch]:
    """Batches of a run that were begun on this store; beside it lie its own, wherever it moved."""
    beside = store.side_directory()
    own = beside is not None and directory == beside / "quarantine"
    for batch in batches(run):
        record = batch.record
        if not batch.done and record.scheme == store.scheme and (own or record.store == store.url):
            yield batch


def _added(one: RepairOutcome, other: RepairOutcome) -> RepairOutcome:
    return RepairOutcome(
        repaired=one.repaired + other.repaired,
        quarantined=one.quarantined + other.quarantined,
        deleted=one.deleted + other.deleted,
        gone=one.gone + other.gone,
        kept=one.kept + other.kept,
        nbytes=one.nbytes + other.nbytes,
        failed=one.failed + other.failed,
        remaining=one.remaining + other.remaining,
        rows=pa.concat_tables([one.rows, other.rows]),
        quarantine=one.quarantine or other.quarantine,
    )


def _rehearse(planner: _Planner, mode: Mode, directory: Path | None) -> RepairOutcome:
    """Say what would be done."""
    ledger = _Ledger()
    objects = 0
    for planned in planner.batches():
        for group in planned:
            objects += len(group.scanned)
            sizes = [facts.nbytes or 0 for facts in group.scanned.values()]
            ledger.note(group.page, group.model, group.tag, sizes, REMOVED)
    keeps = mode == "quarantine"
    return RepairOutcome(
        repaired=len(planner),
        quarantined=objects if keeps else 0,
        deleted=0 if keeps else objects,
        nbytes=sum(ledger.columns["nbytes"]),
        rows=ledger.table(),
        quarantine=str(directory) if keeps else None,
    )


# from the plan to what a batch needs


@dataclass(frozen=True, slots=True)
class _Planned:
    """A group of the plan; scanned, digests and unwanted are by slot of its shape."""

    page: str
    model: str
    tag: str
    shape: Shape
    scanned: dict[int, Facts]
    digests: dict[int, str]
    unwanted: frozenset[int]
    findings: tuple[dict[str, str | None], ...]

    def as_it_is(self, there: Mapping[int, Facts], first_file: int) -> TakenGroup:
        """Describe the group as it is now; its objects get file numbers from `first_file`."""
        same = {
            s for s, facts in there.items() if s in self.scanned and facts.same(self.scanned[s])
        }
        objects = tuple(
            TakenObject(
                slot=slot,
                file=first_file + number,
                unwanted=slot in self.unwanted and slot in same,
                facts=facts,
                blake3=self.digests.get(slot) if slot in same else None,
            )
            for number, (slot, facts) in enumerate(there.items())
        )
        lacks = {finding["code"] for finding in self.findings} & STRUCTURAL_CODES
        absent = () if lacks else set(range(len(self.shape))) - self.scanned.keys()
        return TakenGroup(
            self.page, self.model, self.tag, self.shape, objects, frozenset(absent), self.findings
        )


class _Planner:
    """Makes of a plan's groups what batches need, without Python for what is not planned."""

    def __init__(
        self,
        inventory: Inventory,
        groups: PageGroups,
        plan: RepairPlan,
        digests: Mapping[bytes, str],
    ) -> None:
        self._inventory = inventory
        self._groups = groups
        self._plan = plan
        self._digests = digests
        self._outright = np.isin(plan.groups, plan.outright)
        chosen = np.zeros(len(groups) + 1, dtype=np.bool_)
        chosen[plan.groups] = True
        rows = np.flatnonzero(chosen[groups.of_object])
        self._rows = rows[np.argsort(groups.of_object[rows], kind="stable")]
        self._objects = _spans(groups.of_object[self._rows], plan.groups)
        self._reasons = _spans(plan.about, plan.groups)
        self._shapes = [_shape_of(deployment) for deployment in groups.deployments]
        self._members = inventory.by_affix(inventory.table.member_ids, UNRESOLVED)

    def __len__(self) -> int:
        return len(self._plan.groups)

    def batches(self) -> Iterator[list[_Planned]]:
        """Give the groups in batches of about BATCH_OBJECTS objects."""
        first = 0
        while first < len(self):
            limit = self._objects[first] + BATCH_OBJECTS
            last = int(np.searchsorted(self._objects, limit, side="right")) - 1
            last = max(first + 1, last)
            yield self._batch(first, last)
            first = last

    def _batch(self, first: int, last: int) -> list[_Planned]:
        start = int(self._objects[first])
        rows = self._rows[start : self._objects[last]]
        objects = self._inventory.objects.take(pa.array(rows))
        keys = objects.column("key").to_pylist()
        columns = (_values(objects, name) for name in ("nbytes", "mtime_ns", "version"))
        facts = list(map(Facts, *columns))
        pages = self._groups.pages.take(pa.array(self._plan.groups[first:last])).to_pylist()
        planned = []
        for number in range(first, last):
            mine = slice(self._objects[number] - start, self._objects[number + 1] - start)
            planned.append(
                self._planned(number, pages[number - first], rows[mine], keys[mine], facts[mine])
            )
        return planned

    def _planned(
        self, number: int, page: str, rows: IntArray, keys: list[bytes], facts: list[Facts]
    ) -> _Planned:
        deployment_id = int(self._groups.deployment_ids[self._plan.groups[number]])
        if deployment_id == UNRESOLVED:
            shape, model, tag = self._ambiguous_shape(rows), "", ""
            slots = list(range(len(rows)))
        else:
            deployment = self._groups.deployments[deployment_id]
            shape, model, tag = self._shapes[deployment_id], deployment.model, deployment.tag
            slots = self._members[rows].tolist()
        reasons = self._plan.reasons.slice(
            int(self._reasons[number]), int(self._reasons[number + 1] - self._reasons[number])
        ).to_pylist()
        damaged = {reason["key"] for reason in reasons if reason["code"] not in STRUCTURAL_CODES}
        # A finding without a key is about all of its page.
        everything = bool(self._outright[number]) or None in damaged
        of_key = dict(zip(keys, slots, strict=True))
        return _Planned(
            page=page,
            model=model,
            tag=tag,
            shape=shape,
            scanned=dict(zip(slots, facts, strict=True)),
            digests={s: self._digests[key] for key, s in of_key.items() if key in self._digests},
            unwanted=frozenset(
                s for key, s in of_key.items() if everything or key.decode() in damaged
            ),
            findings=tuple(reasons),
        )

    def _ambiguous_shape(self, rows: IntArray) -> Shape:
        """Make a shape of objects whose keys can be read in several ways: all belong together."""
        table = self._inventory.table
        return tuple(
            Slot(
                prefix=table.affixes[affix][0],
                suffix=table.affixes[affix][1],
                anchor=any(r.pool == ANCHOR_POOL for r in table.resolved[affix].readings),
                required=True,
            )
            for affix in self._inventory.affix_ids[rows].tolist()
        )


def _spans(owners: IntArray, groups: IntArray) -> IntArray:
    """Where each group's run of `owners` starts, and behind the last where it ends."""
    return np.append(np.searchsorted(owners, groups), len(owners)).astype(np.int64)


def _shape_of(deployment: Deployment) -> Shape:
    """List the slots of a deployment's pages, by member id."""
    sets: dict[object, int] = {}
    sidecars = [n for n, member in enumerate(deployment.members) if _is_sidecar(member)]
    return tuple(
        Slot(
            prefix=member.affix[0],
            suffix=member.affix[1],
            anchor=member.anchor,
            required=member.anchor or number in sidecars,
            trailing=sets.setdefault(member.object_set, len(sets)) if _is_in_set(member) else None,
            sidecars=tuple(
                n for n in sidecars if member.anchor and _same_rank(member, deployment.members[n])
            ),
        )
        for number, member in enumerate(deployment.members)
    )


def _is_sidecar(member: Member) -> bool:
    """Whether every page must have it: servers without speculation write pages without a draft."""
    return not (member.anchor or member.trailing or member.coordinate.pool.startswith("draft"))


def _is_in_set(member: Member) -> bool:
    """Whether a page has all or nothing of its kind; nothing says so of what no profile lists."""
    return member.trailing and member.listed


def _same_rank(anchor: Member, sidecar: Member) -> bool:
    """Whether one rank writes both: their ranks are equal where both keys say one."""
    return all(
        mine is None or theirs is None or mine == theirs
        for mine, theirs in (
            (getattr(anchor.coordinate.shard, axis), getattr(sidecar.coordinate.shard, axis))
            for axis in ("tp_rank", "pp_rank", "cp_rank", "dcp_rank")
        )
    )


def _values(table: pa.Table, name: str) -> list[Any]:
    if name not in table.column_names:
        return [None] * len(table)
    values: list[Any] = table.column(name).to_pylist()
    return values


# the work


class _Ledger:
    """Notes what became of each group."""

    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = {name: [] for name in ROWS.names}

    def note(self, page: str, model: str, tag: str, sizes: Sequence[int], state: str) -> None:
        row = (page, model or None, tag or None, len(sizes), sum(sizes), state)
        for column, value in zip(self.columns.values(), row, strict=True):
            column.append(value)

    def table(self) -> pa.Table:
        return pa.table(self.columns, schema=ROWS)


class _Worker:
    """Takes batches of groups out of one store."""

    def __init__(self, store: Store, directory: Path | None, mode: Mode) -> None:
        self.full = False  # the quarantine has no room: nothing more is begun
        self._store = store
        self._directory = directory
        self._mode: Mode = mode
        self._run = None if directory is None else Run(directory)
        self._ledger = _Ledger()
        self._watched: dict[int, TakenGroup] = {}  # row of the ledger to the group, to be settled
        self._counts: Counter[str] = Counter()
        self._failed: list[tuple[str, str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._run is not None:
            self._run.close()

    @property
    def tried(self) -> int:
        """How many groups the ledger has."""
        return len(self._ledger.columns["page"])

    def work(self, planned: Sequence[_Planned]) -> None:
        """Take a batch away, from its record to its end."""
        works = self._as_they_are(planned)
        bad = [work for work in works if work.standing is Standing.BAD]
        if bad:
            self._carry_out(bad, self._mode)
        for work in works:
            self._note(work)

    def finish(self, batch: Batch) -> None:
        """Take away what is left of the groups of a batch that a killed run had begun."""
        batch.folder.mkdir(exist_ok=True)
        held = batch.held()
        works = [
            Work(group, touched=any(o.file in held for o in group.objects))
            for group in batch.record.groups
        ]
        with ExitStack() as exits:
            mover = self._store.mover(str(batch.folder))
            if mover is not None:
                exits.enter_context(mover)
            self._take(works, batch, mover)
        for work in works:
            self._note(work)

    def settle(self, seconds: float) -> None:
        """Look after the groups taken away, and take what a server half wrote of them meanwhile.

        One that had looked for a sidecar just before it was taken writes its anchor later.
        """
        deadline = time.monotonic() + seconds
        while self._watched and time.monotonic() < deadline:
            time.sleep(min(0.2, seconds / 5))
            bad = [w for w in self._unsettled().values() if w.standing is Standing.BAD]
            if bad:
                self._carry_out(bad, "delete")
                self._counts["new"] += sum(work.removed + work.new for work in bad)
        for row in self._unsettled():
            self._ledger.columns["state"][row] = IN_FLIGHT

    def outcome(self, untried: int = 0) -> RepairOutcome:
        """Sum up."""
        states = Counter(self._ledger.columns["state"])
        keeps = self._mode == "quarantine"
        taken = self._counts["taken"]
        return RepairOutcome(
            repaired=states[REMOVED] + states[IN_FLIGHT],
            quarantined=taken if keeps else 0,
            deleted=self._counts["new"] + (0 if keeps else taken),
            gone=self._counts["gone"],
            kept=states[KEPT],
            nbytes=self._counts["nbytes"],
            failed=tuple(self._failed),
            remaining=states[FAILED] + untried,
            rows=self._ledger.table(),
            quarantine=str(self._directory) if keeps else None,
        )

    def _as_they_are(self, planned: Sequence[_Planned]) -> list[Work]:
        """Look at planned groups again: what has changed since the scan is not what was found."""
        bare = [TakenGroup(p.page, p.model, p.tag, p.shape, ()) for p in planned]
        seen = look(self._store, bare)
        works = []
        files = 0
        for plan, group in zip(planned, bare, strict=True):
            there = seen.of(group)
            work = Work(plan.as_it_is(there, files), gone=len(plan.scanned.keys() - there.keys()))
            work.standing = work.judge(there)
            works.append(work)
            files += len(there)
        return works

    def _carry_out(self, works: Sequence[Work], mode: Mode) -> None:
        """Take groups away under a record, with copies of them where they cannot be moved."""
        if self._run is None:  # mode delete, and no place for a record
            take_away(self._store, works, Deleting(self._store))
            return
        with ExitStack() as exits:
            try:
                batch = self._run.new_folder()
                mover = self._store.mover(str(batch.folder))
                if mover is not None:
                    exits.enter_context(mover)
                elif mode == "quarantine":
                    self._copy(works, batch)
                works = [work for work in works if work.error is None]
                if not works:
                    return
                groups = tuple(work.group for work in works)
                record = Record(self._store.url, self._store.scheme, mode, time.time(), groups)
                batch = self._run.begin(batch, record)
            except OSError as error:
                self._refuse(works, error)
                return
            self._take(works, batch, mover)

    def _take(self, works: Sequence[Work], batch: Batch, mover: Mover | None) -> None:
        """Take recorded groups away; the record is done once none of them has failed."""
        take_away(self._store, works, Deleting(self._store) if mover is None else MovingOut(mover))
        if any(work.error is not None for work in works):
            return
        try:
            if batch.record.mode == "delete":
                batch.discard()
            else:
                untouched = (w.standing is Standing.SOUND and not w.touched for w in works)
                batch.write([w.group for w, kept in zip(works, untouched, strict=True) if not kept])
        except OSError as error:
            # The record of what was begun is there, and the next run finishes it.
            self._failed.append((str(batch.run), error.strerror or str(error)))

    def _copy(self, works: Sequence[Work], batch: Batch) -> None:
        """Copy every object of some groups; a group of which one fails stays, without copies."""
        from hicachectl.backends.file import FileStore

        seen = look(self._store, (work.group for work in works))
        objects = [
            (w, o, seen.places.get(w.group.key(o.slot))) for w in works for o in w.group.objects
        ]
        there = [(work, taken, place) for work, taken, place in objects if place is not None]
        sizes = np.array([taken.facts.nbytes or 0 for _, taken, _ in there], dtype=np.int64)
        rows = seen.rows.take(pa.array([place for _, _, place in there], pa.int64()))
        names = pa.table(
            {
                "key": pa.array([str(taken.file).encode() for _, taken, _ in there], pa.binary()),
                "mtime_ns": pa.array([taken.facts.mtime_ns for _, taken, _ in there], pa.int64()),
            }
        )
        with FileStore(batch.folder) as target:
            result = copy_objects(self._store, rows, target, names, sizes)
        for number, message in result.errors.items():
            work, taken, _ = there[number]
            work.error = work.error or (work.group.key(taken.slot), f"cannot be copied: {message}")
            self.full |= message in OUT_OF_SPACE
        self._forget_changed(
            works, batch, {t.file for (_, t, _), ok in zip(there, result.ok, strict=True) if ok}
        )

    def _forget_changed(self, works: Sequence[Work], batch: Batch, copied: set[int]) -> None:
        """Record only copies of what is still there as it was copied; remove the others."""
        seen = look(self._store, (work.group for work in works))
        for work in works:
            there = seen.of(work.group)
            kept = tuple(
                taken
                for taken in work.group.objects
                if taken.file in copied
                and work.error is None
                and (taken.slot not in there or taken.facts.same(there[taken.slot]))
            )
            for taken in work.group.objects:
                if taken not in kept:
                    (batch.folder / str(taken.file)).unlink(missing_ok=True)
            work.group = replace(work.group, objects=kept)

    def _refuse(self, works: Sequence[Work], error: OSError) -> None:
        """Give up a batch that has no record: nothing of it was touched."""
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise StoreUnavailable(
                f"cannot write to the quarantine {self._directory}: {error.strerror}"
            ) from error
        self.full = True
        self._failed.append((str(self._directory), error.strerror or str(error)))
        for work in works:
            work.error = b"", ""

    def _note(self, work: Work) -> None:
        """Enter in the ledger what became of a group."""
        self._counts["gone"] += work.gone
        self._counts["new"] += work.new
        self._counts["taken"] += work.removed
        sizes = [taken.facts.nbytes or 0 for taken in work.group.objects]
        if work.touched:
            self._counts["nbytes"] += sum(sizes)
        if work.error is not None:
            state = FAILED
            if work.error[1]:
                self._failed.append(
                    (work.error[0].decode(errors="backslashreplace"), work.error[1])
                )
        elif work.touched:
            state = REMOVED
            self._watched[self.tried] = replace(work.group, objects=(), findings=())
        else:
            state = {Standing.NOTHING: GONE, Standing.SOUND: KEPT}.get(work.standing, IN_FLIGHT)
        group = work.group
        self._ledger.note(group.page, group.model, group.tag, sizes, state)

    def _unsettled(self) -> dict[int, Work]:
        """Look at the watched groups; give those of which something is there that is not whole."""
        unsettled: dict[int, Work] = {}
        files = 0
        rows = list(self._watched)
        for start in range(0, len(rows), BATCH_OBJECTS):
            some = rows[start : start + BATCH_OBJECTS]
            seen = look(self._store, (self._watched[row] for row in some))
            for row in some:
                there = seen.of(self._watched[row])
                work = Work(self._watched[row])
                work.standing = work.judge(there)
                if work.standing in (Standing.COMING, Standing.BAD):
                    work.group = replace(work.group, objects=_unblamed(there, files))
                    unsettled[row] = work
                    files += len(there)
        return unsettled


def _unblamed(there: Mapping[int, Facts], first_file: int) -> tuple[TakenObject, ...]:
    """Describe objects of which none is unwanted once their group is whole."""
    return tuple(
        TakenObject(slot, number, False, facts)
        for number, (slot, facts) in enumerate(there.items(), first_file)
    )
