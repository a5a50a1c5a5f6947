"""Tests of backends.hf3fs on SGLang's metadata server: the shared suite, and 3FS's own rules."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
from msgspec import structs

from hicachectl.backends.arena import Arena
from hicachectl.backends.base import Result, Status, Store, open_store
from hicachectl.backends.hf3fs.store import Hf3fsStore
from hicachectl.backends.hf3fs.writing import _Reservation
from hicachectl.backends.testing import (
    ARENA_BYTES,
    PAGE_HASHES,
    StoreSuite,
    listing,
    read,
    rows_of,
    scanned_rows,
    write,
)
from hicachectl.formats.errors import (
    DeniedError,
    ProfileError,
    StoreUnavailable,
    UnsupportedByBackend,
    UsageError,
)
from hicachectl.formats.kinds.pool import Pool
from tests.backends.hf3fs.place import FILE_SIZE, NUM_PAGES, PAGE_BYTES, PROFILE, FreshStore, Place
from tests.other_user import as_other_user
from tests.skips import missing, need_tool, needs_root

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.hf3fs_server import MetadataServer

KEYS = tuple(f"{n % 2}:kv:{page}-{'kv'[n // 2 % 2]}".encode() for n, page in enumerate(PAGE_HASHES))
KEY, OTHER, THIRD = (f"0:kv:{page}-k".encode() for page in PAGE_HASHES[:3])


def name_of(key: bytes) -> str:
    return Place.split(key)[2]


def page(seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(PAGE_BYTES)


@pytest.fixture
def place(metadata_server: MetadataServer, tmp_path: Path) -> Place:
    place = Place(metadata_server, tmp_path / "hicache")
    place.create()
    return place


@contextmanager
def ready(store: FreshStore) -> Iterator[FreshStore]:
    """Attach an arena to a store."""
    with Arena(ARENA_BYTES) as arena, store:
        store.attach(arena)
        yield store


@pytest.fixture
def store(place: Place) -> Iterator[FreshStore]:
    with ready(place.open()) as store:
        yield store


class TestHf3fsStore(StoreSuite):
    keys = KEYS
    sizes = (PAGE_BYTES,)
    empty_objects = False

    @pytest.fixture
    def store(self, place: Place) -> Iterator[Store]:
        self.place = place
        with place.open() as store:
            yield store

    def reopen(self, store: Store) -> Store:
        return self.place.open()

    def raw_put(self, store: Store, key: bytes, value: bytes) -> None:
        self.place.put(key, value)

    def raw_get(self, store: Store, key: bytes) -> bytes | None:
        return self.place.get(key)

    def raw_delete(self, store: Store, key: bytes) -> None:
        self.place.delete(key)


class TestHf3fsStoreOnFuse(TestHf3fsStore):
    """The suite on a FUSE mount, where reads bypass the page cache."""

    @pytest.fixture
    def store(self, metadata_server: MetadataServer, fuse_mount: Path) -> Iterator[Store]:
        self.place = Place(metadata_server, fuse_mount / "hicache")
        self.place.create()
        with self.place.open() as store:
            yield store


@pytest.fixture
def fuse_mount(tmp_path: Path) -> Iterator[Path]:
    need_tool("bindfs")
    unmount = need_tool("fusermount3", "fuse3")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        missing("access to /dev/fuse", "load the module fuse, and pass the device to a container")
    source, mount = tmp_path / "mirrored", tmp_path / "fuse"
    source.mkdir()
    mount.mkdir()
    done = subprocess.run(
        ["bindfs", "--no-allow-other", source, mount], capture_output=True, text=True, check=False
    )
    if done.returncode:
        missing("the right to mount with FUSE", done.stderr.strip())
    try:
        yield mount
    finally:
        subprocess.run([unmount, "-u", mount], check=True)


# listing


def test_a_key_that_the_server_dropped_since_the_snapshot_is_not_listed(place: Place) -> None:
    for key in (KEY, OTHER):
        place.put(key, page(0))
    place.server.save()
    place.delete(OTHER)
    with open_store(place.url) as store:
        assert set(listing(store)) == {KEY}


def test_keys_are_listed_least_recent_first_with_their_page_index(
    store: FreshStore, place: Place
) -> None:
    indices = [place.put(key, page(n)) for n, key in enumerate((THIRD, KEY, OTHER))]
    (batch,) = [batch for batch in store.scan(("locator", "version")) if len(batch)]
    assert batch.column("key").to_pylist() == [THIRD, KEY, OTHER]
    assert batch.column("locator").to_pylist() == indices
    assert batch.column("version").to_pylist() == [n.to_bytes(8, "little") for n in indices]


def test_nothing_that_looks_changes_the_order_of_eviction(store: FreshStore, place: Place) -> None:
    for n, key in enumerate((THIRD, KEY, OTHER)):
        place.put(key, page(n))
    before = place.server.keys_by_recency(0)
    rows = scanned_rows(store, [THIRD, KEY, OTHER])
    store.exists(rows)
    store.look(rows)
    store.holes(rows)
    store.free_bytes()
    assert read(store, rows, [PAGE_BYTES] * 3)[0].all_ok
    assert place.server.keys_by_recency(0) == before
    assert store.touched_keys == 0


def test_without_a_server_the_snapshot_alone_is_listed_and_read(place: Place) -> None:
    place.put(KEY, page(1))
    snapshot = place.server.save()
    place.delete(KEY)  # the store is not told
    settings = place.settings(server=None, snapshot=str(snapshot))
    with Arena(ARENA_BYTES) as arena, Hf3fsStore(settings) as store:
        store.use_profile(PROFILE)
        store.attach(arena)
        assert listing(store) == {KEY: PAGE_BYTES}
        assert store.exists(rows_of([KEY, OTHER])).tolist() == [True, False]
        _, (found,) = read(store, rows_of([KEY]), [PAGE_BYTES])
        assert found == page(1)
        list(store.scan())
        assert not store.confirms
        assert re.match(r"Listed from a snapshot saved [0-9] s ago", store.remarks[0])
        with pytest.raises(UnsupportedByBackend, match="server="):
            store.delete(rows_of([KEY]))
        with pytest.raises(UnsupportedByBackend, match="server="):
            write(store, {OTHER: page(2)}, if_absent=True)


def test_without_a_snapshot_nothing_is_listed_but_all_else_works(place: Place) -> None:
    place.put(KEY, page(1))
    with Arena(ARENA_BYTES) as arena, Hf3fsStore(place.settings(snapshot=None)) as store:
        store.use_profile(PROFILE)
        store.attach(arena)
        with pytest.raises(UsageError, match="snapshot="):
            list(store.scan())
        assert store.remarks == ()
        assert store.free_bytes() is None
        assert store.look(rows_of([KEY, OTHER])).column("key").to_pylist() == [KEY]
        assert write(store, {OTHER: page(2)}, if_absent=True).all_ok
        assert store.delete(rows_of([KEY])).all_ok
    assert place.get(OTHER) == page(2)
    assert place.get(KEY) is None


def test_a_key_newer_than_the_snapshot_is_found_by_looking_but_cannot_be_read(
    place: Place,
) -> None:
    place.server.save()
    place.put(KEY, page(1))
    with Arena(ARENA_BYTES) as arena, Hf3fsStore(place.settings()) as store:
        store.use_profile(PROFILE)
        store.attach(arena)
        (row,) = store.look(rows_of([KEY]), ("locator", "version", "nbytes")).to_pylist()
        assert row == {"key": KEY, "nbytes": PAGE_BYTES, "locator": None, "version": None}
        result, _ = read(store, rows_of([KEY]), [PAGE_BYTES])
        assert result.statuses.tolist() == [Status.ERROR]
        assert "newer than the snapshot" in result.errors[0]


def test_tables_of_other_ranks_are_left_out(place: Place) -> None:
    place.put(KEYS[0], page(0))
    place.put(KEYS[1], page(1))
    with place.open(ranks=1) as store:
        assert set(listing(store)) == {KEYS[0]}
        assert [table.name for table in store.page_tables()] == ["0:kv"]


# the profile


def test_without_a_profile_objects_have_no_size_and_cannot_be_read(place: Place) -> None:
    place.put(KEY, page(0))
    with ready(place.open(profile=None)) as store:
        assert listing(store) == {KEY: None}
        result, _ = read(store, scanned_rows(store, [KEY]), [PAGE_BYTES])
        assert result.statuses.tolist() == [Status.ERROR]
        assert "--profile" in result.errors[0]
        with pytest.raises(UnsupportedByBackend, match="profile"):
            write(store, {OTHER: page(1)}, if_absent=True)


def test_an_inferred_profile_tells_nothing(place: Place) -> None:
    place.put(KEY, page(0))
    with place.open(profile=structs.replace(PROFILE, inferred=True)) as store:
        assert listing(store) == {KEY: None}


def test_a_profile_of_other_page_sizes_is_refused(place: Place) -> None:
    other = structs.replace(PROFILE, page_size=16)
    with pytest.raises(ProfileError, match=rf"0:kv has {NUM_PAGES} pages, but {NUM_PAGES // 2} "):
        place.open(profile=other)
    with pytest.raises(ProfileError, match=f"file of {FILE_SIZE * 3}"):
        place.open(file_size=FILE_SIZE * 3)


def test_one_rank_with_another_page_count_is_no_fault_of_the_profile(
    place: Place,
) -> None:
    place.server.reset()
    place.server.initialize(0, NUM_PAGES)
    place.server.initialize(1, NUM_PAGES // 2)
    place.put(KEYS[1], page(1))
    with ready(place.open()) as store:
        _, (found,) = read(store, scanned_rows(store, KEYS[1:2]), [PAGE_BYTES])
        assert found == page(1)


def test_pools_that_sglang_cannot_hold_there_are_refused(place: Place) -> None:
    draft = Pool(name="draft", kind="mha", dtype="bfloat16", layers=1, kv_heads=2, head_dim=64)
    for profile in (
        structs.replace(PROFILE, pools=(*PROFILE.pools, draft)),
        structs.replace(PROFILE, pp=2),
    ):
        with pytest.raises(UnsupportedByBackend):
            place.open(profile=profile)


# reading


def test_a_data_file_that_ends_within_a_page_says_short(store: FreshStore, place: Place) -> None:
    first, second = place.put(KEY, page(0)), place.put(OTHER, page(1))
    assert (first, second) == (NUM_PAGES - 1, NUM_PAGES - 2)
    rows = scanned_rows(store, [KEY, OTHER])
    os.truncate(place.file(KEY), second * PAGE_BYTES + 100)
    result, _ = read(store, rows, [PAGE_BYTES] * 2)
    assert result.statuses.tolist() == [Status.SHORT, Status.SHORT]
    assert result.nbytes.tolist() == [0, 100]
    assert place.file(KEY).stat().st_size == second * PAGE_BYTES + 100


def test_another_size_than_a_page_is_short_or_oversized(store: FreshStore, place: Place) -> None:
    place.put(KEY, page(0))
    for capacity, status in ((PAGE_BYTES + 1, Status.SHORT), (PAGE_BYTES - 1, Status.OVERSIZED)):
        result, _ = read(store, scanned_rows(store, [KEY]), [capacity])
        assert result.statuses.tolist() == [status]
        assert result.nbytes.tolist() == [PAGE_BYTES]


@pytest.mark.parametrize("index", [NUM_PAGES, 1 << 40, (1 << 63) - 1])
def test_an_index_behind_the_file_is_short(store: FreshStore, place: Place, index: int) -> None:
    place.server.confirm(0, [(name_of(KEY), index)])
    result, _ = read(store, scanned_rows(store, [KEY]), [PAGE_BYTES])
    assert result.statuses.tolist() == [Status.SHORT]
    assert result.nbytes.tolist() == [0]
    assert store.holes(scanned_rows(store, [KEY])).tolist() == [False]


def test_a_missing_data_file_is_an_error_and_is_not_created(place: Place) -> None:
    place.put(KEY, page(0))
    place.file(KEY).unlink()
    with ready(place.open()) as store:
        result, _ = read(store, scanned_rows(store, [KEY]), [PAGE_BYTES])
        assert result.statuses.tolist() == [Status.ERROR]
        assert "No such file" in result.errors[0]
        assert write(store, {OTHER: page(1)}, if_absent=True).statuses.tolist() == [Status.ERROR]
    assert not place.file(KEY).exists()
    assert place.reserved() == 0


@needs_root
def test_a_data_file_that_this_user_may_not_read_is_no_damage(place: Place) -> None:
    place.put(KEY, page(0))
    place.file(KEY).chmod(0o600)
    place.server.save()
    with Arena(ARENA_BYTES) as arena, Hf3fsStore(place.settings()) as store:
        store.use_sizes({("0:kv:", "-k"): PAGE_BYTES})
        store.attach(arena)
        rows = scanned_rows(store, [KEY])
        with as_other_user(), pytest.raises(DeniedError, match="cannot read: Permission denied"):
            read(store, rows, [PAGE_BYTES])


def test_another_name_of_the_files_is_the_same_place(place: Place, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(place.prefix.parent)
    linked = place.url.replace(str(place.prefix), str(tmp_path / "link" / place.prefix.name))
    with open_store(place.url) as store, open_store(linked) as same:
        assert linked != place.url
        assert store.places == same.places
    at_once = f"hf3fs://{place.prefix}?server={place.server.url}"
    saved = f"hf3fs://{place.prefix}?snapshot={place.server.snapshot}"
    with open_store(at_once) as same, open_store(saved) as earlier:
        assert same.places == store.places != earlier.places


def test_many_neighbours_and_single_pages_are_read_into_their_places(
    store: FreshStore, place: Place
) -> None:
    names = [f"{n:064x}-k" for n in range(NUM_PAGES)]
    keys = [f"0:kv:{name}".encode() for name in names]
    for n, key in enumerate(keys):
        place.put(key, page(n))
    chosen = np.random.default_rng(0).permutation(NUM_PAGES)[: NUM_PAGES * 3 // 4].tolist()
    result, found = read(
        store, scanned_rows(store, [keys[n] for n in chosen]), [PAGE_BYTES] * len(chosen)
    )
    assert result.all_ok
    assert found == [page(n) for n in chosen]


def test_reading_past_the_cache_gives_the_same(place: Place) -> None:
    for n, key in enumerate((KEY, OTHER, THIRD)):
        place.put(key, page(n))
    with Arena(ARENA_BYTES) as arena, Hf3fsStore(place.settings(), direct=True) as store:
        place.server.save()
        store.use_profile(PROFILE)
        store.attach(arena)
        rows = scanned_rows(store, [OTHER, KEY, THIRD])
        result, found = read(store, rows, [PAGE_BYTES] * 3)
        assert found == [page(1), page(0), page(2)]
        # Neither the memory nor, with such pages, the file is aligned.
        offsets = np.array([1, 5000, 10000], dtype=np.int64)
        sizes = np.full(3, PAGE_BYTES, dtype=np.int64)
        assert store.read_into(rows, offsets, sizes).all_ok
        assert store.arena is not None
        assert store.arena.view(5000, PAGE_BYTES).tobytes() == page(0)
        assert result.all_ok


def test_a_file_system_that_opens_for_direct_reads_and_refuses_them_is_read_otherwise(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n, key in enumerate((KEY, OTHER)):
        place.put(key, page(n))
    place.server.save()
    real, refused = os.preadv, []

    def preadv(descriptor: int, *arguments: Any) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(descriptor)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(descriptor, *arguments)

    monkeypatch.setattr(os, "preadv", preadv)
    with Arena(ARENA_BYTES) as arena, Hf3fsStore(place.settings(), direct=True) as store:
        store.use_profile(PROFILE)
        store.attach(arena)
        result, found = read(store, scanned_rows(store, [KEY, OTHER]), [PAGE_BYTES] * 2)
    assert refused
    assert result.all_ok
    assert found == [page(0), page(1)]


def test_a_page_that_was_never_written_is_a_hole(store: FreshStore, place: Place) -> None:
    for n, key in enumerate((KEY, THIRD)):
        place.put(key, page(n))
    ((_, index),) = place.server.reserve(0, [name_of(OTHER)])
    place.server.confirm(0, [(name_of(OTHER), index)])
    rows = scanned_rows(store, [KEY, OTHER, THIRD])
    with place.file(KEY).open("rb") as file:
        if os.lseek(file.fileno(), 0, os.SEEK_HOLE) == FILE_SIZE:
            missing("a file system with holes", "set TMPDIR to one on tmpfs, ext4 or XFS")
    assert store.holes(rows).tolist() == [False, True, False]
    result, found = read(store, rows, [PAGE_BYTES] * 3)
    assert result.all_ok
    assert found[1] == bytes(PAGE_BYTES)


# races


def test_confirming_tells_where_keys_are_now_and_makes_them_the_most_recent(
    store: FreshStore, place: Place
) -> None:
    for n, key in enumerate((KEY, OTHER, THIRD)):
        place.put(key, page(n))
    rows = scanned_rows(store, [KEY, OTHER, THIRD])
    place.delete(OTHER)
    place.server.confirm(0, [(name_of(THIRD), 0)])
    assert store.confirms
    assert store.confirm(rows).tolist() == [Status.OK, Status.GONE, Status.CHANGED]
    assert place.server.keys_by_recency(0) == [name_of(KEY), name_of(THIRD)]
    assert store.touched_keys == 2  # the two existing keys


def test_a_page_that_was_reused_is_gone_when_read_with_confirmation(
    store: FreshStore, place: Place
) -> None:
    for n, key in enumerate((KEY, OTHER)):
        place.put(key, page(n))
    rows = scanned_rows(store, [KEY, OTHER])
    index = rows.column("locator").to_pylist()[0]
    place.delete(KEY)
    assert place.put(THIRD, page(2)) == index
    place.put(KEY, page(0))  # on another page, which `exists` does not notice
    result, found = read(store, rows, [PAGE_BYTES] * 2)
    assert result.all_ok
    assert found == [page(2), page(1)]
    offsets = np.array([0, PAGE_BYTES], dtype=np.int64)
    sizes = np.full(2, PAGE_BYTES, dtype=np.int64)
    confirmed = store.read_confirmed(rows, offsets, sizes)
    assert confirmed.statuses.tolist() == [Status.GONE, Status.OK]
    assert confirmed.nbytes.tolist() == [-1, PAGE_BYTES]


# writing


def free_pages(place: Place) -> list[int]:
    table = place.server.saved()["0:kv"]
    free: list[int] = table["free_pages"]
    return free


def test_a_page_that_cannot_be_written_is_released(store: FreshStore, place: Place) -> None:
    os.truncate(place.file(KEY), (NUM_PAGES - 1) * PAGE_BYTES)
    result = write(store, {KEY: page(0), OTHER: page(1)}, if_absent=True)
    assert result.statuses.tolist() == [Status.ERROR, Status.OK]
    assert "truncated" in result.errors[0]
    assert place.reserved() == 0
    assert (place.get(KEY), place.get(OTHER)) == (None, page(1))
    assert place.file(KEY).stat().st_size == (NUM_PAGES - 1) * PAGE_BYTES


@pytest.mark.parametrize("call", ["write", "sync"])
def test_a_failing_disk_leaves_no_page_reserved(
    store: FreshStore, place: Place, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(store._files, call, fail)
    result = write(store, {KEY: page(0), OTHER: page(1)}, if_absent=True)
    assert result.statuses.tolist() == [Status.ERROR] * 2
    assert "Input/output error" in result.errors[0]
    assert place.reserved() == 0
    assert len(free_pages(place)) == NUM_PAGES


def assert_interrupted(store: FreshStore, place: Place) -> None:
    """After an interrupt, none of the three pages exists or is reserved."""
    with pytest.raises(KeyboardInterrupt):
        write(store, {KEY: page(0), OTHER: page(1), THIRD: page(2)}, if_absent=True)
    assert place.reserved() == 0
    assert listing(store) == {}


def test_an_interrupt_before_the_batch_is_waited_for_ends_it_as_well(
    store: FreshStore, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()
    stops: list[threading.Event] = []
    written: list[int] = []
    submit, real = ThreadPoolExecutor.submit, store._files.write

    def interrupted(pool: Any, run: Any) -> Any:
        stops.append(run.__self__.stop)
        submit(pool, run)
        assert begun.wait(60)
        raise KeyboardInterrupt

    def write_slowly(path: str, position: int, data: memoryview) -> None:
        real(path, position, data)
        written.append(position)
        begun.set()
        stops[0].wait(20)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", interrupted)
    monkeypatch.setattr(store._files, "write", write_slowly)
    assert_interrupted(store, place)
    assert len(written) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_exception_while_writing_leaves_no_page_reserved(
    store: FreshStore, place: Place, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(store._files, "write", fail)
    with pytest.raises(error):
        write(store, {KEY: page(0), OTHER: page(1)}, if_absent=True)
    assert place.reserved() == 0
    assert len(free_pages(place)) == NUM_PAGES


def test_an_interrupt_ends_the_batch_and_releases_its_pages(
    store: FreshStore, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real signal reaches the main thread while another thread writes."""
    real, run = store._files.write, _Reservation.run
    written: list[int] = []
    reservations: list[_Reservation] = []

    def noted(reservation: _Reservation) -> Result:
        reservations.append(reservation)
        return run(reservation)

    def write_slowly(path: str, position: int, data: memoryview) -> None:
        real(path, position, data)
        written.append(position)
        if len(written) == 1:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            reservations[0].stop.wait(60)  # set by the main thread after the signal

    monkeypatch.setattr(_Reservation, "run", noted)
    monkeypatch.setattr(store._files, "write", write_slowly)
    assert_interrupted(store, place)
    assert len(written) == 1


