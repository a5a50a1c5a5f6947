"""Tests of backends.file: the shared suite, and tests that only directories need."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import socket
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hicachectl.backends.arena import Arena
from hicachectl.backends.base import Result, Status, Store, open_store, scan_schema
from hicachectl.backends.disk import durable, entries
from hicachectl.backends.disk.io import copy_bytes
from hicachectl.backends.file.store import FileStore
from hicachectl.backends.object_files import listing as file_listing
from hicachectl.backends.pack.store import PackStore
from hicachectl.backends.testing import (
    ARENA_BYTES,
    OLD_TIME_NS,
    StoreSuite,
    listing,
    read,
    rows_of,
    scanned_rows,
    write,
)
from hicachectl.backends.urls import parse_url
from hicachectl.formats.errors import (
    DeniedError,
    StoreUnavailable,
    UnsupportedByBackend,
    UntrustedError,
)
from tests.processes import descriptors as open_descriptors
from tests.skips import missing
from tests.small_file_system import small_file_system

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hicachectl.backends.object_files.writing import Temporary


class TestFileStore(StoreSuite):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        with FileStore(tmp_path) as opened:
            yield opened

    def reopen(self, store: Store) -> Store:
        return FileStore(_path(store))

    def raw_put(self, store: Store, key: bytes, value: bytes) -> None:
        path = _path(store) / os.fsdecode(key)
        path.with_name(".put").write_bytes(value)
        path.with_name(".put").rename(path)

    def raw_get(self, store: Store, key: bytes) -> bytes | None:
        path = _path(store) / os.fsdecode(key)
        return path.read_bytes() if path.exists() else None

    def raw_delete(self, store: Store, key: bytes) -> None:
        (_path(store) / os.fsdecode(key)).unlink(missing_ok=True)


def _path(store: Store) -> Path:
    assert isinstance(store, FileStore)
    return Path(store.path)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    (tmp_path / "store").mkdir()
    with Arena(ARENA_BYTES) as arena, FileStore(tmp_path / "store") as opened:
        opened.attach(arena)
        yield opened


def _names(directory: str | Path) -> list[str]:
    return sorted(path.name for path in Path(directory).iterdir())


def _fill(store: FileStore, count: int) -> list[str]:
    names = [f"{n:064x}_m_{n % 2}_2.bin" for n in range(count)]
    for n, name in enumerate(names):
        descriptor = os.open(name, os.O_CREAT | os.O_WRONLY, dir_fd=store.objects.descriptor)
        os.ftruncate(descriptor, n)
        os.close(descriptor)
    return names


# listing


def test_scan_agrees_with_the_directory(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_listing, "SCAN_ROWS", 70)
    _fill(store, 200)
    with os.scandir(store.path) as found:
        facts = [(os.fsencode(e.name), e.stat()) for e in found]
    truth = {name: (s.st_size, s.st_mtime_ns) for name, s in facts}
    for columns in (("nbytes", "mtime_ns"), ("nbytes", "mtime_ns", "version")):
        batches = list(store.scan(columns))
        assert len(batches) > 1
        assert all(batch.num_rows < 2 * 70 for batch in batches)
        rows = [row for batch in batches for row in batch.to_pylist()]
        assert len(rows) == len(truth)
        assert {row["key"]: (row["nbytes"], row["mtime_ns"]) for row in rows} == truth


def test_names_that_are_not_utf8_come_out_byte_for_byte(store: FileStore) -> None:
    names = [b"\xff\xfe.bin", "ü€.bin".encode(), b"a\nb.bin", b" ", b"plain.bin"]
    for n, name in enumerate(names):
        (Path(store.path) / os.fsdecode(name)).write_bytes(b"x" * n)
    assert listing(store) == {name: n for n, name in enumerate(names)}
    assert {row["key"] for batch in store.scan(()) for row in batch.to_pylist()} == set(names)
    result, found = read(store, scanned_rows(store, names), range(5))
    assert result.all_ok
    assert found == [b"x" * n for n in range(5)]


def test_a_directory_name_that_is_not_utf8_is_listed(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff")
    path.mkdir()
    (path / "a.bin").write_bytes(b"abc")
    with FileStore(path) as store:
        assert listing(store) == {b"a.bin": 3}


@pytest.mark.parametrize("kinds_known", [True, False])
def test_only_regular_files_are_objects(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, kinds_known: bool
) -> None:
    """Also where a directory does not tell the kinds of its entries."""
    if not kinds_known:
        monkeypatch.setattr(entries, "LIBC", SimpleNamespace())
    base = Path(store.path)
    (base / "object.bin").write_bytes(b"abc")
    (base / "link.bin").symlink_to("object.bin")
    (base / "dangling.bin").symlink_to("nowhere")
    (base / "folder.bin").mkdir()
    (base / "folder.bin" / "inside.bin").write_bytes(b"abc")
    (base / ".hicachectl").mkdir()
    (base / ".hicachectl" / "stamp.json").write_text("{}")
    os.mkfifo(base / "fifo.bin")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(base / "socket.bin"))
        for columns in (("key",), ("nbytes", "mtime_ns"), ("nbytes", "version")):
            (batch,) = store.scan(columns)
            assert batch.column("key").to_pylist() == [b"object.bin"]
            (remark,) = store.remarks
            assert "ignored 4 links, FIFOs, sockets or devices" in remark
        others = [b"link.bin", b"dangling.bin", b"folder.bin", b"fifo.bin", b"socket.bin"]
        result, _ = read(store, rows_of(others), [3] * 5)
        assert result.statuses.tolist() == [Status.ERROR] * 5
        assert result.errors[0] == "a symbolic link, not a regular file"
        assert result.errors[2] == result.errors[3] == result.errors[4] == "not a regular file"
        assert not store.exists(rows_of(others)).any()


def test_leftovers_of_unfinished_writes_are_listed(store: FileStore) -> None:
    names = {b".%032x.tmp" % 7, b".hicachectl-%032x.tmp" % 7}
    for name in names:
        (Path(store.path) / os.fsdecode(name)).write_bytes(b"half")
    assert set(listing(store)) == names
    assert store.delete(rows_of(sorted(names))).all_ok
    assert listing(store) == {}


@pytest.mark.slow
@pytest.mark.parametrize("columns", [("nbytes",), ("version",)])
def test_files_that_vanish_while_listing_are_left_out(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, columns: tuple[str, ...]
) -> None:
    monkeypatch.setattr(file_listing, "SCAN_ROWS", 50)
    names = _fill(store, 800)
    kept = {os.fsencode(name) for name in names[::2]}

    def delete_others() -> None:
        for name in names[1::2]:
            os.unlink(name, dir_fd=store.objects.descriptor)

    thread = threading.Thread(target=delete_others)
    thread.start()
    batches = list(store.scan(columns))
    thread.join()
    found = [row for batch in batches for row in batch.to_pylist()]
    assert all(row[columns[0]] is not None for row in found)
    assert kept <= {row["key"] for row in found} <= {os.fsencode(name) for name in names}
    assert set(listing(store)) == kept


def test_a_listed_name_that_is_gone_has_no_row(store: FileStore) -> None:
    (Path(store.path) / "here.bin").write_bytes(b"abc")
    for columns in (("nbytes", "mtime_ns"), ("nbytes", "version")):
        ask = file_listing.batch_reader(store.objects.descriptor, store.path, scan_schema(columns))
        batch = ask(["gone.bin", "here.bin"])
        assert batch.column("key").to_pylist() == [b"here.bin"]
        assert batch.column("nbytes").to_pylist() == [3]


def test_scans_at_the_same_time_do_not_disturb_one_another(store: FileStore) -> None:
    names = _fill(store, 100)
    outer = store.scan()
    next(outer)
    assert len(listing(store)) == len(names)
    outer.close()


def test_an_early_close_leaves_no_threads_or_descriptors(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the scan, when it is closed; of the store, when that is."""
    monkeypatch.setattr(file_listing, "SCAN_ROWS", 10)
    _fill(store, 500)
    threads, descriptors = threading.active_count(), open_descriptors()
    batches = store.scan()
    assert next(batches).num_rows < 2 * 10
    assert threading.active_count() > threads
    batches.close()
    assert open_descriptors() == descriptors
    store.close()
    assert threading.active_count() == threads


