"""`rm` with processes that remove the objects: the same outcome, and no half pages after a kill."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from hicachectl.backends.file.store import FileStore
from hicachectl.formats.errors import StoreUnavailable
from hicachectl.move import removal_plan
from tests.move.repairs import dsa_store, indexer, kv
from tests.stores import contents

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hicachectl.backends.base import Result, Rows
    from tests.conftest import Invoke

PAGES = 24

pytestmark = pytest.mark.usefixtures("forks")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return dsa_store(tmp_path / "store", PAGES)


def before_each_removal(monkeypatch: pytest.MonkeyPatch, then: Callable[[], object]) -> None:
    """Call a function before each call that removes objects, in the process that makes it."""
    delete = FileStore.delete

    def deleted(self: FileStore, rows: Rows) -> Result:
        then()
        return delete(self, rows)

    monkeypatch.setattr(FileStore, "delete", deleted)


@pytest.mark.parametrize("jobs", [(), ("--jobs", "8")], ids=["found", "given"])
def test_processes_remove_unless_the_calls_at_once_are_given(
    invoke: Invoke,
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    jobs: tuple[str, ...],
) -> None:
    """Several processes have a part of each batch; the outcome is that of one process."""
    removers = tmp_path / "removers"

    def note() -> None:
        with removers.open("a") as file:
            file.write(f"{os.getpid()}\n")

    before_each_removal(monkeypatch, note)
    result = invoke("rm", store, "--model", "x/dsa", "--yes", *jobs, "--format", "json").document
    assert result["pages"] == PAGES
    assert not contents(store)
    pids = set(removers.read_text().split())
    assert pids == {str(os.getpid())} if jobs else len(pids - {str(os.getpid())}) > 1


def test_a_process_that_is_killed_leaves_no_half_page(
    invoke: Invoke, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stays is whole pages, and sidecars that no server finds; a rerun completes it."""
    monkeypatch.setattr(removal_plan, "BATCH_OBJECTS", 16)
    us, alarm = os.getpid(), store.parent / "alarm"

    def die() -> None:
        if os.getpid() == us:
            return
        try:
            alarm.touch(exist_ok=False)
        except FileExistsError:
            os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as killing:
        before_each_removal(killing, die)
        failed = invoke("rm", store, "--model", "x/dsa", "--yes", exit_code=2)
    assert "was killed by signal 9" in failed.stderr
    left = {path.name for path in store.glob("*.bin")}
    assert left
    assert {indexer(n) for n in range(PAGES) if kv(n) in left} <= left
    invoke("rm", store, "--model", "x/dsa", "--yes")
    assert not list(store.glob("*.bin"))


def test_a_store_that_a_process_loses_is_lost(
    invoke: Invoke, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose() -> None:
        raise StoreUnavailable("/mnt: cannot use the store: Stale file handle")

    before_each_removal(monkeypatch, lose)
    failed = invoke("rm", store, "--model", "x/dsa", "--yes", exit_code=3)
    assert "/mnt: cannot use the store: Stale file handle" in failed.stderr
    assert len(contents(store)) == 2 * PAGES


def test_an_object_that_was_replaced_since_the_listing_stays(
    invoke: Invoke, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version is compared in the process that removes."""
    replaced = store / kv(3)

    def replace() -> None:
        new = store / ".new"
        new.write_bytes(b"n" * replaced.stat().st_size)
        try:
            new.rename(replaced)
        except FileNotFoundError:  # another process was first
            return

    before_each_removal(monkeypatch, replace)
    invoke("rm", store, "--page", kv(3)[:16], "--yes")
    assert replaced.read_bytes().startswith(b"n")
