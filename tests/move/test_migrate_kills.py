"""Migrations killed at any point lose no page, show no half page, and can be completed."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from tests.move.migrations import marks
from tests.places import (
    SOURCE_PAGES,
    half_pages,
    whole_pages,
)
from tests.speed import ROUNDS, chance_of_run, some

if TYPE_CHECKING:
    from pathlib import Path

    from tests.killed import Run, Unit
    from tests.places import Held, Places

pytestmark = pytest.mark.slow

KILLS = 10
KINDS = ("file", "pack", "mooncake", "hf3fs")
PAIRS = some(
    [*itertools.product(KINDS, KINDS), ("file", "nixl"), ("nixl", "mooncake")],
    ("file", "file"),
    ("file", "pack"),
    ("pack", "hf3fs"),
    ("hf3fs", "mooncake"),
    ("mooncake", "file"),
    ("file", "nixl"),
    ("nixl", "mooncake"),
)
MOVES = (
    ("file", "file"),
    ("file", "pack"),
    ("file", "mooncake"),
    ("file", "hf3fs"),
    ("mooncake", "file"),
    ("hf3fs", "file"),
    ("nixl", "nixl"),
)
# A batch has the bytes of two pages with states, or of a dozen without.
BUFFER_BYTES = 1 << 20
_SHARE = 3  # a run is killed within this fraction (1/3) of the way; the next one goes on


class Killing:
    """A migration that is killed again and again."""

    def __init__(
        self, places: Places, home: Path, source: str, destination: str, *, move: bool = False
    ) -> None:
        self._places = places
        self._home = home
        self._move = move
        self.source = places.source(source, fresh=move)
        self.destination = places.destination(destination)
        self.read_from = self.source.held()
        self.whole = self._run()
        document = self.whole.document
        assert (document["pages"], document["complete"]) == (SOURCE_PAGES, True)
        self.arrived = self._held()
        self._restore()
        self._chance, self.words = chance_of_run()

    def kill(self, kills: int, *, share: int) -> None:
        """Kill runs; each goes on where the run killed before ended."""
        done = 0
        while done < kills:
            unit: Unit = "bytes" if done % 2 and self._counts_bytes else "steps"
            total = self.whole.written if unit == "bytes" else self.whole.steps
            run = self._run(kill=(unit, self._chance.randint(1, total // share)))
            if run.killed:
                done += 1
                self.check_between()
                if share > 1:
                    continue
                run = self._run()
            self.check_whole(run)
            self._restore()
        self.check_whole(self._run())
        self._restore()

    @property
    def _counts_bytes(self) -> bool:
        """Whether writes are calls that can be cut short."""
        return self.destination.kind != "mooncake"

    def check_between(self) -> None:
        """Check that no server treats half a page as present, and that no page is lost."""
        assert half_pages(self.destination, self.arrived) == [], self.words
        if self._move:
            kept = whole_pages(self.source, self.read_from)
            moved = whole_pages(self.destination, self.arrived)
            assert len(kept | moved) == SOURCE_PAGES, self.words

    def check_whole(self, run: Run) -> None:
        """Check that the outcome equals that of an uninterrupted run."""
        assert run.document["complete"], self.words
        assert self._held() == self.arrived, self.words
        assert self.destination.leftovers() == [], self.words
        assert marks(self._home) == [], self.words
        assert self.source.held() == ({} if self._move else self.read_from), self.words
        assert run.document["left_in_source"] == 0, self.words

    def _run(self, *, kill: tuple[Unit, int] | None = None) -> Run:
        # Without a grace, rests in a store without times need no wait.
        options = ("--move", "--yes", "--grace", "0s") if self._move else ()
        before = self._missing()
        run = self._places.runner.run(
            "migrate", self.source.url, self.destination.url, "--profile", self._places.profile,
            "--buffer-bytes", BUFFER_BYTES, "--format", "json", *options,
            home=self._home, kill=kill,
        )  # fmt: skip
        # Copied pages are not read again, except the batches at work; those are read twice while
        # the master waits for a killed writer.
        times = 2 if self.destination.kind == "mooncake" else 1
        if before is not None and not self._move:
            assert run.read <= before + times * BUFFER_BYTES, self.words
        return run

    def _held(self) -> Held:
        """Return the destination's objects, with times only if they come from the source."""
        timed = all(time for _, time in self.read_from.values())
        held = self.destination.held()
        return {key: (value, time if timed else None) for key, (value, time) in held.items()}

    def _missing(self) -> int | None:
        """Return the bytes that have not arrived; None before the first whole run."""
        if not hasattr(self, "arrived"):
            return None
        lacking = self.arrived.keys() - set(map(str.encode, self.destination.keys()))
        return sum(len(self.arrived[key][0]) for key in lacking)

    def _restore(self) -> None:
        self.destination.empty()
        if self._move:
            self._refill()

    def _refill(self) -> None:
        self.source.fill(SOURCE_PAGES)
        self.source.set_times(self.read_from)
        assert self.source.held() == self.read_from


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_a_migration_killed_anywhere_is_completed_by_the_next(
    places: Places, tmp_path: Path, pair: tuple[str, str]
) -> None:
    Killing(places, tmp_path, *pair).kill(KILLS * ROUNDS, share=_SHARE)


@pytest.mark.parametrize("pair", MOVES, ids="-".join)
def test_a_move_killed_anywhere_loses_no_page(
    places: Places, tmp_path: Path, pair: tuple[str, str]
) -> None:
    Killing(places, tmp_path, *pair, move=True).kill(KILLS // 2 * ROUNDS, share=_SHARE)


@pytest.mark.parametrize("pair", [("file", "file"), ("nixl", "file")], ids="-".join)
def test_a_move_killed_once_is_completed_by_the_same_words(
    places: Places, tmp_path: Path, pair: tuple[str, str]
) -> None:
    """Each kill comes at any moment of a whole move, and the next run ends with 0."""
    Killing(places, tmp_path, *pair, move=True).kill(KILLS * ROUNDS, share=1)
