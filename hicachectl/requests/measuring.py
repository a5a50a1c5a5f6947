"""Measure how far a store serves requests: the rows and the document of `hits`, and its gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import UNSET, UnsetType

from hicachectl.formats.keys.columns import RANK_COLUMNS, SPAN_COLUMNS, shard_fields
from hicachectl.formats.keys.table import join_keys
from hicachectl.formats.kinds.pool import pool_name
from hicachectl.formats.objects import ANCHOR
from hicachectl.formats.profile import PREFETCH_THRESHOLD
from hicachectl.formats.restorable import fetched
from hicachectl.formats.wording import OTHER_BYTES, PAGES_COMPARED
from hicachectl.pages.listing import key_text
from hicachectl.pages.naming import (
    DeploymentDocument,
    ambiguity_remark,
    deployment_document,
    deployment_text,
)
from hicachectl.pages.scanning import take_inventory
from hicachectl.pages.selection import EVERYTHING, Selection, explain_selection
from hicachectl.pages.tally import object_counts
from hicachectl.profiles.identities import acceptance_of, expected_identities
from hicachectl.profiles.inference import choose_deployment
from hicachectl.requests.elsewhere import ElsewhereRow, find_elsewhere, miss_remarks
from hicachectl.requests.hits import (
    CLEARED,
    FOREIGN,
    MISFIT,
    UNTRAILED,
    find_hits,
    inventory_of_chains,
)
from hicachectl.text.jsontext import WRITE_NULL
from hicachectl.text.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from hicachectl.backends.base import Store
    from hicachectl.formats.arrays import BoolArray
    from hicachectl.formats.profile import Profile
    from hicachectl.pages.inventory import Inventory
    from hicachectl.profiles.identities import Expected
    from hicachectl.requests.chains import Requests
    from hicachectl.requests.elsewhere import Elsewhere
    from hicachectl.requests.hits import Hits


class ShardRow(TypedDict, total=False):
    """Coordinates of an object; those that its key does not show are left out."""

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
    """Why servers fetch no more of a chain."""

    page: str | None
    pool: str | None
    part: str | None
    shard: ShardRow | None
    key: str | None
    exists_at: str | None
    reason: str | None


class ChainRow(TypedDict):
    """Row of `hits`."""

    chain: int
    tokens: int | None
    kv_pages: int
    usable_pages: int
    usable_tokens: int | None
    served_tokens: int | None
    unreachable_pages: int
    stopped_by: StopRow | None


class HitsDocument(msgspec.Struct, kw_only=True):
    """Document of `hits`."""

    chains: list[ChainRow] | UnsetType = UNSET
    deployment: DeploymentDocument | None
    requested_tokens: int | None
    usable_tokens: int | None
    served_tokens: int | None
    usable_share: float | None
    unreachable_pages: int
    distinct_unreachable_pages: int
    elsewhere: list[ElsewhereRow]


@dataclass(frozen=True, slots=True)
class HitsReport:
    """How much of each request a store can serve.

    rows: `ChainRow` of each request.
    document: members of `HitsDocument`.
    remarks: messages about what these do not show.
    """

    rows: pa.Table
    document: dict[str, Any]
    remarks: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HitsRequest:
    """Requests to measure.

    profile: profile of the servers; None: the one deployment of the store that `choice` fits.
    threshold: the servers' prefetch threshold in tokens; None: what the profile states, else
        SGLang's default.
    """

    requests: Requests
    profile: Profile | None = None
    choice: Selection = EVERYTHING
    threshold: int | None = None


def measure_hits(
    store: Store, request: HitsRequest, *, on_listed: Callable[[int], None] = lambda objects: None
) -> HitsReport:
    """Return how far servers can restore each request, and what else the store has of them.

    Raises ProfileError if the profile contradicts the store, or `choice` fits several deployments;
    StoreUnavailable.
    """
    profile, requests = request.profile, request.requests
    inventory = (
        take_inventory(store, on_batch=on_listed)
        if profile is None
        else inventory_of_chains(store, profile, requests, only_others=True, on_batch=on_listed)
    )
    return measure_listed(store, inventory, request)[1]


def measure_listed(
    store: Store, inventory: Inventory, request: HitsRequest
) -> tuple[Hits, HitsReport]:
    """Return the hits in objects that are listed, and `measure_hits` of them."""
    profile = request.profile
    hits = find_hits(
        inventory,
        _deployment(inventory, request),
        request.requests,
        acceptance=acceptance_of(store, inventory, profile),
    )
    elsewhere = find_elsewhere(inventory, hits)
    page_size, threshold = request.requests.page_size, request.threshold
    if threshold is None:
        threshold = PREFETCH_THRESHOLD if profile is None else profile.prefetch_threshold
    rows = hit_rows(hits, page_size, threshold, elsewhere)
    remarks = [
        *store.remarks,
        *hit_remarks(hits, inventory, expected_identities(store, profile)),
        *miss_remarks(store, inventory, hits, elsewhere),
    ]
    if hits.deployment is None:
        remarks.append(explain_selection(store, inventory, EVERYTHING))
    remarks += _threshold_remarks(rows, threshold)
    return hits, HitsReport(
        rows=rows,
        document=_document(hits, rows, page_size, elsewhere),
        remarks=tuple(remarks),
    )


def _threshold_remarks(rows: pa.Table, threshold: int) -> list[str]:
    """Return a remark if usable pages of requests are not fetched. rows: those of `hit_rows`."""
    below = pc.sum(pc.less(rows["served_tokens"], rows["usable_tokens"])).as_py()
    if not below:
        return []
    return [
        f"{counted(below, 'request')}: fewer tokens are usable than the prefetch threshold of the "
        f"servers ({threshold}), so they fetch none; --prefetch-threshold states another one"
    ]


def _deployment(inventory: Inventory, request: HitsRequest) -> int | None:
    """Return the index of the measured deployment; None if the store has no pages."""
    if request.profile is not None:
        return 0  # assign_affixes puts the profile's deployment first
    if not inventory.table.deployments and not any(r.readings for r in inventory.table.resolved):
        return None
    return choose_deployment(inventory, request.choice)


def _document(
    hits: Hits, rows: pa.Table, page_size: int | None, elsewhere: list[Elsewhere]
) -> dict[str, Any]:
    usable = int(hits.usable_pages.sum()) * (page_size or 1)
    requested = (
        int(hits.chains.reach.sum())
        if page_size is None
        else hits.chains.requested_tokens(page_size)
    )
    own = hits.deployment
    document: dict[str, Any] = msgspec.to_builtins(
        HitsDocument(
            deployment=None if own is None else deployment_document(own, page_size),
            requested_tokens=None if page_size is None else requested,
            usable_tokens=None if page_size is None else usable,
            served_tokens=None if page_size is None else pc.sum(rows["served_tokens"]).as_py() or 0,
            usable_share=usable / requested if requested else None,
            unreachable_pages=pc.sum(rows["unreachable_pages"]).as_py() or 0,
            distinct_unreachable_pages=int(hits.unreachable.sum()),
            elsewhere=[one.row for one in elsewhere],
        )
    )
    return document


BELOW_THRESHOLD = "below_threshold"  # a reason, as SGLang's metrics name it

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
            "unreachable_pages": pa.array(hits.unreachable_pages),
            "stopped_by": _stopped_by(hits, served < usable, elsewhere),
        }
    )


def hit_remarks(hits: Hits, inventory: Inventory, expected: Expected) -> Iterator[str]:
    """Yield facts that no row shows: comparisons not made, and faults that stop chains.

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


