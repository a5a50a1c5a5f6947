"""Epochs make objects stale, and the sweeper removes these and abandoned temporary files."""

from __future__ import annotations

import errno
import os
import time
from typing import TYPE_CHECKING

import pytest

from hicachectl.backends.disk.directory import Directory
from hicachectl.backends.disk.io import LIBC
from hicachectl.backends.file.folders import ObjectDirectory
from hicachectl.backends.object_files.epochs import (
    EpochReader,
    Epochs,
    begin_epoch,
    open_side,
    owner_of,
)
from hicachectl.backends.sglang import file_pages
from hicachectl.backends.sglang.calls import Call
from hicachectl.backends.sglang.capacity import Capacity
from hicachectl.backends.sglang.counters import Counters
from hicachectl.backends.sglang.file_pages import FilePages, Found
from hicachectl.backends.sglang.settings import Settings
from hicachectl.backends.sglang.sweeping import Sweeper
from hicachectl.backends.urls import parse_url
from tests.backends.sglang.page_writer import INDEXER, KV, SUFFIXES, page_files, page_hash
from tests.backends.sglang.pages import HostPool, hashes
from tests.speed import slow
from tests.waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OTHER = b"_other_0_1.bin"


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[ObjectDirectory]:
    with ObjectDirectory.create(str(tmp_path / "store")) as made:
        yield made


def put(directory: ObjectDirectory, number: int, suffix: bytes) -> Path:
    """Write an object that has an old mtime, as a copy keeps it."""
    here, name = directory.place_for_new(page_hash(number).encode() + suffix)
    with os.fdopen(os.open(name, os.O_CREAT | os.O_WRONLY, dir_fd=here), "wb") as file:
        file.write(b"x" * 100)
    os.utime(name, (1e9, 1e9), dir_fd=here)
    return _path(directory, name)


def _path(directory: ObjectDirectory, name: bytes) -> Path:
    from pathlib import Path

    return Path(directory.path) / os.fsdecode(name)


def _epoch_file(directory: ObjectDirectory, suffix: bytes) -> Path:
    return _path(directory, b".hicachectl/epoch-" + owner_of(suffix))


def _epoch(directory: ObjectDirectory, suffix: bytes) -> int:
    """Return an epoch as the plug-in reads it; commands must read the same."""
    time_ns = EpochReader(directory, suffix).look()
    assert Epochs(directory).of(b"0" * 64 + suffix) == time_ns
    return time_ns


def _tick(file: Path) -> None:
    """Wait until the file system's clock is past a file's ctime."""

    def has_passed() -> bool:
        probe = file.with_name("probe")
        probe.write_bytes(b"")
        passed = probe.stat().st_ctime_ns > file.stat().st_ctime_ns
        probe.unlink()
        return passed

    wait_until(has_passed)


def test_objects_from_before_an_epoch_are_stale_and_later_ones_are_not(
    directory: ObjectDirectory,
) -> None:
    """Copies keep old mtimes: the ctime decides. A second epoch ends what the first let live."""
    epoch = EpochReader(directory, KV)
    before, other = put(directory, 0, KV), EpochReader(directory, OTHER)
    assert epoch.look() == 0
    assert not epoch.stale(before.stat())
    begin_epoch(directory, [KV, INDEXER])
    assert not epoch.stale(before.stat())  # not looked yet
    assert epoch.look() > 0
    assert epoch.stale(before.stat())
    assert other.look() == 0
    _tick(_epoch_file(directory, KV))
    after = put(directory, 1, KV)
    assert not epoch.stale(after.stat())
    _tick(after)
    begin_epoch(directory, [KV])
    epoch.look()
    assert epoch.stale(after.stat())


def test_the_epoch_does_not_follow_its_file(directory: ObjectDirectory) -> None:
    """chown -R and chmod -R change the ctime of the epoch's file after later pages were written."""
    begin_epoch(directory, [KV])
    epoch, file = EpochReader(directory, KV), _epoch_file(directory, KV)
    begun_ns = epoch.look()
    _tick(file)
    later = put(directory, 0, KV)
    _tick(later)
    file.chmod(0o640)
    assert file.stat().st_ctime_ns > later.stat().st_ctime_ns
    assert epoch.look() == _epoch(directory, KV) == begun_ns
    assert not epoch.stale(later.stat())


