"""Measure how far a store serves requests, for the rows and --min-usable of `hits`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import UNSET, UnsetType

from hicachectl.formats.kinds.pool import pool_name
from hicachectl.formats.profile import PREFETCH_THRESHOLD
from hicachectl.formats.restorable import LOAD_BACK_TOKENS
from hicachectl.formats.wording import OTHER_BYTES, PAGES_COMPARED
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
from hicachectl.requests.grouping import grouping_of
from hicachectl.requests.hits import (
    CLEARED,
    FOREIGN,
    MISFIT,
    UNTRAILED,
    find_hits,
    inventory_of_chains,
)
from hicachectl.requests.rows import (
    BELOW_LOAD_BACK,
    BELOW_THRESHOLD,
    CauseRow,
    ChainRow,
    GroupRow,
    cause_rows,
    group_rows,
    hit_rows,
)
from hicachectl.text.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from hicachectl.backends.base import Store
    from hicachectl.formats.profile import Profile
    from hicachectl.pages.inventory import Inventory
    from hicachectl.profiles.identities import Expected
    from hicachectl.requests.chains import Requests
    from hicachectl.requests.elsewhere import Elsewhere
    from hicachectl.requests.hits import Hits


class HitsTotals(msgspec.Struct, kw_only=True):
    """Document of `hits --summary`."""

    causes: list[CauseRow]
    groups: list[GroupRow] | UnsetType = UNSET
    deployment: DeploymentDocument | None
    requests: int
    threshold: int
    short_requests: int | None
    requested_tokens: int | None
    usable_tokens: int | None
    served_tokens: int | None
    usable_share: float | None
    unreachable_pages: int
    distinct_unreachable_pages: int
    elsewhere: list[ElsewhereRow]


class HitsDocument(HitsTotals, kw_only=True):
    """Document of `hits`."""

    chains: list[ChainRow] | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class HitsReport:
    """Part of each request that a store can serve.

    rows: a `ChainRow` for each request.
    causes: a `CauseRow` for each cause that stops requests, the most lost tokens first.
    groups: for each word of `HitsRequest.by`, a `GroupRow` for each group, the largest first.
    document: other members of `HitsDocument`.
    remarks: messages about facts that no row shows.
    """

    rows: pa.Table
    causes: pa.Table
    groups: dict[str, pa.Table]
    document: dict[str, Any]
    remarks: tuple[str, ...]

    @property
    def totals(self) -> dict[str, Any]:
        """All members of `HitsTotals`, with tables as rows."""
        found = {"causes": self.causes, **self.document}
        if self.groups:
            found["groups"] = pa.concat_tables(self.groups.values())
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class HitsRequest:
    """Requests to measure.

    profile: profile of the servers; None for the only deployment of the store that `choice` fits.
    threshold: prefetch threshold of the servers in tokens; None for the profile's threshold or,
        without a profile, for SGLang's default.
    by: words of `GROUPINGS`; each adds rows by group.
    """

    requests: Requests
    profile: Profile | None = None
    choice: Selection = EVERYTHING
    threshold: int | None = None
    by: Sequence[str] = ()


def measure_hits(
    store: Store, request: HitsRequest, *, on_listed: Callable[[int], None] = lambda objects: None
) -> HitsReport:
    """Return how far servers can restore each request, and which of its other pages exist.

    Raises UsageError if the requests do not have the groups of `by`. Raises ProfileError if the
    profile contradicts the store, or if `choice` fits no deployment or several. Raises
    StoreUnavailable.
    """
    profile, requests = request.profile, request.requests
    for by in request.by:
        grouping_of(requests, by)  # raises before the work if the input lacks the groups
    inventory = (
        take_inventory(store, on_batch=on_listed)
        if profile is None
        else inventory_of_chains(store, profile, requests, only_others=True, on_batch=on_listed)
    )
    return measure_listed(store, inventory, request)[1]


def measure_listed(
    store: Store, inventory: Inventory, request: HitsRequest
) -> tuple[Hits, HitsReport]:
    """Return the hits in listed objects, and their report as `measure_hits` returns it."""
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
        causes=cause_rows(hits, rows, page_size),
        groups={
            by: group_rows(grouping_of(request.requests, by), hits, rows, page_size)
            for by in request.by
        },
        document=_document(hits, rows, page_size, threshold, elsewhere),
        remarks=tuple(remarks),
    )


def short_requests(hits: Hits, page_size: int, threshold: int) -> int:
    """Return how many requests are so short that servers look up no page of them.

    threshold: prefetch threshold of the servers, in tokens.
    """
    return int(np.count_nonzero(hits.chains.reach * page_size < max(threshold, page_size)))


def _threshold_remarks(rows: pa.Table, threshold: int) -> Iterator[str]:
    """Yield why servers do not take usable pages of requests. rows: result of `hit_rows`."""
    reasons = pc.value_counts(pc.struct_field(rows["stopped_by"].combine_chunks(), "reason"))
    counts = {row["values"]: row["counts"] for row in reasons.to_pylist()}
    if below := counts.get(BELOW_THRESHOLD):
        yield (
            f"{counted(below, 'request')}: fewer tokens are usable than the prefetch threshold of "
            f"the servers ({threshold}), so they fetch none; --prefetch-threshold states another "
            "threshold"
        )
    if below := counts.get(BELOW_LOAD_BACK):
        yield (
            f"{counted(below, 'request')}: fewer than {LOAD_BACK_TOKENS} tokens are usable; "
            "servers fetch such tokens, but compute them again; larger pages avoid this"
        )


def _deployment(inventory: Inventory, request: HitsRequest) -> int | None:
    """Return the index of the measured deployment; None if the store has no pages."""
    if request.profile is not None:
        return 0  # assign_affixes puts the profile's deployment first
    if not inventory.table.deployments and not any(r.readings for r in inventory.table.resolved):
        return None
    return choose_deployment(inventory, request.choice)


def _document(
    hits: Hits, rows: pa.Table, page_size: int | None, threshold: int, elsewhere: list[Elsewhere]
) -> dict[str, Any]:
    usable = int(hits.usable_pages.sum()) * (page_size or 1)
    requested = (
        int(hits.chains.reach.sum())
        if page_size is None
        else hits.chains.requested_tokens(page_size)
    )
    own = hits.deployment
    document: dict[str, Any] = msgspec.to_builtins(
        HitsTotals(
            causes=[],
            deployment=None if own is None else deployment_document(own, page_size),
            requests=len(hits.chains),
            threshold=threshold,
            short_requests=None
            if page_size is None
            else short_requests(hits, page_size, threshold),
            requested_tokens=None if page_size is None else requested,
            usable_tokens=None if page_size is None else usable,
            served_tokens=None if page_size is None else pc.sum(rows["served_tokens"]).as_py() or 0,
            usable_share=usable / requested if requested else None,
            unreachable_pages=pc.sum(rows["unreachable_pages"]).as_py() or 0,
            distinct_unreachable_pages=int(hits.unreachable.sum()),
            elsewhere=[one.row for one in elsewhere],
        )
    )
    del document["causes"]  # `HitsReport.totals` adds the rows
    return document


def hit_remarks(hits: Hits, inventory: Inventory, expected: Expected) -> Iterator[str]:
    """Yield messages about comparisons that were not made, and about faults that stop chains.

    expected: identities that the objects of the servers have.
    """
    if expected.unknown:
        yield f"Objects of every identity count, because {expected.unknown}"
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
        (
            UNTRAILED,
            'without a trailer stop {}; servers with "unstamped": "read" use them, and hicachectl '
            "migrate STORE STORE --trailers write gives them trailers",
        ),
        (CLEARED, "from before a server cleared the store stop {}"),
    ):
        if count := int(np.count_nonzero(hits.stop_faults == value)):
            yield f"Objects {what.format(counted(count, 'chain'))}"


def served_share(document: Mapping[str, Any]) -> float | None:
    """Return the share of the requested tokens that servers fetch; None if nothing is requested.

    If the served tokens are unknown, because prefixes or the page size are unknown, the usable
    tokens are counted instead.
    document: document of `hits` or `prewarm`.
    """
    requested = document["requested_tokens"]
    if requested is None:
        share: float | None = document["usable_share"]
        return share
    return _counted(document) / requested if requested else None


def served_text(document: Mapping[str, Any], *, now: bool = False) -> str:
    """Return the share as text: `89% of 1152 tokens served by org/model tp 2`.

    now: whether to add "now", because a copy is about to change the share.
    """
    requested = document["requested_tokens"]
    if served_share(document) is None:
        return "0 tokens requested"
    of = "the requested pages" if requested is None else counted(requested, "token")
    verb = "usable" if document["served_tokens"] is None else "served"
    by = document["deployment"] and f" by {deployment_text(document['deployment'])}"
    return f"{_percent(document)}% of {of} {verb}{' now' if now else ''}{by or ''}"


def short_text(document: Mapping[str, Any]) -> str:
    """Return a message about requests below the threshold; "" if there are none.

    document: document of `hits`.
    """
    short = document["short_requests"]
    if not short:
        return ""
    return (
        f"{short} of {counted(document['requests'], 'request')}: shorter than the prefetch "
        f"threshold of the servers ({document['threshold']} tokens), so they look up no page"
    )


def unreachable_text(document: Mapping[str, Any]) -> str:
    """Return a message about pages that no server reaches; "" if there are none.

    document: document of `hits`.
    """
    pages, distinct = document["unreachable_pages"], document["distinct_unreachable_pages"]
    if not pages:
        return ""
    some = f" ({distinct} distinct)" if distinct != pages else ""
    verb = "is" if pages == 1 else "are"
    return (
        f"{counted(pages, 'whole page')}{some} {verb} out of reach, because servers can restore "
        "only shorter prefixes"
    )


def _counted(document: Mapping[str, Any]) -> int:
    """Return the served tokens; the usable tokens if the served tokens are unknown."""
    served, usable = document["served_tokens"], document["usable_tokens"]
    return int(usable if served is None else served)


def _percent(document: Mapping[str, Any]) -> int:
    """Return the share in percent, rounded. Only the whole gives 100, and only nothing gives 0."""
    share = served_share(document) or 0.0
    return round(share * 100) if share in (0, 1) else min(max(round(share * 100), 1), 99)


def passes(document: Mapping[str, Any], min_usable: float | None) -> bool:
    """Return whether the share is at least --min-usable; True if --min-usable is not given.

    If nothing was requested, every given --min-usable fails.
    """
    share = served_share(document)
    return min_usable is None or (share is not None and share >= min_usable)


def failed_text(document: Mapping[str, Any], min_usable: float, next_step: str) -> str:
    """Return the message of a failed --min-usable, in one line."""
    deployment = document["deployment"]
    by = f"servers of {deployment_text(deployment)}" if deployment else "servers"
    share, requested = served_share(document), document["requested_tokens"]
    if share is None:
        return f"--min-usable {min_usable:g}: no tokens were requested; check the requests"
    what = "of the requested pages"
    if requested is not None:
        counted_tokens = _counted(document)
        below = document["usable_tokens"] - counted_tokens
        more = f", and {below} usable tokens are below the servers' thresholds" if below else ""
        what = f"of the requested tokens ({counted_tokens} of {requested}{more})"
    return f"--min-usable {min_usable:g}: {by} can restore {share:.1%} {what}; {next_step}"