@pytest.mark.parametrize("applied", [True, False])
def test_a_lost_answer_to_a_confirmation_leaves_no_page_reserved_or_free_and_mapped(
    store: FreshStore, place: Place, monkeypatch: pytest.MonkeyPatch, applied: bool
) -> None:
    assert store._server is not None
    real = store._server.confirm
    calls = []

    def confirm(*arguments: object) -> None:
        calls.append(arguments)
        if applied or len(calls) > 1:
            real(*arguments)  # type: ignore[arg-type]
        if len(calls) == 1:
            raise StoreUnavailable("the connection broke")

    monkeypatch.setattr(store._server, "confirm", confirm)
    with pytest.raises(StoreUnavailable, match="broke"):
        write(store, {KEY: page(0), OTHER: page(1)}, if_absent=True)
    assert place.reserved() == 0
    assert place.get(KEY) == (page(0) if applied else None)
    held = {index for _, index in place.server.saved()["0:kv"]["key_to_index"]}
    assert not held & set(free_pages(place))


def test_a_key_that_another_writer_stores_meanwhile_is_left_and_our_page_freed(
    store: FreshStore, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = store._files.sync

    def put_meanwhile(path: str) -> None:
        place.put(KEY, page(9))
        real(path)

    monkeypatch.setattr(store._files, "sync", put_meanwhile)
    result = write(store, {KEY: page(0), OTHER: page(1)}, if_absent=True)
    assert result.statuses.tolist() == [Status.EXISTS, Status.OK]
    assert result.errors == {}
    assert (place.get(KEY), place.get(OTHER)) == (page(9), page(1))
    assert place.reserved() == 0


def test_a_replaced_object_moves_to_another_page_and_frees_its_own(
    store: FreshStore, place: Place
) -> None:
    old = place.put(KEY, page(0))
    assert write(store, {KEY: page(1)}, if_absent=False).all_ok
    assert place.get(KEY) == page(1)
    with place.file(KEY).open("rb") as file:
        assert os.pread(file.fileno(), PAGE_BYTES, old * PAGE_BYTES) == page(0)
    assert old in free_pages(place)
    assert place.reserved() == 0


def test_a_key_that_is_named_twice_is_written_once(store: FreshStore, place: Place) -> None:
    assert store.arena is not None
    store.arena.view(0, PAGE_BYTES)[:] = np.frombuffer(page(0), dtype=np.uint8)
    offsets, sizes = np.zeros(2, dtype=np.int64), np.full(2, PAGE_BYTES, dtype=np.int64)
    result = store.write_from(rows_of([KEY, KEY]), offsets, sizes, if_absent=True)
    assert result.statuses.tolist() == [Status.OK, Status.EXISTS]
    assert place.reserved() == 0


def test_a_full_table_makes_room_and_more_keys_than_pages_do_no_harm(
    metadata_server: MetadataServer, tmp_path: Path
) -> None:
    place = Place(metadata_server, tmp_path / "small")
    place.create(num_pages=4)
    objects = {f"0:kv:{n:064x}-k".encode(): page(n) for n in range(10)}
    with ready(place.open()) as store:
        assert write(store, objects, if_absent=True).all_ok
        assert set(listing(store)) == set(list(objects)[-4:])
        assert place.reserved() == 0
        for key in list(objects)[-4:]:
            assert place.get(key) == objects[key]


@pytest.mark.parametrize(
    ("key", "size", "named"),
    [
        (KEY, PAGE_BYTES - 1, "4095 bytes"),
        (f"2:kv:{PAGE_HASHES[0]}-k".encode(), PAGE_BYTES, "2:kv:"),
        (f"0:kv:{PAGE_HASHES[0]}".encode(), PAGE_BYTES, "is not a key of"),
        (f"0:draft:{PAGE_HASHES[0]}_draft".encode(), PAGE_BYTES, "draft"),
        (b"0:kv:short-k", PAGE_BYTES, "short-k"),
        (b"\xff", PAGE_BYTES, "xff"),
    ],
)
def test_what_the_deployment_does_not_have_is_refused_before_anything_is_written(
    store: FreshStore, place: Place, key: bytes, size: int, named: str
) -> None:
    with pytest.raises(UnsupportedByBackend, match=named):
        write(store, {OTHER: page(0), key: page(1)[:size]}, if_absent=True)
    assert place.get(OTHER) is None
    assert len(free_pages(place)) == NUM_PAGES


def test_a_table_with_keys_of_another_form_is_not_written_to(
    store: FreshStore, place: Place
) -> None:
    """Keys name no model, but flat MLA pages beside K and V show another model."""
    place.put(f"0:kv:{PAGE_HASHES[5]}", page(0))
    with pytest.raises(UnsupportedByBackend, match="another model"):
        write(store, {KEY: page(1)}, if_absent=True)
    assert place.get(KEY) is None


# deleting


def share_a_page(place: Place) -> int:
    """Map KEY and OTHER to one page, as a server that lost its newest table does."""
    index = place.put(KEY, page(0))
    place.server.confirm(0, [(name_of(OTHER), index)])
    return index


def test_keys_that_share_a_page_are_deleted_together(store: FreshStore, place: Place) -> None:
    index = share_a_page(place)
    assert store.delete(scanned_rows(store, [KEY, OTHER])).all_ok
    assert listing(store) == {}
    assert free_pages(place).count(index) == 1


def test_a_key_is_not_deleted_without_the_one_that_shares_its_page(
    store: FreshStore, place: Place
) -> None:
    index = share_a_page(place)
    place.put(THIRD, page(2))
    result = store.delete(scanned_rows(store, [KEY, THIRD]))
    assert result.statuses.tolist() == [Status.ERROR, Status.OK]
    assert name_of(OTHER) in result.errors[0]
    assert set(listing(store)) == {KEY, OTHER}
    assert index not in free_pages(place)
    place.delete(OTHER)  # the page is already free, but no other key has it
    place.server.save()


def test_keys_of_a_table_that_no_engine_made_are_nowhere(store: FreshStore) -> None:
    rows = rows_of(
        [f"0:mamba:{PAGE_HASHES[0]}_mamba".encode(), f"7:kv:{PAGE_HASHES[0]}-k".encode()]
    )
    assert store.exists(rows).tolist() == [False, False]
    assert store.confirm(rows).tolist() == [Status.GONE, Status.GONE]
    assert len(store.look(rows)) == 0
    assert (store.delete(rows).statuses == Status.GONE).all()


def test_keys_of_no_form_are_nowhere(store: FreshStore) -> None:
    strange = rows_of([b"", b"kv:x", b"0:kv", b"-1:kv:x", b"0:kv:\xff", b"0:../kv:x"])
    assert not store.exists(strange).any()
    assert (store.delete(strange).statuses == Status.GONE).all()
    result, _ = read(store, strange, [PAGE_BYTES] * 6)
    assert (result.statuses == Status.GONE).all()
    assert len(store.look(strange)) == 0


def test_rows_given_as_batches_and_tables_are_the_same(store: FreshStore, place: Place) -> None:
    place.put(KEY, page(0))
    table = scanned_rows(store, [KEY])
    (batch,) = table.to_batches()
    assert store.confirm(batch).tolist() == store.confirm(table).tolist() == [Status.OK]
    assert isinstance(batch, pa.RecordBatch)
