"""Tests of the `Store` contract, which every store must pass.

A backend's test module subclasses `StoreSuite` and defines a `store` fixture, `reopen` and the
`raw_` accessors. The accessors bypass the backend. A test through the backend alone would not show
a fault that its writes and reads share. Tests of traits and capabilities that the store lacks are
skipped.
Only tests import this module, because it needs pytest and hypothesis.
"""
# ruff: noqa: D102 - the names of tests are their descriptions

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pyarrow as pa
import pytest
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicachectl.backends.arena import Arena, place
from hicachectl.backends.base import (
    SCAN_FIELDS,
    ReadResult,
    Result,
    Status,
    Store,
    scan_schema,
)
from hicachectl.backends.capabilities import (
    Confirm,
    Digesting,
    Mounted,
    Mover,
    Pins,
    ReadsAhead,
    Renames,
    SideFiles,
    SystemCopy,
    Touch,
    mover_of,
)
from hicachectl.backends.disk.directory import Directory
from hicachectl.backends.runs import begin_run, make_run_folder, open_run
from hicachectl.formats.errors import UnsupportedByBackend

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ARENA_BYTES = 1 << 20
OLD_TIME_NS = 1_600_000_000_123_456_789
_FLAGS = ("writes", "deletes")
PAGE_HASHES = tuple(f"{n:064x}" for n in range(8))
STEPS = st.lists(
    st.tuples(
        st.sampled_from(("put", "put_if_absent", "delete", "read", "scan")),
        st.integers(0, len(PAGE_HASHES) - 1),
        st.integers(0, 3),
    ),
    max_size=12,
)


def rows_of(keys: Sequence[bytes], **columns: Any) -> Any:
    """Return rows as a scan of another store returns them.

    columns: values of further scan columns, by name.
    """
    schema = scan_schema(columns)
    return pa.table({"key": list(keys), **columns}, schema=schema)


def listing(store: Store) -> dict[bytes, int | None]:
    """Scan, and return the size of every key."""
    found: dict[bytes, int | None] = {}
    for batch in store.scan(("nbytes",)):
        for row in batch.to_pylist():
            assert row["key"] not in found, "listed twice"
            found[row["key"]] = row["nbytes"]
    return found


def scanned_rows(store: Store, keys: Sequence[bytes]) -> Any:
    """Scan, and return the rows of `keys`, in that order, with every column."""
    table = pa.Table.from_batches(
        list(store.scan(tuple(SCAN_FIELDS))), schema=scan_schema(SCAN_FIELDS)
    )
    at = {key: index for index, key in enumerate(table.column("key").to_pylist())}
    return table.take([at[key] for key in keys])


def read(store: Store, rows: Any, sizes: Sequence[int]) -> tuple[ReadResult, list[bytes]]:
    """Read objects of `sizes` bytes; return the result, and the bytes of each object."""
    assert store.arena is not None
    capacities = np.array(sizes, dtype=np.int64)
    offsets, _ = place(capacities)
    result = store.read_into(rows, offsets, capacities)
    spans = zip(offsets.tolist(), sizes, strict=True)
    return result, [store.arena.view(offset, size).tobytes() for offset, size in spans]


def write(store: Store, objects: Mapping[bytes, bytes], *, if_absent: bool, **more: Any) -> Result:
    """Put objects into the arena and write them.

    more: values of further scan columns, by name.
    """
    assert store.arena is not None
    sizes = np.array([len(value) for value in objects.values()], dtype=np.int64)
    offsets, _ = place(sizes)
    for offset, value in zip(offsets.tolist(), objects.values(), strict=True):
        store.arena.view(offset, len(value))[:] = np.frombuffer(value, dtype=np.uint8)
    rows = rows_of(list(objects), **more)
    return store.write_from(rows, offsets, sizes, if_absent=if_absent)


def lack(store: Store, what: str) -> NoReturn:
    """Skip the running test, because the store lacks a capability. what: the capability."""
    pytest.skip(f"the store lacks a capability: {type(store).__name__} {what}")


