"""A rank's objects stay within their limits, whoever writes them, and pages go as a whole."""

from __future__ import annotations

import errno
import os
import statistics
import struct
import threading
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest import mock

import pytest

from hicachectl.backends.disk.directory import Directory
from hicachectl.backends.file.folders import ObjectDirectory
from hicachectl.backends.object_files.epochs import owner_of
from hicachectl.backends.sglang import capacity as capacity_module
from hicachectl.backends.sglang import file_pages
from hicachectl.backends.sglang.calls import Call, Ended
from hicachectl.backends.sglang.capacity import Capacity
from hicachectl.backends.sglang.counters import Counters
from hicachectl.backends.sglang.file_pages import FilePages, Found, PageFiles
from hicachectl.backends.sglang.settings import Settings
from hicachectl.backends.sglang.sweeping import Sweeper
from hicachectl.backends.urls import parse_url
from hicachectl.formats.errors import UsageError
from tests.backends.sglang.page_writer import (
    INDEXER,
    INDEXER_BYTES,
    KV,
    KV_BYTES,
    PAGE_BYTES,
    SUFFIXES,
    PageWriter,
    page_files,
    page_hash,
    start,
)
from tests.backends.sglang.pages import HostPool
from tests.small_file_system import small_file_system
from tests.waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

HOUR_NS = 3600 * 10**9
LIMIT = 100 * PAGE_BYTES


class Place:
    """A directory of pages, and the capacities over it."""

    def __init__(self, path: Path, *, folders: bool | None = None) -> None:
        self.path = path
        self.directory = ObjectDirectory.create(str(path), folders=folders)
        self.counters = Counters(str(path))
        self._capacities: list[Capacity] = []

    def capacity(
        self,
        limit: int = 0,
        *,
        suffixes: Mapping[bytes, bool] = SUFFIXES,
        min_free: int = 0,
        evict: str = "owner",
    ) -> Capacity:
        made = Capacity(
            self.directory,
            suffixes,
            max_size=limit,
            min_free_space=min_free,
            evict=evict,
            counters=self.counters,
        )
        self._capacities.append(made)
        return made

    def put(self, number: int, suffix: bytes, nbytes: int, age_s: float) -> None:
        """Write an object that was written, and not used, so long ago."""
        key = page_hash(number).encode() + suffix
        here, name = self.directory.place_for_new(key)
        descriptor = os.open(name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, dir_fd=here)
        os.write(descriptor, bytes(nbytes))
        self.set_age(descriptor, age_s)
        os.close(descriptor)

    @staticmethod
    def set_age(file: int | Path, age_s: float) -> None:
        then = time.time_ns() - int(age_s * 1e9)
        os.utime(file, ns=(then, then))

    def put_page(self, number: int, age_s: float) -> None:
        self.put(number, INDEXER, INDEXER_BYTES, age_s + 0.001)
        self.put(number, KV, KV_BYTES, age_s)

    def put_pages(self, count: int) -> None:
        """Write pages, each a minute older than the next one."""
        for number in range(count):
            self.put_page(number, 7200 + 60 * (count - number))

    def pages(self, suffix: bytes, count: int = 3000) -> list[int]:
        """Return the numbers of the pages that have an object."""
        return [number for number in range(count) if self.has(number, suffix)]

    def has(self, number: int, suffix: bytes) -> bool:
        return self.file(number, suffix).exists()

    def file(self, number: int, suffix: bytes) -> Path:
        name = page_hash(number) + suffix.decode()
        return self.path / name[:2] / name if self.directory.folders else self.path / name

    def total(self) -> int:
        sizes = 0
        for file in self.path.rglob("*.bin"):
            try:
                sizes += file.stat().st_size
            except FileNotFoundError:
                continue
        return sizes

    def wait(self, capacity: Capacity, limit: int) -> None:
        """Wait until the objects are within a limit, and no eviction is under way."""
        wait_until(lambda: capacity.evict_now() and self.total() <= 0.98 * limit, "no eviction")

    def close(self) -> None:
        for capacity in self._capacities:
            capacity.close()
        self.directory.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path / "store")
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("folders", [False, True])
def test_the_least_recently_used_pages_go_first_and_whole(tmp_path: Path, folders: bool) -> None:
    place = Place(tmp_path / "store", folders=folders)
    place.put_pages(150)
    capacity = place.capacity(LIMIT)
    place.wait(capacity, LIMIT)
    left = place.pages(KV)
    assert left == place.pages(INDEXER) == list(range(150 - len(left), 150))
    assert place.total() > 0.94 * LIMIT
    assert not list(place.path.rglob("*.tmp"))
    place.close()


