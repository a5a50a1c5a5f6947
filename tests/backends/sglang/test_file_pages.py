"""Pages in a file store: what is read is what was written, or a miss."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.backends.disk.io import LIBC, write_all
from hicachectl.backends.sglang import file_pages
from hicachectl.backends.sglang.calls import Call
from hicachectl.backends.sglang.capacity import Capacity
from hicachectl.backends.sglang.counters import Counters
from hicachectl.backends.sglang.file_pages import FilePages, PageFiles
from hicachectl.backends.sglang.settings import Settings
from hicachectl.backends.urls import StoreUrl, parse_url
from hicachectl.formats.keys.base import Ranks
from hicachectl.formats.keys.file import FileGrammar
from hicachectl.formats.trailer import TRAILER_BYTES, parse_trailer
from tests.backends.sglang.pages import HostPool, hashes
from tests.other_user import as_other_user
from tests.served_stores import forget_ranks
from tests.skips import needs_root
from tests.small_file_system import small_file_system
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

PAGES = hashes(4)
NBYTES = 1000
SECONDS = 60.0  # for calls that end; a busy machine may be slow


@contextmanager
def opened(directory: Path, *hosts: HostPool, **options: Any) -> Iterator[FilePages]:
    url, writes = parse_url(str(directory)), options.pop("writes", True)
    settings = Settings(stores=(url,), **options)
    store = FilePages(url, Counters(str(directory)), settings, writes=writes)
    for host in hosts:
        store.add(host.pool)
    try:
        yield store
    finally:
        store.close()


def write(store: FilePages, host: HostPool, pages: list[str] = PAGES) -> list[bool]:
    with Call(SECONDS) as call:
        return store.write(host.pool, pages, host.pieces(range(len(pages))), call)


def read(store: FilePages, host: HostPool, pages: list[str] = PAGES) -> list[bool]:
    with Call(SECONDS) as call:
        return store.read(host.pool, pages, host.pieces(range(len(pages))), call)


def exists(store: FilePages, host: HostPool, pages: list[str] = PAGES) -> list[bool]:
    with Call(SECONDS) as call:
        return store.exists(host.pool, pages, call)


def file_of(directory: Path, page: str, pool: str = "kv") -> Path:
    name = f"{page}_org-model_0_1.bin" if pool == "kv" else f"{page}.{pool}_org-model_0_1.bin"
    return directory / name


@pytest.fixture
def host() -> HostPool:
    host = HostPool(NBYTES)
    host.fill(1)
    return host


@pytest.mark.parametrize("stamped", [True, False])
def test_a_directory_mounted_read_only_is_read(
    tmp_path: Path, host: HostPool, stamped: bool
) -> None:
    """Also one of SGLang's own backend. Writes fail, and a clear makes its pages misses."""
    with small_file_system(tmp_path / "fixed", "16m") as fixed:
        with opened(fixed, host) as store:
            assert write(store, host) == [True] * 4
        before = host.page(2)
        if not stamped:
            shutil.rmtree(fixed / ".hicachectl")
            for page in PAGES:
                os.truncate(file_of(fixed, page), NBYTES)
        subprocess.run(["mount", "-o", "remount,ro", fixed], check=True)
        host.fill(3)
        with opened(fixed, host, max_size=1 << 30, unstamped="read") as store:
            assert exists(store, host) == read(store, host) == [True] * 4
            assert host.page(2) == before
            assert write(store, host, hashes(2, seed=1)) == [False] * 2
            assert store.counters.tally.of("refused") == {"unwritable": 2}
            store.clear(Call(SECONDS))
            assert exists(store, host) == read(store, host) == [False] * 4


