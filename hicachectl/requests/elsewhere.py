"""Explain missing pages: other deployments have them, or the requests were hashed wrongly."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.formats.keys.base import codec_for
from hicachectl.formats.keys.table import join_keys
from hicachectl.formats.spec import ObjectSpec
from hicachectl.pages.deployments import UNRESOLVED, Deployment
from hicachectl.pages.naming import deployment_document, deployment_text, place_text
from hicachectl.requests.chains import raw_pages
from hicachectl.requests.suspicion import suspect_hashing
from hicachectl.text.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from hicachectl.backends.base import Store
    from hicachectl.formats.keys.base import Affix, KeyCodec
    from hicachectl.formats.objects import Coordinate, Shard
    from hicachectl.pages.inventory import Inventory
    from hicachectl.requests.chains import Hashing
    from hicachectl.requests.hits import Hits

    IntArray = npt.NDArray[np.int64]

# Topologies to look for if the store was not listed.
_TP_SIZES = (1, 2, 4, 8, 16, 32, 64)
_PP_SIZES = (2, 4, 8)
_FIRST_PAGES = 64  # looked up in each of these
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


def find_elsewhere(store: Store, inventory: Inventory, hits: Hits) -> list[Elsewhere]:
    """Return where the store has pages that the measured deployment cannot restore, most first.

    If only the keys of the deployment were looked up, looks for usual TP and PP sizes, too. Raises
    StoreUnavailable.
    """
    if hits.deployment is None:
        return []
    lacking = np.flatnonzero(hits.lacking)
    found = [*_listed(inventory, hits, lacking)]
    if not found and inventory.partial and len(lacking):
        found = [*_looked_up(store, hits, lacking)]
    return sorted(found, key=lambda one: (-len(one.pages), one.place))


def miss_remarks(
    store: Store,
    inventory: Inventory,
    hits: Hits,
    elsewhere: list[Elsewhere],
    hashing: Hashing | None,
) -> list[str]:
    """Return why pages may be missing: they are elsewhere, or the requests were hashed wrongly.

    elsewhere: from `find_elsewhere`. hashing: of the chains; None if unknown.
    """
    if hits.deployment is None:
        return []
    if elsewhere:
        return [_elsewhere_remark(store.url, hits.deployment, elsewhere)]
    if hits.found:
        return []
    return list(filter(None, [suspect_hashing(store.url, inventory, hits.chains, hashing)]))


def _elsewhere_remark(url: str, own: Deployment, found: list[Elsewhere]) -> str:
    places = [f"{one.place} ({counted(len(one.pages), 'page')})" for one in found]
    more = f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
    return (
        f"{url}: requested pages that servers of {deployment_text(deployment_document(own))} "
        f"cannot restore exist at {', '.join(places[:_SHOWN])}{more}; give the profile of these "
        "servers or, if the weights are the same, convert the pages with hicachectl migrate"
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
    raw = raw_pages(hits.page_names.take(pa.array(lacking)))
    wanted = np.ascontiguousarray(raw[:, :8]).view(">u8").ravel().astype(np.uint64)
    at = pc.index_in(words, value_set=pa.array(wanted)).fill_null(-1).to_numpy()
    codes = of_objects[chosen][at >= 0] * len(lacking) + at[at >= 0]
    codes.sort()
    codes = codes[np.diff(codes, prepend=-1) != 0]
    numbers, starts = np.unique(codes // len(lacking), return_index=True)
    for number, some in zip(numbers.tolist(), np.split(codes, starts[1:]), strict=False):
        deployment = table.deployments[number]
        yield Elsewhere(deployment, place_text(deployment, own), lacking[some % len(lacking)])


def _looked_up(store: Store, hits: Hits, lacking: IntArray) -> Iterator[Elsewhere]:
    """Yield the deployments of usual sizes that have lacking pages."""
    own = hits.deployment
    assert own is not None
    some = lacking[_spread(len(lacking))]
    for affix, coordinate in _other_sizes(own, codec_for(store.grammar)).items():
        if not _exist(store, hits, affix, some).any():
            continue
        pages = lacking[_exist(store, hits, affix, lacking)]
        spec = ObjectSpec(affix=affix, coordinate=coordinate, anchor=True)
        deployment = Deployment(own.model, own.tag, None, (spec,))
        yield Elsewhere(deployment, place_text(deployment, own), pages)


def _spread(count: int) -> IntArray:
    """Return up to _FIRST_PAGES indices, spread over `count`."""
    return np.unique(np.linspace(0, count - 1, min(count, _FIRST_PAGES)).astype(np.int64))


def _exist(store: Store, hits: Hits, affix: Affix, pages: IntArray) -> npt.NDArray[np.bool_]:
    """Return which pages have an object of an affix: [pages]."""
    names = hits.page_names.take(pa.array(pages)).cast(pa.string())
    keys = join_keys([affix], pa.repeat(0, len(names)), names)
    return store.exists(pa.table({"key": keys}))


def _other_sizes(own: Deployment, codec: KeyCodec) -> dict[Affix, Coordinate]:
    """Return anchors of deployments of other TP and PP sizes, by affix."""
    coordinate = own.specs[0].coordinate
    shard = coordinate.shard
    if shard.layers is not None or shard.heads is not None:
        return {}
    states_tp = _distinct(codec, coordinate, [replace(shard, tp_rank=0, tp_size=n) for n in (2, 4)])
    states_pp = _distinct(codec, coordinate, [replace(shard, pp_rank=0, pp_size=n) for n in (2, 4)])
    shards = [replace(shard, pp_rank=None, pp_size=None)]
    shards += [replace(shard, pp_rank=0, pp_size=size) for size in _PP_SIZES]
    if shard.tp_rank is not None:
        shards = [replace(one, tp_rank=0, tp_size=size) for one in shards for size in _TP_SIZES]
        if not states_tp:
            ranks = [spec.coordinate.shard.tp_rank or 0 for spec in own.specs]
            shards.append(replace(shard, tp_rank=1 + max(ranks)))
    others: dict[Affix, Coordinate] = {}
    for one in shards:
        affix = codec.affix(replace(coordinate, shard=one))
        if all(affix != spec.affix for spec in own.specs):
            tp_size, pp_size = (
                one.tp_size if states_tp else None,
                one.pp_size if states_pp else None,
            )
            stated = replace(one, tp_size=tp_size, pp_size=pp_size)
            others[affix] = replace(coordinate, shard=stated)
    return others


def _distinct(codec: KeyCodec, coordinate: Coordinate, shards: list[Shard]) -> bool:
    """Return whether the shards have distinct keys."""
    return len({codec.affix(replace(coordinate, shard=shard)) for shard in shards}) == len(shards)
