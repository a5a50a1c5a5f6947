"""The rows that `hits` prints, as an Arrow table, and the remarks beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.formats.keys.columns import RANK_COLUMNS, SPAN_COLUMNS, shard_fields
from hicachectl.formats.keys.table import join_keys
from hicachectl.formats.kinds.pool import pool_name
from hicachectl.formats.objects import ANCHOR
from hicachectl.formats.restorable import fetched
from hicachectl.formats.wording import OTHER_BYTES, PAGES_COMPARED
from hicachectl.pages.ambiguity import ambiguity_remark
from hicachectl.pages.listing import key_text
from hicachectl.pages.tally import object_counts
from hicachectl.requests.hits import CLEARED, FOREIGN, MISFIT, UNTRAILED
from hicachectl.text.jsontext import WRITE_NULL
from hicachectl.text.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicachectl.formats.arrays import BoolArray
    from hicachectl.pages.inventory import Inventory
    from hicachectl.profiles.identities import Expected
    from hicachectl.requests.elsewhere import Elsewhere
    from hicachectl.requests.hits import Hits

BELOW_THRESHOLD = "below_threshold"  # a reason, as SGLang's metrics name it

_SHARD = pa.struct(
    [
        *((name, pa.int32()) for name in RANK_COLUMNS),
        *((name, pa.string()) for name in SPAN_COLUMNS),
    ]
)
_STOP_FIELDS = [
    pa.field(name, kind, metadata=WRITE_NULL)
    for name, kind in (
        ("page", pa.string()),
        ("pool", pa.string()),
        ("part", pa.string()),
        ("shard", _SHARD),
        ("key", pa.string()),
        ("exists_at", pa.string()),
        ("reason", pa.string()),
    )
]


def hit_rows(
    hits: Hits, page_size: int | None, threshold: int, elsewhere: Sequence[Elsewhere] = ()
) -> pa.Table:
    """Return a row per chain, in the columns of `hits`.

    page_size: None if unknown.
    threshold: prefetch threshold of the servers, in tokens.
    elsewhere: other deployments with requested pages; of several that have a page, the first is
        named.
    """
    tokens = hits.chains.tokens
    usable = hits.usable_pages * (page_size or 0)
    served = fetched(hits.usable_pages, page_size or 0, threshold) * (page_size or 0)
    unknown = np.full(len(usable), page_size is None)
    return pa.table(
        {
            "chain": pa.array(np.arange(len(hits.chains))),
            "tokens": pa.array(tokens, mask=tokens < 0),
            "kv_pages": pa.array(hits.kv_pages),
            "usable_pages": pa.array(hits.usable_pages),
            "usable_tokens": pa.array(usable, mask=unknown),
            "served_tokens": pa.array(served, mask=unknown),
            "stopped_by": _stopped_by(hits, served < usable, elsewhere),
        }
    )


def hit_remarks(hits: Hits, inventory: Inventory, expected: Expected) -> Iterator[str]:
    """Yield what the rows do not show: what was not compared, and faults that stop chains.

    expected: identities of the servers' objects in the store.
    """
    if expected.unknown:
        yield f"Objects of every identity count: {expected.unknown}"
    if hits.deployment is None:
        return  # the store has no pages
    if hits.deployment.profile is None:
        yield f"No --profile: {PAGES_COMPARED}"
        trailing = {needed.spec.pool for needed in hits.needs if needed.spec.trailing}
        for pool in sorted(pool for pool in trailing if not pool_name(pool).states):
            yield (
                f"{pool}: the number of pages that servers need at the end of a prefix is unknown; "
                "1 is assumed"
            )
    ambiguous = ambiguity_remark(inventory.table, object_counts(inventory))
    if ambiguous:
        yield f"Ambiguous keys were ignored: {ambiguous}"
    for value, what in (
        (MISFIT, "of the wrong size stop {}; run hicachectl verify"),
        (FOREIGN, f"of {OTHER_BYTES} stop {{}}; run hicachectl verify"),
        (UNTRAILED, 'without a trailer stop {}; servers with "unstamped": "read" use them'),
        (CLEARED, "from before a server cleared the store stop {}"),
    ):
        if count := hits.faults.get(value):
            yield f"Objects {what.format(counted(count, 'chain'))}"


def _stopped_by(hits: Hits, below: BoolArray, elsewhere: Sequence[Elsewhere]) -> pa.StructArray:
    """Return what stops each chain.

    below: [chains] whether usable pages are not fetched, since they are below the threshold.
    """
    stopped = hits.stop_pages >= 0
    positions = (hits.chains.offsets[:-1] + hits.stop_pages)[stopped]
    spread = np.full(len(stopped), -1, dtype=np.int64)
    spread[stopped] = hits.page_of[positions]
    numbers = pa.array(spread, mask=~stopped)
    pages = hits.page_names.take(numbers).cast(pa.string())
    which = pa.array(hits.stop_specs, mask=hits.stop_specs < 0)
    specs = () if hits.deployment is None else hits.deployment.specs
    coordinates = [spec.coordinate for spec in specs]
    keys = join_keys([spec.affix for spec in specs], which, pages)
    pools = pa.array([c.pool for c in coordinates], pa.string()).take(which)
    if hits.deployment is None:  # the first missing object is kv
        pools = pc.if_else(pa.array(stopped), ANCHOR, pools)
    parts = pa.array([c.part for c in coordinates], pa.string()).take(which)
    shards = pa.array([shard_fields(c.shard) for c in coordinates], _SHARD).take(which)
    return pa.StructArray.from_arrays(
        [
            pages,
            pools,
            parts,
            shards,
            key_text(keys),
            _places(hits, elsewhere).take(numbers),
            pc.if_else(pa.array(below), BELOW_THRESHOLD, pa.scalar(None, pa.string())),
        ],
        fields=_STOP_FIELDS,
        mask=pa.array(~stopped & ~below),
    )


def _places(hits: Hits, elsewhere: Sequence[Elsewhere]) -> pa.StringArray:
    """Return where else each page exists, or null: [page_names]."""
    numbers = np.full(len(hits.page_names), -1, dtype=np.int64)
    for number in reversed(range(len(elsewhere))):
        numbers[elsewhere[number].pages] = number
    texts = pa.array([one.place for one in elsewhere], pa.string())
    return texts.take(pa.array(numbers, mask=numbers < 0))
