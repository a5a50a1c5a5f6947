"""Choose the page groups to remove from a store to make room. The least useful groups go first.

Incomplete pages are removed first. Next come pages that the trace or plan does not have, the
longest unused first. The trace or plan then ranks the remaining pages by value, as for `prewarm`.
A page is never worth more than its prefix, so the end of a chain is removed before its beginning.
Among pages without a value, write times tell which page is nearer to the end of a chain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.formats.errors import UnsupportedByBackend, UsageError
from hicachectl.formats.keys.labels import label_text
from hicachectl.formats.restorable import leading_runs
from hicachectl.formats.spec import UNKNOWN_SIZE
from hicachectl.move.removal_plan import plan_removal
from hicachectl.move.results import GroupStatus
from hicachectl.pages.census import byte_sum, byte_sums
from hicachectl.pages.deployments import UNRESOLVED
from hicachectl.pages.groups import UNKNOWN_BYTES
from hicachectl.prewarming.ranking import places_among, rank_by_value, read_plan
from hicachectl.prewarming.targets import Gauge
from hicachectl.profiles.identities import acceptance_of
from hicachectl.requests.hits import find_hits
from hicachectl.text.units import counted, first_of, human_age, human_size

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy.typing as npt

    from hicachectl.backends.base import Store
    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.formats.profile import Profile
    from hicachectl.move.removal_plan import RepairPlan
    from hicachectl.move.results import FreeDocument, UnnamedDeployment
    from hicachectl.pages.groups import PageGroups
    from hicachectl.prewarming.targets import Target
    from hicachectl.requests.chains import Requests


@dataclass(frozen=True, slots=True, eq=False)
class Worth:
    """Pages of known value.

    source: "trace" or "plan".
    pages: distinct pages, best first.
    requests: requests of the trace; None if a plan gives the value.
    """

    source: str
    pages: pa.StringArray
    requests: Requests | None = None


_LOOK_PAGES = 256  # most pages removed between two looks at the free bytes of a store
_INT64_MAX = np.iinfo(np.int64).max
# Uses within a span of this length count as one use. A request reads and writes its pages within
# seconds, and pages stay unused for hours before they leave. `prewarm --all` has the same span.
_SPAN_NS = 60 * 10**9
# A removal ends after more failed pages than this: its other pages would probably fail, too.
_MOST_FAILED = 100


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FreeRequest:
    """Target of a removal, and the groups that may be removed to reach it.

    groups: all groups of the store; their inventory has `atime_ns` if the store has it.
    matching: numbers of the groups that may leave.
    incomplete: [groups] whether the group is of no use to any server. Such groups leave first.
    worth: value of pages; None without a trace or plan. With a profile, only pages of its
        deployment have a value.
    and_unnamed: with a profile and `worth`, whether complete groups of other deployments leave,
        too, directly after the incomplete groups. If not, these groups stay.
    never_all: whether to refuse a target that would remove every group that may leave.
    doubtful: number of groups that are partial according to the profile, but do not leave first,
        because the profile may be wrong.
    """

    store: Store
    groups: PageGroups
    matching: IntArray
    target: Target
    incomplete: BoolArray
    worth: Worth | None = None
    profile: Profile | None = None
    and_unnamed: bool = False
    never_all: bool = False
    doubtful: int = 0


class Freeing:
    """Groups to remove, in order, until a target is reached.

    groups: numbers of the groups that would reach the target in the store's present state.
    remarks: messages about groups that do not leave, or do not leave first.
    lacking: bytes that must still be removed for the target.
    facts: member `free` of the removal's document; None until `conclude` is called.
    """

    def __init__(self, request: FreeRequest, candidates: _Candidates, gauge: Gauge) -> None:
        self.remarks = list(candidates.remarks)
        self.gauge = gauge
        self._request = request
        self._candidates = candidates
        # With `never_all`, one candidate always stays, whatever servers write meanwhile.
        self._most = len(candidates) - request.never_all
        self._taken = 0  # number of groups chosen so far
        self._last: IntArray = candidates.order[:0]
        self._removed = self._failed = 0
        # Size of all candidates as text, if the target would remove all of them; else empty.
        self._emptied = ""
        self.groups = candidates.order[: candidates.end(0, gauge.asked)]
        self.lacking = max(0, gauge.asked - candidates.space(self.groups))
        if request.never_all and 0 < len(candidates) == len(self.groups):
            self._refuse_all()
        self.facts: FreeDocument | None = None
        if request.doubtful and len(self.groups):
            self.remarks.append(
                f"the removal does not begin with {counted(request.doubtful, 'page')} that "
                "--profile calls partial, because most of the newest pages lack the same pool; "
                "the profile may be wrong, so check it"
            )
        if request.worth is None and not candidates.incomplete[: len(self.groups)].all():
            self.remarks.append(
                "rm does not know which page follows which, because neither --trace nor "
                "--keep-plan is given; servers cannot use the pages that follow a removed page, so "
                "give --trace if you have a log of requests"
            )
        if spared := len(candidates.spared):
            cost = human_size(candidates.in_place(len(self.groups)))
            self.remarks.append(
                f"kept {counted(spared, 'page')} ({human_size(candidates.spared_bytes)}) of "
                f"deployments that no request names; {cost} of other pages leave instead; "
                "--and-unnamed removes the pages of these deployments first"
            )

    def next(self, statuses: npt.NDArray[np.uint8]) -> RepairPlan | None:
        """Return the groups to remove next; None if the removal ends.

        The removal ends in any of these cases:

        - the target is reached
        - no candidates are left
        - removed bytes did not become free
        - too many groups failed

        statuses: GroupStatus of each group of the last plan; empty before the first plan.
        Raises StoreUnavailable.
        """
        stayed = self._last[np.isin(statuses, (GroupStatus.KEPT, GroupStatus.FAILED))]
        space = self._candidates.space
        self._removed += space(self._last) - space(stayed)
        self.lacking = self.gauge.lacking(self._removed)
        start, end = self._taken, self._taken
        self._failed += int((statuses == GroupStatus.FAILED).sum())
        if self.lacking and not (self.gauge.is_held or self._failed > _MOST_FAILED):
            end = self._candidates.end(start, self.gauge.step(self.lacking))
            end = min(end, max(start, self._most))
            if self.gauge.is_measured:
                end = min(end, start + _LOOK_PAGES)
        self._taken = end
        self._last = np.sort(self._candidates.order[start:end])
        return plan_removal(self._last) if end > start else None

    def _refuse_all(self) -> None:
        """Choose no group, because the target would take every page that may leave.

        Raises UsageError, unless the target is free space. Such a target can be right, because
        other files may take up the space.
        """
        gauge, nbytes = self.gauge, human_size(self._candidates.sum(self.groups))
        if not gauge.is_measured:
            size = "larger" if gauge.target.kind == "max-size" else "smaller"
            raise UsageError(
                f"{gauge.target}: {self._request.store.url} has only {nbytes} in pages that may "
                f"leave, so {human_size(gauge.limit)} would take all of them; give a {size} SIZE, "
                "or also a filter"
            )
        self._most = 0
        self.groups = self.groups[:0]
        self.lacking = gauge.asked
        self._emptied = nbytes

    def why_short(self, in_flight: int) -> str:
        """Return why the target was not reached, and the next step.

        in_flight: number of matching pages that servers may still be writing.
        """
        target, lacking = self.gauge.target, human_size(self.lacking)
        start = f"{target}: {lacking} short of {human_size(self.gauge.limit)}"
        if self._emptied:
            return (
                f"{start}: the pages that may leave have only {self._emptied}, so nothing was "
                "removed; make room beside them, or give a smaller SIZE"
            )
        if self.gauge.is_held:
            return (
                f"{start}: the removed bytes are not free; look for hard links, snapshots and "
                "files that servers hold open, or for servers that fill the freed space, then run "
                "again"
            )
        if self._candidates.in_place(self._taken):
            return f"{start}: no further page may leave; --and-unnamed removes more pages"
        if self._failed > _MOST_FAILED:
            return (
                f"{start}: {counted(self._failed, 'page')} could not be removed; see above, then "
                "run again"
            )
        later = ", once the pages in flight are old enough" if in_flight else ""
        return (
            f"{start}: no further page may leave; leave out filters, make room beside the pages, "
            f"or run again{later}"
        )

    def conclude(self, *, rehearsed: bool) -> None:
        """Set `facts` from the groups that were removed and the groups that stay.

        rehearsed: whether this is a dry run. In a dry run, `groups` count as removed.
        """
        if rehearsed:
            self._taken = len(self.groups)
        candidates, worth, gauge = self._candidates, self._request.worth, self.gauge
        chosen, known = candidates.order[: self._taken], candidates.places[: self._taken]
        nbytes, incomplete = candidates.sum(chosen), candidates.incomplete[: self._taken]
        unused = candidates.named[: self._taken] & (known < 0) & ~incomplete
        last_use = None
        if worth is None and len(chosen):
            last_use = float(self._request.groups.used_ns[chosen].max()) / 1e9
        stated: Any = {
            "target": gauge.target.kind,
            "limit_bytes": gauge.limit,
            "asked_bytes": gauge.asked,
            "bytes": nbytes,
            "stored_bytes": gauge.stored_bytes,
            "incomplete_pages": int(incomplete.sum()),
            "incomplete_bytes": candidates.sum(chosen[incomplete]),
            "unused_pages": None if worth is None else int(unused.sum()),
            "unused_bytes": None if worth is None else candidates.sum(chosen[unused]),
            "order": "last-use" if worth is None else worth.source,
            "last_use": last_use,
            "kept_pages": len(candidates) + candidates.unsized - len(chosen),
            "kept_bytes": None
            if candidates.unsized
            else candidates.sum(candidates.order[self._taken :]),
            "valued_pages": None if worth is None else int((candidates.places >= 0).sum()),
            "valued_pages_removed": None if worth is None else int((known >= 0).sum()),
            **_tokens(self._request, chosen),
            "unnamed": candidates.unnamed,
            "in_place_bytes": candidates.in_place(self._taken),
        }
        self.facts = stated


@dataclass(frozen=True, slots=True, eq=False)
class _Candidates:
    """Groups that may leave, in the order of removal.

    order: [n] numbers of the groups.
    places: [n] place of the page in the trace or plan; -1 for a page that the trace or plan lacks.
    named: [n] whether the group is in the profile's deployment; True without a profile, trace or
        plan.
    incomplete: [n] whether the group is incomplete.
    sizes: [groups] bytes of the objects of each group of the store.
    spaces: [groups] bytes of disk or memory that each group of the store takes.
    ends: [n] sum of the spaces of all groups up to this group, this group included.
    unsized: number of matching groups with an object of unknown size.
    unnamed: deployments other than the profile's; None without a profile, trace or plan.
    spared: numbers of the complete groups of these deployments, if the groups must stay; empty if
        the groups are candidates.
    remarks: messages about matching groups that are no candidates.
    """

    order: IntArray
    places: IntArray
    named: BoolArray
    incomplete: BoolArray
    sizes: IntArray
    spaces: IntArray
    ends: IntArray
    unsized: int
    unnamed: list[UnnamedDeployment] | None
    spared: IntArray
    remarks: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.order)

    @property
    def spared_bytes(self) -> int | None:
        """Bytes of the spared groups; None if a size is unknown."""
        return _known_sum(self.sizes[self.spared])

    def space(self, numbers: IntArray) -> int:
        """Return the bytes of disk or memory that some groups take."""
        return int(self.spaces[numbers].sum())

    def sum(self, numbers: IntArray) -> int:
        """Return the bytes of the objects of some groups."""
        return int(self.sizes[numbers].sum())

    def end(self, start: int, nbytes: int) -> int:
        """Return the smallest end for which the groups [start:end] take `nbytes` bytes or more.

        If all groups from `start` on take fewer bytes, return the number of all groups.
        """
        if nbytes <= 0:
            return start
        reached = nbytes + (int(self.ends[start - 1]) if start else 0)
        return min(len(self), int(np.searchsorted(self.ends, min(reached, _INT64_MAX))) + 1)

    def in_place(self, taken: int) -> int | None:
        """Return the bytes of complete groups that leave in place of the spared groups.

        Return None if the size of a spared group is unknown, or if no group was spared.

        taken: number of groups that leave.
        """
        spared = self.spared_bytes if len(self.spared) else None
        if spared is None:
            return None
        return min(spared, self.sum(self.order[:taken][~self.incomplete[:taken]]))


def worth_of_trace(requests: Requests) -> Worth:
    """Return the pages of a trace, ranked as by `prewarm`. Raises UsageError for block ids."""
    requests.refuse_block_ids("record token ids, or give --keep-plan")
    best_first = np.argsort(rank_by_value(requests))
    return Worth("trace", requests.page_names.take(pa.array(best_first)), requests)


def worth_of_plan(path: Path) -> Worth:
    """Return the pages of a plan of `prewarm`, best first. Raises UsageError and FormatError."""
    return Worth("plan", read_plan(path).pages)


def choose_groups(request: FreeRequest) -> Freeing:
    """Choose groups to remove until a target is reached.

    Groups with an object of unknown size are never chosen.
    Raises these exceptions:

    - UsageError if the store has no page of the trace or plan, if the store can never reach the
      target, if `FreeRequest.never_all` refuses the target, or if a plan is given without a profile
      and several deployments match
    - UnsupportedByBackend if the last uses, all sizes or the free bytes are unknown
    - StoreUnavailable
    """
    _refuse_unordered(request)
    gauge = Gauge.of(request.target, request.store, _stored_bytes(request.groups))
    return Freeing(request, _candidates(request, gauge), gauge)


def _candidates(request: FreeRequest, gauge: Gauge) -> _Candidates:
    """Return the matching groups in the order of their removal."""
    groups, incomplete, worth = request.groups, request.incomplete, request.worth
    sizes = _sizes(groups)
    own, remarks, unnamed, spared = request.matching, list[str](), None, request.matching[:0]
    if worth is not None and request.profile is not None:
        ids = groups.deployment_ids[own]
        others = own[(ids != 0) & (ids != UNRESOLVED)]
        if ambiguous := int((ids == UNRESOLVED).sum()):
            remarks.append(f"{counted(ambiguous, 'page')} with ambiguous keys left alone")
        unnamed = _by_label(groups, sizes, others)
        if not request.and_unnamed:
            spared = others[~incomplete[others]]
        own = np.union1d(own[ids == 0], np.setdiff1d(others, spared))
    sized = own[sizes[own] != UNKNOWN_BYTES]
    if unsized := len(own) - len(sized):
        if not len(sized):
            raise UnsupportedByBackend(
                f"{gauge.target}: {request.store.url} does not tell the sizes of its objects; give "
                "--profile with --trace or --keep-plan, or choose pages by another filter than "
                f"{gauge.target}"
            )
        remarks.append(f"{counted(unsized, 'page')} with objects of unknown size left alone")
    known = _places(request, sized)
    if worth is not None and len(known) and (known < 0).all():
        _refuse_of_other_pages(request, worth)
    named = np.ones(len(sized), dtype=np.bool_)
    if unnamed is not None:
        named = groups.deployment_ids[sized] == 0
    order = _least_useful_first(
        groups.used_ns[sized], groups.newest_ns[sized], known, named, ~incomplete[sized]
    )
    # `searchsorted` needs sums that do not overflow, even for sparse files of exbibytes.
    most = _INT64_MAX // max(1, len(sized))
    spaces = np.minimum(_sizes(groups, gauge.unit), most)
    return _Candidates(
        order=sized[order],
        places=known[order],
        named=named[order],
        incomplete=incomplete[sized[order]],
        sizes=np.minimum(sizes, most),
        spaces=spaces,
        ends=np.cumsum(spaces[sized[order]]),
        unsized=unsized,
        unnamed=unnamed,
        spared=spared,
        remarks=tuple(remarks),
    )


def freeing_lines(document: Mapping[str, Any], now: float) -> list[str]:
    """Return the lines about removed and kept pages.

    document: members of a `RemovalDocument`.
    now: Unix seconds.
    """
    lines, facts = [], document["free"]
    option, limit = f"--{facts['target']}", human_size(facts["limit_bytes"])
    for nbytes, verb in ((document["free_bytes"], "free"), (facts["stored_bytes"], "stored")):
        if nbytes is not None:
            ending = "" if facts["asked_bytes"] else "; nothing to remove"
            lines.append(f"{human_size(nbytes)} {verb}, {option} {limit}{ending}")
    if facts["bytes"] < facts["asked_bytes"] and facts["target"] != "keep-free":
        lines.append(
            f"{option}: the matching pages have only {human_size(facts['bytes'])} of "
            f"{human_size(facts['asked_bytes'])}"
        )
    if facts["incomplete_pages"]:
        size = human_size(facts["incomplete_bytes"])
        lines.append(f"Incomplete: {counted(facts['incomplete_pages'], 'page')}, {size}")
    if facts["unused_pages"]:
        which = "Used by no request" if facts["order"] == "trace" else "Not in the plan"
        size = human_size(facts["unused_bytes"])
        lines.append(f"{which}: {counted(facts['unused_pages'], 'page')}, {size}")
    lines.append(f"Kept: {counted(facts['kept_pages'], 'page')}, {human_size(facts['kept_bytes'])}")
    for row in facts["unnamed"] or ():
        size = f"{counted(row['pages'], 'page')}, {human_size(row['bytes'])}"
        lines.append(f"No request names {label_text(row['group'])}: {size}")
    if facts["last_use"] is not None:
        unused = human_age(now - facts["last_use"])
        lines.append(f"The chosen pages are unused for at least {unused}")
    if facts["valued_pages"] is not None:
        lines.append(
            f"Of {counted(facts['valued_pages'], 'page')} in the {facts['order']}, "
            f"{facts['valued_pages_removed']} leave"
        )
    if requested := facts["requested_tokens"]:
        before = (facts["usable_tokens_before"] or 0) / requested
        after = (facts["usable_tokens_after"] or 0) / requested
        lines.append(f"Usable tokens of the trace: {before:.1%} before, {after:.1%} after")
    return lines


def _refuse_unordered(request: FreeRequest) -> None:
    """Raise UnsupportedByBackend or UsageError if nothing tells which groups are least useful."""
    store, groups = request.store, request.groups
    if request.worth is None:
        if "mtime_ns" not in store.traits.columns:
            raise UnsupportedByBackend(
                f"{request.target}: {store.url} keeps no timestamps, so the oldest pages are "
                "unknown; give --trace or --keep-plan"
            )
    elif request.profile is None:
        ids = np.unique(groups.label_ids[request.matching])
        labels = {groups.labels[n] for n in ids.tolist()}
        if len(labels) > 1:
            raise UsageError(
                f"--keep-plan: {store.url} has pages of {len(labels)} deployments "
                f"({first_of(map(label_text, labels))}), but a plan is of one deployment; give "
                "--profile, or choose the deployment by --model, --tp, --pp or --cp"
            )


def _refuse_of_other_pages(request: FreeRequest, worth: Worth) -> None:
    """Raise UsageError if the trace or plan has no page of the store, candidate or not."""
    groups = request.groups
    stored = groups.pages_at(slice(None) if request.profile is None else groups.span(0))
    if not pc.any(pc.is_in(stored.cast(worth.pages.type), value_set=worth.pages)).as_py():
        option = "--trace" if worth.source == "trace" else "--keep-plan"
        raise UsageError(
            f"{option}: {request.store.url} has none of its pages, so all stored pages would count "
            f"as unused; give a file with this deployment's page size and tokenizer, or leave out "
            f"{option}"
        )


def _stored_bytes(groups: PageGroups) -> int | None:
    """Return the bytes of all listed objects; None if a size is unknown."""
    sizes = _object_sizes(groups)
    return None if (sizes == UNKNOWN_SIZE).any() else byte_sum(sizes)


def _object_sizes(groups: PageGroups) -> IntArray:
    """Return the bytes of each object: [objects].

    The size comes from the listing. If the listing lacks it, the spec states it. If the spec lacks
    it, too, the entry is UNKNOWN_SIZE.
    """
    inventory = groups.inventory
    stated = inventory.table.expected_sizes[inventory.affix_ids]
    sizes: IntArray = np.where(inventory.sizes == UNKNOWN_SIZE, stated, inventory.sizes)
    return sizes


def _sizes(groups: PageGroups, unit: int = 1) -> IntArray:
    """Return the bytes of each group; UNKNOWN_BYTES if the size of an object is unknown.

    unit: number of bytes. The size of each object is rounded up to a multiple of it.
    """
    grouped = groups.of_object >= 0
    owners, nbytes = groups.of_object[grouped], _object_sizes(groups)[grouped]
    unknown = nbytes == UNKNOWN_SIZE
    rounded = nbytes + -nbytes % unit
    sizes = byte_sums(np.where(unknown, 0, rounded), owners, len(groups))
    sizes[owners[unknown]] = UNKNOWN_BYTES
    return sizes


def _known_sum(sizes: IntArray) -> int | None:
    return None if (sizes == UNKNOWN_BYTES).any() else byte_sum(sizes)


def _by_label(groups: PageGroups, sizes: IntArray, numbers: IntArray) -> list[UnnamedDeployment]:
    """Return the pages and bytes of some groups for each label, most bytes first."""
    labels = groups.label_ids[numbers]
    rows: list[UnnamedDeployment] = []
    for label in np.unique(labels).tolist():
        nbytes = sizes[numbers[labels == label]]
        rows.append(
            {
                "group": groups.labels[label],
                "pages": len(nbytes),
                "bytes": _known_sum(nbytes),
            }
        )
    return sorted(rows, key=lambda row: (-(row["bytes"] or 0), row["group"]))


def _places(request: FreeRequest, numbers: IntArray) -> IntArray:
    """Return the place of each group's page in the trace or plan.

    The place is -1 for pages that the trace or plan lacks, and for ambiguous groups. With a
    profile, it is also -1 for groups of other deployments.
    """
    if request.worth is None:
        return np.full(len(numbers), -1, dtype=np.int64)
    places = places_among(request.groups.pages_at(numbers), request.worth.pages)
    ids = request.groups.deployment_ids[numbers]
    places[ids == UNRESOLVED if request.profile is None else ids != 0] = -1
    return places


def _least_useful_first(
    used_ns: IntArray, written_ns: IntArray, places: IntArray, named: BoolArray, complete: BoolArray
) -> IntArray:
    """Return the order of removal: [n].

    Incomplete pages come first, because no server reads them. Next come pages of deployments that
    no request names, then pages without a value. Last come pages with a value, the least valuable
    first. Among pages without a value, the longest unused come first. Pages whose uses count as one
    use leave in the reverse order of their writes, because a server writes a page after its prefix.

    used_ns: [n] last use, Unix nanoseconds.
    written_ns: [n] last write, Unix nanoseconds.
    places, named: see `_Candidates`.
    complete: [n] whether the group is complete.
    """
    valued = places >= 0
    spans, written = (np.where(valued, 0, times) for times in (_spans(used_ns), written_ns))
    order: IntArray = np.lexsort((-written, spans, -places, valued, named, complete))
    return order


def _spans(used_ns: IntArray) -> IntArray:
    """Return the start of the span of each use: [n]. Uses in one span count as one use.

    The first span begins with the first use, and so does a span after a pause longer than
    _SPAN_NS. Without such a pause, the next span begins when the last one ends. So pages of one
    request share a span unless the request crosses the end of a span on a busy store.

    used_ns: [n] Unix nanoseconds, 0 or more.
    """
    times, place = np.unique(used_ns, return_inverse=True)
    after_pause = np.ones(len(times), dtype=np.bool_)
    after_pause[1:] = np.diff(times) > _SPAN_NS
    begins = np.maximum.accumulate(np.where(after_pause, times, 0))
    starts: IntArray = (times - (times - begins) % _SPAN_NS)[place]
    return starts


def _tokens(request: FreeRequest, chosen: IntArray) -> dict[str, int | None]:
    """Count the tokens of a trace that servers can restore before and after the removal."""
    names = ("requested_tokens", "usable_tokens_before", "usable_tokens_after")
    groups, worth, profile = request.groups, request.worth, request.profile
    if worth is None or worth.requests is None or profile is None:
        return dict.fromkeys(names)
    acceptance = acceptance_of(request.store, groups.inventory, profile)
    hits = find_hits(groups.inventory, 0, worth.requests, acceptance=acceptance)
    removed = groups.pages_at(chosen[groups.deployment_ids[chosen] == 0])
    leaves = pc.is_in(hits.page_names, value_set=removed.cast(hits.page_names.type))
    stays = ~leaves.to_numpy(zero_copy_only=False)[hits.page_of]
    after = hits.usable_within(leading_runs(stays, hits.chains.offsets))
    size = profile.page_size
    counts = (
        hits.chains.requested_tokens(size),
        int(hits.usable_pages.sum()) * size,
        int(after.sum()) * size,
    )
    return dict(zip(names, counts, strict=True))
