"""Model of the sparse loader for one layer of one request, in plain Python.

Slow on purpose: a stable sort moves the slots of a step behind all others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Fetch:
    """A token row to copy from the host, and its slot."""

    position: int
    slot: int


class SparseModel:
    """A buffer of `slots` token rows, and one more for the newest token of a long sequence.

    tokens: [slots] the position in each slot, -1 if empty.
    lru:    [slots] slots, least recently used first; slots used in one step keep their order.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.reset()

    def reset(self) -> None:
        """Empty the buffer."""
        self.tokens = [-1] * self.slots
        self.lru = list(range(self.slots))
        self._loaded = 0  # positions of a short sequence in the buffer

    def step(
        self, top_k: Sequence[int], length: int, there: Sequence[bool]
    ) -> tuple[list[int], list[Fetch]]:
        """Load selected tokens: return the slot of each or -1, and the copies to make first.

        top_k:  positions; those outside 0 ... length - 1 or not `there` are ignored.
        length: tokens of the sequence, the newest included. The caller writes the newest: to slot
            `slots` if length > slots, else to the slot of its position. 0 does nothing.
        there:  for each position, whether the host has its row.
        """
        if length <= 0:
            return [-1] * len(top_k), []
        newest = length - 1
        asked = [
            position if 0 <= position < length and (position == newest or there[position]) else -1
            for position in top_k
        ]
        locate = self._step_short if length <= self.slots else self._step_long
        slot_of, fetches = locate(asked, newest)
        self.lru.sort(key=set(slot_of.values()).__contains__)
        return [slot_of.get(position, -1) for position in asked], fetches

    def _step_short(self, asked: list[int], newest: int) -> tuple[dict[int, int], list[Fetch]]:
        self.tokens = [slot if slot <= newest else -1 for slot in range(self.slots)]
        fetches = [Fetch(position, position) for position in range(self._loaded, newest)]
        self._loaded = newest + 1
        return {position: position for position in asked if position >= 0}, fetches

    def _step_long(self, asked: list[int], newest: int) -> tuple[dict[int, int], list[Fetch]]:
        self._loaded = 0
        # After a cut, slots behind the cut hold other tokens' rows.
        self.tokens = [token if token < newest else -1 for token in self.tokens]
        resident = {token: slot for slot, token in enumerate(self.tokens) if token >= 0}
        slot_of = {position: resident[position] for position in asked if position in resident}
        kept = set(slot_of.values())
        victims = [slot for slot in self.lru if slot not in kept]
        missing = [p for p in dict.fromkeys(asked) if p not in resident and 0 <= p < newest]
        fetches = [Fetch(p, slot) for p, slot in zip(missing, victims, strict=False)]
        for fetch in fetches:
            self.tokens[fetch.slot] = fetch.position
            slot_of[fetch.position] = fetch.slot
        if newest in asked:
            slot_of[newest] = self.slots
        return slot_of, fetches