# opening


def test_the_store_stays_where_it_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "a.bin").write_bytes(b"abc")
    monkeypatch.chdir(tmp_path)
    with FileStore("store") as store:
        monkeypatch.chdir("/")
        assert listing(store) == {b"a.bin": 3}


def test_a_removed_directory_is_a_lost_store(store: FileStore) -> None:
    Path(store.path).rmdir()
    with pytest.raises(StoreUnavailable):
        write(store, {b"a.bin": b"abc"}, if_absent=True)
    with pytest.raises(StoreUnavailable):
        read(store, rows_of([b"a.bin"]), [3])


def test_a_closed_store_is_a_mistake_of_ours(store: FileStore) -> None:
    store.close()
    store.close()
    with pytest.raises(ValueError, match="closed"):
        store.delete(rows_of([b"a.bin"]))


def _as_nobody(run: Callable[[], Iterator[object]]) -> list[str]:
    """Return what a function yields in a forked process, in a directory that all may enter.

    Its user is root up to the first value, and then another one.
    """
    if os.getuid() != 0:
        missing("root's rights", "run the tests as root")
    base = tempfile.mkdtemp(prefix="hicachectl-test-")
    Path(base).chmod(0o755)
    said = Path(base) / "said"
    try:
        if not (child := os.fork()):
            with said.open("w") as file, contextlib.suppress(BaseException):
                os.chdir(base)
                for number, value in enumerate(run()):
                    if not number:
                        os.setgroups([])
                        os.setgid(65534)
                        os.setuid(65534)
                    print(value, file=file, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        return said.read_text().splitlines()[1:]
    finally:
        shutil.rmtree(base)


def test_a_directory_without_permission_is_unavailable() -> None:
    def run() -> Iterator[object]:
        for mode in (0o311, 0o744):
            Path(str(mode)).mkdir()
            Path(str(mode)).chmod(mode)
        yield "made"
        for mode in (0o311, 0o744):
            with pytest.raises(StoreUnavailable) as refused:
                FileStore(str(mode))
            yield refused.value

    for mode, line in zip((0o311, 0o744), _as_nobody(run), strict=True):
        assert f"/{mode}: cannot use the store: Permission denied; run as" in line


def test_files_of_others_are_read_where_allowed() -> None:
    def run() -> Iterator[object]:
        Path("store").mkdir()
        for name, mode in (("open.bin", 0o644), ("shut.bin", 0o600)):
            path = Path("store", name)
            path.write_text("abc")
            path.chmod(mode)
        Path("store").chmod(0o755)
        yield "made"
        store = FileStore("store")
        store.attach(Arena(8192))
        result, found = read(store, rows_of([b"open.bin"]), [3])
        yield f"{result.statuses.tolist()} {found[0]!r} {listing(store)[b'shut.bin']}"
        with pytest.raises(DeniedError) as denied:
            read(store, rows_of([b"open.bin", b"shut.bin"]), [3, 3])
        yield denied.value
        yield store.delete(rows_of([b"open.bin"])).errors
        with pytest.raises(StoreUnavailable) as refused:
            write(store, {b"new.bin": b"abc"}, if_absent=True)
        yield refused.value

    statuses, read_errors, delete_errors, refused = _as_nobody(run)
    assert statuses == "[0] b'abc' 3"
    assert "/store: shut.bin: cannot read: Permission denied; run as" in read_errors
    assert delete_errors == "{0: 'Permission denied'}"
    assert refused.endswith(
        "/store: cannot write to the store: Permission denied; "
        "run as the server's user, and check that the file system is writable"
    )


# reading


def test_reading_leaves_access_and_modification_times(store: FileStore) -> None:
    path = Path(store.path) / "a.bin"
    path.write_bytes(b"abc")
    os.utime(path, (1000, 2000))  # an access older than the change: relatime would record a read
    before = path.stat()
    assert read(store, scanned_rows(store, [b"a.bin"]), [3])[0].all_ok
    after = path.stat()
    assert (after.st_atime_ns, after.st_mtime_ns) == (before.st_atime_ns, before.st_mtime_ns)
    path.read_bytes()
    if path.stat().st_atime_ns == before.st_atime_ns:
        missing("a mount with access times", "mount the file system of TMPDIR without noatime")


def test_looking_never_waits_for_a_fifo(store: FileStore) -> None:
    os.mkfifo(Path(store.path) / "fifo")
    start = time.monotonic()
    assert read(store, rows_of([b"fifo"]), [0])[0].statuses.tolist() == [Status.ERROR]
    assert time.monotonic() - start < 60


BAD_KEYS = [b"", b".", b"..", b"../up.bin", b"/etc/passwd", b"a\0b", b"x" * 256]


def test_keys_are_no_paths(store: FileStore, tmp_path: Path) -> None:
    (tmp_path / "up.bin").write_bytes(b"abc")
    rows = rows_of(BAD_KEYS)
    result, _ = read(store, rows, [3] * len(BAD_KEYS))
    deleted = store.delete(rows)
    for answer in (result, deleted):
        assert answer.statuses.tolist() == [Status.ERROR] * len(BAD_KEYS)
        assert set(answer.errors) == set(range(len(BAD_KEYS)))
    assert not store.exists(rows).any()
    written = write(
        store, dict.fromkeys([*BAD_KEYS, b".hicachectl", b"ok"], b"abc"), if_absent=False
    )
    assert written.statuses.tolist() == [Status.ERROR] * (len(BAD_KEYS) + 1) + [Status.OK]
    assert "reserved for hicachectl" in written.errors[len(BAD_KEYS)]
    assert "too long" in written.errors[BAD_KEYS.index(b"x" * 256)]
    assert (tmp_path / "up.bin").read_bytes() == b"abc"
    assert _names(store.path) == ["ok"]


# writing


def test_writing_leaves_nothing_but_the_objects(store: FileStore) -> None:
    write(store, {b"a.bin": b"abc", b"b.bin": b""}, if_absent=True)
    write(store, {b"a.bin": b"ABC", b"c.bin": b"c"}, if_absent=True)
    assert _names(store.path) == ["a.bin", "b.bin", "c.bin"]


def test_files_get_the_permissions_that_sglang_would_give(store: FileStore) -> None:
    write(store, {b"a.bin": b"abc"}, if_absent=True)
    reference = Path(store.path) / "reference"
    reference.write_bytes(b"")
    assert (Path(store.path) / "a.bin").stat().st_mode == reference.stat().st_mode


@pytest.mark.parametrize("noreplace", [True, False])
def test_a_key_that_appears_meanwhile_is_not_replaced(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, *, noreplace: bool
) -> None:
    if not noreplace:  # as on a file system without RENAME_NOREPLACE
        monkeypatch.setattr(durable, "rename_noreplace", lambda *_: False)
    sync = store._writer.sync_data

    def overtaken(files: list[Temporary]) -> None:
        sync(files)
        (Path(store.path) / "a.bin").write_bytes(b"first")

    monkeypatch.setattr(store._writer, "sync_data", overtaken)
    result = write(store, {b"a.bin": b"second", b"b.bin": b"b"}, if_absent=True)
    assert result.statuses.tolist() == [Status.EXISTS, Status.OK]
    assert (Path(store.path) / "a.bin").read_bytes() == b"first"
    assert _names(store.path) == ["a.bin", "b.bin"]


def test_readers_of_a_replaced_file_keep_the_old_one(store: FileStore) -> None:
    path = Path(store.path) / "a.bin"
    path.write_bytes(b"old")
    with path.open("rb") as reader:
        assert write(store, {b"a.bin": b"new"}, if_absent=False).all_ok
        assert reader.read() == b"old"
    assert path.read_bytes() == b"new"


def test_a_failed_sync_publishes_nothing(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: list[Temporary]) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(store._writer, "sync_data", fail)
    result = write(store, {b"a.bin": b"abc", b"..": b""}, if_absent=True)
    assert result.statuses.tolist() == [Status.ERROR] * 2
    assert result.errors[0] == "Input/output error"
    assert _names(store.path) == []


def test_without_syncfs_every_file_is_synced(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(durable, "LIBC", object())
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))
    assert write(store, {b"a.bin": b"abc", b"b.bin": b"b"}, if_absent=True).all_ok
    assert synced[:2] == [3, 1]
    assert _names(store.path) == ["a.bin", "b.bin"]


