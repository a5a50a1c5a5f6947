"""Splitting columns of keys equals splitting each key by itself."""

from __future__ import annotations

import re

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.formats.keys.table import FOREIGN, KeySplitter

HASH = "0123456789abcdef" * 4
_FRAGMENTS = st.sampled_from(
    [HASH, HASH[:63], HASH + "a", "_m_0_2.bin", ".indexer_m.bin", "tag_", "0:kv:", "\n", "é", ""]
)
_KEYS = st.one_of(
    st.lists(_FRAGMENTS, max_size=3).map(lambda parts: "".join(parts).encode()),
    st.binary(max_size=80),
)


def split_one(key: bytes) -> tuple[str, tuple[str, str]] | None:
    """What the table must say of a key: its page and affix, by the obvious means."""
    runs = list(re.finditer(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])", key))
    if not runs:
        return None
    run = runs[0] if runs[0].start() == 0 else runs[-1]
    try:
        return run[0].decode(), (key[: run.start()].decode(), key[run.end() :].decode())
    except UnicodeDecodeError:
        return None


@given(st.lists(st.lists(_KEYS, max_size=20), max_size=3))
def test_tables_split_like_single_keys(batches: list[list[bytes]]) -> None:
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
