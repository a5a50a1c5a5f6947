"""Memory of ours that stores read into and write from, in slots that are used again.

A call that hangs in the store keeps its slot until it comes back: what it reads late goes nowhere,
and what it writes late is what it was given.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from hicachectl.backends.arena import ALIGNMENT, Arena

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.backends.sglang.calls import Call
    from hicachectl.backends.sglang.served import Pieces


class NoSlotError(Exception):
    """All slots are held by calls that hang in the store."""


class Slots:
    """Slots of equal size in one arena."""

    def __init__(self, nbytes: int, count: int, *, named: bool = False) -> None:
        """Map `count` slots of at least `nbytes` bytes; the system allocates memory at first use.

        named: as in `Arena`. Raises UsageError if the system refuses the memory.
        """
        self.nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
        self.arena = Arena(self.nbytes * count, named=named)
        self._free = [n * self.nbytes for n in reversed(range(count))]  # the last used comes first

    @contextmanager
    def slot(self) -> Iterator[int]:
        """Hold a slot; give its offset in the arena. Raises NoSlotError, without waiting."""
        try:
            offset = self._free.pop()
        except IndexError:
            raise NoSlotError from None
        try:
            yield offset
        finally:
            self._free.append(offset)


def gather(call: Call, pieces: Pieces, address: int) -> None:
    """Copy pieces of the host pool to one address of ours. Raises Ended."""
    for source, nbytes in pieces:
        call.copy(source, [(address, nbytes)])
        address += nbytes
