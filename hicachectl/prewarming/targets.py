"""Targets of removals, and the bytes that a removal still has to free."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, Self

from hicachectl.formats.documents import shown
from hicachectl.formats.errors import UnsupportedByBackend, UsageError
from hicachectl.formats.sizes import parse_size
from hicachectl.text.units import human_size

if TYPE_CHECKING:
    from hicachectl.backends.base import Store

Kind = Literal["free", "keep-free", "max-size"]
KINDS: tuple[Kind, ...] = ("free", "keep-free", "max-size")

_PERCENTS = 100
_PERCENTAGE = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?%")
# If less than this share of the removed bytes is free after _LATE_SECONDS, the wait was fruitless.
_LEAST_GAIN = 0.1
_LATE_SECONDS = 10.0
_PAUSE_SECONDS = 0.5
# After this many fruitless waits, the removed bytes count as held: something keeps their space.
_MOST_FRUITLESS = 3


@dataclass(frozen=True, slots=True)
class Target:
    """Target of a removal.

    kind: whether the amount counts removed objects (free), free space (keep-free), or the objects
        left in the store (max-size).
    amount: bytes, or for keep-free a share of the store's capacity.
    """

    kind: Kind
    amount: int | Fraction

    def __str__(self) -> str:
        return f"--{self.kind}"

    @property
    def stands(self) -> bool:
        """Whether the target is a state of the store, so that another run has nothing to do."""
        return self.kind != "free"


def parse_room(text: str) -> int | Fraction:
    """Return the bytes of a size such as 200GiB, or the share of a percentage such as 30%.

    Raises UsageError for other text, for 0, and for 100% or more. A small number without a unit is
    refused, too: whoever writes 30 means 30%, and a run that keeps 30 bytes free always succeeds.
    """
    if not text.endswith("%"):
        size = parse_size(text, least=1)
        if size < _PERCENTS and text[-1].isdigit():
            raise UsageError(f"{shown(text)} is {size} bytes; write {text}%, {text}GiB or {text}B")
        return size
    if not _PERCENTAGE.fullmatch(text):
        raise UsageError(f"{shown(text)} is not a share; write 30% or a size such as 200GiB")
    share = Fraction(text[:-1]) / 100
    if not 0 < share < 1:
        raise UsageError(f"{text} is not between 0% and 100%; write 30%, for example")
    return share


class Gauge:
    """Measure of the bytes that a removal still has to free.

    limit: bytes of the target. A share has been converted to bytes.
    asked: bytes to remove, measured at the start.
    unit: number of bytes. The space that an object takes is a multiple of it.
    free_bytes: free bytes of the store at the last look; None if the target is not keep-free.
    stored_bytes: bytes of the listed objects; None if the target is not max-size.
    is_held: whether removed bytes did not become free.
    """

    def __init__(
        self,
        target: Target,
        limit: int,
        asked: int,
        *,
        store: Store | None = None,
        free_bytes: int | None = None,
        unit: int = 1,
        stored_bytes: int | None = None,
    ) -> None:
        self.target = target
        self.limit = limit
        self.asked = asked
        self.unit = unit
        self.stored_bytes = stored_bytes
        self.free_bytes = free_bytes
        self.is_held = False
        self._fruitless = 0
        self._store = store
        # The free bytes after the last wait for removed bytes.
        self._known_free = free_bytes or 0
        # The bytes that had been removed at that wait.
        self._known_removed = 0
        # The free bytes at the start, minus the bytes that servers have written since.
        self._first_free = self._known_free

    @classmethod
    def of(cls, target: Target, store: Store, stored_bytes: int | None) -> Self:
        """Look at the store, and return the gauge of a target.

        stored_bytes: bytes of all objects of the store; None if a size is unknown.
        Raises UsageError for a target that the store cannot reach, UnsupportedByBackend for a
        target that it cannot measure, and StoreUnavailable.
        """
        if target.kind == "free":
            return cls(target, int(target.amount), int(target.amount))
        if target.kind == "max-size":
            if stored_bytes is None:
                raise UnsupportedByBackend(
                    f"{target}: {store.url} does not tell the sizes of its objects; give "
                    "--profile, or --free SIZE"
                )
            limit = int(target.amount)
            return cls(target, limit, max(0, stored_bytes - limit), stored_bytes=stored_bytes)
        capacity = store.capacity()
        free = None if capacity is None else store.free_bytes()
        if capacity is None or free is None:
            raise _untold(target, store)
        amount = target.amount
        limit = int(amount * capacity.nbytes) if isinstance(amount, Fraction) else amount
        if limit >= capacity.nbytes:
            raise UsageError(
                f"{target}: {store.url} can hold only {human_size(capacity.nbytes)}, so "
                f"{human_size(limit)} are never free; give a smaller SIZE"
            )
        asked = max(0, limit - free)
        return cls(target, limit, asked, store=store, free_bytes=free, unit=capacity.unit)

    def lacking(self, removed: int) -> int:
        """Return the bytes still to be removed. Look at the store if the target is free space.

        A file system may show freed space late. Until a sync, removed bytes count as free even if
        they do not show, so that nothing is removed needlessly.
        removed: bytes of the objects removed so far.
        Raises StoreUnavailable.
        """
        if self._store is None:
            return max(0, self.asked - removed)
        free = self._look(self._store)
        unseen = self.limit - self._known_free - (removed - self._known_removed)
        if free >= self.limit or unseen > 0:
            return max(0, min(self.limit - free, unseen))
        self._store.flush()
        free = self._settled(self._store, removed)
        self._known_free, self._known_removed = free, removed
        return max(0, self.limit - free)

    @property
    def is_measured(self) -> bool:
        """Whether the target is the free space of the store, which servers change meanwhile."""
        return self._store is not None

    def step(self, lacking: int) -> int:
        """Return how many of the lacking bytes to remove before the next look.

        If the target is measured, return half of them, because objects may take more space than
        their bytes. So a step does not remove more than the target needs.
        """
        return lacking if self._store is None else -(-lacking // 2)

    def _settled(self, store: Store, removed: int) -> int:
        """Wait for removed bytes to show as free. Return the free bytes, and set `is_held`.

        Some file systems free space in the background, so wait before more pages are removed. If
        servers write as much as was removed, the free space falls instead. Then stop waiting,
        because more pages must leave before the store is full.
        """
        free = first = self._look(store)
        latest = removed - self._known_removed  # perhaps no byte of these shows as free yet
        ends = time.monotonic() + _LATE_SECONDS
        while is_fruitless := self._is_fruitless(free, removed):
            if time.monotonic() >= ends or first - free >= latest:
                break
            time.sleep(_PAUSE_SECONDS)
            free = self._look(store)
        self._fruitless += is_fruitless
        self.is_held = is_fruitless and (free >= first or self._fruitless >= _MOST_FRUITLESS)
        self._first_free -= max(0, first - free)
        return free

    def _is_fruitless(self, free: int, removed: int) -> bool:
        gain = free - self._first_free
        return removed > 0 and free < self.limit and gain < _LEAST_GAIN * removed

    def _look(self, store: Store) -> int:
        self.free_bytes = free = store.free_bytes()
        if free is None:
            raise _untold(self.target, store)
        return free


def _untold(target: Target, store: Store) -> UnsupportedByBackend:
    return UnsupportedByBackend(
        f"{target}: {store.url} does not tell its free space after a removal; give --max-size SIZE "
        "or --free SIZE"
    )
