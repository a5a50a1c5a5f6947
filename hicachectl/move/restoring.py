"""Put quarantined page groups back: sidecars first, anchors last, never over what is there."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from hicachectl.backends.base import Status
from hicachectl.backends.capabilities import open_mover
from hicachectl.backends.file.store import FileStore
from hicachectl.formats.errors import StoreUnavailable, UsageError
from hicachectl.move.quarantine import Batch, Quarantine, batches, runs, sweep
from hicachectl.move.records import total_bytes
from hicachectl.move.relocation import copy_objects, same_bytes
from hicachectl.move.removal import look

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from hicachectl.backends.base import Store
    from hicachectl.backends.capabilities import Mover
    from hicachectl.backends.disk.directory import Directory
    from hicachectl.move.records import Facts, TakenGroup, TakenObject
    from hicachectl.move.removal import Look

RESTORED = "restored"
WOULD_RESTORE = "would-restore"  # in a dry run
CONFLICT = "conflict"
FAILED = "failed"

_NO_MORE = "is in the quarantine no more"

ROWS = pa.schema(
    [
        ("page", pa.string()),
        ("model", pa.string()),
        ("tag", pa.string()),
        ("objects", pa.int64()),
        ("nbytes", pa.int64()),
        ("codes", pa.list_(pa.string())),
        ("state", pa.string()),
        ("detail", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class RestoreOutcome:
    """What a restore did.

    restored: groups. objects, nbytes: put back. conflicts: groups of which an object is in the
    store again. gone: objects that were quarantined and are nowhere. failed: groups.
    busy: runs of the quarantine that another process is working on. unrecorded: folders with
    objects that no record names; left alone. rows: each group, with the
    codes of the findings that it was taken away for.
    """

    restored: int = 0
    objects: int = 0
    nbytes: int | None = 0
    conflicts: int = 0
    gone: int = 0
    failed: int = 0
    busy: int = 0
    unrecorded: tuple[str, ...] = ()
    rows: pa.Table = field(default_factory=ROWS.empty_table, repr=False)


def restore_groups(
    store: Store,
    quarantine: Path,
    *,
    wanted: Callable[[TakenGroup, str], bool] = lambda group, scheme: True,
    dry_run: bool = False,
    on_progress: Callable[[int], None] = lambda groups: None,
) -> RestoreOutcome:
    """Put the wanted groups of a quarantine back; their records go with them.

    wanted: given a group and the scheme of its keys.

    A group of which any object is in the store is a conflict, and stays as it is. One that a
    killed run had only begun to take away becomes what it was before. Raises UsageError where
    there is no quarantine or it is of another kind of store, FormatError on a damaged record,
    UntrustedError for links and for files of owners who are not trusted, all before anything is
    moved; StoreUnavailable.
    """
    place = Quarantine(store, quarantine)
    ledger = _Ledger()
    busy = 0
    unrecorded: list[str] = []
    try:
        with _opened(place, writes=not dry_run) as directory:
            _check(store, directory, wanted)
            for name, run in runs(directory):
                if not run.lock():
                    busy += 1
                    continue
                for batch in batches(run):
                    chosen = _chosen(store, batch, wanted)
                    if chosen:
                        _Restorer(store, batch, ledger).restore(chosen, dry_run=dry_run)
                        on_progress(len(chosen))
                if not dry_run:
                    unrecorded += sweep(run, directory, name)
    except OSError as error:
        raise StoreUnavailable(f"cannot work in {quarantine}: {error.strerror}") from error
    return ledger.outcome(busy, unrecorded)


def _opened(place: Quarantine, *, writes: bool) -> Directory:
    try:
        found = place.find(writes=writes)
    except NotADirectoryError:
        found = None
    if found is None:
        raise UsageError(f"{place.path}: no such directory; name one that --quarantine filled")
    return found


def _check(store: Store, directory: Directory, wanted: Callable[[TakenGroup, str], bool]) -> None:
    """Refuse bad records, links and files of strangers before anything is moved."""
    for _, run in runs(directory):
        for batch in batches(run):
            if _chosen(store, batch, wanted):
                batch.held()


def _chosen(
    store: Store, batch: Batch, wanted: Callable[[TakenGroup, str], bool]
) -> list[TakenGroup]:
    chosen = [group for group in batch.record.groups if wanted(group, batch.record.scheme)]
    if not chosen or batch.record.mode == "delete":  # the next rm completes that
        return []
    if batch.record.scheme != store.grammar:
        raise UsageError(
            f"{batch.run.path}: was taken from {batch.record.store}, a {batch.record.scheme} "
            f"store; {store.url} has keys of another form"
        )
    return chosen


_Problems = dict[int, tuple[str, str]]  # state and detail, by id of a _Group


class _Place(Enum):
    """Where a recorded object is."""

    HERE = 0  # in the quarantine
    BACK = 1  # in the store: an earlier restore was interrupted, or it had never left
    BOTH = 2  # in the store, copied there, its copy here not yet deleted
    TAKEN = 3  # another object has its key
    LOST = 4


@dataclass(frozen=True, slots=True)
class _Group:
    """A group to restore: the objects that are still in the quarantine."""

    group: TakenGroup
    here: tuple[TakenObject, ...]
    double: tuple[TakenObject, ...]

    def is_anchor(self, taken: TakenObject) -> bool:
        return self.group.shape[taken.slot].anchor

    def of_kind(self, anchor: bool) -> list[TakenObject]:
        return [taken for taken in self.here if self.is_anchor(taken) == anchor]


class _Restorer:
    """Puts back groups of one batch."""

    def __init__(self, store: Store, batch: Batch, ledger: _Ledger) -> None:
        self._store = store
        self._batch = batch
        self._ledger = ledger
        self._held = batch.held()

    def restore(self, chosen: list[TakenGroup], *, dry_run: bool) -> None:
        """Put the chosen groups back and take them out of the record."""
        seen = look(self._store, chosen)
        ready = [group for group in (self._assess(c, seen) for c in chosen) if group is not None]
        problems = {} if dry_run or not ready else self._put_back(ready)
        done = set()
        for group in ready:
            if id(group) in problems:
                self._ledger.note(group.group, *problems[id(group)])
            else:
                done.add(id(group.group))
                state = WOULD_RESTORE if dry_run else RESTORED
                self._ledger.note(group.group, state, "", group.here)
        if done and not dry_run:
            self._batch.rewrite([g for g in self._batch.record.groups if id(g) not in done])

    def _assess(self, group: TakenGroup, seen: Look) -> _Group | None:
        """Find where a group's objects are; None, and a note, where it cannot be restored."""
        there = seen.of(group)
        places = {o: self._place(group, o, there.get(o.slot)) for o in group.objects}
        own = {o.slot for o, place in places.items() if place in (_Place.BACK, _Place.BOTH)}
        if strange := sorted(there.keys() - own):
            key = group.key(strange[0]).decode()
            self._ledger.note(group, CONFLICT, f"{key} is in the store")
            return None
        self._ledger.gone += sum(place is _Place.LOST for place in places.values())
        for taken, place in places.items():
            problem = _NO_MORE
            if place is _Place.HERE:
                size = self._held[taken.file]
                problem = f"has {size} bytes in the quarantine, had {taken.facts.nbytes}"
                if taken.facts.nbytes in (None, size):
                    continue
            if place in (_Place.HERE, _Place.LOST):
                self._ledger.note(group, FAILED, f"{group.key(taken.slot).decode()} {problem}")
                return None
        return _Group(
            group,
            here=tuple(o for o, place in places.items() if place is _Place.HERE),
            double=tuple(o for o, place in places.items() if place is _Place.BOTH),
        )

    def _place(self, group: TakenGroup, taken: TakenObject, there: Facts | None) -> _Place:
        here = taken.file in self._held
        if there is None:
            return _Place.HERE if here else _Place.LOST
        # Restoring changes inode and ctime, and keeps these.
        if (there.nbytes, there.mtime_ns) != (taken.facts.nbytes, taken.facts.mtime_ns):
            return _Place.TAKEN
        if not here:
            return _Place.BACK
        with FileStore.within(self._batch.folder) as folder:
            row, held_row = _rows([group.key(taken.slot)]), _rows([_name(taken)])
            equal = same_bytes(self._store, row, folder, held_row, self._held[taken.file])
        return _Place.BOTH if equal else _Place.TAKEN

    def _put_back(self, ready: list[_Group]) -> _Problems:
        """Put groups back; what kept some of them from it, by id."""
        if not self._batch.has_folder():  # an earlier restore was interrupted at its end
            return {}
        mover = open_mover(self._store, self._batch.folder)
        problems = self._copy_back(ready) if mover is None else self._rename_back(mover, ready)
        for group in ready:  # only now are the objects in the store durable
            for taken in group.double:
                with suppress(FileNotFoundError):
                    self._batch.folder.remove(str(taken.file))
        return problems

    def _rename_back(self, mover: Mover, ready: list[_Group]) -> _Problems:
        """Rename sidecars, then the anchors of the groups whose sidecars all arrived."""
        problems: _Problems = {}
        moved: dict[int, list[TakenObject]] = defaultdict(list)
        with mover:
            for anchor in (False, True):
                for group in ready:
                    if id(group) not in problems:
                        objects = group.of_kind(anchor)
                        problem = self._move_back(mover, group, objects, moved[id(group)])
                        if problem is not None:
                            problems[id(group)] = problem
                # No anchor is durable before its sidecars are.
                mover.flush(into_store=True)
        return problems

    def _move_back(
        self,
        mover: Mover,
        group: _Group,
        objects: Sequence[TakenObject],
        moved: list[TakenObject],
    ) -> tuple[str, str] | None:
        """Move objects of a group back, or all that was moved of it to the quarantine again."""
        for taken in objects:
            key = group.group.key(taken.slot)
            try:
                status = mover.put_back(str(taken.file), key)
            except OSError as error:
                problem = FAILED, f"{key.decode()}: {error.strerror or error}"
            else:
                if status == Status.OK:
                    moved.append(taken)
                    continue
                problem = CONFLICT, f"{key.decode()} is in the store"
                if status == Status.GONE:
                    problem = FAILED, f"{key.decode()} {_NO_MORE}"
            # A restore that is asked for again goes on from what cannot be taken again.
            for other in reversed(moved):
                status = Status.ERROR
                with suppress(OSError):
                    status = mover.take(group.group.key(other.slot), str(other.file))
                if group.is_anchor(other) and status not in (Status.OK, Status.GONE):
                    break  # a server believes in the page: its sidecars stay
            return problem
        return None

    def _copy_back(self, ready: list[_Group]) -> _Problems:
        """Copy sidecars, then the anchors of the groups whose sidecars all arrived."""
        problems: _Problems = {}
        arrived: dict[int, list[TakenObject]] = defaultdict(list)
        if any(len(group.here) < len(group.group.objects) for group in ready):
            self._store.flush()  # an earlier restore may have been killed before it synced
        with FileStore.within(self._batch.folder) as folder:
            for anchor in (False, True):
                pairs = [(g, o) for g in ready if id(g) not in problems for o in g.of_kind(anchor)]
                keys = [group.group.key(taken.slot) for group, taken in pairs]
                rows = _rows(keys, [taken.facts.mtime_ns for _, taken in pairs])
                sizes = np.array([self._held[taken.file] for _, taken in pairs], dtype=np.int64)
                names = _rows([_name(taken) for _, taken in pairs])
                result = copy_objects(folder, names, self._store, rows, sizes)
                for number, (group, taken) in enumerate(pairs):
                    key, status = keys[number], Status(int(result.statuses[number]))
                    if status is Status.OK:
                        arrived[id(group)].append(taken)
                    elif status is Status.EXISTS:
                        problems[id(group)] = CONFLICT, f"{key.decode()} is in the store"
                    else:
                        message = result.errors.get(number, _NO_MORE)
                        problems[id(group)] = FAILED, f"{key.decode()} {message}"
        self._delete_copies([(g, o) for g in ready if id(g) in problems for o in arrived[id(g)]])
        return problems

    def _delete_copies(self, copies: list[tuple[_Group, TakenObject]]) -> None:
        """Delete anchors, then the sidecars of groups of which no anchor is left."""
        believed: set[int] = set()
        for anchor in (True, False):
            chosen = [(g, o) for g, o in copies if g.is_anchor(o) == anchor]
            chosen = [(g, o) for g, o in chosen if anchor or id(g) not in believed]
            if chosen:
                keys = [group.group.key(taken.slot) for group, taken in chosen]
                result = self._store.delete(_rows(keys))
                believed |= {id(chosen[index][0]) for index in result.errors}


