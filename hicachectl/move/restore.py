"""Restore quarantined page groups, sidecars first. Existing objects are never overwritten."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.backends.base import Result, Status
from hicachectl.backends.capabilities import Trailed, open_mover
from hicachectl.backends.file.store import FileStore
from hicachectl.formats.errors import UsageError
from hicachectl.formats.trailer import TRAILER_BYTES
from hicachectl.formats.wording import reason_of
from hicachectl.move.backups import copy_groups, copy_memory, same_bytes
from hicachectl.move.destination import refuse_other_owner
from hicachectl.move.order import Failures, GroupObjects, publish
from hicachectl.move.quarantine import Batch, Quarantine, batches, is_purged, runs, sweep
from hicachectl.move.recorded import RecordedGroups, look
from hicachectl.move.reports import (
    RESTORED,
    ROWS,
    WOULD_RESTORE,
    GroupReport,
    named,
    states_of,
)
from hicachectl.move.results import GroupStatus, MoveResult
from hicachectl.pages.byte_sums import column_sum

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hicachectl.backends.arena import Arena
    from hicachectl.backends.base import BoolArray, IntArray, Store
    from hicachectl.backends.capabilities import Mover
    from hicachectl.backends.disk.directory import Directory
    from hicachectl.formats.marker import Marker
    from hicachectl.formats.profile import Profile
    from hicachectl.move.recorded import Sight
    from hicachectl.requests.files import PageList

    # (groups, scheme of their keys) -> whether each group is wanted, [k].
    Wanted = Callable[[RecordedGroups, str], BoolArray]

_NO_MORE = "missing from the quarantine"
_IN_STORE = (
    "already exists in the store; to restore this page, first remove the page from the store with "
    "hicachectl rm"
)

_COLUMNS = pa.schema(
    [
        *(ROWS.field(name) for name in ("page", "model", "tag", "objects", "nbytes")),
        ("codes", pa.list_(pa.string())),
        ("state", pa.string()),
        ("detail", pa.string()),
    ]
)


def all_groups(groups: RecordedGroups, scheme: str) -> BoolArray:
    """Choose every group."""
    return np.ones(len(groups), dtype=np.bool_)


def starting_with(prefix: str) -> Wanted:
    """Choose the groups of pages whose hash starts with a prefix."""

    def wanted(groups: RecordedGroups, scheme: str) -> BoolArray:
        found: BoolArray = pc.starts_with(groups.pages, prefix).to_numpy(zero_copy_only=False)
        return found

    return wanted


def listed_groups(listed: PageList) -> Wanted:
    """Choose groups in a page list; a row without a label names all groups of its page."""
    named: dict[str, set[str | None]] = {}
    for page, label in zip(listed.pages, listed.groups, strict=True):
        named.setdefault(page, set()).add(label)

    def wanted(groups: RecordedGroups, scheme: str) -> BoolArray:
        pages = pa.array(list(named), pa.string())
        found: BoolArray = pc.is_in(groups.pages, pages).to_numpy(zero_copy_only=False).copy()
        chosen = np.flatnonzero(found)
        some = groups.take(chosen)
        pairs = zip(chosen.tolist(), some.pages.to_pylist(), some.labels(scheme), strict=True)
        for group, page, label in pairs:
            found[group] = not named[page].isdisjoint((None, label))
        return found

    return wanted


def restore_groups(
    store: Store,
    quarantine: Path,
    *,
    profile: Profile | None = None,
    wanted: Wanted = all_groups,
    dry_run: bool = False,
    on_progress: Callable[[int], None] = lambda groups: None,
) -> GroupReport:
    """Restore the wanted groups of a quarantine, and remove them from its records.

    A group is a conflict and stays if the store has another object under one of its keys. A group
    whose removal was interrupted becomes complete again. Rows also have `codes` (of the findings
    that caused the removal) and `detail`.

    profile: of the pages; a 3FS store that servers of the plug-in use needs it, with the weights.

    Raises, before any change: ProfileError if the store has pages of another deployment that its
    keys do not name, UsageError if the quarantine is missing or its records are from
    another kind of store, FormatError if a record is damaged, UntrustedError if an entry is a link
    or its owner is not trusted. Raises StoreUnavailable.
    """
    place = Quarantine(store, quarantine)
    state = WOULD_RESTORE if dry_run else RESTORED
    tables = [_COLUMNS.empty_table()]
    busy = purged = lost = 0
    unrecorded: list[str] = []
    with ExitStack() as exits, place.opened(writes=not dry_run) as directory:
        if directory is None:
            raise UsageError(
                f"{place.path}: no such directory; give the quarantine that verify --repair named"
            )
        memory = cache(lambda: exits.enter_context(copy_memory(store)))
        _check(store, directory, wanted)
        refuse_other_owner(store, profile, claims=not dry_run)
        for name, run in runs(directory):
            if not run.lock():
                busy += 1
                continue
            if is_purged(run):
                purged += 1
                continue
            for batch in batches(run):
                chosen = _chosen(store, batch, wanted)
                if len(chosen):
                    restore = _Restore(store, batch, chosen, memory)
                    if not dry_run:
                        restore.put_back()
                    tables.append(restore.rows(state))
                    lost += restore.lost
                    on_progress(len(chosen))
            if not dry_run:
                unrecorded += sweep(run, directory, name)
    rows = pa.concat_tables(tables)
    done = rows.filter(pc.equal(rows.column("state"), state))
    return GroupReport(
        rows=rows,
        moved=column_sum(done.column("objects")) or 0,
        gone=lost,
        nbytes=column_sum(done.column("nbytes")),
        busy=busy,
        purged=purged,
        unrecorded=tuple(unrecorded),
    )


def _check(store: Store, directory: Directory, wanted: Wanted) -> None:
    """Raise the errors of damaged records, links and untrusted files."""
    for _, run in runs(directory):
        for batch in () if is_purged(run) else batches(run):
            if len(_chosen(store, batch, wanted)):
                batch.held()


def _chosen(store: Store, batch: Batch, wanted: Wanted) -> IntArray:
    """Return the wanted groups of a batch, as indices into its record."""
    record = batch.record
    chosen = np.flatnonzero(wanted(record.groups, record.scheme))
    if not len(chosen) or record.mode == "delete":  # the next removal completes the deletion
        return chosen[:0]
    if record.scheme != store.grammar:
        raise UsageError(
            f"{batch.run.path}: its pages are from {record.store}, a {record.scheme} store; "
            f"{store.url} is a {store.grammar} store; give a {record.scheme} store"
        )
    return chosen


class _Restore:
    """Restore of one batch's groups. lost: objects in neither quarantine nor store."""

    def __init__(
        self, store: Store, batch: Batch, chosen: IntArray, memory: Callable[[], Arena]
    ) -> None:
        """Locate the objects. chosen: indices of groups in the record."""
        self._memory = memory
        self._store = store
        self._batch = batch
        self._chosen = chosen
        groups = self._groups = batch.record.groups.take(chosen)
        self._result = MoveResult.of(groups.pages)
        keys = groups.keys_of(groups.cells)
        self._objects = GroupObjects(keys, groups.owners, groups.anchors[groups.cells])
        self._names = pa.array(groups.files).cast(pa.string()).cast(pa.binary())
        held = batch.held()
        sizes = np.array([held.get(file, -1) for file in groups.files.tolist()], np.int64)
        # Sizes in the record, as in listings, are without trailers.
        expected = groups.facts.column("nbytes").fill_null(-1).to_numpy()
        self._trailed = (expected >= 0) & (sizes == expected + TRAILER_BYTES)
        self._sizes = np.where(self._trailed, expected, sizes)
        self._here, self._double, self.lost = self._assessed()
        self._refused = ~self._result.open  # first in `rows`

    def _assessed(self) -> tuple[BoolArray, BoolArray, int]:
        """Locate the objects; fail groups that cannot be restored.

        Return which objects are only in the quarantine, [n]; which are also in the store after an
        interrupted run, [n]; and the number of objects in neither.
        """
        groups, objects = self._groups, self._objects
        sight = look(self._store, groups)
        there, held = sight.at[groups.cells] >= 0, self._sizes >= 0
        own = sight.known(groups, versions=False)  # restoring changes inode and ctime
        own[own & held] = self._equal(sight, np.flatnonzero(own & held))
        strange = sight.present
        strange[groups.cells[own]] = False
        for cell in np.flatnonzero(strange).tolist():
            (key,) = groups.keys_of(np.array([cell])).to_pylist()
            self._fail(int(groups.cell_owners[cell]), GroupStatus.CONFLICT, key, _IN_STORE)
        lost = ~there & ~held & self._result.open[groups.owners]
        expected = groups.facts.column("nbytes").fill_null(-1).to_numpy()
        resized = ~there & held & (expected >= 0) & (self._sizes != expected)
        for place in np.flatnonzero(lost | resized).tolist():
            size = int(self._sizes[place])
            problem = f"{size} bytes in the quarantine, but {expected[place]} when it was removed"
            key = objects.keys[place].as_py()
            why = _NO_MORE if lost[place] else problem
            self._fail(int(groups.owners[place]), GroupStatus.FAILED, key, why)
        return ~there & held, own & held, int(lost.sum())

    def _fail(self, group: int, status: GroupStatus, key: bytes, why: str) -> None:
        self._result.fail(group, status, key, f"{key.decode()}: {why}")

    def _equal(self, sight: Sight, places: IntArray) -> BoolArray:
        """Return which objects have the same bytes in store and quarantine."""
        if not len(places):
            return np.zeros(0, dtype=np.bool_)
        rows = sight.rows.take(pa.array(sight.at[self._groups.cells[places]]))
        with FileStore.within(self._batch.folder) as folder:
            names = pa.table({"key": self._names.take(pa.array(places))})
            sizes = self._sizes[places]
            return same_bytes(self._store, rows, folder, names, sizes, arena=self._memory())

    def put_back(self) -> None:
        """Restore the groups, and remove the restored ones from the record."""
        if not self._result.open.any():
            return
        if self._batch.has_folder():  # missing if an earlier restore was interrupted at its end
            self._publish()
        groups = self._batch.record.groups
        back = self._chosen[self._result.open]
        if len(back):
            left = np.setdiff1d(np.arange(len(groups)), back)
            self._batch.rewrite(groups.take(left))

    def _publish(self) -> None:
        ready = self._result.open[self._groups.owners]
        chosen = np.flatnonzero(self._here & ready)
        if isinstance(self._store, Trailed):
            self._store.add_markers(self._markers_of(np.flatnonzero(self._trailed & ready)))
        mover = open_mover(self._store, self._batch.folder)
        if mover is None:
            self._publish_copies(chosen, ready)
        else:
            with mover:
                self._publish_files(chosen, mover)
        for place in np.flatnonzero(self._double & ready).tolist():
            # The objects in the store are durable only now.
            with suppress(FileNotFoundError):
                self._batch.folder.remove(str(self._groups.files[place]))

    def _markers_of(self, places: IntArray) -> list[Marker]:
        """Return the markers of the trailers that objects may have."""
        keys = self._objects.keys.take(pa.array(places)).to_pylist()
        pages = self._groups.pages.take(pa.array(self._groups.owners[places])).to_pylist()
        suffixes = (key.decode().removeprefix(page) for key, page in zip(keys, pages, strict=True))
        kinds = set(zip(suffixes, self._sizes[places].tolist(), strict=True))
        markers = self._batch.record.markers
        return [marker for marker in markers if (marker.suffix, marker.nbytes) in kinds]

    def _publish_files(self, chosen: IntArray, mover: Mover) -> None:
        """Rename files into the store; rename files of failed groups back."""
        files = self._groups.files

        def put(place: int, key: bytes) -> Status:
            return mover.put_back(str(files[place]), key)

        def take(place: int, key: bytes) -> Status:
            return mover.take(key, str(files[place]))

        def undo(places: IntArray) -> Result:
            found = self._each(places, take)
            mover.flush(into_store=False)
            return found

        publish(
            self._objects,
            chosen,
            self._result,
            write=lambda places: self._explained(places, self._each(places, put)),
            undo=undo,
            flush=lambda: mover.flush(into_store=True),  # no anchor is durable before its sidecars
            failures=Failures(statuses={Status.EXISTS: GroupStatus.CONFLICT}),
        )

    def _publish_copies(self, chosen: IntArray, ready: BoolArray) -> None:
        """Copy files into the store; delete the copies of failed groups."""
        if (ready & ~self._here).any():
            self._store.flush()  # an earlier restore may have been killed before it synced
        objects, some = self._objects, pa.array(chosen)
        keys, mtimes = objects.keys.take(some), self._groups.facts.column("mtime_ns").take(some)
        with FileStore.within(self._batch.folder) as folder:
            copies = copy_groups(
                folder,
                pa.table({"key": self._names.take(some), "mtime_ns": mtimes}),
                self._store,
                pa.table({"key": keys, "mtime_ns": mtimes}),
                GroupObjects(keys, objects.owners[chosen], objects.anchors[chosen]),
                self._sizes[chosen],
                self._groups.pages,
                on_gone=_NO_MORE,
                arena=self._memory(),
            )
        for problem in copies.problems:
            status = GroupStatus(copies.statuses[problem.group])
            why = _IN_STORE if status is GroupStatus.CONFLICT else problem.detail
            self._fail(problem.group, status, (problem.key or "").encode(), why)

    def _each(self, places: IntArray, call: Callable[[int, bytes], Status]) -> Result:
        statuses = np.zeros(len(places), dtype=np.uint8)
        errors: dict[int, str] = {}
        keys = self._objects.keys.take(pa.array(places)).to_pylist()
        for index, (place, key) in enumerate(zip(places.tolist(), keys, strict=True)):
            try:
                statuses[index] = call(place, key)
            except OSError as error:
                statuses[index], errors[index] = Status.ERROR, reason_of(error)
        return Result(statuses, errors)

    def _explained(self, places: IntArray, found: Result) -> Result:
        """Return the result with a message for each object not written: key and reason."""
        errors = {}
        for index in np.flatnonzero(~found.ok).tolist():
            key = self._objects.keys[int(places[index])].as_py().decode()
            is_there = found.statuses[index] == Status.EXISTS
            errors[index] = f"{key}: {_IN_STORE if is_there else _NO_MORE}"
            if index in found.errors:
                errors[index] = f"{key}: cannot be restored: {found.errors[index]}"
        return Result(found.statuses, errors)

    def rows(self, done: str) -> pa.Table:
        """Return a row for each group. done: state of groups restored, or to be restored."""
        groups, result = self._groups, self._result
        # In restored groups, only the objects that this run moved count.
        counted = groups.with_objects(self._here | ~result.open[groups.owners])
        details = {problem.group: problem.detail for problem in reversed(result.problems)}
        columns = {
            "page": groups.pages,
            "model": named(groups.models),
            "tag": named(groups.tags),
            "objects": counted.counts,
            "nbytes": counted.nbytes,
            "codes": _codes(groups.findings),
            "state": states_of(result.statuses, done),
            "detail": pa.array(map(details.get, range(len(groups))), pa.string()),
        }
        rows = pa.table(columns, schema=_COLUMNS)
        return rows.take(pa.array(np.argsort(~self._refused, kind="stable")))


def _codes(findings: pa.ListArray) -> pa.ListArray:
    """Return the distinct codes of each group's findings, sorted."""
    owners = pc.list_parent_indices(findings)
    codes = pc.fill_null(pc.struct_field(pc.list_flatten(findings), "code"), "")
    pairs = pa.table({"owner": owners, "code": codes}).group_by(["owner", "code"]).aggregate([])
    pairs = pairs.sort_by([("owner", "ascending"), ("code", "ascending")])
    offsets = np.searchsorted(pairs.column("owner").to_numpy(), np.arange(len(findings) + 1))
    return pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()), pairs.column("code").combine_chunks()
    )