@pytest.mark.parametrize("digest", ["off", "xxh3", "blake3"])
@pytest.mark.parametrize("nbytes", [0, 1, 1000, 3 << 20])
def test_pages_come_back(tmp_path: Path, digest: str, nbytes: int) -> None:
    """Also to another instance; the file begins with the page's bytes, as HiCacheFile's."""
    host = HostPool(nbytes)
    host.fill(2)
    before = [host.page(index) for index in range(len(PAGES))]
    with opened(tmp_path, host, digest=digest) as store:
        assert exists(store, host) == [False] * 4
        assert write(store, host) == [True] * 4
    for page, data in zip(PAGES, before, strict=True):
        content = file_of(tmp_path, page).read_bytes()
        assert content[:nbytes] == data
        trailer = parse_trailer(content[nbytes:])
        assert trailer is not None
        assert (trailer.page.hex(), trailer.nbytes, trailer.digest_kind) == (page, nbytes, digest)
    host.fill(3)
    with opened(tmp_path, host) as store:  # any digest kind is checked
        assert exists(store, host) == [True] * 4
        assert read(store, host) == [True] * 4
    assert [host.page(index) for index in range(len(PAGES))] == before


def test_a_missing_page_is_a_miss_for_itself_alone(tmp_path: Path, host: HostPool) -> None:
    with opened(tmp_path, host) as store:
        write(store, host)
        file_of(tmp_path, PAGES[1]).unlink()
        assert exists(store, host) == [True, False, True, True]
        assert read(store, host) == [True, False, True, True]


@pytest.mark.slow
@given(at=st.integers(0, NBYTES + TRAILER_BYTES - 1), bit=st.integers(0, 7))
def test_no_flipped_bit_is_read(
    tmp_path_factory: pytest.TempPathFactory, at: int, bit: int
) -> None:
    """The page is a miss, and written again; its neighbours are read, its host page is kept."""
    directory = tmp_path_factory.mktemp("flipped")
    host = HostPool(NBYTES)
    host.fill(4)
    data = host.page(1)
    with opened(directory, host) as store:
        write(store, host)
        path = file_of(directory, PAGES[1])
        content = bytearray(path.read_bytes())
        content[at] ^= 1 << bit
        path.write_bytes(content)
        host.fill(5)
        junk = host.page(1)
        assert read(store, host) == [True, False, True, True]
        assert host.page(1) == junk
        host.fill(4)
        assert write(store, host) == [True] * 4
        host.fill(5)
        assert read(store, host) == [True] * 4
        assert host.page(1) == data


@pytest.mark.parametrize("length", [0, 1, NBYTES - 1, NBYTES + 1, NBYTES + TRAILER_BYTES + 1])
def test_a_file_of_another_length_is_a_miss_and_replaced(
    tmp_path: Path, host: HostPool, length: int
) -> None:
    with opened(tmp_path, host) as store:
        write(store, host)
        # The thread's memory still has the page when the cut file is read.
        assert read(store, host, PAGES[:1]) == [True]
        os.truncate(file_of(tmp_path, PAGES[0]), length)
        assert read(store, host, PAGES[:1]) == [False]
        write(store, host, PAGES[:1])
        os.truncate(file_of(tmp_path, PAGES[0]), length)
        assert exists(store, host) == [False, True, True, True]
        assert read(store, host) == [False, True, True, True]
        assert write(store, host) == [True] * 4
        assert read(store, host) == [True] * 4


def test_a_page_under_another_name_is_a_miss(tmp_path: Path, host: HostPool) -> None:
    """A file copied to another page's name, or to another pool's, is not that page."""
    side = HostPool(NBYTES, name="indexer")
    with opened(tmp_path, host, side) as store:
        write(store, host, PAGES[:1])
        content = file_of(tmp_path, PAGES[0]).read_bytes()
        file_of(tmp_path, PAGES[1]).write_bytes(content)
        file_of(tmp_path, PAGES[0], "indexer").write_bytes(content)
        assert exists(store, host) == [True, False, False, False]
        assert read(store, host) == [True, False, False, False]
        before = store.counters.tally.of("refused")
        assert exists(store, side) == [False] * 4
        after = store.counters.tally.of("refused")
        assert after["damaged"] == before["damaged"] + 1
        assert "foreign" not in after


SECOND = Ranks(tp_rank=1, tp=2)
RANKS = [
    ({}, SECOND, Ranks(tp_rank=0, tp=2)),
    ({"shared_anchor": True}, Ranks(), Ranks(pp_rank=1, pp=2)),
    ({}, SECOND._replace(cp_rank=0, cp=2), SECOND._replace(cp_rank=1, cp=2)),
    ({"name": "mamba", "trailing": True}, SECOND, Ranks(tp_rank=1, tp=4)),
]


