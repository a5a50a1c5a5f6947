"""Carry out transfer plans on pages in host memory, many pages at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hicachectl.formats.copyplan import CopyPlan
    from hicachectl.formats.transfer import TransferUnit

    Pages = npt.NDArray[np.uint8]
    View = npt.NDArray[Any]

# Bytes of a block of work. In a block of this size, copies that share cache lines find these lines
# in the cache.
CACHED_BYTES = 512 << 10
_LONG_ITEM = 4096  # bytes of an item so long that it shares cache lines only at its ends
_LONGEST_VOID = 1 << 16

# Bytes that numpy moves before numba is loaded, if numba is installed. Loading numba and compiling
# take a second and 130 MiB. The compiled loop then saves 0.03 to 0.1 seconds a GiB. The loop is not
# cached on disk, because caches of numba are pickles.
COMPILED_AFTER = 16 << 30


@dataclass(slots=True)
class _Work:
    """Number of bytes that this process has moved. If threads race, some bytes are not counted."""

    nbytes: int = 0


_work = _Work()


def relayout(unit: TransferUnit, sources: Sequence[Pages], destinations: Sequence[Pages]) -> None:
    """Fill the destination objects of a unit from its source objects, page by page.

    Every byte of a destination is written.
    sources, destinations: one array per object, [pages, object bytes] uint8. The bytes of a page
        are contiguous, but there may be gaps between pages.
    Raises ValueError if page counts differ, or if a copy reaches beyond an array.
    """
    for position in unit.padded:
        destinations[position][...] = 0
    counts = {len(pages) for pages in (*sources, *destinations)}
    if len(counts) > 1:
        raise ValueError(f"Objects must have equal numbers of pages, not {sorted(counts)}")
    if not unit.copies or counts == {0}:
        return
    for plan in unit.copies:
        _check(destinations[plan.destination], plan, to_destination=True)
        _check(sources[plan.source], plan, to_destination=False)
    count = counts.pop()
    _work.nbytes += count * sum(plan.nbytes for plan in unit.copies)
    move = _compiled() if _work.nbytes > COMPILED_AFTER else None
    if move is not None:
        move(unit, sources, destinations)
        return
    pairs = [
        (
            _view(destinations[plan.destination], plan, to_destination=True),
            _view(sources[plan.source], plan, to_destination=False),
        )
        for plan in unit.copies
    ]
    for block in _blocks(unit, count):
        for destination, source in pairs:
            np.copyto(destination[block], source[block])


@cache
def _compiled() -> Callable[[TransferUnit, Sequence[Pages], Sequence[Pages]], None] | None:
    """Return `carry_out` of `relayout_numba`; None if numba is not installed, or does not work."""
    try:
        from hicachectl.kernels.relayout_numba import carry_out
    except Exception:  # after any failure, numpy does the work
        return None
    return carry_out


def _side(plan: CopyPlan, *, to_destination: bool) -> tuple[int, list[int]]:
    """Return the offset of a copy in an object, and the steps of its axes there."""
    if to_destination:
        return plan.destination_offset, [axis.destination for axis in plan.axes]
    return plan.source_offset, [axis.source for axis in plan.axes]


def _check(pages: Pages, plan: CopyPlan, *, to_destination: bool) -> None:
    """Raise ValueError if a copy reaches beyond a page, or its destination is read-only."""
    offset, steps = _side(plan, to_destination=to_destination)
    span = sum((axis.length - 1) * step for axis, step in zip(plan.axes, steps, strict=True))
    end = offset + span + plan.run
    if pages.dtype != np.uint8 or pages.ndim != 2 or end > pages.shape[1] or pages.strides[1] != 1:
        raise ValueError(f"pages {pages.shape}: must have at least {end} contiguous bytes each")
    if to_destination and not pages.flags.writeable:
        raise ValueError(f"pages {pages.shape}: a destination must not be read-only")


def _view(pages: Pages, plan: CopyPlan, *, to_destination: bool) -> View:
    """View one side of a copy as items, [pages, *shape], or as bytes, which add a last axis."""
    offset, steps = _side(plan, to_destination=to_destination)
    items = np.lib.stride_tricks.as_strided(
        pages[:, offset:],
        (len(pages), *(axis.length for axis in plan.axes), plan.run),
        (pages.strides[0], *steps, 1),
    )
    if not plan.axes or plan.run > _LONGEST_VOID:
        return items
    # numpy copies a void item at once, but would copy the bytes of a run one by one.
    return items.view(np.dtype((np.void, plan.run)))[..., 0]


def _blocks(unit: TransferUnit, count: int) -> Iterator[tuple[slice, ...]]:
    """Yield blocks of the work. If copies share cache lines, a block fits into the cache.

    A block can be larger than the cache if one page is, and the first axes of its copies differ in
    length, so that the page cannot be cut.
    """
    copies = unit.copies
    lengths = {copy.axes[0].length if copy.axes else 0 for copy in copies}
    if len(copies) == 1 or all(copy.run >= _LONG_ITEM for copy in copies):
        yield (slice(None),)
        return
    page_bytes = sum(copy.nbytes for copy in copies)
    pages = max(1, CACHED_BYTES // page_bytes)
    axes = [_steps(count, pages)]
    length = lengths.pop()
    if length and not lengths:
        axes.append(_steps(length, max(1, length * CACHED_BYTES // page_bytes)))
    yield from product(*axes)


def _steps(length: int, step: int) -> list[slice]:
    return [slice(start, start + step) for start in range(0, length, step)]
