"""Pages are numbered in the order of their hashes, even of similar ones."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.formats.keys import grammar_of
from hicachectl.formats.keys.table import KeySplitter
from hicachectl.pages.deployments import assign_affixes
from hicachectl.pages.inventory import Inventory
from tests.speed import examples

# Hashes that begin alike, unlike those of real stores.
PAGES = st.one_of(
    st.integers(0, 3).map("{:064x}".format),
    st.integers(0, 3).map(lambda n: f"{n:016x}{n % 2:016x}{n:032x}"),
    st.binary(min_size=32, max_size=32).map(bytes.hex),
)


def inventory_of(chunks: list[list[str]]) -> Inventory:
    named = ([f"{page}_m_0_1.bin".encode() for page in chunk] for chunk in chunks)
    keys = [pa.array(names, pa.binary()) for names in named]
    splitter = KeySplitter()
    ids = [np.empty(0, dtype=np.int32), *(splitter.identify(chunk) for chunk in keys)]
    objects = pa.table({"key": pa.chunked_array(keys, pa.binary())})
    table = assign_affixes(splitter.affixes, grammar_of("file"), None)
    return Inventory(objects, np.concatenate(ids), table)


@examples(50)
@given(st.lists(st.lists(PAGES, max_size=9), max_size=3), st.integers(0, (1 << 27) - 1))
def test_ranks_are_the_places_among_the_sorted_distinct_pages(
    chunks: list[list[str]], bits: int
) -> None:
    inventory = inventory_of(chunks)
    pages = [page for chunk in chunks for page in chunk]
    chosen = np.array([bits >> n & 1 for n in range(len(pages))], dtype=np.bool_)
    wanted = [page for page, taken in zip(pages, chosen, strict=True) if taken]
    places = {page: rank for rank, page in enumerate(sorted(set(wanted)))}
    ranks, distinct = inventory.page_ranks(chosen)
    assert ranks.tolist() == [places[page] for page in wanted]
    assert distinct == len(places)


@pytest.mark.slow
@examples(50)
@given(st.lists(st.lists(PAGES, max_size=9), max_size=3))
def test_pages_are_cut_out_of_keys_for_all_rows_and_for_some(chunks: list[list[str]]) -> None:
    inventory = inventory_of(chunks)
    pages = [page for chunk in chunks for page in chunk]
    assert inventory.pages().to_pylist() == pages
    rows = np.arange(len(pages))[::-2].copy()
    assert inventory.pages(rows).to_pylist() == pages[::-2]