def served_share(document: Mapping[str, Any]) -> float | None:
    """Return the share of the requested tokens that servers fetch; None if none is requested.

    document: the result of `hits` or `prewarm`. Where that does not tell the served tokens, since
    the prefixes or the page size are unknown, the share is that of the usable ones.
    """
    requested = document["requested_tokens"]
    if requested is None:
        share: float | None = document["usable_share"]
        return share
    return _counted(document) / requested if requested else None


def served_text(document: Mapping[str, Any], *, now: bool = False) -> str:
    """Return the share as a text: `89% of 1152 tokens served by org/model tp 2`.

    now: whether it will change.
    """
    requested = document["requested_tokens"]
    if served_share(document) is None:
        return "0 tokens requested"
    of = "the requested pages" if requested is None else counted(requested, "token")
    verb = "usable" if document["served_tokens"] is None else "served"
    by = document["deployment"] and f" by {deployment_text(document['deployment'])}"
    return f"{_percent(document)}% of {of} {verb}{' now' if now else ''}{by or ''}"


def unreachable_text(document: Mapping[str, Any]) -> str:
    """Return how many pages no server reaches; "" without any. document: the result of `hits`."""
    pages, distinct = document["unreachable_pages"], document["distinct_unreachable_pages"]
    if not pages:
        return ""
    some = f" ({distinct} distinct)" if distinct != pages else ""
    verb = "is" if pages == 1 else "are"
    return (
        f"{counted(pages, 'whole page')}{some} {verb} out of reach behind what stops the requests"
    )


def _counted(document: Mapping[str, Any]) -> int:
    """Return the served tokens, else the usable ones."""
    served, usable = document["served_tokens"], document["usable_tokens"]
    return int(usable if served is None else served)


def _percent(document: Mapping[str, Any]) -> int:
    """Return the share in percent, rounded; 100 means all, and 0 means nothing."""
    share = served_share(document) or 0.0
    return round(share * 100) if share in (0, 1) else min(max(round(share * 100), 1), 99)


def passes(document: Mapping[str, Any], min_usable: float | None) -> bool:
    """Return whether the share is at least --min-usable. Of nothing requested, it never is."""
    share = served_share(document)
    return min_usable is None or (share is not None and share >= min_usable)


def failed_text(document: Mapping[str, Any], min_usable: float, next_step: str) -> str:
    """Return why a gate failed, in one line."""
    deployment = document["deployment"]
    by = f"servers of {deployment_text(deployment)}" if deployment else "servers"
    share, requested = served_share(document), document["requested_tokens"]
    if share is None:
        return f"--min-usable {min_usable:g}: no tokens were requested; check the requests"
    what = "of the requested pages"
    if requested is not None:
        counted_tokens = _counted(document)
        below = document["usable_tokens"] - counted_tokens
        more = f", and {below} usable ones are below the prefetch threshold" if below else ""
        what = f"of the requested tokens ({counted_tokens} of {requested}{more})"
    return f"--min-usable {min_usable:g}: {by} can restore {share:.1%} {what}; {next_step}"
