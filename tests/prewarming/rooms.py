"""A store under a writer that often stops within a page, and checks of what `rm` took from it."""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.move.repairs import INDEXER_BYTES, KV_BYTES, indexer, kv
from tests.stores import page, put

if TYPE_CHECKING:
    from pathlib import Path

BLOCK = 4096
PAGE_SPACE = 4 * BLOCK  # kv takes three blocks, the indexer one
PAGE_BYTES = KV_BYTES + INDEXER_BYTES
GRACE_S = 60.0
SPAN_S = 60.0  # uses within this time may count as one use
_UNSURE_S = 1.0  # the clock of the file system may be so far from ours


def free_bytes(path: Path) -> int:
    space = os.statvfs(path)
    return space.f_bavail * space.f_frsize


def shape_of(name: str) -> str:
    """Return which objects of a page the writer writes: whole, partial or orphan."""
    drawn = random.Random(name).random()
    return "orphan" if drawn < 0.1 else "partial" if drawn < 0.2 else "whole"


class Room:
    """A store, and its writer.

    written: number of pages written.
    """

    def __init__(self, store: Path, written: int = 0) -> None:
        self.store = store
        self.written = written
        store.mkdir(exist_ok=True)

    def write(self) -> None:
        """Write the next page: the indexer first, as servers do."""
        number, shape = self.written, shape_of(page(self.written))
        self.written += 1
        if shape != "partial":
            put(self.store, indexer(number), INDEXER_BYTES, time.time())
        if shape != "orphan":
            put(self.store, kv(number), KV_BYTES, time.time())

    def step(self, seconds: float) -> None:
        """Make all files older."""
        for path in self.store.glob("*.bin"):
            facts = path.stat()
            os.utime(path, (facts.st_atime - seconds, facts.st_mtime - seconds))

    def newest(self) -> dict[str, float]:
        """Return the time of the newest object of each page."""
        times: dict[str, float] = {}
        with os.scandir(self.store) as entries:
            for entry in entries:
                if entry.name.endswith(".bin"):
                    name = entry.name[:64]
                    times[name] = max(times.get(name, 0.0), entry.stat().st_mtime)
        return times

    def watch(self) -> Removal:
        """Note what there is before a removal."""
        return Removal(self, self.newest(), time.time())


@dataclass
class Removal:
    """Pages before a removal: the time of each, and when that was noted."""

    room: Room
    before: dict[str, float]
    noted: float

    def check_free(self, document: dict[str, Any], limit: int, told: str) -> None:
        """Assert that as much was free in the end as asked, and that the last page was needed."""
        assert document["lacking_bytes"] == 0, told
        assert document["free_bytes"] >= limit, told
        if document["pages"]:
            assert document["free_bytes"] < limit + PAGE_SPACE, told

    def check_order(self, document: dict[str, Any], *, judged: bool, told: str) -> int:
        """Assert that what left was the least useful; return the number of pages that left.

        A healthy page leaves only if no incomplete one of age is left, and no healthy one that is
        older by a span.
        judged: whether a profile shows which pages are partial.
        """
        left, before, ended = self.room.newest(), self.before, time.time()
        gone = before.keys() - left.keys()
        assert gone <= {row["page"] for row in document["groups"]}, told
        incomplete = {
            name for name in before if shape_of(name) == "orphan"
            or (judged and shape_of(name) == "partial")
        }  # fmt: skip
        # The run took the ages at some time in between.
        young = {name for name in before if ended - before[name] < GRACE_S - _UNSURE_S}
        old = {name for name in before if self.noted - before[name] > GRACE_S + _UNSURE_S}
        assert not gone & incomplete & young, told
        if healthy := gone - incomplete:
            assert not incomplete & old & left.keys(), told
            kept = left.keys() & (before.keys() - incomplete)
            kept = {name for name in kept if shape_of(name) == "whole" or name in old}
            oldest = min((before[name] for name in kept), default=self.noted)
            assert max(before[name] for name in healthy) <= oldest + SPAN_S, told
        return len(gone)