def renamed(directory: Path, theirs: HostPool, ours: HostPool) -> None:
    """Give all files of one pool the names of another's."""
    for page in PAGES:
        source, target = (FileGrammar().affix(each.pool.coordinate)[1] for each in (theirs, ours))
        (directory / f"{page}{source}").rename(directory / f"{page}{target}")


@pytest.mark.parametrize(("pool", "theirs", "ours"), RANKS)
@pytest.mark.parametrize("replaces", [True, False])
def test_pages_of_another_rank_are_misses_and_replaced(
    tmp_path: Path, pool: dict[str, Any], theirs: Ranks, ours: Ranks, *, replaces: bool
) -> None:
    """As pages of other weights: a wrong rename, or a copy, keeps digest and identity."""
    other, host = HostPool(NBYTES, ranks=theirs, **pool), HostPool(NBYTES, ranks=ours, **pool)
    other.fill(6)
    with opened(tmp_path, other) as store:
        write(store, other)
    renamed(tmp_path, other, host)
    host.fill(7)
    junk, options = host.page(1), {"on_foreign": "replace" if replaces else "leave"}
    with opened(tmp_path, host, **options) as store:
        assert exists(store, host) == read(store, host) == [False] * 4
        assert host.page(1) == junk
        assert store.counters.tally.of("refused")["foreign"] == 8
        assert write(store, host) == read(store, host) == [replaces] * 4


@pytest.mark.parametrize("digest", ["xxh3", "blake3"])
def test_trailers_without_a_rank_are_read_and_counted(
    tmp_path: Path, host: HostPool, digest: str
) -> None:
    """Of the digest that this server writes, and of another one."""
    with opened(tmp_path, host, digest=digest) as store:
        write(store, host)
        forget_ranks(tmp_path)
        before = host.page(2)
        host.fill(8)
    with opened(tmp_path, host) as store:
        assert exists(store, host) == read(store, host) == write(store, host) == [True] * 4
        assert host.page(2) == before
        assert store.counters.tally.of("noted") == {"unranked": 4}


def test_trailers_without_a_rank_are_misses_if_asked(tmp_path: Path, host: HostPool) -> None:
    """They are written again, whatever happens to files of other identities."""
    with opened(tmp_path, host) as store:
        write(store, host)
        forget_ranks(tmp_path)
    with opened(tmp_path, host, unranked="refuse", on_foreign="leave") as store:
        assert exists(store, host) == read(store, host) == [False] * 4
        assert store.counters.tally.of("refused") == {"unranked": 8}
        assert write(store, host) == exists(store, host) == read(store, host) == [True] * 4
        assert store.counters.tally.of("refused") == {"unranked": 8}


def test_ranks_that_no_trailer_can_name(tmp_path: Path) -> None:
    """Their pages are served without ranks; a server that refuses such pages does not start."""
    host = HostPool(NBYTES, ranks=Ranks(tp_rank=5, tp=1024))
    with opened(tmp_path, host) as store:
        assert write(store, host) == exists(store, host) == read(store, host) == [True] * 4
        assert store.counters.tally.of("refused") == {}
    with (
        pytest.raises(ValueError, match=r"^unranked: 'refuse' .* the ranks of tp 1024; remove"),
        opened(tmp_path, host, unranked="refuse"),
    ):
        pass


def test_pages_of_other_weights_are_misses_and_replaced(tmp_path: Path, host: HostPool) -> None:
    other = HostPool(NBYTES, weights="other")
    other.fill(6)
    with opened(tmp_path, other) as theirs, opened(tmp_path, host) as ours:
        write(theirs, other)
        assert exists(ours, host) == [False] * 4
        assert read(ours, host) == [False] * 4
        assert exists(theirs, other) == [True] * 4
        assert write(ours, host) == [True] * 4
        assert read(ours, host) == [True] * 4
        assert read(theirs, other) == [False] * 4


def test_pages_of_other_weights_are_left_if_asked(tmp_path: Path, host: HostPool) -> None:
    other = HostPool(NBYTES, weights="other")
    with opened(tmp_path, other) as theirs, opened(tmp_path, host, on_foreign="leave") as ours:
        write(theirs, other)
        assert write(ours, host) == [False] * 4
        assert read(theirs, other) == [True] * 4


