"""A file store whose system hangs or refuses: closing waits for nothing, and leaves nothing."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

import pytest

from hicachectl.backends.sglang.calls import Call
from hicachectl.backends.sglang.counters import Counters
from hicachectl.backends.sglang.file_pages import FilePages, PageFiles
from hicachectl.backends.sglang.settings import Settings
from hicachectl.backends.urls import StoreUrl, parse_url
from tests.backends.sglang.pages import HostPool, hashes
from tests.processes import descriptors as open_descriptors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import Any

PAGES = hashes(4)
NBYTES = 1000
SECONDS = 60.0  # for calls that end; a busy machine may be slow
SOON = 20.0  # for a close, while what hangs is released after it


class Held:
    """Replaces a function of os by one that waits for `release`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.release, self.reached = threading.Event(), threading.Event()
        self.calls = 0
        original: Callable[..., Any] = getattr(os, name)

        def held(*arguments: Any, **named: Any) -> Any:
            self.calls += 1
            self.reached.set()
            self.release.wait()
            return original(*arguments, **named)

        monkeypatch.setattr(os, name, held)


@pytest.fixture
def host() -> HostPool:
    host = HostPool(NBYTES)
    host.fill(1)
    return host


@pytest.fixture(autouse=True)
def _threads_end() -> Iterator[None]:
    """After each test, all threads of its stores end."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 10
    while left := [t.name for t in set(threading.enumerate()) - before if _is_ours(t)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def _is_ours(thread: threading.Thread) -> bool:
    return thread.name.startswith("hicachectl")


def store_of(directory: Path, host: HostPool, **options: Any) -> FilePages:
    url, writes = parse_url(str(directory)), options.pop("writes", True)
    settings = Settings(stores=(url,), **options)
    store = FilePages(url, Counters(str(directory)), settings, writes=writes)
    store.add(host.pool)
    return store


def write(store: FilePages, host: HostPool, seconds: float = SECONDS) -> list[bool]:
    with Call(seconds) as call:
        return store.write(host.pool, PAGES, host.pieces(range(4)), call)


def read(store: FilePages, host: HostPool) -> list[bool]:
    with Call(SECONDS) as call:
        return store.read(host.pool, PAGES, host.pieces(range(4)), call)


def exists(store: FilePages, host: HostPool, seconds: float = SECONDS) -> list[bool]:
    with Call(seconds) as call:
        return store.exists(host.pool, PAGES, call)


@pytest.mark.slow
def test_closing_waits_for_no_writer_that_hangs(
    tmp_path: Path, host: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer holds the lock on the capacity; when it comes back it writes nothing."""
    store = store_of(tmp_path, host, min_free_space=1, max_size=1 << 30)
    with Call(SECONDS) as call:
        store.open(call)
    held = Held(monkeypatch, "fstatvfs")
    assert write(store, host, 0.3) == [False] * 4
    monkeypatch.setattr(os, "writev", None)  # a write would raise, and be counted
    begun = time.monotonic()
    store.close()
    assert time.monotonic() - begun < SOON
    held.release.set()
    time.sleep(0.3)
    assert "error" not in store.counters.tally.of("failed")
    assert not list(tmp_path.glob("*.bin"))


