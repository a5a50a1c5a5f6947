"""Carrying out transfer plans: on pages that lie apart, and only inside the arrays."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise, product
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.formats.copyplan import Axis, CopyPlan, Extent, Region, overlap
from hicachectl.formats.transfer import TransferUnit
from hicachectl.kernels import relayout as kernel
from hicachectl.kernels.relayout import relayout
from tests.speed import examples, slow

if TYPE_CHECKING:
    from collections.abc import Iterator

# Two sources of [2 tokens, 2 heads of 3 bytes] become one of [4 heads, 2 tokens] and two bytes of
# padding.
UNIT = TransferUnit(
    sources=(0, 1),
    destinations=(0,),
    copies=tuple(
        CopyPlan((Axis("", 2, 3, 6), Axis("", 2, 6, 3)), 3, 0, 12 * n, source=n) for n in (0, 1)
    ),
    identity=False,
    trailing=False,
    padded=(0,),
)


@pytest.fixture(params=["numpy", slow("numba")], scope="module", autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run each test by numpy, and by the compiled loop."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "COMPILED_AFTER", -1 if request.param == "numba" else 1 << 62)
        assert request.param == "numpy" or kernel._compiled() is not None
        yield request.param


def pages(count: int, nbytes: int, *, gap: int = 0) -> np.ndarray:
    memory = np.random.default_rng(7).integers(0, 256, (count, nbytes + gap), dtype=np.uint8)
    return memory[:, :nbytes]


@pytest.mark.parametrize("gap", [0, 5])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_every_page_is_filled(count: int, gap: int) -> None:
    sources = [pages(count, 12, gap=gap), pages(count, 12)]
    made = pages(count, 26, gap=gap)
    relayout(UNIT, sources, [made])
    heads = [source.reshape(count, 2, 2, 3).transpose(0, 2, 1, 3) for source in sources]
    assert np.array_equal(made[:, :24].reshape(count, 4, 2, 3), np.concatenate(heads, axis=1))
    assert not made[:, 24:].any()


def test_what_lies_between_pages_is_left_alone() -> None:
    memory = np.full((3, 40), 9, np.uint8)
    relayout(UNIT, [pages(3, 12), pages(3, 12)], [memory[:, :26]])
    assert (memory[:, 26:] == 9).all()


@pytest.mark.parametrize(
    ("sources", "destination"),
    [
        ((pages(2, 11), pages(2, 12)), pages(2, 26)),
        ((pages(2, 12), pages(2, 12)), pages(2, 23)),
        ((pages(2, 12), pages(3, 12)), pages(2, 26)),
        ((pages(2, 12), pages(2, 24)[:, ::2]), pages(2, 26)),
        ((pages(2, 12), pages(2, 12).view(np.int8)), pages(2, 26)),
        ((pages(2, 12), pages(2, 12)[0]), pages(2, 26)),
    ],
)
def test_arrays_that_a_copy_would_leave_are_refused(
    sources: tuple[np.ndarray, ...], destination: np.ndarray
) -> None:
    with pytest.raises(ValueError, match="pages"):
        relayout(UNIT, list(sources), [destination])


def test_a_destination_that_is_read_only_is_refused() -> None:
    made = pages(2, 26)
    made.flags.writeable = False
    unit = replace(UNIT, padded=())
    with pytest.raises(ValueError, match="read-only"):
        relayout(unit, [pages(2, 12), pages(2, 12)], [made])


class Form(NamedTuple):
    """How the items of a page lie in objects.

    order: axes, outermost first. split: the axis that the objects divide. bounds: where it is cut.
    offset: bytes before an object's first item.
    """

    order: list[int]
    split: int
    bounds: list[int]
    offset: int

    def regions(self, shape: list[int], itemsize: int) -> list[Region]:
        found = []
        for first, end in pairwise(self.bounds):
            lengths = [end - first if n == self.split else long for n, long in enumerate(shape)]
            strides = {
                axis: itemsize * prod(lengths[inner] for inner in self.order[place + 1 :])
                for place, axis in enumerate(self.order)
            }
            extents = tuple(
                Extent(str(n), first if n == self.split else 0, lengths[n], strides[n])
                for n in range(len(shape))
            )
            found.append(Region((), extents, itemsize, self.offset))
        return found

    def cut(self, content: np.ndarray) -> list[np.ndarray]:
        """Return [pages, bytes] of each object. content: [pages, *shape, bytes of an item]."""
        parts = np.split(content, self.bounds[1:-1], axis=1 + self.split)
        axes = [0, *(1 + axis for axis in self.order), content.ndim - 1]
        return [part.transpose(axes).reshape(len(content), -1) for part in parts]


@st.composite
def forms(draw: st.DrawFn, shape: list[int]) -> Form:
    split = draw(st.integers(0, len(shape) - 1))
    cuts = draw(st.sets(st.integers(0, shape[split]), max_size=3)) | {0, shape[split]}
    order = draw(st.permutations(range(len(shape))))
    return Form(order, split, sorted(cuts), draw(st.integers(0, 70)))


def memory_of(count: int, nbytes: int, gap: int, start: int) -> np.ndarray:
    """Return memory [count, nbytes + gap], `start` bytes behind a cache line's begin."""
    memory = np.full(count * (nbytes + gap) + 128, 9, np.uint8)
    start += -memory.ctypes.data % 64
    return memory[start : start + count * (nbytes + gap)].reshape(count, nbytes + gap)


