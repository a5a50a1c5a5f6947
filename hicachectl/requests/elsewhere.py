"""Find out whether another deployment has the missing pages, or the hashing is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.formats.errors import FormatError
from hicachectl.formats.releases import since
from hicachectl.pages.deployments import UNRESOLVED, Deployment
from hicachectl.pages.naming import (
    NAMELESS,
    DeploymentDocument,
    deployment_document,
    deployment_text,
    place_text,
)
from hicachectl.requests.chains import Hashing, hex_pages
from hicachectl.text.units import counted

if TYPE_CHECKING:
    from hicachectl.backends.base import Store
    from hicachectl.formats.arrays import IntArray
    from hicachectl.pages.inventory import Inventory
    from hicachectl.requests.chains import Requests
    from hicachectl.requests.hits import Hits


_SHOWN = 4


class ElsewhereRow(TypedDict):
    """Row for another deployment that has requested pages."""

    place: str
    pages: int
    deployment: DeploymentDocument


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Requested pages that another deployment has, but that the measured deployment cannot restore.

    place: difference from the measured deployment, such as "tp 4".
    pages: indices into the page names of the hits, ascending.
    """

    deployment: Deployment
    place: str
    pages: IntArray

    @property
    def row(self) -> ElsewhereRow:
        """Row for the document."""
        return {
            "place": self.place,
            "pages": len(self.pages),
            "deployment": deployment_document(self.deployment),
        }


def find_elsewhere(inventory: Inventory, hits: Hits) -> list[Elsewhere]:
    """Return the other deployments with pages that the measured deployment cannot restore.

    Only pages in the inventory are found. An inventory from lookups has only the keys that were
    looked up; any other inventory has the whole store. The deployment with most pages comes first.
    """
    own = hits.deployment
    if own is None:
        return []
    lacking = np.flatnonzero(hits.lacking)
    ours = {spec.affix for spec in own.specs}
    table = inventory.table
    others = [
        deployment if spec is not None and spec.anchor and spec.affix not in ours else UNRESOLVED
        for deployment, spec in zip(table.deployment_ids, table.specs, strict=True)
    ]
    of_objects = inventory.by_affix(others, UNRESOLVED)
    chosen = of_objects != UNRESOLVED
    if not chosen.any() or not len(lacking):
        return []
    # The first 64 bits of a hash are enough to tell the pages of a store apart.
    words = pa.array(inventory.page_words(chosen, 0))
    wanted = (
        np.ascontiguousarray(hits.chains.names[lacking, :8]).view(">u8").ravel().astype(np.uint64)
    )
    at = pc.index_in(words, value_set=pa.array(wanted)).fill_null(-1).to_numpy()
    codes = of_objects[chosen][at >= 0] * len(lacking) + at[at >= 0]
    codes.sort()
    codes = codes[np.diff(codes, prepend=-1) != 0]
    numbers, starts = np.unique(codes // len(lacking), return_index=True)
    found = []
    for number, some in zip(numbers.tolist(), np.split(codes, starts[1:]), strict=False):
        deployment = table.deployments[number]
        pages = lacking[some % len(lacking)]
        found.append(Elsewhere(deployment, place_text(deployment, own), pages))
    return sorted(found, key=lambda each: (-len(each.pages), each.place))


def miss_remarks(
    store: Store,
    inventory: Inventory,
    hits: Hits,
    elsewhere: list[Elsewhere],
) -> list[str]:
    """Return a remark if another deployment has the missing pages, or if the hashing seems wrong.

    elsewhere: result of `find_elsewhere`.
    """
    if hits.deployment is None:
        return []
    if elsewhere:
        return [_elsewhere_remark(store.url, hits.deployment, elsewhere)]
    if hits.found:
        return []
    return list(filter(None, [suspect_hashing(store.url, inventory, hits.chains)]))


def _elsewhere_remark(url: str, own: Deployment, found: list[Elsewhere]) -> str:
    places = [f"{one.place} ({counted(len(one.pages), 'page')})" for one in found]
    more = f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
    nameless = any(NAMELESS in one.place for one in found)
    why = f"on Mooncake, SGLang before 0.5.17 writes {NAMELESS}; state that release in the profile"
    old = f"; {why}" if nameless else ""
    return (
        f"{url}: servers of {deployment_text(deployment_document(own))} cannot restore requested "
        f"pages that other servers wrote: {', '.join(places[:_SHOWN])}{more}; give the profile of "
        "the other servers or, if the weights are the same, convert the pages with hicachectl "
        f"migrate{old}"
    )


_PAGE_SIZES = tuple(1 << power for power in range(11))


def suspect_hashing(url: str, inventory: Inventory, chains: Requests) -> str:
    """Return a remark if the store has pages, but no page of any chain; else "".

    Wrong hashing is the likely cause. So hash the first requests with the usual page sizes, over
    tokens and over token pairs, and with and without any extra_key and cache_salt. Then look for
    the resulting pages.
    inventory: all objects of the store.
    """
    hashing = chains.hashing
    names = chains.within_reach().page_names
    if not len(names) or inventory.is_foreign.all() or len(_present(inventory, names)):
        return ""
    found = f"{url}: has pages, but none of the {counted(len(names), 'requested page')}"
    if hashing is None or not chains.sample:
        return f"{found}; check that the page hashes are of this store's model and page size"
    used = f"{found}, hashed with {_hashing_text(hashing)}"
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
        f"{used}; with {_hashing_text(other)}, the store has pages of {requests}; "
        f"{_remedy(hashing, other)}"
    )


def _hashing_text(hashing: Hashing) -> str:
    """Return a hashing as text, with the option that states it."""
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
    """Return the hashing that finds pages of the most sample requests, and how many these are.

    Return None if no hashing finds any page.
    """
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
    """Return the pages of each request of the sample; empty if their tokens cannot be hashed."""
    try:
        return [hex_pages(hashing.hashes(request)) for request in chains.sample]
    except FormatError:  # a token of several words has no hash over token pairs
        return []


def _present(inventory: Inventory, names: pa.StringArray) -> pa.StringArray:
    """Return the distinct pages of `names` that the store has."""
    pages = inventory.pages()
    return pc.unique(pages.filter(pc.is_in(pages, value_set=names.cast(pages.type))))