def test_closing_waits_for_no_folder_that_hangs(
    tmp_path: Path, host: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = StoreUrl("file", str(tmp_path), params={"folders": "hex2"})
    store = FilePages(url, Counters(str(url)), Settings(stores=(url,)))
    store.add(host.pool)
    exists(store, host)
    held = Held(monkeypatch, "mkdir")
    assert write(store, host, 0.3) == [False] * 4
    begun = time.monotonic()
    store.close()
    assert time.monotonic() - begun < SOON
    held.release.set()


def test_after_close_all_are_misses_and_nothing_is_made(tmp_path: Path, host: HostPool) -> None:
    store = store_of(tmp_path / "store", host)
    assert write(store, host) == [True] * 4
    store.close()
    (tmp_path / "store").rename(tmp_path / "moved")
    assert exists(store, host) == read(store, host) == write(store, host) == [False] * 4
    with Call(SECONDS) as call:
        store.clear(call)
        store.open(call)
    store.close()
    assert [path.name for path in tmp_path.iterdir()] == ["moved"]


def test_a_store_that_opens_after_its_close_is_closed(
    tmp_path: Path, host: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptor, no thread and no lock stays."""
    before = open_descriptors()
    store = store_of(tmp_path / "store", host, max_size=1 << 30)
    held = Held(monkeypatch, "mkdir")
    with Call(0.3) as call:
        store.open(call)
    assert held.reached.is_set()
    store.close()
    held.release.set()
    monkeypatch.undo()
    deadline = time.monotonic() + 10
    while open_descriptors() > before:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_a_clear_that_comes_while_the_store_hangs_is_not_lost(
    tmp_path: Path, host: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until its epoch can be written, all pages are misses; then the earlier pages are."""
    store = store_of(tmp_path, host, threads=2)
    assert write(store, host) == [True] * 4
    with monkeypatch.context() as patch:
        held = Held(patch, "writev")  # a late one gets no name
        time.sleep(0.01)
        (tmp_path / f"{PAGES[0]}_org-model_0_1.bin").unlink()
        assert write(store, host, 0.3)[0] is False  # writes pause now
        with Call(SECONDS) as call:
            store.clear(call)
        assert store.counters.tally.of("failed")["uncleared"] == 1
        held.release.set()
    assert exists(store, host) == [False] * 4
    assert exists(store, host) == [False] * 4
    other = store_of(tmp_path, host)
    assert exists(other, host) == [False] * 4
    time.sleep(1.2)  # the pause of the writers
    assert write(store, host) == [True] * 4
    assert exists(store, host) == read(other, host) == [True] * 4
    store.close()
    other.close()


def test_a_page_that_is_cleared_while_it_is_kept_stays_a_miss(
    tmp_path: Path, host: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the disk is full, so that it cannot be written again."""
    store, other = store_of(tmp_path, host), store_of(tmp_path, host)
    assert write(store, host) == exists(other, host) == [True] * 4
    keep = PageFiles.keep

    def keep_later(files: PageFiles, *arguments: Any) -> bool:
        with Call(SECONDS) as call:
            other.clear(call)
        time.sleep(0.05)  # the file system's clock ticks
        return keep(files, *arguments)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(PageFiles, "keep", keep_later)
        patch.setattr(os, "writev", full)
        assert write(store, host) == [False] * 4
    assert exists(store, host) == exists(other, host) == [False] * 4
    store.close()
    other.close()


def test_a_system_without_more_threads_costs_no_descriptors(
    tmp_path: Path, host: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory cannot be served then; later it is."""
    store, start = store_of(tmp_path, host, max_size=1 << 30), threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "hicachectl-evict":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert exists(store, host) == [False] * 4
        before = open_descriptors()
        for _ in range(5):
            store._open_again_at = 0.0
            assert write(store, host) == [False] * 4
        assert open_descriptors() == before
        assert store.counters.tally.of("failed") == {"unopened": 6}
        assert store.counters.tally.of("refused") == {"unopened": 6 * 4}
    store._open_again_at = 0.0
    assert write(store, host) == [True] * 4
    store.close()


def test_a_directory_that_is_replaced_costs_a_reader_no_descriptors(
    tmp_path: Path, host: HostPool
) -> None:
    """It is read in the form that it has, and never made."""
    path = tmp_path / "store"
    store = store_of(path, host, writes=False)
    descriptors = set()
    for number in range(6):
        url = StoreUrl("file", str(path), params={"folders": "hex2"} if number % 2 else {})
        writer = FilePages(url, Counters(str(url)), Settings(stores=(url,)))
        writer.add(host.pool)
        assert write(writer, host) == [True] * 4
        writer.close()
        store._open_again_at = 0.0
        assert read(store, host) == [True] * 4
        path.rename(tmp_path / f"moved {number}")
        assert read(store, host) == [False] * 4
        assert not path.exists()
        descriptors.add(open_descriptors())
    assert max(descriptors) <= min(descriptors) + len(PAGES)  # of folders
    store.close()


def test_a_path_that_cannot_be_asked_is_a_miss_with_a_reason(
    tmp_path: Path, host: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(tmp_path / "store", host)
    assert write(store, host) == [True] * 4
    original = os.stat

    def refused(path: Any, *arguments: Any, **named: Any) -> os.stat_result:
        if path == str(tmp_path / "store"):
            raise PermissionError(13, "Permission denied", path)
        return original(path, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", refused)
        assert write(store, host) == [True] * 4  # the directory itself is there
        assert store.counters.tally.of("failed")["unopened"] >= 1
    assert read(store, host) == [True] * 4
    store.close()


@pytest.mark.parametrize("model", ["m" * 200, "ü" * 100, "a\0b", "a\nb", "\udcff"])
def test_models_that_no_file_name_can_hold_are_refused(tmp_path: Path, model: str) -> None:
    """At the attach; a marker for such names would make the store unreadable for commands."""
    host = HostPool(NBYTES, model=model)
    with pytest.raises(ValueError, match=r"model_name: .* makes file names of"):
        store_of(tmp_path, host)
    assert not list(tmp_path.iterdir())