@pytest.mark.slow
def test_writers_get_no_room_above_the_limit_and_get_it_after_evictions(place: Place) -> None:
    """Files that are being written during a listing may be missed by it, and be above the limit.

    On a busy machine a listing takes the time of several writes.
    """
    writer = PageWriter(str(place.path), LIMIT)
    written = 0
    totals = []

    def write_the_next() -> bool:
        nonlocal written
        written += writer.write(range(written, written + 5))
        totals.append(place.total())
        return written >= 250

    wait_until(write_the_next, "writers get no room")
    assert 0.9 * LIMIT < max(totals) <= 1.25 * LIMIT
    wait_until(lambda: place.total() <= 1.05 * LIMIT, "the evictor does not catch up")
    assert writer.counters.tally.of("tokens")["evicted"] >= 125
    assert not place.capacity(LIMIT).admit(LIMIT + 1)
    writer.close()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["disk", "late", "changed"])
def test_the_room_of_failed_writes_comes_back(
    place: Place, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Writes of three times the limit fail; a page that follows finds room at once."""
    limit = LIMIT // 8
    wait_until(place.capacity(limit).evict_now)  # has listed the empty directory
    writer = PageWriter(str(place.path), limit)
    with monkeypatch.context() as patch:
        if fault == "disk":
            patch.setattr(file_pages, "write_all", mock.Mock(side_effect=OSError(5, "")))
        elif fault == "late":
            patch.setattr(file_pages, "write_all", mock.Mock(side_effect=Ended))
        else:
            digests = (n.to_bytes(32, "little") for n in count())
            patch.setattr(PageFiles, "_digest", lambda *_: next(digests))
        for _ in range(3 * limit // INDEXER_BYTES):  # a late call tries a page only
            assert writer.write(range(8)) == 0
    assert writer.write(range(8)) == 8
    assert "full" not in writer.counters.tally.of("refused")
    writer.close()


def test_the_room_of_replaced_files_comes_back(place: Place) -> None:
    """Two servers with other weights replace each other's pages."""
    wait_until(place.capacity(LIMIT).evict_now)
    writers = [PageWriter(str(place.path), LIMIT, weights=weights) for weights in "ab"]
    for turn in range(3 * LIMIT // (8 * PAGE_BYTES)):
        writer = writers[turn % 2]
        assert writer.write(range(8)) == 8
        assert "full" not in writer.counters.tally.of("refused")
    for writer in writers:
        writer.close()


def test_an_object_that_does_not_fit_beside_the_free_space_is_not_written(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much is free: what counts is what is free after the write."""
    space = SimpleNamespace(f_bavail=1000 + 2 * KV_BYTES, f_frsize=1)
    monkeypatch.setattr(os, "fstatvfs", lambda _: space)
    capacity = place.capacity(min_free=1000)
    assert not capacity.admit(2 * KV_BYTES + 1)
    assert capacity.admit(KV_BYTES)
    assert not capacity.admit(KV_BYTES + 1)
    assert capacity.admit(KV_BYTES)
    assert not capacity.admit(1)


@pytest.mark.parametrize("used", [KV, INDEXER, None], ids=["kv", "indexer", "neither"])
@pytest.mark.parametrize("how", ["read", "rewritten"])
def test_a_page_that_was_used_since_the_listing_stays(
    place: Place, used: bytes | None, how: str
) -> None:
    """An eviction can take long; the page may have become the newest meanwhile."""
    place.put_page(1, 7200)
    listed_ns = place.file(1, KV).stat().st_mtime_ns
    sweeper = Sweeper(place.directory, (KV, INDEXER), has_anchor=True)
    if used is not None:
        file, then = place.file(1, used), time.time_ns() - 120 * 10**9  # no page in flight
        os.utime(file, ns=(then, listed_ns if how == "read" else then))
    sizes = {0: KV_BYTES, 1: INDEXER_BYTES}
    freed = sweeper.remove_page(page_hash(1), sizes, listed_ns)
    assert freed == (PAGE_BYTES if used is None else 0)
    assert place.has(1, KV) == place.has(1, INDEXER) == (used is not None)


def test_the_room_of_a_killed_writer_comes_back_with_the_next_listing(place: Place) -> None:
    killed = place.capacity(LIMIT)
    wait_until(killed.evict_now)
    assert killed.admit(LIMIT - PAGE_BYTES)
    killed.close()  # the room is never used nor given back
    after = place.capacity(LIMIT)
    wait_until(after.evict_now)
    assert after.admit(LIMIT // 2)


@pytest.mark.parametrize("control", ["evictor-", "used-"])
def test_control_files_that_fail_to_open_are_opened_later(
    place: Place, control: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After they were removed, and another server has made them again."""
    capacity, open_lock = place.capacity(LIMIT), Directory.open_lock
    wait_until(capacity.evict_now)
    refused = threading.Event()

    def fail(side: Directory, name: str) -> int:
        if name.startswith(control):
            refused.set()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return open_lock(side, name)

    monkeypatch.setattr(Directory, "open_lock", fail)
    for file in list((place.path / ".hicachectl").iterdir()):
        file.rename(f"{file}.old")
        file.touch()
    assert refused.wait(5)  # the thread looks four times a second
    monkeypatch.setattr(Directory, "open_lock", open_lock)
    assert capacity.evict_now()
    assert capacity.admit(KV_BYTES)


def test_a_page_that_was_read_stays(place: Place) -> None:
    """A touch moves the atime only."""
    place.put_pages(150)
    file = place.file(0, KV)
    with file.open("rb") as opened:
        before = os.fstat(opened.fileno())
        page_files(place.directory)._touch(opened.fileno(), (file.name.encode(), b""), before)
        once = os.fstat(opened.fileno())
    assert once.st_mtime_ns == before.st_mtime_ns
    assert once.st_atime_ns > before.st_atime_ns + HOUR_NS
    capacity = place.capacity(LIMIT)
    place.wait(capacity, LIMIT)
    assert place.has(0, KV)
    assert place.has(0, INDEXER)
    assert not place.has(1, KV)


def test_sidecars_whose_anchor_may_still_come_stay(place: Place) -> None:
    """Young sidecars alone, sidecars younger than the anchor, and kept ones are in flight."""
    place.put_pages(150)
    place.put(1000, INDEXER, INDEXER_BYTES, 30)  # alone
    place.put(1001, INDEXER, INDEXER_BYTES, 90)  # alone, and its writer has given up
    place.put(1, INDEXER, INDEXER_BYTES, 30)  # written anew
    keeping = page_files(place.directory, INDEXER)
    seen = Found("", place.file(2, INDEXER).stat())
    assert keeping.keep((page_hash(2).encode() + INDEXER, b""), seen)
    assert not keeping.keep((page_hash(2000).encode() + INDEXER, b""), seen)
    for number in range(3, 150):
        place.set_age(place.file(number, KV), 10)  # younger than all of those
    capacity = place.capacity(10 * PAGE_BYTES)
    place.wait(capacity, 10 * PAGE_BYTES)
    assert place.has(1000, INDEXER)
    assert not place.has(1001, INDEXER)
    assert not place.has(0, INDEXER)
    for number in (1, 2):
        assert place.has(number, KV)
        assert place.has(number, INDEXER)


def test_an_anchor_that_is_used_in_the_last_moment_keeps_its_sidecars(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A touch between the evictor's look and its removal puts the file back."""
    place.put_pages(150)
    real, victim = os.rename, os.fsencode(page_hash(0)) + KV
    reader = page_files(place.directory)

    def touch_and_rename(old: bytes, new: bytes, **where: int) -> None:
        if old == victim:
            assert reader.keep((victim, b""), Found("", place.file(0, KV).stat()))
        real(old, new, **where)

    monkeypatch.setattr(os, "rename", touch_and_rename)
    capacity = place.capacity(LIMIT, suffixes=SUFFIXES)
    place.wait(capacity, LIMIT)
    assert place.has(0, KV)
    assert place.has(0, INDEXER)
    assert not place.has(1, KV)


def test_pools_of_other_servers_of_the_rank_go_with_their_page(place: Place) -> None:
    draft, other = b".draft" + KV, b".draft_other_0_1.bin"
    place.put_pages(150)
    place.put(0, draft, 100, 7200 + 60 * 151)
    place.put(0, other, 100, 7200 + 60 * 151)
    capacity = place.capacity(LIMIT)
    place.wait(capacity, LIMIT)
    assert not place.has(0, draft)
    assert place.has(0, other)


def test_what_is_not_ours_is_left_alone_and_not_counted(place: Place) -> None:
    place.put_pages(100)
    target = place.path / "target"
    target.write_bytes(b"x" * LIMIT)
    place.set_age(target, 10**6)
    link, folder = place.file(1000, KV), place.file(1001, KV)
    link.symlink_to(target)
    folder.mkdir()
    if not os.geteuid():
        place.put(1002, KV, LIMIT, 10**6)
        os.chown(place.file(1002, KV), 12345, 12345)
    capacity = place.capacity(2 * LIMIT)
    wait_until(capacity.evict_now)
    assert link.is_symlink()
    assert folder.is_dir()
    assert os.geteuid() or place.has(1002, KV)
    assert len(place.pages(KV, 100)) == 100
    assert capacity.admit(LIMIT // 2)


@pytest.mark.slow
def test_space_stays_free_for_others(tmp_path: Path) -> None:
    """Writers are refused below min_free_space, and pages go until it is free again."""
    with small_file_system(tmp_path / "small", 200 * PAGE_BYTES) as small:
        place = Place(small / "store")
        place.put_pages(180)
        writer = PageWriter(str(place.path), min_free=100 * PAGE_BYTES)
        refused = not writer.write([2000])  # pages may go before the first write
        wait_until(lambda: writer.write([2001]), "writers get no room")
        space = os.statvfs(small)
        assert space.f_bavail * space.f_frsize >= 97 * PAGE_BYTES
        assert writer.counters.tally.of("refused").get("full") or not refused
        assert writer.counters.tally.of("tokens")["evicted"]
        assert not place.has(0, KV)
        writer.close()
        place.close()


@pytest.mark.slow
def test_two_processes_keep_the_limit_and_leave_no_half_page(place: Place) -> None:
    limit = 600 * PAGE_BYTES
    writers = [start("write", place.path, limit, 800, seed) for seed in range(2)]
    shares = []
    while any(writer.poll() is None for writer in writers):
        total = 0
        for file in place.path.glob("*.bin"):
            try:
                facts = file.stat()
            except FileNotFoundError:
                continue
            total += facts.st_size
            sidecar = file.with_name(file.name[:64] + INDEXER.decode())
            if file.name.endswith(KV.decode(), 64) and not sidecar.exists():
                try:
                    still = file.stat().st_ino == facts.st_ino
                except FileNotFoundError:
                    continue
                # A sidecar that was away for a moment was put back, or written again.
                assert not still or sidecar.exists(), file.name
        shares.append(total / limit)
        time.sleep(0.01)
    for writer in writers:
        writer.communicate()
        assert not writer.returncode
    assert 0.95 < max(shares) < 1.05
    once_full = next(index for index, share in enumerate(shares) if share > 0.95)
    assert statistics.median(shares[once_full:]) > 0.9
    wait_until(lambda: not list(place.path.glob("*.tmp")))
    assert set(place.pages(KV)) <= set(place.pages(INDEXER))


@pytest.mark.slow
def test_another_process_takes_over_when_the_evictor_is_killed(place: Place) -> None:
    holder = start("hold", place.path, LIMIT)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "holds\n"
    other = place.capacity(LIMIT)
    assert not other.evict_now()
    place.put_pages(150)  # which no process knows of
    holder.kill()
    holder.communicate()
    place.wait(other, LIMIT)


def test_this_process_alone_evicts_if_it_is_told_to(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """max_size is refused on a file system whose locks are local, unless one process evicts."""
    monkeypatch.setattr(capacity_module, "locks_reach_all_hosts", lambda _: False)
    with pytest.raises(UsageError, match=f'{place.path}: locks .* "evict": "this"'):
        place.capacity(LIMIT)
    place.capacity(min_free=1)
    place.put_pages(150)
    capacity = place.capacity(LIMIT, evict="this")
    place.wait(capacity, LIMIT)


def test_a_directory_that_was_made_again_is_served_again(place: Place) -> None:
    capacity = place.capacity(LIMIT)
    wait_until(capacity.evict_now)
    assert capacity.admit(LIMIT - 10 * PAGE_BYTES)
    other = Place(place.path.with_name("other"))
    other.put_pages(150)
    other.close()
    place.path.rename(place.path.with_name("removed"))
    other.path.rename(place.path)
    place.directory.reopen()

    def evicts() -> bool:
        try:
            return capacity.evict_now() and place.total() <= 0.98 * LIMIT
        except FileNotFoundError:
            return False

    wait_until(evicts, "nothing is evicted")
    assert place.pages(KV)


def test_a_ledger_with_a_wrong_number_evicts_nothing(place: Place) -> None:
    place.put_pages(50)
    capacity = place.capacity(LIMIT)
    wait_until(capacity.evict_now)
    ledger = place.path / ".hicachectl" / f"used-{owner_of(KV).decode()}"
    assert struct.unpack("<q", ledger.read_bytes()) == (50 * PAGE_BYTES,)
    ledger.write_bytes(struct.pack("<q", 2**60))
    wait_until(lambda: capacity.admit(PAGE_BYTES), "the ledger is not corrected")
    assert len(place.pages(KV)) == 50


def test_a_rank_that_writes_nothing_evicts_nothing(tmp_path: Path) -> None:
    """It takes no lock from those that write, and leaves no file beside theirs."""
    url = parse_url(str(tmp_path / "store"))
    store = FilePages(url, Counters("test"), Settings(stores=(url,), max_size=1))
    pool = replace(HostPool().pool, writes=False)
    store.add(pool)
    with Call(PATIENCE_S) as call:
        assert store.exists(pool, [page_hash(0)], call) == [False]  # the store is open
    assert not [one for one in threading.enumerate() if one.name == "hicachectl-evict"]
    assert list((tmp_path / "store").rglob("*")) == []
    store.close()


def test_closing_leaves_neither_descriptors_nor_threads(tmp_path: Path) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before, place = descriptors(), Place(tmp_path / "store", folders=True)
    place.put_pages(20)
    for _ in range(5):
        capacity = place.capacity(LIMIT, min_free=1)
        assert capacity.admit(1)
        capacity.close()
        assert not capacity.admit(1)  # a call that comes late
    place.close()
    wait_until(lambda: descriptors() == before, "descriptors are left open")


def test_a_rank_without_an_anchor_evicts_its_sidecars(place: Place) -> None:
    for number in range(150):
        place.put(number, INDEXER, INDEXER_BYTES, 30 + 150 - number)
    capacity = place.capacity(100 * INDEXER_BYTES, suffixes={INDEXER: False})
    place.wait(capacity, 100 * INDEXER_BYTES)
    assert place.pages(INDEXER)[-1] == 149
