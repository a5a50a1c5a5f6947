"""Checks of `doctor` about what the store can serve of requests, and what servers restored."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.compute as pc

from hicachectl.doctor.checks import FAIL, OK, REQUESTS, UNKNOWN, WARN, Check, verdict_of
from hicachectl.formats.errors import HicacheError, UsageError
from hicachectl.formats.objects import ANCHOR
from hicachectl.requests.measuring import measure_listed, served_text
from hicachectl.requests.rows import BELOW_THRESHOLD
from hicachectl.text.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.doctor.listed_store import ListedStore
    from hicachectl.formats.arrays import IntArray
    from hicachectl.requests.chains import Requests
    from hicachectl.requests.hits import Hits
    from hicachectl.requests.measuring import HitsReport, HitsRequest

_SET_THRESHOLD = (
    'set "prefetch_threshold" in --hicache-storage-backend-extra-config, and restart the server'
)

# Stores evict, so missing pages can stop up to one request in _FEW in a sound store. If they stop
# more than one request in _SEVERAL, the check fails.
_FEW, _SEVERAL = 100, 10

# Faults of an object that stops requests, as `StopRow` names them.
_FAULTS = {
    "missing": "is not in the store",
    "cleared": "is from before a server cleared the store, so servers do not use it",
    "wrong_size": "is in the store with a wrong size, so servers cannot use it",
    "no_trailer": "is in the store without the trailer that servers with the plug-in look for",
    "other_bytes": "is in the store with bytes of other weights, dtype or layout, which servers "
    "with the plug-in refuse",
}

_check = partial(Check, group=REQUESTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenRequests:
    """Requests, and the number of tokens that a server says it has restored.

    request: the requests, the profile that they are measured by, and the prefetch threshold.
    words: options that name the requests in suggested commands.
    server: URL of the server; "" if no server answered.
    restored: number of tokens that the server took from storage since it started, by its metrics;
        None if unknown. If the log of the requests has counts, these are used instead.
    """

    request: HitsRequest
    words: str = ""
    server: str = ""
    restored: int | None = None


@dataclass(frozen=True, slots=True)
class _Measured:
    """Requests, and what a listed store can serve of them."""

    given: GivenRequests
    hits: Hits
    report: HitsReport

    @property
    def requests(self) -> Requests:
        return self.given.request.requests

    @property
    def served_tokens(self) -> IntArray:
        """Tokens of each request that servers take from the store: [requests]; 0 if unknown."""
        served: IntArray = pc.fill_null(self.report.rows["served_tokens"], 0).to_numpy()
        return served


def request_checks(
    listed: ListedStore, given: GivenRequests, *, explained: bool = False
) -> list[Check]:
    """Compare the tokens that a store can serve with the tokens that servers restored.

    Checks of possible causes come first.

    explained: whether an earlier check may be the cause if the store serves nothing.
    """
    if listed.store is None or listed.inventory is None:
        return []
    try:
        measured = _Measured(given, *measure_listed(listed.store, listed.inventory, given.request))
    except UsageError:
        raise
    except HicacheError as error:
        return [Check.of_message("hits", UNKNOWN, f"Not measured: {error}", group=REQUESTS)]
    below = list(_below_threshold(measured))
    if verdict_of(below) == FAIL:
        return below  # no other check would show more
    explained |= verdict_of(below) == WARN
    return [*below, *_missing(listed, measured, explained=explained), *_restored(measured)]


def _below_threshold(measured: _Measured) -> Iterator[Check]:
    """Compare the lengths of prompts, and of their stored prefixes, with the threshold."""
    requests, document = measured.requests, measured.report.document
    short, threshold = document["short_requests"], document["threshold"]
    prompts, server = counted(len(requests), "prompt"), measured.given.server
    if short and 2 * short > len(requests):
        yield _check(
            "threshold",
            FAIL if short == len(requests) else WARN,
            f"{short} of {prompts} {'is' if short == 1 else 'are'} shorter than the threshold "
            f"{threshold}, so servers never ask L3 for them",
            evidence=f"the longest has {counted(int(requests.tokens.max()), 'token')}",
            next=_SET_THRESHOLD,
            server=server,
        )
        return
    reasons, counts = (measured.report.causes[name] for name in ("reason", "requests"))
    lost = pc.sum(counts.filter(pc.equal(reasons, BELOW_THRESHOLD))).as_py() or 0
    if 2 * lost > len(requests):
        usable = int(pc.max(measured.report.rows["usable_tokens"]).as_py())
        yield _check(
            "threshold",
            WARN,
            f"For {lost} of {prompts}, the store has fewer tokens than the threshold {threshold}; "
            "servers find these tokens, but fetch none",
            evidence=f"at most {usable} tokens are usable",
            next=_SET_THRESHOLD,
            server=server,
        )


def _missing(listed: ListedStore, measured: _Measured, *, explained: bool) -> Iterator[Check]:
    """Name the missing page that keeps most requests from later pages that the store has.

    explained: see `request_checks`.
    """
    hits, number = measured.hits, len(measured.requests)
    named = listed.command("hits", measured.given.words)
    cut = np.flatnonzero(hits.unreachable_pages > 0)
    if _FEW * len(cut) > number:
        places, counts = np.unique(hits.stop_pages[cut], return_counts=True)
        place = int(places[counts.argmax()])
        mine = cut[hits.stop_pages[cut] == place]
        stored = int(hits.unreachable.sum())
        yield _check(
            "missing-page",
            FAIL if _SEVERAL * len(cut) > number else WARN,
            f"Page {place + 1} stops {len(mine)} of {counted(number, 'request')}, and "
            f"{counted(stored, 'stored page')} behind such pages cannot be reached",
            evidence=_stopping(measured.report, int(mine[0])),
            next=named,
        )
    elif hits.usable_pages.any() or not number:
        yield _check("missing-page", OK, f"The store has {served_text(measured.report.document)}")
    else:
        elsewhere = measured.report.document["elsewhere"]
        yield _check(
            "missing-page",
            (UNKNOWN if elsewhere else WARN) if explained else FAIL,
            f"The store serves nothing of {counted(number, 'request')}",
            evidence="another deployment has pages of these requests" if elsewhere else "",
            next=named,
        )


def _stopping(report: HitsReport, request: int) -> str:
    """Return which object is missing or unusable in the page that stops a request."""
    stop = report.rows.column("stopped_by")[request].as_py() or {}
    if not stop.get("pool"):
        return ""
    shard = stop.get("shard") or {}
    rank = f"of TP rank {shard['tp_rank']}" if shard.get("tp_rank") is not None else ""
    what = " ".join(filter(None, (stop["pool"], stop.get("part"), rank)))
    told = _FAULTS[stop["fault"]]
    if stop["fault"] == "missing" and stop["pool"] == ANCHOR:
        told += (
            "; the server writes it again if you send the prompt again, unless the server still "
        )
        told += "has it in memory"
    return f"its object {what} {told}"


def _restored(measured: _Measured) -> Iterator[Check]:
    """Compare the tokens that the store can serve with the tokens that servers say they took."""
    requests, given = measured.requests, measured.given
    if requests.page_size is None:
        return
    can = int(measured.served_tokens.sum())
    could = f"The store can serve {counted(can, 'token')} of {counted(len(requests), 'request')}"
    if requests.cached is not None and (known := (requests.cached >= 0).any(axis=1)).any():
        taken = np.where(requests.cached < 0, 0, requests.cached)
        storage, memory = int(taken[:, 2].sum()), int(taken[:, :2].sum())
        if not (can or storage):
            return  # the check of missing pages says that the store serves nothing
        said = f"{could}; servers took {storage} from it and {memory} from their memory"
        earlier = _earlier_pages(requests) * requests.page_size
        wanted = np.minimum(measured.served_tokens, earlier)
        wanted[wanted < measured.report.document["threshold"]] = 0
        lacking = np.maximum(0, wanted - taken.sum(axis=1))[known]
        lost = 2 * int(lacking.sum()) > int(wanted[known].sum())
        yield _check(
            "restored",
            WARN if lost else OK,
            said if not lost else f"{said}, although earlier requests of the trace had these pages",
            evidence="counts in the log of the requests"
            + ("; the live checks name reasons, each with a page of explain" if lost else ""),
            next="hicachectl explain below_threshold" if lost else "",
        )
    elif given.restored is not None and (can or given.restored):
        nothing = can > 0 and not given.restored
        yield _check(
            "restored",
            UNKNOWN if nothing else OK,
            f"{could}; the server has restored {given.restored} since it started",
            evidence="cached_tokens_total of source storage in /metrics",
            next="send the requests to the server, then look again" if nothing else "",
            server=given.server,
        )


def _earlier_pages(requests: Requests) -> IntArray:
    """Return the leading pages of each request that earlier requests had: [requests].

    Pages are numbered in the order of their first use.
    """
    sizes, blocks = np.diff(requests.offsets), requests.blocks.astype(np.int64)
    highest = np.maximum.accumulate(blocks) if len(blocks) else blocks
    starts = requests.offsets[:-1]
    before = np.where(starts > 0, np.append(highest, -1)[starts - 1], -1)
    new = np.flatnonzero(blocks > np.repeat(before, sizes))
    ends = np.append(new, len(blocks))[np.searchsorted(new, starts)]
    leading: IntArray = np.minimum(np.minimum(ends - starts, sizes), requests.reach)
    return leading
