"""Checks of `doctor` about requests: what the store can serve, and what servers restored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.doctor.checks import FAIL, OK, REQUESTS, UNKNOWN, WARN, Check
from hicachectl.formats.errors import HicacheError, UsageError
from hicachectl.formats.profile import PREFETCH_THRESHOLD
from hicachectl.requests.measuring import measure_listed, served_text
from hicachectl.text.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.doctor.stores import StoreSeen
    from hicachectl.formats.arrays import IntArray
    from hicachectl.requests.chains import Requests
    from hicachectl.requests.hits import Hits
    from hicachectl.requests.measuring import HitsReport, HitsRequest

_SET_THRESHOLD = (
    'set "prefetch_threshold" in --hicache-storage-backend-extra-config, and restart the server'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Requests, and what servers say of them.

    request: the requests, the profile that they are measured by, and the prefetch threshold.
    server: URL of the server, else "".
    restored: tokens that the server took from storage since it started, by its metrics; None if
        unknown. Counts of a server's log come first.
    """

    request: HitsRequest
    server: str = ""
    restored: int | None = None

    @property
    def threshold(self) -> int:
        """The servers' prefetch threshold in tokens."""
        if self.request.threshold is not None:
            return self.request.threshold
        profile = self.request.profile
        return PREFETCH_THRESHOLD if profile is None else profile.prefetch_threshold


@dataclass(frozen=True, slots=True)
class _Measured:
    """Requests, measured in the listing of a store."""

    asked: Asked
    hits: Hits
    report: HitsReport

    @property
    def requests(self) -> Requests:
        return self.asked.request.requests

    @property
    def page_size(self) -> int:
        """Tokens of a page; 1 if unknown."""
        return self.requests.page_size or 1

    @property
    def served(self) -> IntArray:
        """Pages of each request that servers fetch: [requests]."""
        pages = self.hits.usable_pages
        if self.requests.page_size is None:
            return pages
        served: IntArray = np.where(pages * self.page_size >= self.asked.threshold, pages, 0)
        return served


def request_checks(seen: StoreSeen, asked: Asked) -> list[Check]:
    """Return what a store can serve of requests beside what servers restored, causes first."""
    if seen.store is None or seen.inventory is None:
        return []
    try:
        measured = _Measured(asked, *measure_listed(seen.store, seen.inventory, asked.request))
    except UsageError:
        raise
    except HicacheError as error:
        what, _, remedy = str(error).partition("; ")
        return [_check("hits", UNKNOWN, f"Not measured: {what}", remedy=remedy)]
    below = list(_below_threshold(measured))
    if any(check.status == FAIL for check in below):
        return below  # no other check could tell more
    return [*below, *_missing(seen, measured), *_restored(measured)]


def _check(
    name: str, status: str, detail: str, *, evidence: str = "", remedy: str = "", server: str = ""
) -> Check:
    return Check(
        name=name,
        group=REQUESTS,
        status=status,
        detail=detail,
        evidence=evidence,
        next=remedy,
        server=server,
    )


def _below_threshold(measured: _Measured) -> Iterator[Check]:
    """Compare the lengths of prompts, and of what is stored of them, with the threshold."""
    requests, threshold = measured.requests, measured.asked.threshold
    if requests.page_size is None or not len(requests):
        return
    longest = measured.hits.chains.reach * measured.page_size
    short = int((longest < max(threshold, measured.page_size)).sum())
    if 2 * short > len(requests):
        yield _check(
            "threshold",
            FAIL if short == len(requests) else WARN,
            f"{short} of {counted(len(requests), 'prompt')} are shorter than the threshold "
            f"{threshold}; servers never ask L3 for them",
            evidence=f"the longest has {int(requests.tokens.max())} tokens, "
            f"{int(longest.max())} of them in full pages before the last token",
            remedy=_SET_THRESHOLD,
            server=measured.asked.server,
        )
        return
    usable = measured.hits.usable_pages
    lost = int(((usable > 0) & (measured.served == 0)).sum())
    if 2 * lost > len(requests):
        yield _check(
            "threshold",
            WARN,
            f"The store has fewer tokens of {lost} of {counted(len(requests), 'prompt')} than the "
            f"threshold {threshold}; servers find them and fetch none",
            evidence=f"at most {int(usable.max()) * measured.page_size} tokens are usable",
            remedy=f"{_SET_THRESHOLD}; hicachectl explain below_threshold",
            server=measured.asked.server,
        )


