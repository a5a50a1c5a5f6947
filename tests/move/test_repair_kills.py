"""Repairs, removals and restores killed at any step: a restore makes every page as it was.

HICACHECTL_TEST_SEED repeats a run.
"""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hicachectl.backends.base import Result
from hicachectl.backends.file.store import FileStore
from hicachectl.move.quarantine import purge_runs
from hicachectl.move.restore import restore_groups
from hicachectl.move.withdrawal import remove_groups
from tests import stores
from tests.killed import Runner
from tests.move.quarantines import quarantined, runs_in
from tests.move.repairs import (
    Bare,
    default_quarantine,
    dsa_store,
    indexer,
    kv,
    planned,
    repaired,
    shorten,
)
from tests.speed import ROUNDS, chance_of_run
from tests.stores import contents

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hicachectl.backends.base import ReadResult
    from hicachectl.move.results import GroupReport
    from tests.killed import Run, Unit
    from tests.stores import Contents

pytestmark = pytest.mark.slow

KILLS = 5
PAGES = 12
BAD = (1, 4, 7, 8, 10)


class Commands:
    """Commands on a store of pages with an indexer, killed at a given step."""

    def __init__(self, runner: Runner, folder: Path) -> None:
        self.store = folder / "store"
        self._runner = runner
        self._home = folder
        self._profile = folder / "profile.toml"
        self._profile.write_text(stores.DSA)

    def damage(self) -> tuple[Contents, Contents]:
        """Make the store again, with bad pages; return its objects, and the healthy objects."""
        shutil.rmtree(self.store, ignore_errors=True)
        dsa_store(self.store, PAGES)
        for number in (1, 4, 7):
            shorten(self.store / indexer(number), number)
        shorten(self.store / kv(8))
        (self.store / indexer(10)).unlink()
        before = contents(self.store)
        bad = {name(number) for number in BAD for name in (kv, indexer)}
        return before, {name: value for name, value in before.items() if name not in bad}

    def repair(self, quarantine: Path, kill: tuple[Unit, int] | None = None) -> Run:
        command = ("verify", self.store, "--profile", self._profile, "--checks", "groups,sizes")
        options = ("--repair", "quarantine", "--quarantine", quarantine, "--yes")
        return self._run(*command, *options, "--fail-on", "never", kill=kill)

    def remove(self, kill: tuple[Unit, int] | None = None) -> Run:
        return self._run("rm", self.store, "--model", "x/dsa", "--yes", kill=kill)

    def restore(self, quarantine: Path, kill: tuple[Unit, int] | None = None) -> Run:
        return self._run("restore", quarantine, self.store, "--yes", kill=kill)

    def _run(self, *arguments: object, kill: tuple[Unit, int] | None) -> Run:
        return self._runner.run(*arguments, home=self._home, kill=kill)


def points(whole: Run) -> tuple[list[tuple[Unit, int]], str]:
    """Return steps to kill runs at, and a message for failures that names their seed."""
    chance, words = chance_of_run()
    return [("steps", chance.randint(1, whole.steps)) for _ in range(KILLS * ROUNDS)], words


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    with Runner(tmp_path_factory.mktemp("runs")) as runner:
        yield runner


@pytest.fixture
def commands(runner: Runner, tmp_path: Path) -> Commands:
    return Commands(runner, tmp_path)


@pytest.mark.parametrize("where", ["beside", "elsewhere"])
def test_killed_anywhere_and_run_again_every_group_is_whole_or_gone(
    commands: Commands, where: str, request: pytest.FixtureRequest
) -> None:
    quarantine = default_quarantine(commands.store)
    if where == "elsewhere":
        quarantine = request.getfixturevalue("other_file_system") / "q"
    commands.damage()
    kills, words = points(commands.repair(quarantine))
    for kill in kills:
        shutil.rmtree(quarantine, ignore_errors=True)
        before, healthy = commands.damage()
        assert commands.repair(quarantine, kill).killed, (words, kill)
        half = contents(commands.store)
        # Only page 10 may lack its indexer, as before.
        for number in range(PAGES):
            if kv(number) in half and number != 10:
                assert indexer(number) in half, (words, kill)
        assert {**quarantined(quarantine), **objects(half)} == before, (words, kill)
        repaired(commands.store, quarantine=str(quarantine), codes=("orphan-sidecar",))
        assert objects(contents(commands.store)) == healthy, (words, kill)
        assert quarantined(quarantine) == {
            name: value for name, value in before.items() if name not in healthy
        }, (words, kill)
        check_restored(commands, quarantine, before)


def objects(found: Contents) -> Contents:
    """Return a store's objects, without temporary files."""
    return {name: value for name, value in found.items() if not name.startswith(".")}


def check_restored(commands: Commands, quarantine: Path, before: Contents) -> None:
    """Restore everything; nothing but what is left of killed runs stays, and a purge removes it."""
    with FileStore(commands.store) as opened:
        outcome = restore_groups(opened, quarantine)
    assert (outcome.failed, outcome.conflicts, outcome.left) == (0, 0, ())
    assert objects(contents(commands.store)) == before
    assert quarantined(quarantine) == {}
    purge_runs(quarantine, 0.0)
    assert list(quarantine.iterdir()) == []


