"""Rows of `hits`: one for each request, for each cause that stops requests, and for each group."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.formats.keys.columns import RANK_COLUMNS, SPAN_COLUMNS, shard_fields
from hicachectl.formats.keys.table import join_keys
from hicachectl.formats.objects import ANCHOR
from hicachectl.formats.restorable import fetched
from hicachectl.pages.group_table import ABSENT
from hicachectl.pages.listing import key_text
from hicachectl.requests.hits import CLEARED, FOREIGN, MISFIT, UNTRAILED
from hicachectl.text.jsontext import WRITE_NULL, schema_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicachectl.formats.arrays import IntArray
    from hicachectl.requests.elsewhere import Elsewhere
    from hicachectl.requests.grouping import Grouping
    from hicachectl.requests.hits import Hits


class ShardRow(TypedDict, total=False):
    """Coordinates of an object that its key shows."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    cp_size: int
    dcp_rank: int
    dcp_size: int
    layers: str
    heads: str


class StopRow(TypedDict):
    """Reason why servers fetch no more pages of a chain."""

    page: str | None
    pool: str | None
    part: str | None
    shard: ShardRow | None
    key: str | None
    exists_at: str | None
    reason: str | None
    fault: str | None


class ChainRow(TypedDict):
    """Row for a request in `hits`."""

    chain: int
    tokens: int | None
    kv_pages: int
    usable_pages: int
    usable_tokens: int | None
    served_tokens: int | None
    lost_pages: int
    unreachable_pages: int
    stopped_by: StopRow | None


class CauseRow(TypedDict):
    """Row for a cause that stops requests, with sums over these requests."""

    reason: str | None
    fault: str | None
    pool: str | None
    part: str | None
    shard: ShardRow | None
    exists_at: str | None
    requests: int
    lost_pages: int
    lost_tokens: int | None
    unreachable_pages: int


class GroupRow(TypedDict):
    """Row for a group of requests, with their sums."""

    by: str
    group: str | None
    requests: int
    requested_tokens: int | None
    usable_tokens: int | None
    served_tokens: int | None
    usable_share: float | None
    unreachable_pages: int


BELOW_THRESHOLD = "below_threshold"  # a reason, named as in SGLang's metrics
BELOW_LOAD_BACK = "below_load_back"
"""Reason: servers fetch fewer than `LOAD_BACK_TOKENS` tokens, but compute these again."""

# Faults of the object that stops a chain.
_FAULTS = {
    ABSENT: "missing",
    MISFIT: "wrong_size",
    UNTRAILED: "no_trailer",
    FOREIGN: "other_bytes",
    CLEARED: "cleared",
}
_GROUPS = schema_of(GroupRow)

_SHARD = pa.struct(
    [
        *((name, pa.int32()) for name in RANK_COLUMNS),
        *((name, pa.string()) for name in SPAN_COLUMNS),
    ]
)
_STOP_FIELDS = [
    pa.field(name, _SHARD if name == "shard" else pa.string(), metadata=WRITE_NULL)
    for name in StopRow.__annotations__
]


def hit_rows(
    hits: Hits, page_size: int | None, threshold: int, elsewhere: Sequence[Elsewhere] = ()
) -> pa.Table:
    """Return a row for each chain, in the columns of a `ChainRow`.

    page_size: number of tokens of a page; None if unknown.
    threshold: prefetch threshold of the servers, in tokens.
    elsewhere: other deployments with requested pages. If several of them have a page, the row names
        the first.
    """
    tokens = hits.chains.tokens
    size = page_size or 0
    taken = fetched(hits.usable_pages, size, threshold, trailing=hits.trailing)
    usable, served = hits.usable_pages * size, taken * size
    # Without a page size, a threshold in tokens says nothing about pages.
    lost = hits.chains.reach - (hits.usable_pages if page_size is None else taken)
    unknown = np.full(len(usable), page_size is None)
    return pa.table(
        {
            "chain": pa.array(np.arange(len(hits.chains))),
            "tokens": pa.array(tokens, mask=tokens < 0),
            "kv_pages": pa.array(hits.kv_pages),
            "usable_pages": pa.array(hits.usable_pages),
            "usable_tokens": pa.array(usable, mask=unknown),
            "served_tokens": pa.array(served, mask=unknown),
            "lost_pages": pa.array(lost),
            "unreachable_pages": pa.array(hits.unreachable_pages),
            "stopped_by": _stopped_by(hits, _reasons(usable, served, threshold), elsewhere),
        }
    )


