"""Suspect the hashing of requests if the store has pages, but none of the requests."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.formats.errors import FormatError
from hicachectl.formats.releases import since
from hicachectl.requests.chains import Hashing, hex_pages
from hicachectl.text.units import counted

if TYPE_CHECKING:
    from hicachectl.pages.inventory import Inventory
    from hicachectl.requests.chains import Requests

_PAGE_SIZES = tuple(1 << power for power in range(11))


def suspect_hashing(url: str, inventory: Inventory, chains: Requests) -> str:
    """Return why a store has pages, but none of any chain, as far as that shows; else "".

    inventory: all objects of the store. Tries the usual page sizes, both hash units, and hashes
    with and without a namespace, on the first requests.
    """
    hashing = chains.hashing
    names = chains.within_reach().page_names
    if not len(names) or inventory.is_foreign.all() or len(_present(inventory, names)):
        return ""
    found = f"{url}: has pages, but none of the {counted(len(names), 'requested page')}"
    if hashing is None or not chains.sample:
        return f"{found}; check that the page hashes are of this store's model and page size"
    used = f"{found}, hashed with {_described(hashing)}"
    likely = _likely(inventory, chains, hashing)
    if likely is None:
        return (
            f"{used}; no other usual page size finds pages of the first requests, so compare the "
            "model, the tokenizer, extra_key and cache_salt with those of the servers"
        )
    other, matching = likely
    count = len(chains.sample)
    requests = "the first request" if count == 1 else f"{matching} of the first {count} requests"
    return (
        f"{used}; with {_described(other)}, pages of {requests} are there: "
        f"{_remedy(hashing, other)}"
    )


def _described(hashing: Hashing) -> str:
    """Return a hashing as a text, with the option that states it."""
    words = f"--page-size {hashing.page_size}" + (" over token pairs" if hashing.bigram else "")
    return words if hashing.seeds else f"{words}, without extra_key and cache_salt"


def _remedy(used: Hashing, other: Hashing) -> str:
    options, fields = [], []
    if used.page_size != other.page_size:
        options.append(f"--page-size {other.page_size}")
        fields.append("page_size")
    if used.bigram != other.bigram:
        options.append(
            "--speculative-algorithm EAGLE" if other.bigram else "no --speculative-algorithm"
        )
        fields.append("hash_unit")
    if used.seeds != other.seeds:
        before = "not before" if other.seeds else "before"
        options.append(f"--sglang with the servers' release, if it is {before} {since('seeds')}")
        fields.append("sglang")
    return f"give {' and '.join(options)}, or correct {' and '.join(fields)} in the profile"


def _likely(inventory: Inventory, chains: Requests, used: Hashing) -> tuple[Hashing, int] | None:
    """Return the hashing that finds pages of most of the first requests, and of how many."""
    named = any(request.extra_key or request.cache_salt for request in chains.sample)
    seedings = (used.seeds, not used.seeds) if named else (used.seeds,)
    tried: list[tuple[Hashing, list[pa.StringArray]]] = []
    units = (used.bigram, not used.bigram)
    for bigram, seeds, page_size in product(units, seedings, _PAGE_SIZES):
        if (hashing := Hashing(page_size, bigram, seeds)) != used:
            tried.append((hashing, _pages(chains, hashing)))
    every = [pages for _, of_requests in tried for pages in of_requests]
    present = _present(inventory, pa.concat_arrays(every)) if every else pa.array([], pa.string())
    counts = [
        sum(bool(pc.any(pc.is_in(pages, value_set=present)).as_py()) for pages in of_requests)
        for _, of_requests in tried
    ]
    best = int(np.argmax(counts)) if counts else 0
    return (tried[best][0], counts[best]) if counts and counts[best] else None


def _pages(chains: Requests, hashing: Hashing) -> list[pa.StringArray]:
    """Return the pages of each request of the sample; none for tokens that cannot be hashed."""
    try:
        return [hex_pages(hashing.hashes(request)) for request in chains.sample]
    except FormatError:  # pairs of tokens of several words
        return []


def _present(inventory: Inventory, names: pa.StringArray) -> pa.StringArray:
    """Return which pages the store has, each once."""
    pages = inventory.pages()
    return pc.unique(pages.filter(pc.is_in(pages, value_set=names.cast(pages.type))))