class StoreSuite(ABC):
    """Tests of a store, for a subclass such as TestMyStore.

    The subclass overrides `keys` and `sizes` if its store cannot hold these objects.
    """

    keys: tuple[bytes, ...] = tuple(f"{page}_m_0_1.bin".encode() for page in PAGE_HASHES)
    sizes: tuple[int, ...] = (5000, 1, 4096, 12288)  # bytes of the test objects
    empty_objects = True  # the store can hold objects of 0 bytes

    @pytest.fixture
    @abstractmethod
    def store(self, tmp_path: Any) -> Iterator[Store]:
        """Open an empty store; close it after the test."""

    @abstractmethod
    def reopen(self, store: Store) -> Store:
        """Return another client of the same store."""

    @abstractmethod
    def raw_put(self, store: Store, key: bytes, value: bytes) -> None:
        """Store or replace an object."""

    @abstractmethod
    def raw_get(self, store: Store, key: bytes) -> bytes | None:
        """Return an object's bytes; None if the object is missing."""

    @abstractmethod
    def raw_delete(self, store: Store, key: bytes) -> None:
        """Delete an object, if it exists."""

    def moved(self, key: bytes, value: bytes) -> bytes:
        """Return the content of the file that a mover makes of an object."""
        return value

    @pytest.fixture(autouse=True)
    def _attached_arena(self, store: Store) -> Iterator[None]:
        with Arena(ARENA_BYTES) as arena:
            store.attach(arena)
            yield

    def value(self, seed: int) -> bytes:
        """Return the bytes of a test object. seed: chooses the size and the bytes."""
        size = self.sizes[seed % len(self.sizes)]
        return np.random.default_rng(seed).bytes(size)

    def put(self, store: Store, count: int) -> Any:
        """Put the first `count` objects by `raw_put`. Return their rows, with every scan column."""
        for n in range(count):
            self.raw_put(store, self.keys[n], self.value(n))
        return scanned_rows(store, self.keys[:count])

    def need(self, store: Store, *capabilities: str) -> None:
        """Skip the running test if the store lacks one of the capabilities.

        capabilities: "writes", "deletes" or names of scan columns.
        """
        for name in capabilities:
            has = getattr(store.traits, name) if name in _FLAGS else name in store.traits.columns
            if not has:
                lack(store, name)

    def need_empty_objects(self, store: Store) -> None:
        """Skip the running test if the store cannot hold empty objects."""
        if not self.empty_objects:
            lack(store, "empty objects")

    # listing

    def test_an_empty_store_lists_nothing(self, store: Store) -> None:
        assert listing(store) == {}

    def test_scan_lists_every_object_with_its_size(self, store: Store) -> None:
        objects = {key: self.value(n) for n, key in enumerate(self.keys)}
        self.put(store, len(objects))
        found = listing(store)
        assert set(found) == set(objects)
        if "nbytes" in store.traits.columns:
            assert found == {key: len(value) for key, value in objects.items()}

    @pytest.mark.parametrize(
        "columns", [(), ("nbytes",), ("version", "mtime_ns"), tuple(SCAN_FIELDS)]
    )
    def test_a_scan_has_the_requested_columns(self, store: Store, columns: tuple[str, ...]) -> None:
        self.raw_put(store, self.keys[0], self.value(0))
        batches = list(store.scan(columns))
        assert sum(batch.num_rows for batch in batches) == 1
        for batch in batches:
            assert batch.schema.equals(scan_schema(columns))
            batch.validate(full=True)

    def test_an_unknown_column_is_refused(self, store: Store) -> None:
        with pytest.raises(ValueError, match="colour"):
            list(store.scan(("colour",)))

    def test_the_traits_say_which_columns_are_known(self, store: Store) -> None:
        row = self.put(store, 1).to_pylist()[0]
        for name in ("mtime_ns", "atime_ns", "version", "locator", "replicas"):
            assert (row[name] is not None) == (name in store.traits.columns)
        fields = store.traits.version_fields
        assert len(row["version"] or b"") == 8 * len(fields)

    def test_the_version_changes_when_the_object_does(self, store: Store) -> None:
        self.need(store, "version")
        if store.traits.versions_recur:
            lack(store, "versions that never recur")
        before = self.put(store, 1).column("version").to_pylist()
        again = scanned_rows(store, self.keys[:1]).column("version").to_pylist()
        self.raw_put(store, self.keys[0], self.value(len(self.sizes)))
        after = scanned_rows(store, self.keys[:1]).column("version").to_pylist()
        assert before == again
        assert before != after

    def test_a_scan_closed_early_leaves_the_store_usable(self, store: Store) -> None:
        self.raw_put(store, self.keys[0], self.value(0))
        batches = store.scan()
        next(batches)
        batches.close()
        assert set(listing(store)) == {self.keys[0]}

    # reading

    def test_read_gives_the_bytes_that_were_put(self, store: Store) -> None:
        values = [self.value(n) for n in range(len(self.keys))]
        rows = self.put(store, len(values))
        result, found = read(store, rows, [len(value) for value in values])
        assert result.all_ok
        assert result.errors == {}
        assert found == values
        assert result.nbytes.tolist() == [len(value) for value in values]
        assert result.versions.shape == (len(values), len(store.traits.version_fields))

    def test_a_read_identifies_an_object_as_a_scan_does(self, store: Store) -> None:
        self.need(store, "version")
        rows = self.put(store, 1)
        result, _ = read(store, rows, [len(self.value(0))])
        version = rows.column("version")[0].as_py()
        assert result.versions.astype("<u8").tobytes() == version

    def test_reading_record_batches_equals_reading_tables(self, store: Store) -> None:
        self.raw_put(store, self.keys[0], self.value(0))
        (batch,) = store.scan(tuple(SCAN_FIELDS))
        result, found = read(store, batch, [len(self.value(0))])
        assert result.all_ok
        assert found == [self.value(0)]

    def test_expecting_objects_changes_nothing_and_never_fails(self, store: Store) -> None:
        rows = self.put(store, 2)
        self.raw_delete(store, self.keys[1])
        sizes = np.array([len(self.value(0)) + 1, len(self.value(1))], dtype=np.int64)
        if not isinstance(store, ReadsAhead):
            lack(store, "announcements")
        store.expect(rows, sizes)
        store.expect(rows_of([]), sizes[:0])
        result, found = read(store, rows, [len(self.value(0)), len(self.value(1))])
        assert result.statuses.tolist() == [Status.OK, Status.GONE]
        assert found[0] == self.value(0)

    def test_digesting_objects_says_what_reading_says(self, store: Store) -> None:
        if not isinstance(store, Digesting):
            lack(store, "digests while reading")
        values = [self.value(n) for n in range(4)]
        rows = self.put(store, 4)
        self.raw_delete(store, self.keys[1])
        sizes = np.array([len(value) for value in values], dtype=np.int64)
        sizes[2:] += [1, -1]
        wanted = np.ones(len(values), dtype=np.bool_)
        result, digests = store.digest(rows, sizes, wanted)
        expected, _ = read(store, rows, sizes.tolist())
        states = [Status.OK, Status.GONE, Status.SHORT, Status.OVERSIZED]
        assert result.statuses.tolist() == expected.statuses.tolist() == states
        assert result.nbytes.tolist() == expected.nbytes.tolist()
        assert result.versions[0].tolist() == expected.versions[0].tolist()
        assert digests[0].tobytes() == blake3(values[0]).digest()
        again, digests = store.digest(rows, sizes, ~wanted)
        assert again.statuses.tolist() == states
        assert not digests.any()

    def test_reading_no_rows_is_allowed(self, store: Store) -> None:
        result, found = read(store, rows_of([]), [])
        assert len(result.statuses) == len(result.nbytes) == 0
        assert found == []

    def test_reading_a_deleted_object_says_gone(self, store: Store) -> None:
        rows = self.put(store, 3)
        self.raw_delete(store, self.keys[1])
        result, found = read(store, rows, [len(self.value(n)) for n in range(3)])
        assert result.statuses.tolist() == [Status.OK, Status.GONE, Status.OK]
        assert result.nbytes[1] == -1
        assert (found[0], found[2]) == (self.value(0), self.value(2))

    @pytest.mark.parametrize(("more", "status"), [(1, Status.SHORT), (-1, Status.OVERSIZED)])
    def test_an_object_of_another_size_says_so_and_its_size(
        self, store: Store, more: int, status: Status
    ) -> None:
        self.need(store, "nbytes")
        size = len(self.value(0))
        result, _ = read(store, self.put(store, 1), [size + more])
        assert result.statuses.tolist() == [status]
        assert result.nbytes.tolist() == [size]

    def test_a_read_writes_nowhere_else(self, store: Store) -> None:
        assert store.arena is not None
        values = [self.value(n) for n in range(2)]
        rows = self.put(store, 2)
        store.arena.view(0, ARENA_BYTES)[:] = 0xA5
        sizes = np.array([len(value) for value in values], dtype=np.int64)
        offsets = np.array([8192, 40960], dtype=np.int64)
        store.read_into(rows, offsets, sizes)
        for offset, value in zip(offsets.tolist(), values, strict=True):
            store.arena.view(offset, len(value))[:] = 0xA5
        assert (store.arena.view(0, ARENA_BYTES) == 0xA5).all()

    def test_a_range_outside_the_arena_is_refused(self, store: Store) -> None:
        row = rows_of(self.keys[:1])
        one = np.ones(1, dtype=np.int64)
        for offset in (ARENA_BYTES, -1):
            with pytest.raises(ValueError, match="arena"):
                store.read_into(row, one * offset, one)

    def test_an_empty_object_is_read(self, store: Store) -> None:
        self.need_empty_objects(store)
        self.raw_put(store, self.keys[0], b"")
        result, _ = read(store, scanned_rows(store, self.keys[:1]), [0])
        assert result.all_ok
        assert result.nbytes.tolist() == [0]

    def test_threads_read_at_the_same_time(self, store: Store) -> None:
        assert store.arena is not None
        values = [self.value(n) for n in range(len(self.keys))]
        rows = self.put(store, len(values))
        sizes = np.array([len(value) for value in values], dtype=np.int64)
        offsets, total = place(sizes)

        def read_often(base: int) -> list[bytes]:
            for _ in range(20):
                assert store.read_into(rows, offsets + base, sizes).all_ok
            assert store.arena is not None
            spans = zip(offsets.tolist(), sizes.tolist(), strict=True)
            return [store.arena.view(base + offset, size).tobytes() for offset, size in spans]

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(read_often, (0, total))) == [values, values]

    # writing

    def test_written_objects_are_stored_and_listed(self, store: Store) -> None:
        self.need(store, "writes")
        objects = {key: self.value(n) for n, key in enumerate(self.keys)}
        result = write(store, objects, if_absent=True)
        store.flush()
        assert result.all_ok
        assert result.errors == {}
        assert {key: self.raw_get(store, key) for key in objects} == objects
        assert set(listing(store)) == set(objects)

    def test_an_empty_object_is_written(self, store: Store) -> None:
        self.need(store, "writes")
        self.need_empty_objects(store)
        assert write(store, {self.keys[0]: b""}, if_absent=True).all_ok
        assert self.raw_get(store, self.keys[0]) == b""

    def test_if_absent_leaves_the_old_object(self, store: Store) -> None:
        self.need(store, "writes")
        old, new = self.value(0), self.value(len(self.sizes))
        self.raw_put(store, self.keys[0], old)
        result = write(store, {self.keys[0]: new, self.keys[1]: new}, if_absent=True)
        assert result.statuses.tolist() == [Status.EXISTS, Status.OK]
        assert self.raw_get(store, self.keys[0]) == old
        assert self.raw_get(store, self.keys[1]) == new

    def test_without_if_absent_the_object_is_replaced(self, store: Store) -> None:
        self.need(store, "writes")
        old, new = self.value(0), self.value(len(self.sizes))
        self.raw_put(store, self.keys[0], old)
        assert write(store, {self.keys[0]: new}, if_absent=False).all_ok
        assert self.raw_get(store, self.keys[0]) == new

    def test_modification_times_are_kept(self, store: Store) -> None:
        self.need(store, "writes", "mtime_ns")
        objects = {self.keys[0]: self.value(0)}
        assert write(store, objects, if_absent=True, mtime_ns=[OLD_TIME_NS]).all_ok
        times = scanned_rows(store, self.keys[:1]).column("mtime_ns").to_pylist()
        assert times == [OLD_TIME_NS]

    def test_a_pinned_object_is_there(self, store: Store) -> None:
        if not isinstance(store, Pins):
            lack(store, "pins")
        with self.reopen(store) as other:
            assert isinstance(other, Pins)
            other.pin_writes(60)
            assert store.arena is not None
            other.attach(store.arena)
            assert write(other, {self.keys[0]: self.value(0)}, if_absent=True).all_ok
        assert self.raw_get(store, self.keys[0]) == self.value(0)

    def test_pins_are_set_and_removed_and_missing_objects_are_gone(self, store: Store) -> None:
        if not isinstance(store, Pins) or not store.can_pin(60):
            lack(store, "pins of stored objects")
        self.put(store, 1)
        rows = rows_of(self.keys[:2])
        for _ in range(2):
            assert store.pin(rows, 60).statuses.tolist() == [Status.OK, Status.GONE]
        for _ in range(2):
            assert store.unpin(rows).statuses.tolist() == [Status.OK, Status.GONE]
        assert self.raw_get(store, self.keys[0]) == self.value(0)

    # other operations

    def test_calls_that_the_traits_exclude_are_refused(self, store: Store) -> None:
        if store.traits.writes and store.traits.deletes:
            lack(store, "refusals")
        if not store.traits.writes:
            with pytest.raises(UnsupportedByBackend):
                write(store, {self.keys[0]: self.value(0)}, if_absent=True)
        if not store.traits.deletes:
            with pytest.raises(UnsupportedByBackend):
                store.delete(rows_of(self.keys[:1]))

    def test_delete_removes_only_the_given_objects(self, store: Store) -> None:
        self.need(store, "deletes")
        self.put(store, 3)
        rows = scanned_rows(store, self.keys[:2])
        assert store.delete(rows).all_ok
        assert set(listing(store)) == {self.keys[2]}
        assert self.raw_get(store, self.keys[0]) is None

    def test_new_writes_can_be_undone(self, store: Store) -> None:
        self.need(store, "writes")
        old, new = self.keys[:2]
        self.raw_put(store, old, self.value(0))
        for _ in range(2):  # the second round writes again after an undone write
            assert write(store, {new: self.value(1)}, if_absent=True).all_ok
            assert store.undo_writes(rows_of([new])).all_ok
            assert store.exists(rows_of([old, new])).tolist() == [True, False]

    def test_deleting_a_deleted_object_says_gone(self, store: Store) -> None:
        self.need(store, "deletes")
        rows = self.put(store, 2)
        self.raw_delete(store, self.keys[0])
        assert store.delete(rows).statuses.tolist() == [Status.GONE, Status.OK]
        assert store.delete(rows_of(self.keys[2:3])).statuses.tolist() == [Status.GONE]

    def test_touching_tells_which_objects_exist_and_changes_no_byte(self, store: Store) -> None:
        if not isinstance(store, Touch):
            lack(store, "touch")
        rows = self.put(store, 2)
        assert store.touch(rows).tolist() == [True, True]
        assert self.raw_get(store, self.keys[0]) == self.value(0)
        self.raw_delete(store, self.keys[0])
        assert store.touch(rows).tolist() == [False, True]
        assert store.touch(rows_of(self.keys[2:3])).tolist() == [False]

    def test_a_probe_shows_while_it_lasts(self, store: Store) -> None:
        if not isinstance(store, Mounted):
            lack(store, "mounts")
        with self.reopen(store) as other:
            assert isinstance(other, Mounted)
            with store.probe() as name:
                assert other.shows(name)
            assert not other.shows(name)
            assert not listing(store)

    def test_exists_answers_for_each_row(self, store: Store) -> None:
        self.raw_put(store, self.keys[1], self.value(1))
        answer = store.exists(rows_of(self.keys[:3]))
        assert answer.dtype == np.bool_
        assert answer.tolist() == [False, True, False]
        assert Store.exists(store, rows_of(self.keys[:3])).tolist() == answer.tolist()

    def test_a_look_returns_the_rows_of_a_scan(self, store: Store) -> None:
        self.put(store, 3)
        columns = ("nbytes", "mtime_ns", "version")
        scanned = pa.Table.from_batches(list(store.scan(columns))).sort_by("key").to_pylist()
        wanted = [row for row in scanned if row["key"] != self.keys[1]]
        asked = rows_of([self.keys[2], self.keys[5], self.keys[0]])
        found = store.look(asked, columns)
        assert found.schema.equals(scan_schema(columns))
        assert found.sort_by("key").to_pylist() == wanted
        assert len(store.look(rows_of([]))) == 0

    def test_confirming_finds_unchanged_and_deleted_objects(self, store: Store) -> None:
        if not isinstance(store, Confirm) or not store.confirms:
            lack(store, "confirmed reads")
        rows = self.put(store, 2)
        self.raw_delete(store, self.keys[1])
        assert store.confirm(rows).tolist() == [Status.OK, Status.GONE]
        sizes = np.array([len(self.value(n)) for n in range(2)], dtype=np.int64)
        offsets, _ = place(sizes)
        result = store.read_confirmed(rows, offsets, sizes)
        assert result.statuses.tolist() == [Status.OK, Status.GONE]
        assert store.arena is not None
        assert store.arena.view(int(offsets[0]), int(sizes[0])).tobytes() == self.value(0)

    def test_files_beside_the_objects_are_not_listed(self, store: Store) -> None:
        if not isinstance(store, SideFiles):
            lack(store, "side files")
        existing = store.open_side_directory(writes=False)
        if existing is not None:  # the store keeps its own files in the side directory
            existing.close()
        made = store.open_side_directory(writes=True, makes=True)
        assert made is not None
        with made:
            made.write(self.keys[0].decode(), b"a note")
        assert (store.side_directory() / self.keys[0].decode()).read_bytes() == b"a note"
        assert listing(store) == {}
        assert not store.exists(rows_of(self.keys[:1])).any()

    def test_the_system_copies_listed_objects(self, store: Store) -> None:
        if not isinstance(store, SystemCopy):
            lack(store, "copies by the system")
        origins = self.put(store, 2)
        sizes = np.array([len(self.value(n)) for n in range(2)], dtype=np.int64)
        self.raw_delete(store, self.keys[1])
        with self.reopen(store) as source:
            assert store.can_copy_from(source)
            result = store.copy_from(
                source, origins, rows_of(self.keys[2:4]), sizes, if_absent=True
            )
        assert result.statuses.tolist() == [Status.OK, Status.GONE]
        assert self.raw_get(store, self.keys[2]) == self.value(0)
        assert set(listing(store)) == {self.keys[0], self.keys[2]}

    def test_objects_are_moved_to_a_run_and_back(self, store: Store, tmp_path: Any) -> None:
        values = [self.value(n) for n in range(2)]
        mover, run = self.mover_and_run(store, tmp_path)
        with run:
            objects = self.put(store, 2)
            before = objects.to_pylist()[0]
            assert mover.take(objects.slice(0, 1)).all_ok
            mover.flush(into_store=False)
            assert set(listing(store)) == {self.keys[1]}
            assert set(listing(run)) == {self.keys[0]}
            (file,) = tmp_path.rglob(os.fsdecode(self.keys[0]))
            assert file.read_bytes() == self.moved(self.keys[0], values[0])
            assert mover.put_back(rows_of(self.keys[:1])).all_ok
            mover.flush(into_store=True)
            assert listing(run) == {}
        assert self.raw_get(store, self.keys[0]) == values[0]
        after = scanned_rows(store, self.keys[:1]).to_pylist()[0]
        assert after["mtime_ns"] == before["mtime_ns"]

    def test_an_object_that_has_changed_is_not_moved(self, store: Store, tmp_path: Any) -> None:
        mover, run = self.mover_and_run(store, tmp_path)
        with run:
            objects = self.put(store, 3)
            self.raw_put(store, self.keys[0], self.value(4))
            self.raw_delete(store, self.keys[1])
            taken = mover.take(objects)
            assert taken.statuses.tolist() == [Status.CHANGED, Status.GONE, Status.OK]
            assert mover.put_back(objects.slice(2)).all_ok
            assert listing(run) == {}
        assert self.raw_get(store, self.keys[0]) == self.value(4)

    def test_moving_back_replaces_nothing(self, store: Store, tmp_path: Any) -> None:
        mover, run = self.mover_and_run(store, tmp_path)
        with run:
            self.raw_put(store, self.keys[0], self.value(4))
            assert mover.take(rows_of(self.keys[:1])).all_ok
            self.raw_put(store, self.keys[0], self.value(0))
            back = mover.put_back(rows_of(self.keys[:2]))
            assert back.statuses.tolist() == [Status.EXISTS, Status.GONE]
            assert set(listing(run)) == {self.keys[0]}
        assert self.raw_get(store, self.keys[0]) == self.value(0)

    def mover_and_run(self, store: Store, tmp_path: Any) -> tuple[Mover, Store]:
        """Return a mover into a new quarantine run in tmp_path, and the run.

        Skip the running test if the store does not rename objects.
        """
        if not isinstance(store, Renames):
            lack(store, "moves")
        name = "20260101T000000Z-abcdef"
        with (
            Directory.named(str(tmp_path), writes=True) as parent,
            make_run_folder(parent, name, store) as folder,
        ):
            run = open_run(folder, begin_run(folder, name, store, 0), create=True)
        mover = mover_of(store, run)
        assert mover is not None
        return mover, run

    def test_free_space_is_a_count_or_unknown(self, store: Store) -> None:
        """A store that overrides `free_bytes` returns a positive count, or None."""
        free = store.free_bytes()
        if type(store).free_bytes is Store.free_bytes:
            assert free is None
        else:
            assert free is None or free > 0

    def test_a_store_holds_more_than_is_free(self, store: Store) -> None:
        """A store whose removals add to `free_bytes` says how much it can hold."""
        capacity, free = store.capacity(), store.free_bytes()
        if type(store).capacity is Store.capacity:
            assert capacity is None
        elif capacity is not None:
            assert capacity.unit > 0
            assert free is not None
            assert free <= capacity.nbytes

    def test_another_client_sees_the_same_objects(self, store: Store) -> None:
        self.raw_put(store, self.keys[0], self.value(0))
        with self.reopen(store) as other:
            assert store.arena is not None
            other.attach(store.arena)
            assert other.places == store.places
            assert listing(other) == listing(store)
            _, found = read(other, scanned_rows(other, self.keys[:1]), [len(self.value(0))])
        assert found == [self.value(0)]

    @given(steps=STEPS)
    @settings(
        max_examples=10,
        deadline=None,
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,
            HealthCheck.differing_executors,
            HealthCheck.too_slow,
        ],
    )
    def test_any_order_of_calls_behaves_like_a_dict(
        self, store: Store, steps: list[tuple[str, int, int]]
    ) -> None:
        self.need(store, "writes", "deletes")
        for key in self.keys:
            self.raw_delete(store, key)
        model: dict[bytes, bytes] = {}
        for verb, which, seed in steps:
            self._step(store, model, verb, self.keys[which], self.value(seed))
        assert {key: self.raw_get(store, key) for key in model} == model
        assert set(listing(store)) == set(model)

    def _step(
        self, store: Store, model: dict[bytes, bytes], verb: str, key: bytes, value: bytes
    ) -> None:
        """Make one call on the store and on the dict, and compare the results."""
        old = model.get(key)
        row = rows_of([key]) if old is None else scanned_rows(store, [key])
        if verb == "read":
            capacity = len(value) if old is None else len(old)
            result, found = read(store, row, [capacity])
            assert result.statuses.tolist() == [Status.GONE if old is None else Status.OK]
            assert old is None or found == [old]
        elif verb == "delete":
            expected = Status.GONE if model.pop(key, None) is None else Status.OK
            assert store.delete(row).statuses.tolist() == [expected]
        elif verb == "scan":
            assert set(listing(store)) == set(model)
        else:
            kept = verb == "put_if_absent" and old is not None
            result_ = write(store, {key: value}, if_absent=verb == "put_if_absent")
            assert result_.statuses.tolist() == [Status.EXISTS if kept else Status.OK]
            if not kept:
                model[key] = value