@pytest.mark.parametrize("early", [True, False])
def test_an_epoch_of_the_first_plug_ins_is_the_ctime_of_its_file(
    directory: ObjectDirectory, early: bool
) -> None:
    """They write the suffix over what a later plug-in wrote."""
    if not early:
        begin_epoch(directory, [KV])
        _tick(_epoch_file(directory, KV))
    begun_ns = _epoch(directory, KV)
    with open_side(directory) as side:  # begin_epoch of 79ee9eeb
        descriptor = side.open_lock("epoch-" + owner_of(KV).decode())
        os.pwrite(descriptor, KV + b"\n", 0)
        os.utime(descriptor)
        os.close(descriptor)
    assert _epoch(directory, KV) == _epoch_file(directory, KV).stat().st_ctime_ns > begun_ns


@pytest.mark.parametrize(
    "text", [b"", b"epoch", b"epoch 1234 _x.bin", b"epoch -5 x\n", b"epoch 9223372036854775807 x\n"]
)
def test_a_text_that_is_no_epochs_does_not_count(directory: ObjectDirectory, text: bytes) -> None:
    """A file that was cut off, and a time after the file's own."""
    begin_epoch(directory, [KV])
    file = _epoch_file(directory, KV)
    file.write_bytes(text)
    assert _epoch(directory, KV) == file.stat().st_ctime_ns


