"""Tests of backends.hf3fs.keys: a repeated key is always found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.backends.hf3fs import keys as hf3fs_keys
from hicachectl.backends.hf3fs.keys import repeated_key

if TYPE_CHECKING:
    import pytest

KEYS = st.one_of(st.binary(max_size=3), st.binary(min_size=120, max_size=300))


@given(st.lists(st.lists(KEYS, max_size=6), max_size=3), st.integers(0, 30))
def test_a_repeated_key_is_found_across_chunks(chunks: list[list[bytes]], again: int) -> None:
    keys = [key for chunk in chunks for key in chunk]
    if again < len(keys):
        chunks = [*chunks, [keys[again]]]
        keys.append(keys[again])
    found = repeated_key(pa.chunked_array(chunks, pa.binary()))
    repeated = {key for key in keys if keys.count(key) > 1}
    assert found in repeated if repeated else found is None


def test_keys_of_equal_hashes_are_compared_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf3fs_keys, "_FACTOR", np.uint64(0))
    assert repeated_key(pa.chunked_array([[b"a", b"b"], [b"c"]], pa.binary())) is None
    assert repeated_key(pa.chunked_array([[b"a", b"b"], [b"b"]], pa.binary())) == b"b"


def test_long_keys_that_differ_in_their_middle_alone_are_distinct() -> None:
    ends = b"x" * 200
    keys = pa.chunked_array([[ends + bytes([n]) + ends for n in range(20)]], pa.binary())
    assert repeated_key(keys) is None
