"""Tests of backends.base: take_rows returns what Table.take does."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.backends.base import take_rows


@given(st.lists(st.integers(0, 3), max_size=20), st.data())
def test_rows_come_in_the_order_asked_for_and_as_often(
    lengths: list[int], data: st.DataObject
) -> None:
    count = sum(lengths)
    ends = np.cumsum(lengths).tolist()
    chunks = [list(range(end - length, end)) for end, length in zip(ends, lengths, strict=True)]
    column = pa.chunked_array(chunks, pa.int64())
    rows = data.draw(st.lists(st.integers(0, count - 1), max_size=30)) if count else []
    taken = take_rows(pa.table({"n": column}), np.array(rows, dtype=np.int64))
    assert taken.column("n").to_pylist() == rows
    assert taken.schema == pa.schema([("n", pa.int64())])