def _missing(seen: StoreSeen, measured: _Measured) -> Iterator[Check]:
    """Name the page that stops most requests before others that the store has."""
    hits, number = measured.hits, len(measured.requests)
    named = seen.command("hits", "--trace TRACE")
    behind = hits.unreachable_pages
    cut = np.flatnonzero(behind > 0)
    if len(cut):
        places, counts = np.unique(hits.stop_pages[cut], return_counts=True)
        place = int(places[counts.argmax()])
        mine = cut[hits.stop_pages[cut] == place]
        yield _check(
            "missing-page",
            FAIL,
            f"Page {place + 1} stops {len(mine)} of {counted(number, 'request')}, and "
            f"{counted(int(behind[mine].sum()), 'stored page')} behind it cannot be reached",
            evidence=_stopping(measured.report, int(mine[0])),
            remedy=f"{named} names it; a server that gets the prompt again writes a missing page",
        )
    elif hits.usable_pages.any() or not number:
        yield _check("missing-page", OK, f"The store has {served_text(measured.report.document)}")
    else:
        elsewhere = measured.report.document["elsewhere"]
        yield _check(
            "missing-page",
            UNKNOWN if elsewhere else WARN,
            f"The store serves nothing of {counted(number, 'request')}",
            evidence="pages of them are stored for another deployment" if elsewhere else "",
            remedy=f"{named} tells why",
        )


def _stopping(report: HitsReport, request: int) -> str:
    """Return which object of the page that stops a request is missing or unusable."""
    stop = report.rows.column("stopped_by")[request].as_py() or {}
    if not stop.get("pool"):
        return ""
    shard = stop.get("shard") or {}
    rank = f"of TP rank {shard['tp_rank']}" if shard.get("tp_rank") is not None else ""
    what = " ".join(filter(None, (stop["pool"], stop.get("part"), rank)))
    return f"its object {what} is missing, or servers cannot use it"


def _restored(measured: _Measured) -> Iterator[Check]:
    """Compare what the store can serve with what servers say that they took."""
    requests, asked = measured.requests, measured.asked
    if requests.page_size is None:
        return
    can = int(measured.served.sum()) * measured.page_size
    could = f"The store can serve {counted(can, 'token')} of {counted(len(requests), 'request')}"
    if requests.cached is not None and (known := (requests.cached >= 0).any(axis=1)).any():
        taken = np.where(requests.cached < 0, 0, requests.cached)
        storage, memory = int(taken[:, 2].sum()), int(taken[:, :2].sum())
        said = f"{could}; servers took {storage} from it and {memory} from their memory"
        wanted = np.minimum(measured.served, _seen_before(requests)) * measured.page_size
        lacking = np.maximum(0, wanted - taken.sum(axis=1))[known]
        lost = 2 * int(lacking.sum()) > int(wanted[known].sum())
        yield _check(
            "restored",
            WARN if lost else OK,
            said if not lost else f"{said}, although earlier requests of the trace had these pages",
            evidence="counts of the requests' own log",
            remedy="look at the live checks: hicachectl explain has a page for each reason"
            if lost
            else "",
        )
    elif asked.restored is not None:
        nothing = can > 0 and not asked.restored
        yield _check(
            "restored",
            UNKNOWN if nothing else OK,
            f"{could}; the server has restored {asked.restored} since it started",
            evidence="cached_tokens_total of source storage in /metrics",
            remedy="send the requests to the server, then look again" if nothing else "",
            server=asked.server,
        )


def _seen_before(requests: Requests) -> IntArray:
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