def noted_touches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the inode of each file whose reader marks it as used."""
    touched: list[int] = []

    def note(descriptor: int, _: object) -> None:
        touched.append(os.fstat(descriptor).st_ino)

    libc = SimpleNamespace(futimens=note, utimensat=LIBC.utimensat)
    monkeypatch.setattr(file_pages, "LIBC", libc)
    return touched


def test_files_without_trailer_are_pages_only_if_asked(
    tmp_path: Path, host: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a page counts as used, too, when it is read; once an hour."""
    hours_ago = time.time() - 7200
    for index, page in enumerate(PAGES):
        file_of(tmp_path, page).write_bytes(host.page(index))
    before = host.page(2)
    host.fill(7)
    with opened(tmp_path, host) as store:
        assert exists(store, host) == [False] * 4
        assert read(store, host) == [False] * 4
    used = noted_touches(monkeypatch)  # atimes would show the mount's own updates, too
    with opened(tmp_path, host, unstamped="read") as store:
        assert exists(store, host) == [True] * 4
        for page in PAGES:
            os.utime(file_of(tmp_path, page), (time.time(), hours_ago))
        for page in PAGES[:3]:
            os.utime(file_of(tmp_path, page), (hours_ago, hours_ago))
        assert read(store, host) == [True] * 4
    assert host.page(2) == before
    assert sorted(used) == sorted(file_of(tmp_path, page).stat().st_ino for page in PAGES[:3])
    with opened(tmp_path, host) as store:
        assert write(store, host) == [True] * 4
        assert exists(store, host) == [True] * 4


