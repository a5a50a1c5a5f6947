"""Repairs, removals and restores killed at any step are completed by the next run.

HICACHECTL_TEST_SEED repeats a run.
"""

from __future__ import annotations

import os
import random
import shutil
from typing import TYPE_CHECKING

import pytest

from hicachectl.backends.file.store import FileStore
from hicachectl.move.restore import restore_groups
from hicachectl.move.withdrawal import finish_removals
from tests import stores
from tests.killed import Runner
from tests.move.repairs import (
    INDEXER_BYTES,
    KV_BYTES,
    default_quarantine,
    dsa_store,
    indexer,
    kv,
    quarantined,
    repaired,
    shorten,
)
from tests.stores import contents

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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

    def free(self, nbytes: int, kill: tuple[Unit, int] | None = None) -> Run:
        return self._run("rm", self.store, "--free", nbytes, "--yes", kill=kill)

    def restore(self, quarantine: Path, kill: tuple[Unit, int] | None = None) -> Run:
        return self._run("restore", quarantine, self.store, "--yes", kill=kill)

    def _run(self, *arguments: object, kill: tuple[Unit, int] | None) -> Run:
        return self._runner.run(*arguments, home=self._home, kill=kill)


def points(whole: Run, count: int) -> tuple[list[tuple[Unit, int]], str]:
    """Return steps to kill runs at, and a message for failures that names their seed."""
    seed = int(os.environ.get("HICACHECTL_TEST_SEED") or random.randrange(1 << 32))
    words = f"HICACHECTL_TEST_SEED={seed}"
    print(words)
    chance = random.Random(seed)
    return [("steps", chance.randint(1, whole.steps)) for _ in range(count)], words


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
    check_kills(commands, KILLS, quarantine)


def check_kills(commands: Commands, count: int, quarantine: Path) -> None:
    """Kill a repair at random points, run the repair again, and restore everything."""
    commands.damage()
    kills, words = points(commands.repair(quarantine), count)
    for kill in kills:
        shutil.rmtree(quarantine, ignore_errors=True)
        before, healthy = commands.damage()
        assert commands.repair(quarantine, kill).killed, (words, kill)
        half = contents(commands.store)
        # Between the runs, only page 10 may lack its indexer, as before.
        for number in range(PAGES):
            if kv(number) in half and number != 10:
                assert indexer(number) in half, (words, kill)
        repaired(commands.store, quarantine=str(quarantine))
        assert contents(commands.store) == healthy, (words, kill)
        assert quarantined(quarantine) == {
            name: value for name, value in before.items() if name not in healthy
        }, (words, kill)
        assert not list(quarantine.glob("*/*.begun")), (words, kill)
        with FileStore(commands.store) as opened:
            outcome = restore_groups(opened, quarantine)
        assert (outcome.groups, outcome.failed, outcome.conflicts) == (5, 0, 0), (words, kill)
        assert contents(commands.store) == before, (words, kill)
        assert list(quarantine.iterdir()) == []


def test_a_killed_repair_can_be_taken_back(commands: Commands) -> None:
    check_taking_back(commands, KILLS)


def check_taking_back(commands: Commands, count: int) -> None:
    """Kill a repair at random points, then restore instead of finishing the repair."""
    commands.damage()
    quarantine = default_quarantine(commands.store)
    kills, words = points(commands.repair(quarantine), count)
    for kill in kills:
        before, _ = commands.damage()
        quarantine.mkdir(parents=True)
        commands.repair(quarantine, kill)
        with FileStore(commands.store) as opened:
            restore_groups(opened, quarantine)
        assert contents(commands.store) == before, (words, kill)
        assert list(quarantine.iterdir()) == [], (words, kill)


def test_a_killed_removal_is_completed(commands: Commands) -> None:
    check_removal(commands, KILLS)


def check_removal(commands: Commands, count: int) -> None:
    """Kill a removal of everything at random points; the next run completes begun batches."""
    dsa_store(commands.store, PAGES)
    kills, words = points(commands.remove(), count)
    for kill in kills:
        shutil.rmtree(commands.store)
        dsa_store(commands.store, PAGES)
        commands.remove(kill)
        with FileStore(commands.store) as opened:
            finish_removals(opened)
        assert len(contents(commands.store)) in (0, 2 * PAGES), (words, kill)
        assert not list(commands.store.glob(".hicachectl/quarantine/*")), (words, kill)


def test_a_killed_run_that_frees_space_is_completed(commands: Commands) -> None:
    """The next run completes it, then frees as much again: the pages that are next by their use."""
    page_bytes = KV_BYTES + INDEXER_BYTES
    asked = 4 * page_bytes
    dsa_store(commands.store, PAGES)
    kills, words = points(commands.free(asked), KILLS)
    assert whole_pages(commands.store) == {*range(4, PAGES)}
    for kill in kills:
        shutil.rmtree(commands.store)
        dsa_store(commands.store, PAGES)
        assert commands.free(asked, kill).killed, (words, kill)
        begun = len(list(commands.store.glob(".hicachectl/quarantine/*/*.begun")))
        names = {path.name for path in commands.store.glob("*.bin")}
        for number in range(PAGES):
            assert (kv(number) in names) <= (indexer(number) in names), (words, kill)
        untouched = whole_pages(commands.store) == {*range(PAGES)} and not begun
        assert commands.free(asked).code == 0, (words, kill)
        first = 4 if untouched else 8
        assert whole_pages(commands.store) == {*range(first, PAGES)}, (words, kill)
        assert len(list(commands.store.glob("*.bin"))) == 2 * (PAGES - first), (words, kill)
        assert not list(commands.store.glob(".hicachectl/quarantine/*")), (words, kill)


def whole_pages(store: Path) -> set[int]:
    """Return the pages with both objects, by their names: reading an object would be a use."""
    return {n for n in range(PAGES) if (store / kv(n)).exists() and (store / indexer(n)).exists()}


def test_a_killed_restore_goes_on(commands: Commands) -> None:
    check_restore(commands, KILLS)


def check_restore(commands: Commands, count: int) -> None:
    """Kill a restore at random points, then run the restore again."""
    before, healthy = commands.damage()
    quarantine = default_quarantine(commands.store)
    repaired(commands.store)
    kills, words = points(commands.restore(quarantine), count)
    for kill in kills:
        repaired(commands.store)
        assert contents(commands.store) == healthy, (words, kill)
        commands.restore(quarantine, kill)
        with FileStore(commands.store) as opened:
            restore_groups(opened, quarantine)
        assert contents(commands.store) == before, (words, kill)
        assert list(quarantine.iterdir()) == [], (words, kill)
