"""Gather the facts about a store that the report shows."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hicachectl.backends.capabilities import Leases
from hicachectl.checks.codes import SEVERITIES
from hicachectl.checks.findings import severity_ranks
from hicachectl.checks.registry import group_names
from hicachectl.formats.errors import FormatError, UsageError
from hicachectl.pages.listing import summarise
from hicachectl.profiles.identities import markers_of
from hicachectl.report.completeness import Completeness, completeness_of
from hicachectl.report.filling import Filling, filling_of
from hicachectl.report.names import deployment_name
from hicachectl.report.prefixes import PrefixTree, prefix_tree
from hicachectl.report.tenants import Tenancy, Unused, tenancies_of, unused_of
from hicachectl.report.worth import Worth, worth_of
from hicachectl.report.writes import Writes, writes_of
from hicachectl.requests.measuring import measure_listed
from hicachectl.text.vocabulary import NEVER, STATES
from hicachectl.verification.inspection import PageReport, inspect_listed
from hicachectl.verification.report import VerifyReport, describe_store, report_of
from hicachectl.verification.report_text import FindingGroup, group_findings, sum_line
from hicachectl.verification.verify import check_store

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa

    from hicachectl.backends.base import Store
    from hicachectl.pages.groups import PageGroups
    from hicachectl.pages.listing import Totals
    from hicachectl.requests.measuring import HitsRequest
    from hicachectl.verification.request import VerifyRequest
    from hicachectl.verification.verify import PartCheck


_NAMED = ("severity", "code")


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureRequest:
    """Options of a report.

    verify: checks to run on the whole store.
    hits: requests to measure; None without requests.
    page: hash prefix of the page to show in full; None if the report chooses a page.
    title: title of the report; "" for the URL of the store.
    """

    verify: VerifyRequest
    hits: HitsRequest | None = None
    page: str | None = None
    title: str = ""


class Requested(NamedTuple):
    """Facts that requests show about a store.
    tree: prefix tree of the requests; None without requests.
    no_tree: why the requests have no tree; "" if they have one.
    unused: pages that are in no request; None if requests do not give the keys of pages, or if no
        deployment was found for them.
    tenancies: pages by salt and by adapter, if requests name these.
    worth: hits that caches of several capacities would give, or why they are unknown; None without
        requests.
    remarks: messages about the requests.
    """

    tree: PrefixTree | None = None
    no_tree: str = ""
    unused: Unused | None = None
    tenancies: tuple[Tenancy, ...] = ()
    worth: Worth | str | None = None
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """Facts about a store that the report shows.

    made: Unix seconds at which the report was made.
    models: whether keys name models.
    asked: groups of checks that were requested.
    rows, total: rows and total of `ls --summary`.
    states: number of page groups in each state, in the order of `vocabulary.STATES`.
    writes: objects by time of their last write; None if the store keeps no times.
    page: report on the page that is shown in full; None without one.
    page_choice: why this page is shown in full, or why no page is.
    remarks: messages to read first.
    """

    url: str
    title: str
    made: float
    models: bool
    asked: tuple[str, ...]
    verified: VerifyReport
    findings: tuple[FindingGroup, ...]
    rows: pa.Table
    total: Totals
    free_bytes: int | None
    states: tuple[int, ...]
    writes: Writes | None
    filling: Filling
    completeness: tuple[Completeness, ...]
    requested: Requested
    page: PageReport | None
    page_choice: str
    remarks: tuple[str, ...]

    @property
    def page_only(self) -> dict[str, int]:
        """Number of findings of the page in full, by code, without codes that the checks found."""
        if self.page is None:
            return {}
        known = {(group.severity, group.code) for group in self.findings}
        found = zip(*(self.page.findings.column(n).to_pylist() for n in _NAMED), strict=True)
        return dict(Counter(code for severity, code in found if (severity, code) not in known))

    @property
    def line(self) -> str:
        """One line with the sums of the checks, and with the findings of `page_only`."""
        more = ", ".join(f"{count} {code}" for code, count in self.page_only.items())
        unasked = [name for name in group_names() if name not in self.asked]
        sums = sum_line(self.verified.document, unasked)
        return sums + (f"; in the page shown in full: {more}" if more else "")

    def worst(self) -> str:
        """Return the worst severity of all findings; "" if there are none.

        Findings of the page in full count, too.
        """
        tables = [self.verified.placed, *([self.page.findings] if self.page else [])]
        ranks = np.concatenate([severity_ranks(table) for table in tables])
        return SEVERITIES[ranks.max()] if len(ranks) else ""

    def fails(self, fail_on: str) -> bool:
        """Return whether a finding is at least as severe as `fail_on`.

        fail_on: a severity, or "never", with which no finding fails.
        """
        found = self.worst()
        return (
            fail_on != NEVER
            and found != ""
            and (SEVERITIES.index(found) >= SEVERITIES.index(fail_on))
        )


def take_picture(
    store: Store,
    request: PictureRequest,
    *,
    on_listed: Callable[[int], None] = lambda objects: None,
    on_read: Callable[[int, int], None] = lambda nbytes, total: None,
    on_wait: Callable[[float, int], None] = lambda seconds, pages: None,
) -> Picture:
    """List and check a store, and gather the facts that the report shows.

    The callbacks and errors are those of `check_store`. Also raises UsageError if not exactly one
    page begins with the wanted prefix, and ProfileError if the deployment of the requests is
    unknown.
    """
    made = time.time()
    verify = request.verify
    checked = check_store(
        store,
        verify,
        columns={"atime_ns"} & store.traits.columns,
        on_listed=on_listed,
        on_read=on_read,
        on_wait=on_wait,
    )
    groups, inventory = checked.groups, checked.groups.inventory
    verified = report_of([checked.result], describe_store(store, verify), inventory.table, verify)
    free_bytes = store.free_bytes()
    requested = _requested(store, groups, request, free_bytes)
    page, why = _page(store, request, verified, checked)
    rows, total = summarise(inventory, markers_of(store))
    return Picture(
        url=store.url,
        title=request.title,
        made=made,
        models=all(deployment.names.model for deployment in inventory.table.deployments),
        asked=verify.checks,
        verified=verified,
        findings=tuple(group_findings(verified.placed, made)),
        rows=rows,
        total=total,
        free_bytes=free_bytes,
        states=tuple(np.bincount(groups.states, minlength=len(STATES)).tolist()),
        writes=writes_of(inventory),
        filling=filling_of(groups, made, is_part=bool(verify.selection)),
        completeness=tuple(completeness_of(groups, checked.in_flight)),
        requested=requested,
        page=page,
        page_choice=why,
        remarks=(*verified.remarks, *requested.remarks),
    )


def _requested(
    store: Store, groups: PageGroups, request: PictureRequest, free_bytes: int | None
) -> Requested:
    if request.hits is None:
        return Requested()
    asked = replace(request.hits, requests=request.hits.requests.in_time_order())
    if not asked.requests.hashed:
        why = f"{asked.requests.source}: its block ids do not give the keys of pages"
        return Requested(no_tree=why, worth=worth_of(asked, store.eviction(), None))
    hits, measured = measure_listed(store, groups.inventory, asked)
    is_all = asked.profile is not None and not request.verify.selection
    worth = worth_of(
        asked, store.eviction(), (groups, hits) if is_all else None, free_bytes=free_bytes
    )
    told = tuple(f"Requests: {text}" for text in measured.remarks if text not in store.remarks)
    name, unused, tenancies = "", None, list[Tenancy]()
    if hits.deployment is not None:
        name = deployment_name(hits.deployment)
        number = list(groups.deployments).index(hits.deployment)
        unused = unused_of(groups, number, asked.requests)
        tenancies = tenancies_of(groups, number, asked.requests)
    tree, no_tree = None, ""
    try:
        tree = prefix_tree(hits, measured, name)
    except FormatError as error:
        no_tree = str(error)
    return Requested(tree, no_tree, unused, tuple(tenancies), worth, told)


def _page(
    store: Store,
    request: PictureRequest,
    verified: VerifyReport,
    checked: PartCheck,
) -> tuple[PageReport | None, str]:
    """Return the page to show in full, or None, and the reason."""
    verify = request.verify

    def read(page: str) -> PageReport:
        return inspect_listed(
            store,
            checked.groups.inventory,
            checked.listing,
            verify.profile,
            page,
            grace_seconds=verify.grace_seconds,
        )

    if request.page is not None:
        return read(request.page), "Chosen with --page."
    if isinstance(store, Leases):
        return None, "Reads of this store grant leases, so no page was read. --page chooses a page."
    chosen, why = _choice(verified, checked.groups)
    if not chosen:
        return None, why
    try:
        return read(chosen), why
    except UsageError as error:  # the finding has no group, such as one about cleared objects
        return None, str(error)


def _choice(verified: VerifyReport, groups: PageGroups) -> tuple[str, str]:
    """Return the page to show in full, and the reason.

    This is the page with the worst finding, or the newest page if no finding needs action. The page
    is "" if the store has no pages.
    """
    if not len(groups):
        return "", "The store has no pages."
    placed = verified.placed
    for one in placed.filter(placed.column("page").is_valid()).slice(0, 1).to_pylist():
        if one["severity"] != "info":
            return one["page"], f"Chosen for its finding: {one['severity']} {one['code']}."
    newest = np.argmax(groups.newest_ns)
    (page,) = groups.pages_at(np.array([newest])).to_pylist()
    return page, "The page written last." if groups.has_times else "The first page."
