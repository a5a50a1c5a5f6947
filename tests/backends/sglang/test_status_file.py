"""The thread that writes the status of a rank; a store that hangs holds up only this thread."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.backends.disk.directory import Directory
from hicachectl.backends.disk.statuses import CLOSED, SERVING, read_statuses, write_status
from hicachectl.backends.sglang import status_file
from hicachectl.backends.sglang.counters import Counters
from hicachectl.backends.sglang.status_file import StatusFile
from tests.backends.disk.test_statuses import status
from tests.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from hicachectl.formats.plugin_status import PluginStatus


def standings(path: Path) -> list[str]:
    """Return how the ranks of a store stand."""
    if not (path / ".hicachectl").exists():
        return []
    with Directory.named(str(path / ".hicachectl"), writes=False) as side:
        return [seen.standing for seen in read_statuses(side).statuses]


@pytest.fixture
def counters() -> Counters:
    return Counters("file:///store")


def test_it_is_written_at_once_again_and_at_the_end(
    tmp_path: Path,
    counters: Counters,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(status_file, "WRITTEN_EVERY_S", 0.02)
    file = StatusFile(str(tmp_path), status(), counters)
    wait_until(lambda: standings(tmp_path) == [SERVING])
    (path,) = (tmp_path / ".hicachectl" / "status").iterdir()
    before = path.stat().st_ino, path.stat().st_mtime_ns
    wait_until(lambda: (path.stat().st_ino, path.stat().st_mtime_ns) != before)
    file.close()
    wait_until(lambda: standings(tmp_path) == [CLOSED])
    assert counters.tally.of("failed") == {}


def test_old_ones_are_removed_once_the_directory_is_there(
    tmp_path: Path, counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that is mounted after the server's start does not keep those of all its restarts."""
    monkeypatch.setattr(status_file, "WRITTEN_EVERY_S", 0.02)
    later, store = tmp_path / "later", tmp_path / "store"
    later.mkdir()
    with Directory.named(str(later), writes=True) as directory:
        write_status(directory, status(host="gone", written_ns=1))
    turns = list[bool]()
    write = StatusFile._write

    def counted(self: StatusFile, *, first: bool, last: bool) -> None:
        turns.append(first)
        write(self, first=first, last=last)

    monkeypatch.setattr(StatusFile, "_write", counted)
    file = StatusFile(str(store), status(), counters)
    wait_until(lambda: len(turns) > 1)  # they find no directory
    assert len(standings(later)) == 1
    later.rename(store)
    wait_until(lambda: standings(store) == [SERVING])
    file.close()


def test_a_missing_or_read_only_directory_gets_none(
    tmp_path: Path,
    counters: Counters,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No failure is counted: reads and writes of pages report the directory."""
    StatusFile(str(tmp_path / "missing"), status(), counters).close()
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(os, "access", lambda *_, **__: False)  # root may write anywhere
    StatusFile(str(tmp_path), status(), counters).close()
    assert not list(tmp_path.iterdir())
    assert counters.tally.of("failed") == {}


def test_a_directory_that_cannot_be_used_is_a_failure_with_its_reason(
    tmp_path: Path,
    counters: Counters,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / ".hicachectl").symlink_to(tmp_path)
    StatusFile(str(tmp_path), status(), counters).close()
    wait_until(lambda: "unreported: " in caplog.text)
    assert counters.tally.of("failed")["unreported"] >= 1
    assert ".hicachectl: is a symbolic link" in caplog.text


def test_an_error_of_ours_does_not_end_the_thread(
    tmp_path: Path,
    counters: Counters,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(status_file, "WRITTEN_EVERY_S", 0.02)
    calls = []

    def fails_once(directory: Directory, one: PluginStatus) -> None:
        calls.append(one)
        if len(calls) == 1:
            raise ValueError("no status")
        write_status(directory, one)

    monkeypatch.setattr(status_file, "write_status", fails_once)
    file = StatusFile(str(tmp_path), status(), counters)
    wait_until(lambda: standings(tmp_path) == [SERVING])
    file.close()
    assert counters.tally.of("failed") == {"error": 1}


def test_a_store_that_hangs_holds_up_the_thread_alone(
    tmp_path: Path,
    counters: Counters,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Closing takes a moment; when the store answers, the last status is written."""
    release, reached, rename = threading.Event(), threading.Event(), os.rename

    def hangs(*arguments: Any, **named: Any) -> None:
        reached.set()
        release.wait()
        rename(*arguments, **named)

    monkeypatch.setattr(os, "rename", hangs)
    file = StatusFile(str(tmp_path), status(), counters)
    assert reached.wait(60)
    begun = time.monotonic()
    file.close()
    assert time.monotonic() - begun < 5
    assert standings(tmp_path) == []
    release.set()
    wait_until(lambda: standings(tmp_path) == [CLOSED])


def test_a_system_without_more_threads_is_a_failure_only(
    tmp_path: Path,
    counters: Counters,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        StatusFile(str(tmp_path), status(), counters).close()
    assert counters.tally.of("failed") == {"unreported": 1}
