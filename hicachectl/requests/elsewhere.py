"""Explain missing pages: other deployments have them, or the requests were hashed wrongly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.pages.deployments import UNRESOLVED, Deployment
from hicachectl.pages.naming import NAMELESS, deployment_document, deployment_text, place_text
from hicachectl.requests.suspicion import suspect_hashing
from hicachectl.text.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.backends.base import Store
    from hicachectl.formats.arrays import IntArray
    from hicachectl.pages.inventory import Inventory
    from hicachectl.requests.hits import Hits


_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Requested pages that another deployment has, and the measured one cannot restore.

    place: seen from the measured deployment, such as "tp 4". pages: indices into the page names of
    the hits, ascending.
    """

    deployment: Deployment
    place: str
    pages: IntArray

    @property
    def document(self) -> dict[str, Any]:
        """The members of the JSON result."""
        return {
            "place": self.place,
            "pages": len(self.pages),
            "deployment": deployment_document(self.deployment),
        }


def find_elsewhere(inventory: Inventory, hits: Hits) -> list[Elsewhere]:
    """Return where the store has pages that the measured deployment cannot restore, most first.

    Only what is listed is found: all keys, unless some key of the deployment could be looked up.
    """
    if hits.deployment is None:
        return []
    found = _listed(inventory, hits, np.flatnonzero(hits.lacking))
    return sorted(found, key=lambda each: (-len(each.pages), each.place))


def miss_remarks(
    store: Store,
    inventory: Inventory,
    hits: Hits,
    elsewhere: list[Elsewhere],
) -> list[str]:
    """Return why pages may be missing: they are elsewhere, or the requests were hashed wrongly.

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
    why = f"; {NAMELESS} on Mooncake are those of SGLang before 0.5.17, which the profile states"
    old = why if nameless else ""
    return (
        f"{url}: requested pages that servers of {deployment_text(deployment_document(own))} "
        f"cannot restore exist at {', '.join(places[:_SHOWN])}{more}; give the profile of these "
        f"servers or, if the weights are the same, convert the pages with hicachectl migrate{old}"
    )


def _listed(inventory: Inventory, hits: Hits, lacking: IntArray) -> Iterator[Elsewhere]:
    """Yield the other deployments of an inventory that have lacking pages, by their anchors."""
    own = hits.deployment
    assert own is not None
    ours = {spec.affix for spec in own.specs}
    table = inventory.table
    others = [
        deployment if spec is not None and spec.anchor and spec.affix not in ours else UNRESOLVED
        for deployment, spec in zip(table.deployment_ids, table.specs, strict=True)
    ]
    of_objects = inventory.by_affix(others, UNRESOLVED)
    chosen = of_objects != UNRESOLVED
    if not chosen.any() or not len(lacking):
        return
    # 64 bits distinguish the pages of a store.
    words = pa.array(inventory.page_words(chosen, 0))
    wanted = (
        np.ascontiguousarray(hits.chains.names[lacking, :8]).view(">u8").ravel().astype(np.uint64)
    )
    at = pc.index_in(words, value_set=pa.array(wanted)).fill_null(-1).to_numpy()
    codes = of_objects[chosen][at >= 0] * len(lacking) + at[at >= 0]
    codes.sort()
    codes = codes[np.diff(codes, prepend=-1) != 0]
    numbers, starts = np.unique(codes // len(lacking), return_index=True)
    for number, some in zip(numbers.tolist(), np.split(codes, starts[1:]), strict=False):
        deployment = table.deployments[number]
        yield Elsewhere(deployment, place_text(deployment, own), lacking[some % len(lacking)])