def test_a_page_that_changes_while_it_is_written_gets_no_name(
    tmp_path: Path, host: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang may give a host page to another request; the call is still open."""

    def change(*arguments: Any) -> None:
        write_all(*arguments)
        host.fill(9)

    with opened(tmp_path, host) as store:
        with monkeypatch.context() as patch:
            patch.setattr(file_pages, "write_all", change)
            assert write(store, host, PAGES[:1]) == [False]
            assert list(tmp_path.glob("*.bin")) == list(tmp_path.glob(".*.tmp")) == []
        assert write(store, host) == read(store, host) == [True] * 4


def test_a_page_in_use_is_marked_again_after_an_hour(
    tmp_path: Path, host: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that is read all the time would age otherwise, and be evicted."""
    hour_ns, now_ns = 3600 * 10**9, time.time_ns()
    used = noted_touches(monkeypatch)
    with opened(tmp_path, host) as store:
        write(store, host)
        clock = SimpleNamespace(time_ns=lambda: now_ns, monotonic=time.monotonic)
        monkeypatch.setattr(file_pages, "time", clock)
        for hours in (2, 0, 2, 0, 2):
            now_ns += hours * hour_ns
            assert read(store, host, PAGES[:1]) == [True]
    assert len(used) == 3


def test_removed_files_make_room(
    tmp_path: Path, host: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged file, and one that a writer found and could not keep; each with its trailer."""
    freed: list[int] = []
    with opened(tmp_path, host) as store:
        write(store, host)
    whole = file_of(tmp_path, PAGES[0]).stat().st_size
    file_of(tmp_path, PAGES[0]).write_bytes(bytes(whole))
    monkeypatch.setattr(Capacity, "release", lambda _, nbytes: freed.append(nbytes))
    with opened(tmp_path, host, max_size=1 << 30) as store:
        assert read(store, host) == [False, True, True, True]
        assert freed == [whole]
        monkeypatch.setattr(PageFiles, "keep", lambda *_: False)
        assert write(store, host, PAGES[1:2]) == [True]
    assert freed == [whole, whole]


def test_a_pool_that_comes_late_leaves_the_evictor_running(tmp_path: Path, host: HostPool) -> None:
    """It lists the directory once, not again for each pool."""
    side, draft = HostPool(NBYTES, name="indexer"), HostPool(NBYTES, name="draft")
    with opened(tmp_path, host) as store:
        assert write(store, host) == [True] * 4
        evictors = [one for one in threading.enumerate() if one.name == "hicachectl-evict"]
        for late in (side, draft):
            store.add(late.pool)
            assert write(store, late) == read(store, late) == [True] * 4
        now = [one for one in threading.enumerate() if one.name == "hicachectl-evict"]
        assert now == evictors
        assert len(evictors) == 1


def test_a_damaged_sidecar_goes_with_its_anchor(tmp_path: Path, host: HostPool) -> None:
    """So that the next backup writes both again; a damaged trailing state goes alone."""
    side = HostPool(NBYTES, name="indexer")
    states = HostPool(NBYTES, name="mamba", trailing=True)
    with opened(tmp_path, host, side, states) as store:
        for pool in (host, side, states):
            pool.fill(11)
            write(store, pool)
        for index, name in ((1, "indexer"), (2, "mamba")):
            path = file_of(tmp_path, PAGES[index], name)
            path.write_bytes(bytes(NBYTES) + path.read_bytes()[NBYTES:])
        assert read(store, side) == [True, False, True, True]
        assert read(store, states) == [True, True, False, True]
        assert exists(store, host) == [True, False, True, True]
        assert exists(store, side) == [True, False, True, True]
        assert exists(store, states) == [True, True, False, True]


@pytest.mark.parametrize("kind", ["directory", "fifo", "link"])
def test_what_is_no_regular_file_is_a_miss_and_replaced(
    tmp_path: Path, host: HostPool, kind: str
) -> None:
    path = file_of(tmp_path, PAGES[1])
    with opened(tmp_path, host) as store:
        write(store, host)
        path.rename(tmp_path / "elsewhere")
        if kind == "directory":
            path.mkdir()
        elif kind == "fifo":
            os.mkfifo(path)
        else:
            path.symlink_to(tmp_path / "elsewhere")
        assert exists(store, host) == [True, False, True, True]
        assert read(store, host) == [True, False, True, True]
        # A write replaces what a rename can replace, and follows no link.
        healed = kind != "directory"
        assert write(store, host) == [True, healed, True, True]
        assert read(store, host) == [True, healed, True, True]
        assert not path.is_symlink()
        assert (tmp_path / "elsewhere").stat().st_size == NBYTES + TRAILER_BYTES


@needs_root
def test_a_page_that_this_user_may_not_read_is_a_miss_and_stays(
    tmp_path: Path, host: HostPool
) -> None:
    """It serves the servers of its owner."""
    with opened(tmp_path, host) as store:
        assert write(store, host) == [True] * 4
        path = file_of(tmp_path, PAGES[1])
        path.chmod(0o600)
        tmp_path.chmod(0o777)
        before = path.stat()
        with as_other_user():
            assert exists(store, host) == [True, False, True, True]
            assert read(store, host) == [True, False, True, True]
            assert write(store, host) == [True, False, True, True]
        assert path.stat().st_ino == before.st_ino
        assert store.counters.tally.of("refused") == {"unreadable": 2, "unwritable": 1}


def test_the_directory_is_made_again(tmp_path: Path, host: HostPool) -> None:
    directory = tmp_path / "a" / "b"
    with opened(directory, host) as store:
        assert write(store, host) == [True] * 4
        directory.rename(tmp_path / "moved")
        assert exists(store, host) == [False] * 4
        assert write(store, host) == [True] * 4
        assert read(store, host) == [True] * 4
        assert file_of(directory, PAGES[0]).exists()


def test_folders_hold_the_files(tmp_path: Path, host: HostPool) -> None:
    url = StoreUrl("file", str(tmp_path), params={"folders": "hex2"})
    store = FilePages(url, Counters(str(url)), Settings(stores=(url,)))
    store.add(host.pool)
    assert write(store, host) == [True] * 4
    assert file_of(tmp_path / PAGES[0][:2], PAGES[0]).is_file()
    store.close()
    with opened(tmp_path, host) as again:  # the directory knows its form
        assert read(again, host) == [True] * 4


def test_names_that_are_no_page_hash_reach_no_file(tmp_path: Path, host: HostPool) -> None:
    bad = ["../" + PAGES[0][3:], "x" * 64, "", PAGES[0].upper()]
    with opened(tmp_path / "store", host) as store:
        assert write(store, host) == [True] * 4
        assert write(store, host, bad) == [False] * 4
        assert exists(store, host, bad) == [False] * 4
        assert read(store, host, bad) == [False] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    assert len(list((tmp_path / "store").glob("*.bin"))) == 4


def test_a_full_file_system_leaves_nothing_behind(
    tmp_path: Path, host: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writes fail, count as full, and no temporary file stays."""

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with opened(tmp_path, host) as store:
        write(store, host, PAGES[:1])
        monkeypatch.setattr(os, "writev", full)
        assert write(store, host) == [True, False, False, False]
        assert store.counters.tally.of("refused")["full"] == 3
    assert [path for path in tmp_path.iterdir() if path.name != ".hicachectl"] == [
        file_of(tmp_path, PAGES[0])
    ]


class Held:
    """Replaces a function of os by one that waits for `release`, from the n-th call on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.release, self.waiting = threading.Event(), threading.Event()
        original = getattr(os, name)

        def held(*arguments: Any, **named: Any) -> Any:
            self.waiting.set()
            self.release.wait()
            return original(*arguments, **named)

        monkeypatch.setattr(os, name, held)


def test_a_read_that_comes_late_changes_no_host_page(
    tmp_path: Path, host: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with all_threads_ended(), opened(tmp_path, host, threads=2) as store:
        write(store, host)
        held = Held(monkeypatch, "preadv")
        begun = time.monotonic()
        with Call(0.1) as call:
            assert store.read(host.pool, PAGES, host.pieces(range(4)), call) == [False] * 4
        assert time.monotonic() - begun < SECONDS / 2  # the read is held until after it
        host.fill(8)
        reused = [host.page(index) for index in range(4)]
        held.release.set()
    assert [host.page(index) for index in range(4)] == reused


@pytest.mark.parametrize("function", ["writev", "rename", "open"])
def test_a_write_that_comes_late_gets_no_wrong_name(
    tmp_path: Path, host: HostPool, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """Host pages are reused while the write hangs: no file may hold their new bytes."""
    before = [host.page(index) for index in range(4)]
    with all_threads_ended(), opened(tmp_path, host, threads=2) as store:
        exists(store, host)
        held = Held(monkeypatch, function)
        with Call(0.1) as call:
            assert store.write(host.pool, PAGES, host.pieces(range(4)), call) == [False] * 4
        host.fill(9)
        held.release.set()
    files = [file_of(tmp_path, page) for page in PAGES]
    if function != "rename":  # its bytes were complete and checked before
        assert not any(path.exists() for path in files)
    for path, data in zip(files, before, strict=True):
        assert not path.exists() or path.read_bytes()[:NBYTES] == data
    assert not list(tmp_path.glob(".hicachectl-*"))


@contextmanager
def all_threads_ended() -> Iterator[None]:
    """Wait at the end for the threads begun in the block: workers of hung calls end late."""
    before = set(threading.enumerate())
    yield
    wait_until(lambda: before.issuperset(threading.enumerate()), "a worker does not end")


@pytest.mark.slow
def test_pages_written_at_once_by_many_threads_are_whole(tmp_path: Path) -> None:
    """Several instances write, read and damage the same pages: no read gives wrong bytes."""
    stop = time.monotonic() + 2
    wrong: list[bytes] = []

    def work(seed: int) -> None:
        host = HostPool(NBYTES)
        host.fill(10)
        right = [host.page(index) for index in range(4)]
        with opened(tmp_path, host) as store:
            while time.monotonic() < stop:
                write(store, host)
                if seed == 0:
                    path = file_of(tmp_path, PAGES[seed])
                    path.write_bytes(b"x" * (NBYTES + TRAILER_BYTES))
                target = HostPool(NBYTES)
                with Call(SECONDS) as call:
                    done = store.read(target.pool, PAGES, target.pieces(range(4)), call)
                wrong.extend(
                    target.page(n) for n in range(4) if done[n] and target.page(n) != right[n]
                )

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_clear_makes_pages_misses_until_they_are_written_again(
    tmp_path: Path, host: HostPool
) -> None:
    """For every instance on the directory, also with files of the same bytes."""
    with opened(tmp_path, host) as one, opened(tmp_path, host) as other:
        write(one, host)
        assert exists(other, host) == [True] * 4
        with Call(SECONDS) as call:
            one.clear(call)
        assert exists(one, host) == exists(other, host) == [False] * 4
        assert read(other, host) == [False] * 4
        time.sleep(0.05)  # the file system's clock ticks
        assert write(one, host) == [True] * 4
        assert read(other, host) == [True] * 4


def test_writes_beyond_max_size_fail_and_count(tmp_path: Path, host: HostPool) -> None:
    """A page with its trailer is larger than the limit."""
    with opened(tmp_path, host, max_size=NBYTES + TRAILER_BYTES - 1) as store:
        assert write(store, host) == [False] * 4
        assert not list(tmp_path.glob("*.bin"))
        assert store.counters.tally.of("refused")["full"] == 4


def test_a_folder_that_is_a_link_costs_its_pages_alone(tmp_path: Path, host: HostPool) -> None:
    """Nothing is written or read through it, and pages in other folders are served."""
    url = StoreUrl("file", str(tmp_path / "store"), params={"folders": "hex2"})
    (tmp_path / "elsewhere").mkdir()
    store = FilePages(url, Counters(str(url)), Settings(stores=(url,)))
    store.add(host.pool)
    with Call(SECONDS) as call:
        store.open(call)
    (tmp_path / "store" / PAGES[1][:2]).symlink_to(tmp_path / "elsewhere")
    assert write(store, host) == [True, False, True, True]
    assert exists(store, host) == [True, False, True, True]
    assert read(store, host) == [True, False, True, True]
    assert not list((tmp_path / "elsewhere").iterdir())
    store.close()


def test_a_store_that_is_only_read_is_not_changed(tmp_path: Path, host: HostPool) -> None:
    """No marker, no removal of damaged files, no times of reads."""
    with opened(tmp_path, host) as store:
        write(store, host)
    shutil.rmtree(tmp_path / ".hicachectl")
    os.truncate(file_of(tmp_path, PAGES[0]), 10)
    for path in tmp_path.iterdir():
        os.utime(path, (1, 1))
    before = {path.name: path.stat() for path in tmp_path.iterdir()}
    with opened(tmp_path, host, writes=False) as store:
        assert exists(store, host) == read(store, host) == [False, True, True, True]
    after = {path.name: path.stat() for path in tmp_path.iterdir()}
    assert before.keys() == after.keys()
    for name, facts in before.items():
        assert (facts.st_ino, facts.st_ctime_ns) == (after[name].st_ino, after[name].st_ctime_ns)


def test_a_missing_store_that_is_only_read_is_not_made(tmp_path: Path, host: HostPool) -> None:
    with opened(tmp_path / "missing", host, writes=False) as store:
        assert exists(store, host) == [False] * 4
    assert not list(tmp_path.iterdir())


def test_a_slow_store_serves_what_it_can_in_time(
    tmp_path: Path, host: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a hanging thread: the pages that came too late count as timed out."""
    original = os.preadv

    def slow(*arguments: Any) -> int:
        time.sleep(0.3)
        return original(*arguments)

    with opened(tmp_path, host, threads=1) as store:
        write(store, host)
        monkeypatch.setattr(os, "preadv", slow)
        with Call(0.75) as call:
            done = store.read(host.pool, PAGES, host.pieces(range(4)), call)
        assert 1 <= done.count(True) < 4
        assert store.counters.tally.of("refused")["timeout"] == done.count(False)


def test_a_file_that_is_replaced_while_it_is_removed_stays(
    tmp_path: Path, host: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a file system without hard links."""
    rename = os.rename
    with opened(tmp_path, host) as store:
        assert write(store, host) == [True] * 4
        path = file_of(tmp_path, PAGES[1])
        whole = path.read_bytes()
        path.write_bytes(b"\1" + whole[1:])

        def replace_first(source: Any, target: Any, **named: Any) -> None:
            if source == os.fsencode(path.name):
                other = tmp_path / "other"
                other.write_bytes(whole)
                other.replace(path)
            rename(source, target, **named)

        def no_links(*_: Any, **__: Any) -> None:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

        monkeypatch.setattr(os, "rename", replace_first)
        monkeypatch.setattr(os, "link", no_links)
        assert read(store, host) == [True, False, True, True]
        monkeypatch.undo()
        assert path.read_bytes() == whole
        assert read(store, host) == [True] * 4
    assert not list(tmp_path.glob(".hicachectl-*"))
