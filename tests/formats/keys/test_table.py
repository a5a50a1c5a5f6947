"""Splitting a column of keys equals splitting each key alone."""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.formats.keys import table
from hicachectl.formats.keys.table import FOREIGN, KeySplitter, page_starts, page_words

HASH = "0123456789abcdef" * 4
_FRAGMENTS = st.sampled_from(
    [HASH, HASH[:63], HASH + "a", "_m_0_2.bin", ".indexer_m.bin", "tag_", "0:kv:", "\n", "é", ""]
)
_KEYS = st.one_of(
    st.lists(_FRAGMENTS, max_size=3).map(lambda parts: "".join(parts).encode()),
    st.binary(max_size=80),
)


def split_one(key: bytes) -> tuple[str, tuple[str, str]] | None:
    """Return the page and affix of one key, with plain string functions."""
    runs = list(re.finditer(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])", key))
    if not runs:
        return None
    run = runs[0] if runs[0].start() == 0 else runs[-1]
    try:
        return run[0].decode(), (key[: run.start()].decode(), key[run.end() :].decode())
    except UnicodeDecodeError:
        return None


@pytest.mark.slow
@pytest.mark.parametrize("likenesses", [0, 1, 32])
@given(batches=st.lists(st.lists(_KEYS, max_size=20), max_size=3))
def test_tables_split_like_single_keys(likenesses: int, batches: list[list[bytes]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "_LIKENESSES", likenesses)  # none: only the regular expression is used
        _check(batches)


def _check(batches: list[list[bytes]]) -> None:
    splitter = KeySplitter()
    for keys in batches:
        pages, ids = splitter.split(pa.array(keys, pa.binary()))
        found = [
            None if number == FOREIGN else (page, splitter.affixes[number])
            for page, number in zip(pages.to_pylist(), ids.tolist(), strict=True)
        ]
        assert found == [split_one(key) for key in keys]
        assert all(
            (page is None) == (number == FOREIGN)
            for page, number in zip(pages.to_pylist(), ids.tolist(), strict=True)
        )
    assert len(set(splitter.affixes)) == len(splitter.affixes)


@pytest.mark.parametrize("place", [0, 63])
def test_a_page_hash_has_hex_digits_in_lower_case_alone(place: int) -> None:
    """Replace one digit by every byte; other bytes equal those of the first key."""
    good = f"{HASH}_m_0_2.bin".encode()
    _check([[good, *(good[:place] + bytes([b]) + good[place + 1 :] for b in range(256))]])


def test_a_slice_of_a_column_and_nulls_split_like_a_column_of_their_own() -> None:
    keys = pa.array([b"x", HASH.encode(), None, f"tag_{HASH}-k".encode()], pa.binary())
    splitter = KeySplitter()
    pages, ids = splitter.split(keys.slice(1))
    assert pages.to_pylist() == [HASH, None, HASH]
    assert ids.tolist() == [0, FOREIGN, 1]
    assert splitter.affixes == [("", ""), ("tag_", "-k")]


@given(st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=9))
def test_the_words_of_a_page_are_the_numbers_that_its_digits_spell(hashes: list[bytes]) -> None:
    keys = pa.array([f"0:kv:{page.hex()}-k".encode() for page in hashes], pa.binary())
    splitter = KeySplitter()
    rows = np.arange(len(hashes))
    ids = splitter.identify(keys)
    starts = page_starts(splitter.affixes)[ids]
    words = [page_words(keys, rows, starts, word) for word in range(4)]
    spelt = [b"".join(int(word).to_bytes(8) for word in page) for page in np.stack(words).T]
    assert spelt == hashes