def test_a_clear_of_a_full_disk(
    directory: ObjectDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text has no room, but the ctime needs none."""
    begin_epoch(directory, [KV])
    before = put(directory, 0, KV)
    _tick(before)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "")

    monkeypatch.setattr(Directory, "write", full)
    begin_epoch(directory, [KV, INDEXER])
    assert _epoch(directory, KV) == _epoch_file(directory, KV).stat().st_ctime_ns
    assert _epoch(directory, KV) > before.stat().st_ctime_ns
    assert _epoch(directory, INDEXER)


def test_an_object_of_the_moment_of_the_epoch_is_stale(directory: ObjectDirectory) -> None:
    """It was renamed just before the clear, within one tick of the clock."""
    file = put(directory, 0, KV)
    now_ns = file.stat().st_ctime_ns
    begin_epoch(directory, [KV])
    epoch, remover = EpochReader(directory, KV), _sweeper(directory)
    for earlier_ns, is_stale in ((1, False), (0, True)):
        _epoch_file(directory, KV).write_bytes(b"epoch %d %s\n" % (now_ns - earlier_ns, KV))
        assert epoch.look() == now_ns - earlier_ns
        assert epoch.stale(file.stat()) == is_stale
        assert bool(remover.remove_stale(page_hash(0), 0, epoch.time_ns)) == is_stale
    assert not file.exists()


def _sweeper(directory: ObjectDirectory, *suffixes: bytes) -> Sweeper:
    return Sweeper(directory, suffixes or (KV,), has_anchor=True)


def test_reading_a_stale_object_does_not_make_it_valid(directory: ObjectDirectory) -> None:
    """The epoch comes after the reader's look at the file, and before its touch."""
    files, file = page_files(directory), put(directory, 0, KV)
    page = (file.name.encode(), b"")
    with file.open("rb") as opened:
        seen = os.fstat(opened.fileno())
        begin_epoch(directory, [KV])
        _tick(_epoch_file(directory, KV))  # else the touch falls into the epoch's moment
        files._touch(opened.fileno(), page, seen)
        epoch = EpochReader(directory, KV)
        epoch.look()
        assert epoch.stale(file.stat())
        # A writer that found the object marks it, and learns that it has to write it.
        assert not files.keep(page, Found("", seen))


def test_a_clear_during_the_touch_of_a_read_is_noticed(
    directory: ObjectDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The touch makes the object new, so its reader removes it."""

    class Late:
        @staticmethod
        def futimens(descriptor: int, times: object) -> None:
            begin_epoch(directory, [KV])
            _tick(_epoch_file(directory, KV))
            LIBC.futimens(descriptor, times)
            assert not EpochReader(directory, KV).stale(os.fstat(descriptor))

    monkeypatch.setattr(file_pages, "LIBC", Late)
    files, file = page_files(directory), put(directory, 0, KV)
    with file.open("rb") as opened:
        files._touch(opened.fileno(), (file.name.encode(), b""), os.fstat(opened.fileno()))
    assert not file.exists()


@pytest.mark.parametrize("limit", [0, slow(1 << 20)])
def test_stale_objects_are_removed_in_the_background(
    directory: ObjectDirectory, limit: int
) -> None:
    files = [put(directory, number, suffix) for number in range(200) for suffix in SUFFIXES]
    foreign = put(directory, 0, OTHER)
    capacity = Capacity(directory, SUFFIXES, max_size=limit, counters=Counters("test"))
    wait_until(capacity.evict_now)
    assert all(file.exists() for file in files)
    begin_epoch(directory, SUFFIXES)
    _tick(_epoch_file(directory, INDEXER))
    fresh = [put(directory, number, suffix) for number in range(500, 510) for suffix in SUFFIXES]
    wait_until(lambda: not any(file.exists() for file in files), "stale objects stay")
    assert all(file.exists() for file in [*fresh, foreign])
    capacity.close()


def test_an_epoch_is_not_read_through_links(directory: ObjectDirectory, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / f"epoch-{owner_of(KV).decode()}").touch()
    _path(directory, b".hicachectl").symlink_to(tmp_path / "elsewhere")
    assert EpochReader(directory, KV).look() == 0


def test_only_old_temporary_files_of_the_suffixes_are_swept(
    directory: ObjectDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = os.urandom(4).hex().encode()
    own = directory.temporary_name(b"00", owner_of(KV) + token, 1)
    sidecar = directory.temporary_name(b"00", owner_of(INDEXER) + token, 1)
    others = directory.temporary_name(b"00", owner_of(OTHER) + token, 1)
    names = [own, sidecar, others, b"." + b"0" * 32 + b".tmp", own[:-4] + b".bin"]
    files = [_path(directory, name) for name in names]
    for file in files:
        file.write_bytes(b"x")
    link = _path(directory, directory.temporary_name(b"00", owner_of(KV) + token, 2))
    link.symlink_to(files[0])
    sweeper = _sweeper(directory, KV, INDEXER)
    young = sweeper.list(lambda: False)
    assert all(file.exists() for file in files)
    assert young.listed == 2
    later_ns = time.time_ns() + 61 * 10**9
    monkeypatch.setattr(sweeper, "now_ns", lambda: later_ns)
    sweeper.list(lambda: False)
    assert [file.exists() for file in files] == [False, False, True, True, True]
    assert link.is_symlink()


def test_what_a_killed_write_of_a_page_leaves_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, path = HostPool(), tmp_path / "store"
    url = parse_url(str(path))
    store = FilePages(url, Counters("test"), Settings(stores=(url,)))
    store.add(host.pool)
    with Call(PATIENCE_S) as call:
        assert store.exists(host.pool, hashes(1), call) == [False]  # the store is open

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "")

    with monkeypatch.context() as patch, Call(PATIENCE_S) as call:
        patch.setattr(os, "rename", fail)  # killed before it,
        patch.setattr(os, "unlink", fail)  # and before the file is removed
        assert store.write(host.pool, hashes(1), host.pieces([0]), call) == [False]
    store.close()
    with ObjectDirectory.open(str(path)) as directory:
        sweeper = _sweeper(directory)
        left = list(path.glob(".hicachectl-*.tmp"))
        # The store's own listing may have left its clock, which is empty.
        assert [bool(file.stat().st_size) for file in left].count(True) == 1
        monkeypatch.setattr(sweeper, "now_ns", lambda: time.time_ns() + 61 * 10**9)
        sweeper.list(lambda: False)
        assert not list(path.glob(".hicachectl-*.tmp"))


def test_a_listing_is_by_page_and_by_the_last_use_of_any_object(
    directory: ObjectDirectory,
) -> None:
    for number, used in ((0, 300), (1, 100), (2, 200)):
        for suffix in SUFFIXES:
            os.utime(put(directory, number, suffix), (used, 50))
    os.utime(put(directory, 1, INDEXER), (400, 50))
    put(directory, 0, OTHER)
    _path(directory, b"G" * 64 + KV).touch()
    _path(directory, page_hash(3).upper().encode() + KV).touch()
    listing = _sweeper(directory, KV, INDEXER).list(lambda: False)
    assert listing.left == 600
    assert [listing.take_page() for _ in range(4)] == [
        *(
            (page_hash(number), {0: 100, 1: 100}, used * 10**9)
            for number, used in ((2, 200), (0, 300), (1, 400))
        ),
        None,
    ]
    assert (listing.listed, listing.left, listing.others) == (600, 0, 1)


def test_an_object_of_the_far_future_is_the_last(directory: ObjectDirectory) -> None:
    """Its time does not fit 64 bits."""
    for number in range(2):
        put(directory, number, KV)
    far = 430 * 31_557_600  # after 1970
    os.utime(put(directory, 2, KV), (far, far))
    listing = _sweeper(directory).list(lambda: False)
    assert [page for page, _, _ in iter(listing.take_page, None)][-1] == page_hash(2)