def _rows(keys: list[bytes], mtimes: list[int | None] | None = None) -> pa.Table:
    columns = {"key": pa.array(keys, pa.binary())}
    if mtimes is not None:
        columns["mtime_ns"] = pa.array(mtimes, pa.int64())
    return pa.table(columns)


def _name(taken: TakenObject) -> bytes:
    return str(taken.file).encode()


class _Ledger:
    """Notes what became of each group."""

    def __init__(self) -> None:
        self.gone = 0
        self._columns: dict[str, list[Any]] = {name: [] for name in ROWS.names}

    def note(
        self, group: TakenGroup, state: str, detail: str, restored: tuple[TakenObject, ...] = ()
    ) -> None:
        objects = restored if state in (RESTORED, WOULD_RESTORE) else group.objects
        row = (
            group.page,
            group.model or None,
            group.tag or None,
            len(objects),
            total_bytes(taken.facts.nbytes for taken in objects),
            sorted({finding.get("code") or "" for finding in group.findings}),
            state,
            detail or None,
        )
        for column, value in zip(self._columns.values(), row, strict=True):
            column.append(value)

    def outcome(self, busy: int, unrecorded: Sequence[str]) -> RestoreOutcome:
        rows = pa.table(self._columns, schema=ROWS)
        states = np.array(self._columns["state"], dtype=object)
        restored = rows.filter(pa.array(np.isin(states, (RESTORED, WOULD_RESTORE)), pa.bool_()))
        return RestoreOutcome(
            restored=len(restored),
            objects=sum(restored.column("objects").to_pylist()),
            nbytes=total_bytes(restored.column("nbytes").to_pylist()),
            conflicts=int((states == CONFLICT).sum()),
            gone=self.gone,
            failed=int((states == FAILED).sum()),
            busy=busy,
            unrecorded=tuple(unrecorded),
            rows=rows,
        )
