"""Repairs and restores of every kind of store, killed at any step: a restore loses nothing.

HICACHECTL_TEST_SEED repeats a run. HICACHECTL_ATTACK_ROUNDS=0 kills at every step.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from hicachectl.backends.base import open_store
from hicachectl.backends.capabilities import Profiled
from hicachectl.formats.keys import grammar_of
from hicachectl.formats.spec import object_specs
from tests.places import half_pages, page_of, whole_pages
from tests.speed import ROUNDS, chance_of_run

if TYPE_CHECKING:
    from pathlib import Path

    from tests.killed import Run, Unit
    from tests.places import Held, Place, Places

pytestmark = pytest.mark.slow

KINDS = ("file", "nixl", "mooncake", "hf3fs")
PAGES = 7
BAD = 2
KILLS = 2


class Damaged:
    """A store of pages, some of which lack an object beside their anchor."""

    def __init__(self, places: Places, kind: str, home: Path) -> None:
        self._runner = places.runner
        self._profile = places.profile
        self._home = home
        self.place: Place = places.destination(kind)
        self.quarantine = home / "quarantine"
        self.before: Held = {}
        self.bad: set[str] = set()

    def make(self) -> None:
        """Make the store and its damage again, without a quarantine."""
        shutil.rmtree(self.quarantine, ignore_errors=True)
        self.place.fill(PAGES)
        if self.before:
            self.place.set_times(self.place.held())
        spell = grammar_of(self.place.grammar).affix
        specs = object_specs(self.place.profile, self.place.grammar)
        anchors = {spell(one.coordinate) for one in specs if one.anchor}
        held = sorted(map(bytes.decode, self.place.held()))
        sidecars = [key for key in held if tuple(key.split(page_of(key))) not in anchors]
        first = {page_of(key): key for key in reversed(sidecars)}
        self.bad = set(sorted(first)[:BAD])
        gone = pa.array([first[page].encode() for page in sorted(self.bad)], pa.binary())
        with open_store(self.place.url) as store:
            if isinstance(store, Profiled):
                store.use_profile(self.place.profile)
            store.delete(store.look(pa.table({"key": gone}), ("nbytes", "version")))
        self.before = self.held()
        assert half_pages(self.place, dict.fromkeys(map(str.encode, held), (b"", None))) == sorted(
            self.bad
        )

    def held(self) -> dict[bytes, tuple[bytes, int | None]]:
        """Return the objects, without times: each making of the store has others."""
        return {key: (value, None) for key, (value, _) in self.place.held().items()}

    def repair(self, kill: tuple[Unit, int] | None = None) -> Run:
        checks = ("--profile", self._profile, "--checks", "groups", "--grace", "0s")
        repair = ("--repair", "quarantine", "--quarantine", self.quarantine, "--yes")
        code = (
            *("--repair-code", "missing-rank", "--repair-code", "missing-part"),
            "--despite-profile",
        )
        words = (*checks, *repair, *code, "--fail-on", "never")
        return self._run("verify", self.place.url, *words, kill=kill)

    def restore(self, kill: tuple[Unit, int] | None = None) -> Run:
        words = ("restore", self.quarantine, self.place.url, "--yes")
        return self._run(*words, "--profile", self._profile, kill=kill)

    def _run(self, *words: object, kill: tuple[Unit, int] | None) -> Run:
        return self._runner.run(*words, home=self._home, kill=kill)

    def check_nothing_lost(self, why: object) -> None:
        """Check that healthy pages are untouched, and that no page lost a sidecar alone."""
        held = self.held()
        for key, value in self.before.items():
            if page_of(key.decode()) not in self.bad:
                assert held.get(key) == value, why
        assert not half_pages(self.place, self.before), why

    def check_restored(self, why: object) -> None:
        """Restore all; check that the store has every object again, and the quarantine none."""
        if self.quarantine.exists():
            run = self.restore()
            assert run.code == 0, (why, run)
        assert self.held() == self.before, why
        assert self.place.leftovers() == [], why


def steps_of(whole: Run) -> tuple[list[int], str]:
    """Return the steps to kill runs at, and words that repeat the choice."""
    if not ROUNDS:
        return [*range(1, whole.steps + 1)], "every step"
    chance, words = chance_of_run()
    return [chance.randint(1, whole.steps) for _ in range(KILLS * ROUNDS)], words


@pytest.fixture(params=KINDS)
def damaged(request: pytest.FixtureRequest, places: Places, tmp_path: Path) -> Damaged:
    return Damaged(places, request.param, tmp_path)


def test_a_repair_killed_anywhere_is_taken_back(damaged: Damaged) -> None:
    damaged.make()
    whole = damaged.repair()
    assert whole.code == 0, whole
    left = damaged.place.keys()
    assert not {page_of(key) for key in left} & damaged.bad
    damaged.check_restored("whole")
    steps, words = steps_of(whole)
    for step in steps:
        damaged.make()
        run = damaged.repair(("steps", step))
        assert run.killed, (words, step, run)
        damaged.check_nothing_lost((words, step))
        damaged.check_restored((words, step))


def test_a_restore_killed_anywhere_is_completed_by_the_next(damaged: Damaged) -> None:
    damaged.make()
    damaged.repair()
    whole = damaged.restore()
    assert whole.code == 0, whole
    steps, words = steps_of(whole)
    for step in steps:
        damaged.make()
        damaged.repair()
        run = damaged.restore(("steps", step))
        assert run.killed, (words, step, run)
        damaged.check_nothing_lost((words, step))
        assert len(whole_pages(damaged.place, damaged.before)) >= PAGES - BAD, (words, step)
        damaged.check_restored((words, step))
