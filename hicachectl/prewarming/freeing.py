"""Choose the page groups to remove from a store to make room: the least useful first.

A trace or a plan gives the value of pages, as for `prewarm`: no page ranks before its prefix, so
tails are removed first. Pages that it lacks are removed before, the longest unused first.
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
from hicachectl.pages.census import byte_sum, byte_sums
from hicachectl.pages.deployments import UNRESOLVED
from hicachectl.pages.groups import UNKNOWN_BYTES
from hicachectl.prewarming.ranking import places_among, rank_by_value, read_plan
from hicachectl.profiles.identities import acceptance_of
from hicachectl.requests.hits import find_hits
from hicachectl.text.units import counted, first_of, human_age, human_size

if TYPE_CHECKING:
    from pathlib import Path

    from hicachectl.backends.base import Store
    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.formats.profile import Profile
    from hicachectl.move.results import FreeDocument, UnnamedDeployment
    from hicachectl.pages.groups import PageGroups
    from hicachectl.requests.chains import Requests


@dataclass(frozen=True, slots=True, eq=False)
class Worth:
    """Pages of known value.

    source: "trace" or "plan".
    pages: distinct pages, best first.
    requests: requests of the trace; None for a plan.
    """

    source: str
    pages: pa.StringArray
    requests: Requests | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Freeing:
    """Groups to remove, and what is known of the loss.

    groups: numbers, the least useful first. facts: the member "free" of the document.
    remarks: about groups that were no candidates.
    """

    groups: IntArray
    facts: FreeDocument
    remarks: tuple[str, ...] = ()

    def lacking(self, stayed: int = 0) -> int:
        """Return the bytes asked for beyond those of the groups. stayed: bytes not removed."""
        return max(0, int(self.facts["asked_bytes"]) - int(self.facts["bytes"]) + stayed)


def worth_of_trace(requests: Requests) -> Worth:
    """Rank the pages of a trace as `prewarm` does. Raises UsageError for block ids."""
    requests.refuse_block_ids("record token ids, or give --keep-plan")
    best_first = np.argsort(rank_by_value(requests))
    return Worth("trace", requests.page_names.take(pa.array(best_first)), requests)


def worth_of_plan(path: Path) -> Worth:
    """Read the pages of a plan of `prewarm`. Raises UsageError and FormatError."""
    return Worth("plan", read_plan(path).pages)


def choose_groups(
    store: Store,
    groups: PageGroups,
    candidates: IntArray,
    asked: int,
    *,
    worth: Worth | None = None,
    profile: Profile | None = None,
    and_unnamed: bool = False,
) -> Freeing:
    """Choose groups to remove, so that their objects have at least `asked` bytes.

    candidates: numbers. If they have less, all are chosen. Groups with an object of unknown size
    are none.
    worth: with a profile, requests name its deployment only. Groups of other deployments leave
    first if and_unnamed is True, else they stay.
    groups: groups of an inventory that has `atime_ns` if the store has it.
    Raises UsageError if worth is of other pages than the store's, and UnsupportedByBackend if the
    order or all sizes are unknown.
    """
    _refuse_unordered(store, groups, candidates, worth, profile)
    sizes = _sizes(groups)
    own, remarks, unnamed = candidates, list[str](), None
    if worth is not None and profile is not None:
        of_candidates = groups.deployment_ids[candidates]
        others = candidates[(of_candidates != 0) & (of_candidates != UNRESOLVED)]
        own = candidates[of_candidates == 0]
        if ambiguous := len(candidates) - len(own) - len(others):
            remarks.append(f"{counted(ambiguous, 'page')} with ambiguous keys left alone")
        unnamed = _by_label(groups, sizes, others)
        if and_unnamed:
            own = np.union1d(own, others)
        elif len(others):
            size = human_size(_known_sum(sizes[others]))
            remarks.append(
                f"{counted(len(others), 'page')} ({size}) of deployments that no "
                "request names left alone; --and-unnamed removes them first"
            )
    sized = own[sizes[own] != UNKNOWN_BYTES]
    if unsized := len(own) - len(sized):
        if not len(sized):
            raise UnsupportedByBackend(
                f"--free: {store.url} does not tell the sizes of its objects; give --profile with "
                "--trace or --keep-plan, or choose pages by another filter than --free"
            )
        remarks.append(f"{counted(unsized, 'page')} with objects of unknown size left alone")
    known = _places(groups, sized, worth, profile)
    if worth is not None and len(known) and (known < 0).all():
        _refuse_of_other_pages(store, groups, worth, profile)
    named = np.ones(len(sized), dtype=np.bool_)
    if unnamed is not None:
        named = groups.deployment_ids[sized] == 0
    order = _least_useful_first(groups.used_ns[sized], known, named)
    # Sums of sparse files of exbibytes must not overflow: the order of removal needs them.
    sizes = np.minimum(sizes[sized], np.iinfo(np.int64).max // max(1, len(sized)))
    ends = np.cumsum(sizes[order])
    taken = order[: int(np.searchsorted(ends, asked)) + 1]
    chosen = sized[taken]
    nbytes = int(sizes[taken].sum())
    last_use = None
    if worth is None and len(chosen):
        last_use = float(groups.used_ns[chosen].max()) / 1e9
    facts: Any = {
        "asked_bytes": asked,
        "bytes": nbytes,
        "order": "last-use" if worth is None else worth.source,
        "last_use": last_use,
        "kept_pages": len(own) - len(chosen),
        "kept_bytes": None if unsized else int(ends[-1:].sum()) - nbytes,
        "valued_pages": None if worth is None else int((known >= 0).sum()),
        "valued_pages_removed": None if worth is None else int((known[taken] >= 0).sum()),
        **_tokens(store, groups, chosen, worth, profile),
        "unnamed": unnamed,
    }
    return Freeing(chosen, facts, tuple(remarks))


def freeing_lines(facts: FreeDocument, now: float) -> list[str]:
    """Return what is lost and kept, in words. now: Unix seconds."""
    lines = []
    if facts["bytes"] < facts["asked_bytes"]:
        lines.append(
            f"--free: the matching pages have only {human_size(facts['bytes'])} of "
            f"{human_size(facts['asked_bytes'])}"
        )
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
            f"{facts['valued_pages_removed']} chosen"
        )
    if requested := facts["requested_tokens"]:
        before = (facts["usable_tokens_before"] or 0) / requested
        after = (facts["usable_tokens_after"] or 0) / requested
        lines.append(f"Usable tokens of the trace: {before:.1%} before, {after:.1%} after")
    return lines


def _refuse_unordered(
    store: Store,
    groups: PageGroups,
    candidates: IntArray,
    worth: Worth | None,
    profile: Profile | None,
) -> None:
    """Raise if nothing tells which groups are the least useful."""
    if worth is None:
        if "mtime_ns" not in store.traits.columns:
            raise UnsupportedByBackend(
                f"--free: {store.url} keeps no timestamps, so the oldest pages are unknown; give "
                "--trace or --keep-plan"
            )
    elif profile is None:
        labels = {groups.labels[n] for n in np.unique(groups.label_ids[candidates]).tolist()}
        if len(labels) > 1:
            raise UsageError(
                f"--keep-plan: {store.url} has pages of {len(labels)} deployments "
                f"({first_of(map(label_text, labels))}), but a plan is of one; give "
                "--profile, or choose one by --model, --tp, --pp or --cp"
            )


def _refuse_of_other_pages(
    store: Store, groups: PageGroups, worth: Worth, profile: Profile | None
) -> None:
    """Raise if the store has none of the pages of worth, not even pages that are no candidates."""
    there = groups.pages_at(slice(None) if profile is None else groups.span(0))
    if not pc.any(pc.is_in(there.cast(worth.pages.type), value_set=worth.pages)).as_py():
        option = "--trace" if worth.source == "trace" else "--keep-plan"
        raise UsageError(
            f"{option}: {store.url} has none of its pages, so all would count as unused; give one "
            f"of this deployment's page size and tokenizer, or leave out {option}"
        )


def _sizes(groups: PageGroups) -> IntArray:
    """Return the listed bytes of each group, else those that the specs state.

    UNKNOWN_BYTES if neither tells the size of an object.
    """
    inventory = groups.inventory
    column = inventory.objects.column("nbytes")
    if not column.null_count:
        return groups.nbytes
    stated = inventory.table.expected_sizes[inventory.affix_ids]
    nbytes = np.where(column.is_null().to_numpy(), stated, column.fill_null(0).to_numpy())
    grouped = groups.of_object >= 0
    owners, nbytes = groups.of_object[grouped], nbytes[grouped]
    unknown = nbytes == UNKNOWN_SIZE
    sizes = byte_sums(np.where(unknown, 0, nbytes), owners, len(groups))
    sizes[owners[unknown]] = UNKNOWN_BYTES
    return sizes


def _known_sum(sizes: IntArray) -> int | None:
    return None if (sizes == UNKNOWN_BYTES).any() else byte_sum(sizes)


def _by_label(groups: PageGroups, sizes: IntArray, numbers: IntArray) -> list[UnnamedDeployment]:
    """Return the pages and bytes of some groups by their label, most bytes first."""
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


def _places(
    groups: PageGroups, numbers: IntArray, worth: Worth | None, profile: Profile | None
) -> IntArray:
    """Return the place of each group's page in `worth`.

    -1 for pages that it lacks, ambiguous groups and, with a profile, groups of other deployments.
    """
    if worth is None:
        return np.full(len(numbers), -1, dtype=np.int64)
    places = places_among(groups.pages_at(numbers), worth.pages)
    ids = groups.deployment_ids[numbers]
    places[ids == UNRESOLVED if profile is None else ids != 0] = -1
    return places


def _least_useful_first(used_ns: IntArray, places: IntArray, named: BoolArray) -> IntArray:
    """Return the order of removal: [n].

    Deployments that no request names come first, then pages without a value, both by their last
    use, in the order of SGLang's evictor and our plug-in; then the others, the worst first. Without
    chains, the prefix of a page is unknown. Servers use the pages of a request within seconds, so
    only requests at the limit lose a prefix before its tail.
    named: [n] whether requests name the deployment.
    """
    order: IntArray = np.lexsort((np.where(places < 0, used_ns, 0), -places, places >= 0, named))
    return order


def _tokens(
    store: Store,
    groups: PageGroups,
    chosen: IntArray,
    worth: Worth | None,
    profile: Profile | None,
) -> dict[str, int | None]:
    """Count the tokens of a trace's requests that servers can restore, before and after."""
    names = ("requested_tokens", "usable_tokens_before", "usable_tokens_after")
    if worth is None or worth.requests is None or profile is None:
        return dict.fromkeys(names)
    acceptance = acceptance_of(store, groups.inventory, profile)
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
