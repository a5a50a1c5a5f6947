"""Copies between two orders of one box, against numpy's own indexing."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.formats.copyplan import Axis, CopyPlan, Extent, Region, joined, overlap

NAMES = ("a", "b", "c")


@st.composite
def regions(draw: st.DrawFn) -> tuple[Region, list[int], int]:
    """A box of random indices, dense in a random axis order after an offset."""
    firsts = [draw(st.integers(0, 3)) for _ in NAMES]
    lengths = [draw(st.integers(1, 4)) for _ in NAMES]
    order = draw(st.permutations(range(3)))
    offset, itemsize = draw(st.integers(0, 5)), 2
    strides = {}
    step = itemsize
    for axis in reversed(order):
        strides[axis] = step
        step *= lengths[axis]
    extents = tuple(Extent(name, firsts[n], lengths[n], strides[n]) for n, name in enumerate(NAMES))
    return Region(("space",), extents, itemsize, offset), list(order), offset + prod(lengths) * 2


def bytes_of(region: Region, order: list[int], nbytes: int, seed: int) -> np.ndarray:
    """Return an object whose items state their indices and their object."""
    grids = np.meshgrid(
        *(np.arange(a.first, a.first + a.length) for a in region.extents), indexing="ij"
    )
    items = (grids[0] * 64 + grids[1] * 8 + grids[2] + 1 + seed).astype("<u2").transpose(order)
    found = np.zeros(nbytes, np.uint8)
    found[region.offset :] = np.ascontiguousarray(items).reshape(-1).view(np.uint8)
    return found


def carried_out(copy: CopyPlan, source: np.ndarray, destination: np.ndarray) -> None:
    """Copy item by item."""
    for index in np.ndindex(*(axis.length for axis in copy.axes)):
        one = copy.source_offset + int(np.dot(index, [axis.source for axis in copy.axes]))
        two = copy.destination_offset + int(np.dot(index, [axis.destination for axis in copy.axes]))
        destination[two : two + copy.run] = source[one : one + copy.run]


@given(regions(), regions())
def test_a_copy_moves_what_two_boxes_share(
    one: tuple[Region, list[int], int], two: tuple[Region, list[int], int]
) -> None:
    source, destination = bytes_of(*one, 0), bytes_of(*two, 1000)
    spans = [
        range(max(a.first, b.first), min(a.first + a.length, b.first + b.length))
        for a, b in zip(one[0].extents, two[0].extents, strict=True)
    ]
    copy = overlap(one[0], two[0], copy_from=0, copy_to=0)
    shared = prod(map(len, spans))
    assert (copy.nbytes if copy else 0) == 2 * shared
    if copy is not None:
        carried_out(copy, source, destination)
    values = destination[two[0].offset :].view("<u2")
    assert int((values < 1000).sum()) == shared
    kept = {x * 64 + y * 8 + z + 1 for x in spans[0] for y in spans[1] for z in spans[2]}
    assert set(values[values < 1000].tolist()) == kept
    whole = bytes_of(*two, 0)[two[0].offset :].view("<u2")
    assert np.array_equal(whole[values < 1000], values[values < 1000])


def test_axes_that_follow_one_another_on_both_sides_are_one() -> None:
    dense = Region((), (Extent("a", 0, 4, 48), Extent("b", 0, 3, 16), Extent("c", 0, 2, 8)), 8, 0)
    copy = overlap(dense, dense, copy_from=0, copy_to=0)
    assert copy == CopyPlan((), 192)
    apart = Region((), (Extent("a", 0, 4, 96), Extent("b", 0, 3, 32), Extent("c", 0, 2, 8)), 8, 0)
    copy = overlap(apart, dense, copy_from=0, copy_to=0)
    assert copy == CopyPlan((Axis("", 12, 32, 16),), 16)


def test_copies_that_continue_one_another_are_joined() -> None:
    halves = [CopyPlan((Axis("", 3, 16, 16),), 8, start, start) for start in (0, 8)]
    behind = CopyPlan((), 10, 48, 48)
    assert joined([behind, *halves]) == (CopyPlan((), 58),)
    elsewhere = CopyPlan((), 10, 48, 48, source=1)
    assert len(joined([elsewhere, *halves])) == 2