def cause_rows(hits: Hits, rows: pa.Table, page_size: int | None) -> pa.Table:
    """Return a `CauseRow` for each cause that stops requests, the most lost tokens first.

    rows: result of `hit_rows`.
    """
    stops = rows["stopped_by"].combine_chunks()
    stopped = np.flatnonzero(stops.is_valid().to_numpy(zero_copy_only=False))
    stops = stops.take(pa.array(stopped))
    code = np.zeros(len(stopped), np.int64)
    for column in (
        hits.stop_specs[stopped],
        hits.stop_faults[stopped],
        _codes(stops.field("reason")),
        _codes(stops.field("exists_at")),
    ):
        code = code * (column.max(initial=0) + 2) + column + 1
    _, firsts, causes = np.unique(code, return_index=True, return_inverse=True)
    count = len(firsts)
    lost_pages = rows["lost_pages"].to_numpy()
    lost = lost_pages
    if page_size is not None:
        lost = hits.chains.tokens_requested(page_size) - rows["served_tokens"].to_numpy()
    lost_sums = _sums(lost[stopped], causes, count)
    examples = stops.take(pa.array(firsts))
    found = pa.table(
        {
            **{
                name: examples.field(name)
                for name in ("reason", "fault", "pool", "part", "shard", "exists_at")
            },
            "requests": _sums(np.ones(len(stopped), np.int64), causes, count),
            "lost_pages": _sums(lost_pages[stopped], causes, count),
            "lost_tokens": pa.array(lost_sums, mask=np.full(count, page_size is None)),
            "unreachable_pages": _sums(
                rows["unreachable_pages"].to_numpy()[stopped], causes, count
            ),
        }
    )
    return found.take(pa.array(np.argsort(-lost_sums, kind="stable")))


def group_rows(grouping: Grouping, hits: Hits, rows: pa.Table, page_size: int | None) -> pa.Table:
    """Return a `GroupRow` for each group of requests, the largest first.

    rows: result of `hit_rows`.
    """
    unit = page_size or 1  # if the tokens of a page are unknown, shares count pages
    chains, count = hits.chains, len(grouping.names)
    requested = chains.reach if page_size is None else chains.tokens_requested(unit)
    requests = np.bincount(grouping.ids, minlength=count)
    served = pc.fill_null(rows["served_tokens"], 0).to_numpy()
    asked, usable, taken, unreachable = (
        _sums(values, grouping.ids, count)
        for values in (
            requested,
            hits.usable_pages * unit,
            served,
            rows["unreachable_pages"].to_numpy(),
        )
    )
    unknown = np.full(count, page_size is None)
    columns = {
        "by": pa.repeat(grouping.by, count),
        "group": pa.array(grouping.names, pa.string()),
        "requests": pa.array(requests),
        "requested_tokens": pa.array(asked, mask=unknown),
        "usable_tokens": pa.array(usable, mask=unknown),
        "served_tokens": pa.array(taken, mask=unknown),
        "usable_share": pa.array(usable / np.maximum(asked, 1), mask=asked == 0),
        "unreachable_pages": pa.array(unreachable),
    }
    order = np.lexsort([-requests, -asked])
    return pa.table(columns, schema=_GROUPS).take(pa.array(order[requests[order] > 0]))


def _codes(texts: pa.StringArray) -> IntArray:
    """Return a number for each text: [n]; -1 for null."""
    codes: IntArray = texts.dictionary_encode().indices.fill_null(-1).to_numpy().astype(np.int64)
    return codes


def _sums(values: IntArray, ids: IntArray, count: int) -> IntArray:
    """Return the sum of the values of each id: [count]."""
    sums = np.zeros(count, np.int64)
    np.add.at(sums, ids, values)
    return sums


def _reasons(usable: IntArray, served: IntArray, threshold: int) -> pa.StringArray:
    """Return why servers leave usable tokens of each chain: [chains]; null if they take them all.

    usable, served: [chains] tokens.
    """
    reasons = np.where(usable < threshold, BELOW_THRESHOLD, BELOW_LOAD_BACK)
    return pa.array(reasons, pa.string(), mask=served == usable)


def _stopped_by(
    hits: Hits, reasons: pa.StringArray, elsewhere: Sequence[Elsewhere]
) -> pa.StructArray:
    """Return a `StopRow` for each chain; null if nothing stops it. reasons: see `_reasons`."""
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
    if hits.deployment is None:  # the first object that servers miss is kv
        pools = pc.if_else(pa.array(stopped), ANCHOR, pools)
    parts = pa.array([c.part for c in coordinates], pa.string()).take(which)
    shards = pa.array([shard_fields(c.shard) for c in coordinates], _SHARD).take(which)
    faults = pa.DictionaryArray.from_arrays(
        pa.array(np.searchsorted(list(_FAULTS), hits.stop_faults), mask=~stopped),
        pa.array(_FAULTS.values(), pa.string()),
    )
    return pa.StructArray.from_arrays(
        [
            pages,
            pools,
            parts,
            shards,
            key_text(keys),
            _places(hits, elsewhere).take(numbers),
            reasons,
            faults.cast(pa.string()),
        ],
        fields=_STOP_FIELDS,
        mask=pc.and_(pa.array(~stopped), reasons.is_null()),
    )


def _places(hits: Hits, elsewhere: Sequence[Elsewhere]) -> pa.StringArray:
    """Return where another deployment has each page: [page_names]; null if none has the page."""
    numbers = np.full(len(hits.page_names), -1, dtype=np.int64)
    for number in reversed(range(len(elsewhere))):
        numbers[elsewhere[number].pages] = number
    texts = pa.array([one.place for one in elsewhere], pa.string())
    return texts.take(pa.array(numbers, mask=numbers < 0))