def test_a_killed_repair_can_be_taken_back(commands: Commands) -> None:
    commands.damage()
    quarantine = default_quarantine(commands.store)
    kills, _ = points(commands.repair(quarantine))
    for kill in kills:
        before, _ = commands.damage()
        quarantine.mkdir(parents=True)
        commands.repair(quarantine, kill)
        check_restored(commands, quarantine, before)


def test_a_killed_removal_leaves_pages_or_sidecars_that_no_server_finds(
    commands: Commands,
) -> None:
    """The next run removes the rest."""
    dsa_store(commands.store, PAGES)
    kills, words = points(commands.remove())
    for kill in kills:
        shutil.rmtree(commands.store)
        dsa_store(commands.store, PAGES)
        commands.remove(kill)
        left = contents(commands.store)
        for number in range(PAGES):
            assert (kv(number) in left) <= (indexer(number) in left), (words, kill)
        assert commands.remove().code == 0, (words, kill)
        assert objects(contents(commands.store)) == {}, (words, kill)
        assert not default_quarantine(commands.store).exists(), (words, kill)


def test_several_repairs_at_once_divide_no_page(tmp_path: Path) -> None:
    """Proves, ten times, that each page is in one run, and that a restore brings all back."""
    for number in range(10):
        store = dsa_store(tmp_path / f"{number}", 40)
        for page_number in range(0, 40, 2):
            shorten(store / indexer(page_number))
        before = contents(store)
        start = threading.Barrier(3)

        def run(store: Path = store, start: threading.Barrier = start) -> GroupReport:
            with FileStore(store) as opened:
                plan = planned(opened)
                start.wait()
                return remove_groups(opened, *plan, mode="quarantine")

        with ThreadPoolExecutor(3) as pool:
            done = [one.result() for one in [pool.submit(run) for _ in range(3)]]
        assert sum(one.groups for one in done) == 20
        assert all(one.failures == () for one in done)
        runs = runs_in(default_quarantine(store))
        pages = [{name[:64] for name in contents(one)} for one in runs]
        assert sum(map(len, pages)) == len(set[str]().union(*pages)) == 20
        with FileStore(store) as opened:
            outcome = restore_groups(opened, default_quarantine(store))
        assert (outcome.groups, outcome.conflicts, outcome.failed) == (20, 0, 0)
        assert contents(store) == before


class _Killed(BaseException):
    """The end of a process."""


class Dying(Bare):
    """A store without files of its own, whose process ends after some calls."""

    calls = 1 << 30

    def _count(self) -> None:
        self.calls -= 1
        if self.calls < 0:
            raise _Killed

    def look(self, *arguments: Any, **options: Any) -> Any:
        self._count()
        return super().look(*arguments, **options)

    def read_into(self, *arguments: Any, **options: Any) -> ReadResult:
        self._count()
        return super().read_into(*arguments, **options)

    def delete(self, rows: Any) -> Result:
        """Delete the objects one by one; the process can end after each."""
        found = []
        for n in range(len(rows)):
            self._count()
            found.append(super().delete(rows.slice(n, 1)).statuses[0])
        return Result(np.array(found, dtype=np.uint8))


def test_a_repair_into_a_pack_is_taken_back_wherever_it_was_killed(tmp_path: Path) -> None:
    """As for Mooncake and 3FS: no object leaves before the pack is whole."""
    for calls in range(100):
        store, quarantine = dsa_store(tmp_path / f"{calls}", 6), tmp_path / f"{calls}-q"
        for number in (1, 2, 4):
            shorten(store / indexer(number))
        before = contents(store)
        killed = False
        with Dying(store) as opened:
            plan = planned(opened)
            opened.calls = calls
            try:
                remove_groups(opened, *plan, mode="quarantine", quarantine=str(quarantine))
            except _Killed:
                killed = True
        half = contents(store)
        for number in range(6):
            assert (kv(number) in half) <= (indexer(number) in half)
        if quarantine.exists():
            with FileStore(store) as target:
                outcome = restore_groups(target, quarantine)
            assert (outcome.failed, outcome.conflicts) == (0, 0)
        assert contents(store) == before
        if not killed:
            break
    assert 5 < calls < 99
    assert not list(quarantine.iterdir())


def test_a_killed_restore_goes_on(commands: Commands) -> None:
    before, healthy = commands.damage()
    quarantine = default_quarantine(commands.store)
    repaired(commands.store)
    kills, words = points(commands.restore(quarantine))
    for kill in kills:
        repaired(commands.store, codes=("orphan-sidecar",))
        assert contents(commands.store) == healthy, (words, kill)
        commands.restore(quarantine, kill)
        half = contents(commands.store)
        for number in set(range(PAGES)) - {10}:
            assert (kv(number) in half) <= (indexer(number) in half), (words, kill)
        check_restored(commands, quarantine, before)
