"""Carrying out transfer plans: on pages that lie apart, and only inside the arrays."""

from __future__ import annotations

import numpy as np
import pytest

from hicachectl.formats.copyplan import Axis, CopyPlan
from hicachectl.formats.transfer import TransferUnit
from hicachectl.kernels.relayout import relayout

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