def test_a_directory_cleared_while_writing_is_an_error(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clear(_: list[Temporary]) -> None:
        for name in _names(store.path):
            (Path(store.path) / name).unlink()

    monkeypatch.setattr(store._writer, "sync_data", clear)
    result = write(store, {b"a.bin": b"abc"}, if_absent=True)
    assert result.errors == {0: "another process cleared the store; run again"}


def test_a_full_file_system_is_told_of_the_row(tmp_path: Path) -> None:
    with (
        small_file_system(tmp_path, "64k"),
        Arena(1 << 20) as arena,
        FileStore(tmp_path) as store,
    ):
        store.attach(arena)
        assert store.free_bytes() == 64 << 10
        objects = {b"a.bin": b"a" * 4096, b"b.bin": b"b" * (256 << 10), b"c.bin": b"c"}
        result = write(store, objects, if_absent=True)
        assert result.statuses.tolist() == [Status.OK, Status.FULL, Status.OK]
        assert result.errors == {1: "No space left on device"}
        assert _names(tmp_path) == ["a.bin", "c.bin"]


def test_a_write_that_is_interrupted_leaves_no_temporary_file(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: list[Temporary]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(store._writer, "sync_data", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(store, {b"a.bin": b"abc"}, if_absent=True)
    assert _names(store.path) == []


# copying


@pytest.fixture
def origin(tmp_path: Path) -> Iterator[FileStore]:
    (tmp_path / "origin").mkdir()
    with FileStore(tmp_path / "origin") as opened:
        yield opened


def _copy(
    origin: FileStore, store: FileStore, sizes: dict[bytes, int], *, if_absent: bool = True
) -> Result:
    """Copy objects to keys with the prefix `new-`, with an old modification time."""
    rows = rows_of([b"new-" + key for key in sizes], mtime_ns=[OLD_TIME_NS] * len(sizes))
    expected = np.array(list(sizes.values()), dtype=np.int64)
    return store.copy_from(origin, rows_of(list(sizes)), rows, expected, if_absent=if_absent)


def _while_copying(
    monkeypatch: pytest.MonkeyPatch, then: Callable[[], object], *, before: bool
) -> None:
    """Call `then` right before or after the bytes of each object are copied."""

    def copy(source: int, nbytes: int, target: int) -> None:
        if before:
            then()
        copy_bytes(source, nbytes, target)
        if not before:
            then()

    monkeypatch.setattr("hicachectl.backends.object_files.copies.copy_bytes", copy)


def test_only_files_are_copied_from(store: FileStore, origin: FileStore) -> None:
    none = np.zeros(0, dtype=np.int64)
    with PackStore.create(parse_url(f"pack://{origin.path}/a.hcpack")) as pack:
        assert store.can_copy_from(origin)
        assert not store.can_copy_from(pack)
        with pytest.raises(UnsupportedByBackend):
            store.copy_from(pack, rows_of([]), rows_of([]), none, if_absent=True)


def test_copies_have_their_own_keys_and_the_bytes_and_times_asked_for(
    store: FileStore, origin: FileStore
) -> None:
    sizes = {b"%d.bin" % n: n for n in (0, 1, 4096, 1_000_000)}
    for name, nbytes in sizes.items():
        (Path(origin.path) / os.fsdecode(name)).write_bytes(b"x" * nbytes)
    store.detach()
    assert _copy(origin, store, sizes).all_ok
    assert {name: path.read_bytes() for name, path in _paths(store)} == {
        f"new-{n}.bin": b"x" * n for n in sizes.values()
    }
    assert {path.stat().st_mtime_ns for _, path in _paths(store)} == {OLD_TIME_NS}


def _paths(store: FileStore) -> list[tuple[str, Path]]:
    return [(name, Path(store.path) / name) for name in _names(store.path)]


def test_each_object_that_cannot_be_copied_says_why(store: FileStore, origin: FileStore) -> None:
    base = Path(origin.path)
    for name in ("fine", "short", "long"):
        (base / name).write_bytes(b"abc")
    (base / "link").symlink_to("fine")
    (base / "folder").mkdir()
    os.mkfifo(base / "fifo")
    sizes = {b"gone": 3, b"short": 4, b"long": 2, b"link": 3, b"folder": 3, b"fifo": 0, b"../x": 1}
    result = _copy(origin, store, {**sizes, b"fine": 3})
    refused = [Status.GONE, Status.SHORT, Status.OVERSIZED, *[Status.ERROR] * 4]
    assert result.statuses.tolist() == [*refused, Status.OK]
    assert result.errors == {
        3: "a symbolic link, not a regular file",
        4: "not a regular file",
        5: "not a regular file",
        6: "the key cannot be a file name",
    }
    assert _names(store.path) == ["new-fine"]


@pytest.mark.parametrize("atomic", [True, False], ids=["renameat2", "rename"])
@pytest.mark.parametrize("times", [1, 2])
def test_a_file_that_replaces_the_listed_one_at_the_last_moment_is_not_taken(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int, *, atomic: bool
) -> None:
    """A server renames a new object to the key right after the stat of the listed one."""
    path, aside = Path(store.path) / "a.bin", tmp_path / "aside"
    aside.mkdir()
    path.write_bytes(b"listed")
    new = [f"new {number}".encode() for number in range(times)]
    written = iter(new)
    real = durable.rename_noreplace

    def raced(*arguments: Any) -> bool:
        if (value := next(written, None)) is not None:
            (tmp_path / "fresh").write_bytes(value)
            (tmp_path / "fresh").replace(path)
        return atomic and real(*arguments)

    monkeypatch.setattr(durable, "rename_noreplace", raced)
    version = store.look(rows_of([b"a.bin"])).column("version")[0].as_py()
    with FileStore(aside) as run:
        mover = store.mover(run)
        assert mover is not None
        taken = mover.take(rows_of([b"a.bin"], version=[version]))
        assert taken.statuses.tolist() == [Status.CHANGED]
    assert path.read_bytes() == new[-1]
    assert list(aside.iterdir()) == []


@pytest.mark.parametrize(
    ("before", "change", "status"),
    [
        (True, lambda path: os.truncate(path, 10), Status.SHORT),
        (False, lambda path: os.truncate(path, 10), Status.CHANGED),
        (False, lambda path: path.write_bytes(b"y" * 9000), Status.CHANGED),
        (True, lambda path: path.write_bytes(b"y" * 9001), Status.CHANGED),
        (True, Path.unlink, Status.OK),
    ],
    ids=["cut before", "cut after", "rewritten", "grown", "unlinked"],
)
def test_what_changes_while_it_is_copied_is_not_published(
    store: FileStore,
    origin: FileStore,
    monkeypatch: pytest.MonkeyPatch,
    *,
    before: bool,
    change: Callable[[Path], object],
    status: Status,
) -> None:
    path = Path(origin.path) / "a.bin"
    path.write_bytes(b"x" * 9000)
    os.utime(path, ns=(OLD_TIME_NS, OLD_TIME_NS))
    _while_copying(monkeypatch, lambda: change(path), before=before)
    assert _copy(origin, store, {b"a.bin": 9000}).statuses.tolist() == [status]
    written = [data for _, p in _paths(store) if (data := p.read_bytes())]
    assert written == ([b"x" * 9000] if status == Status.OK else [])


def test_a_copy_leaves_or_replaces_what_is_there(store: FileStore, origin: FileStore) -> None:
    (Path(origin.path) / "a.bin").write_bytes(b"new")
    there = Path(store.path) / "new-a.bin"
    there.write_bytes(b"old")
    assert _copy(origin, store, {b"a.bin": 3}).statuses.tolist() == [Status.EXISTS]
    assert there.read_bytes() == b"old"
    assert _copy(origin, store, {b"a.bin": 3}, if_absent=False).all_ok
    assert there.read_bytes() == b"new"
    assert _names(store.path) == ["new-a.bin"]


def test_a_copy_that_is_interrupted_leaves_nothing(
    store: FileStore, origin: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = itertools.count(1)

    def interrupt() -> None:
        if next(left) == 2:
            raise KeyboardInterrupt

    for name in ("a.bin", "b.bin"):
        (Path(origin.path) / name).write_bytes(b"abc")
    _while_copying(monkeypatch, interrupt, before=False)
    descriptors = open_descriptors()
    with pytest.raises(KeyboardInterrupt):
        _copy(origin, store, {b"a.bin": 3, b"b.bin": 3})
    assert _names(store.path) == []
    assert open_descriptors() == descriptors


def test_a_copy_says_which_directory_is_lost(store: FileStore, origin: FileStore) -> None:
    (Path(origin.path) / "a.bin").write_bytes(b"abc")
    Path(store.path).rmdir()
    with pytest.raises(StoreUnavailable, match="/store: "):
        _copy(origin, store, {b"a.bin": 3})
    shutil.rmtree(origin.path)
    with pytest.raises(StoreUnavailable, match="/origin: "):
        _copy(origin, store, {b"a.bin": 3})


def test_copying_leaves_access_times(store: FileStore, origin: FileStore) -> None:
    path = Path(origin.path) / "a.bin"
    path.write_bytes(b"abc")
    os.utime(path, (1000, 2000))
    before = path.stat()
    assert _copy(origin, store, {b"a.bin": 3}).all_ok
    assert path.stat().st_atime_ns == before.st_atime_ns


def test_a_copy_on_a_full_file_system_is_told_of_the_row(tmp_path: Path, origin: FileStore) -> None:
    small = tmp_path / "small"
    sizes = {b"a.bin": 4096, b"b.bin": 256 << 10, b"c.bin": 1}
    for name, nbytes in sizes.items():
        (Path(origin.path) / os.fsdecode(name)).write_bytes(b"x" * nbytes)
    with small_file_system(small, "64k"), FileStore(small) as store:
        result = _copy(origin, store, sizes)
        assert result.statuses.tolist() == [Status.OK, Status.FULL, Status.OK]
        assert result.errors == {1: "No space left on device"}
        assert _names(small) == ["new-a.bin", "new-c.bin"]


def _abc(descriptor: int) -> None:
    os.write(descriptor, b"abc")


def test_a_temporary_name_is_one_that_sglang_ignores(store: FileStore) -> None:
    name = store._writer.write_temporary(b"a.bin", _abc, None).name
    assert name.startswith(b".")
    assert not name.endswith(b".bin")
    assert (Path(store.path) / os.fsdecode(name)).read_bytes() == b"abc"


def test_leftovers_are_swept_by_their_owner_alone(store: FileStore) -> None:
    mine, theirs = "0" * 16, "1" * 16
    with FileStore(store.path) as another:
        another.own_temporaries(theirs, sweep=False)
        kept = os.fsdecode(another._writer.write_temporary(b"a.bin", _abc, None).name)
    store.own_temporaries(mine, sweep=False)
    left = os.fsdecode(store._writer.write_temporary(b"a.bin", _abc, None).name)
    (Path(store.path) / "a.bin").write_bytes(b"abc")
    store.own_temporaries("2" * 16, sweep=True)
    assert _names(store.path) == sorted([kept, left, "a.bin"])
    store.own_temporaries(mine, sweep=True)
    assert _names(store.path) == sorted([kept, "a.bin"])


def test_only_files_that_are_not_in_memory_are_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cold", "warm"):
        (tmp_path / name).write_bytes(bytes(1 << 20))
    preadv = os.preadv
    advised: list[tuple[str, int, int]] = []

    def name_of(descriptor: int) -> str:
        return Path(f"/proc/self/fd/{descriptor}").readlink().name

    def read(descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
        # The system's answer for a page not in memory, which the test cannot force.
        if flags & os.RWF_NOWAIT and name_of(descriptor) == "cold":
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return preadv(descriptor, buffers, offset)

    def advise(descriptor: int, offset: int, nbytes: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        advised.append((name_of(descriptor), offset, nbytes))

    monkeypatch.setattr(os, "preadv", read)
    monkeypatch.setattr(os, "posix_fadvise", advise)
    with FileStore(tmp_path) as store:
        store.expect(rows_of([b"warm", b"cold"]), np.full(2, 1 << 20))
    assert advised == [("cold", 0, 1 << 20)]


def test_touched_files_are_newer_than_all_and_in_the_order_they_were_named(tmp_path: Path) -> None:
    for name in ("a.bin", "b.bin", "c.bin"):
        (tmp_path / name).touch()
    with FileStore(tmp_path) as store:
        touched = store.touch(rows_of([b"c.bin", b"a.bin", b"../x", b"gone.bin"]))
    assert touched.tolist() == [True, True, False, False]
    times = {name: (tmp_path / f"{name}.bin").stat().st_mtime_ns for name in "abc"}
    assert times["b"] < times["c"] < times["a"]


def test_a_side_directory_that_is_a_link_is_named_before_a_change(tmp_path: Path) -> None:
    """Folders and trailers could go unnoticed behind it."""
    store_directory = tmp_path / "store"
    store_directory.mkdir()
    (store_directory / ".hicachectl").symlink_to(tmp_path)
    with FileStore(str(store_directory)) as store, pytest.raises(UntrustedError) as refused:
        store.add_markers([])
    assert str(refused.value) == (
        f"{store_directory}/.hicachectl: is a symbolic link, and links are not followed here; move "
        f"it out of {store_directory}"
    )


def test_a_store_that_cannot_be_made_names_its_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreUnavailable) as refused:
        open_store(f"file://{tmp_path}/file/store", create=True)
    assert str(refused.value) == (
        f"{tmp_path}/file/store: cannot create the directory: Not a directory; check the path and "
        "the permissions of its parent directories"
    )


USES: dict[str, Callable[[FileStore, Any], object]] = {
    "scan": lambda store, _: list(store.scan()),
    "look": lambda store, rows: store.look(rows),
    "exists": lambda store, rows: store.exists(rows),
    "touch": lambda store, rows: store.touch(rows),
    "sweep": lambda store, _: store.own_temporaries("a", sweep=True),
    "flush": lambda store, _: store.flush(),
    "markers": lambda store, _: store.add_markers([]),
}


@pytest.mark.parametrize("use", USES)
def test_a_lost_file_system_is_named_whatever_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    def lost(*_: object, **__: object) -> Any:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    (tmp_path / "a.bin").write_bytes(b"x")
    with FileStore(str(tmp_path)) as store:
        rows = scanned_rows(store, [b"a.bin"])
        with monkeypatch.context() as patch:
            for call in ("open", "stat", "scandir", "listdir", "utime", "fsync", "sync"):
                patch.setattr(os, call, lost)
            with pytest.raises(StoreUnavailable) as refused:
                USES[use](store, rows)
    assert str(refused.value) == (
        f"{tmp_path}: cannot use the store: Stale file handle; check that the file system is "
        "mounted"
    )
