"""Sums of sizes: exact, or at their bound if a store claims more."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.pages.census import MOST_BYTES, byte_sum, byte_sums, column_sum, column_sums

EXACT = 2**53
SIZES = st.one_of(
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**40),
    st.sampled_from([0, 2**32 - 1, 2**61, 2**62 - 1, 2**62, 2**63 - 1]),
)


@given(st.lists(st.tuples(SIZES, st.integers(0, 2)), max_size=40))
def test_sums_are_those_of_python_up_to_their_bound(pairs: list[tuple[int, int]]) -> None:
    sizes = np.array([size for size, _ in pairs], dtype=np.int64)
    owners = np.array([owner for _, owner in pairs], dtype=np.int64)
    sums = [
        min(sum(size for size, owner in pairs if owner == number), MOST_BYTES)
        for number in range(4)
    ]
    for computed, exact in (
        *zip(byte_sums(sizes, owners, 4).tolist(), sums, strict=True),
        (byte_sum(sizes), min(sum(sizes.tolist()), MOST_BYTES)),
    ):
        assert computed == (exact if exact < EXACT else pytest.approx(exact))
        assert 0 <= computed <= MOST_BYTES


def test_a_sum_with_an_unknown_size_is_unknown() -> None:
    sizes = pa.chunked_array([[2**62, None], [5, 2**62]])
    assert column_sum(sizes) is None
    assert column_sums(sizes, np.array([0, 1, 1, 0]), 3).to_pylist() == [MOST_BYTES, None, 0]
    assert column_sum(pa.array([], pa.int64())) == 0
