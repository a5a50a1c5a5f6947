"""Watch what a destination does with what was written to it, and put it into the right order."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from hicachectl.backends.capabilities import Touch
from hicachectl.move.survey import keys_of
from hicachectl.text.units import human_size

if TYPE_CHECKING:
    from hicachectl.backends.base import Store
    from hicachectl.move.delivery import Delivered
    from hicachectl.move.survey import Survey
    from hicachectl.pages.inventory import IntArray

_WATCHED = 256  # objects; the first ones written are the best, and the first to be evicted
_SECONDS = 2.0  # between two looks


class Watch:
    """Notices that a destination evicts what was just written to it."""

    def __init__(self, store: Store, survey: Survey) -> None:
        self._store = store
        self._survey = survey
        self._keys: list[pa.BinaryArray] = []
        self._count = 0
        self._written = 0
        self._next = 0.0
        self._lost = False

    def add(self, delivered: Delivered) -> None:
        """Take note of what was written."""
        self._written += delivered.nbytes
        done = delivered.parcel.items[delivered.done]
        if self._count < _WATCHED and len(done):
            keys = anchor_keys(self._survey, done[: _WATCHED - self._count])
            self._keys.append(keys)
            self._count += len(keys)

    def lost(self) -> bool:
        """Look, now and then, whether something of it is gone."""
        if self._lost or not self._keys or time.monotonic() < self._next:
            return self._lost
        self._next = time.monotonic() + _SECONDS
        rows = pa.table({"key": pa.concat_arrays(self._keys)})
        self._lost = not self._store.exists(rows).all()
        return self._lost

    def remark(self) -> str:
        """Say what the destination seems to hold."""
        return (
            f"{self._store.url}: evicts what was just written; it holds about "
            f"{human_size(self._written)} of what is asked for (--budget)"
        )


class Touching:
    """Makes pages the most recently used: the least valuable first, and leaves before roots."""

    def __init__(self, store: Store, survey: Survey) -> None:
        self._store = store if isinstance(store, Touch) else None
        self._survey = survey

    def touch(self, items: IntArray, *, until: float | None = None) -> None:
        """Touch groups, the most valuable first in `items`, where the store has such an order.

        until: `time.monotonic()` by which it shall have ended, but for one more call. Where there
        seems to be no time for all, less valuable ones are left out.
        """
        if self._store is None:
            return
        step = self._store.limits.batch_objects
        calls = -(-len(items) // step)
        begun, made, at = time.monotonic(), 0, 0
        while at < calls:
            self._touch(self._store, items[::-1][at * step : (at + 1) * step])
            at, made = at + 1, made + 1
            if until is not None:
                now = time.monotonic()
                affordable = int(made * (until - now) / max(now - begun, 1e-9))
                at = max(at, calls - max(affordable, 1))

    def _touch(self, store: Touch, items: IntArray) -> None:
        """Touch all objects of some groups, in their order."""
        at, targets, _ = self._survey.wanted.objects(items)
        pages = self._survey.pages.take(pa.array(items[at]))
        store.touch(pa.table({"key": keys_of(self._survey.route, targets, pages)}))


def anchor_keys(survey: Survey, items: IntArray) -> pa.BinaryArray:
    """Spell the keys of one anchor of each group."""
    anchor = next(at for at, target in enumerate(survey.route.targets) if target.anchor)
    pages = survey.pages.take(pa.array(items))
    return keys_of(survey.route, np.full(len(items), anchor, dtype=np.int64), pages)