@pytest.mark.slow
@examples(200)
@given(st.data())
def test_any_order_becomes_any_other(data: st.DataObject) -> None:
    """Items of all sizes, at addresses of all alignments, with nothing written beside them."""
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    itemsize = data.draw(st.one_of(st.integers(1, 300), st.sampled_from([64, 128, 192, 256])))
    count = data.draw(st.integers(1, 3))
    one, two = data.draw(forms(shape)), data.draw(forms(shape))
    content = np.random.default_rng(1).integers(0, 256, (count, *shape, itemsize), dtype=np.uint8)
    gap, start = data.draw(st.sampled_from([0, 1, 13, 64])), data.draw(st.sampled_from([0, 1, 16]))

    sources = []
    for part in one.cut(content):
        memory = memory_of(count, one.offset + part.shape[1], gap, start)
        memory[:, one.offset : one.offset + part.shape[1]] = part
        sources.append(memory[:, : one.offset + part.shape[1]])
    wanted = two.cut(content)
    memories = [memory_of(count, two.offset + part.shape[1], gap, start) for part in wanted]
    found = (
        overlap(source, destination, copy_from=n, copy_to=m)
        for (n, source), (m, destination) in product(
            enumerate(one.regions(shape, itemsize)), enumerate(two.regions(shape, itemsize))
        )
    )
    unit = TransferUnit((), (), tuple(plan for plan in found if plan), False, False)
    ends = [two.offset + part.shape[1] for part in wanted]
    relayout(unit, sources, [each[:, :end] for each, end in zip(memories, ends, strict=True)])
    for memory, end, part in zip(memories, ends, wanted, strict=True):
        assert np.array_equal(memory[:, two.offset : end], part)
        assert (memory[:, : two.offset] == 9).all()
        assert (memory[:, end:] == 9).all()


def test_numba_is_loaded_when_much_was_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[TransferUnit] = []
    monkeypatch.setattr(kernel, "COMPILED_AFTER", 40)
    monkeypatch.setattr(kernel, "_work", kernel._Work())
    monkeypatch.setattr(kernel, "_compiled", lambda: lambda unit, *_: moved.append(unit))
    for _ in range(3):  # 24 bytes each
        relayout(UNIT, [pages(1, 12), pages(1, 12)], [pages(1, 26)])
    assert moved == [UNIT, UNIT]


def without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill pages as a process does that cannot compile."""
    monkeypatch.setattr(kernel, "COMPILED_AFTER", -1)
    monkeypatch.setattr(kernel, "_compiled", kernel._compiled.__wrapped__)
    monkeypatch.delitem(sys.modules, "hicachectl.kernels.relayout_numba", raising=False)
    assert kernel._compiled() is None
    test_every_page_is_filled(7, 5)


def test_numpy_does_all_where_numba_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    without_numba(monkeypatch)


@pytest.mark.slow
def test_numpy_does_all_where_numba_may_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.config.DISABLE_JIT", 1)
    without_numba(monkeypatch)
