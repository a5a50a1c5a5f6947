"""Plans of `verify --repair` and `rm`: which page groups to remove, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.checks.codes import SEVERITIES
from hicachectl.checks.findings import NO_NUMBER, reasons, severity_ranks
from hicachectl.pages.deployments import UNRESOLVED
from hicachectl.pages.group_table import PARTIAL
from hicachectl.requests.page_lists import NamedGroups
from hicachectl.text.vocabulary import STATES

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from hicachectl.pages.deployments import Deployment
    from hicachectl.pages.groups import BoolArray, PageGroups
    from hicachectl.pages.inventory import IntArray
    from hicachectl.requests.files import PageList
    from hicachectl.verification.report import Refusal

BY_CHOICE = "removed"  # the code of groups that leave without a finding


@dataclass(frozen=True, slots=True)
class RepairPlan:
    """Groups to remove.

    groups: numbers, ascending.
    outright: numbers of groups removed even if whole. They stay if they change before.
    reasons: rows of findings.LOCATED_SCHEMA, by group.
    unplaced: number of findings without a group, by code: about foreign keys or the whole store.
        Removing groups does not repair them.
    others: number of groups with findings that the profile does not describe.
    mixed: number of groups with an object of a mix (`SizeMix`).
    refused: why the plan has no groups, although there are findings to repair.
    """

    groups: IntArray
    outright: IntArray
    reasons: pa.Table
    unplaced: Mapping[str, int] = field(default_factory=dict)
    others: int = 0
    mixed: int = 0
    refused: Refusal | None = None

    @property
    def about(self) -> IntArray:
        """Group of each reason: [reasons], ascending."""
        about: IntArray = self.reasons.column("group").to_numpy()
        return about

    def where(self, kept: BoolArray) -> RepairPlan:
        """Return the plan with only some groups; kept: [groups of the store] bool."""
        return replace(
            self,
            groups=self.groups[kept[self.groups]],
            outright=self.outright[kept[self.outright]],
            reasons=self.reasons.filter(pa.array(kept[self.about])),
        )


@dataclass(frozen=True, slots=True)
class Criteria:
    """Filters of `rm`; a group must match all that are given.

    model: with "/" or "-". tp, pp, cp: sizes as in `ls`. pages: pages or groups.
    all_deployments: a row of `pages` without a group names groups of all deployments.
    before: Unix seconds; the last write must be earlier.
    states: only a profile shows what a page lacks, so groups of deployments without one never match
    "partial". Groups of ambiguous keys match only "unknown" or `pages`.
    """

    model: str | None = None
    tag: str | None = None
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    pages: PageList | None = None
    all_deployments: bool = False
    before: float | None = None
    states: Collection[str] | None = None

    def chosen(self, groups: PageGroups, store: str = "STORE") -> IntArray:
        """Return the numbers of matching groups; without times, a group never matches `before`.

        Raises UsageError, naming the store, if a row of `pages` without a group names several
        groups.
        """
        keep = np.append([self._fits(d) for d in groups.deployments], self._fits_any)
        keep = keep.astype(np.bool_)[groups.deployment_ids]
        if self.pages is not None:
            named = NamedGroups(self.pages, groups)
            if not self.all_deployments:
                named.refuse_several(keep, store)
            keep &= named.chosen
        elif "unknown" not in (self.states or ()):
            keep &= groups.deployment_ids != UNRESOLVED
        if self.before is not None:
            keep &= (groups.newest_ns > 0) & (groups.newest_ns < int(self.before * 1e9))
        if self.states is not None:
            keep &= np.isin(groups.states, [STATES.index(state) for state in self.states])
            keep &= ~unjudged_partial(groups)
        return np.flatnonzero(keep)

    def unjudged(self, groups: PageGroups) -> int:
        """Return how many groups look partial, but do not match "partial" without a profile."""
        if self.states is None or STATES[PARTIAL] not in self.states:
            return 0
        states = replace(self, states=None)
        return int(unjudged_partial(groups)[states.chosen(groups)].sum())

    @property
    def filters(self) -> bool:
        """Whether a filter other than pages and states is given."""
        return self.before is not None or not self._fits_any

    @property
    def _fits_any(self) -> bool:
        """Whether no filter on the deployment is given."""
        asked = (self.model, self.tag, self.tp, self.pp, self.cp)
        return all(value is None for value in asked)

    def _fits(self, deployment: Deployment) -> bool:
        shard = deployment.shard
        return all(
            wanted in (None, found)
            for wanted, found in (
                (None if self.model is None else self.model.replace("/", "-"), deployment.model),
                (self.tag, deployment.tag),
                (self.tp, shard.tp_size),
                (self.pp, shard.pp_size),
                (self.cp, shard.cp_size),
            )
        )


def unjudged_partial(groups: PageGroups) -> BoolArray:
    """Return which groups look partial, but are of a deployment without a profile: [groups].

    Its specs are inferred: a single stray object makes all its other pages look partial.
    """
    profiled = np.array([*(d.profile is not None for d in groups.deployments), False])
    unjudged: BoolArray = (groups.states == PARTIAL) & ~profiled[groups.deployment_ids]
    return unjudged


def plan_repair(found: pa.Table, *, codes: Collection[str] = ()) -> RepairPlan:
    """Plan to remove every group with an error or with a finding of one of `codes`.

    found: findings as `checks.running.located` returns them: findings.LOCATED_SCHEMA.
    """
    wanted = severity_ranks(found) == SEVERITIES.index("error")
    named = pc.is_in(found.column("code"), value_set=pa.array(list(codes), pa.string()))
    chosen = found.filter(pa.array(wanted | named.to_numpy()))
    grouped = pc.not_equal(chosen.column("group"), NO_NUMBER)
    reasons = chosen.filter(grouped).sort_by("group")
    unplaced = chosen.filter(pc.invert(grouped)).column("code")
    return RepairPlan(
        groups=np.unique(reasons.column("group").to_numpy()).astype(np.int64),
        outright=np.zeros(0, dtype=np.int64),
        reasons=reasons,
        unplaced=Counter(unplaced.to_pylist()),
    )


def described_groups(groups: PageGroups) -> BoolArray:
    """Return which groups the profile describes: [groups]."""
    described = np.zeros(len(groups), dtype=np.bool_)
    if groups.deployments and groups.deployments[0].profile is not None:
        described[groups.span(0)] = True
    return described


def plan_removal(groups: PageGroups, chosen: IntArray, why: str) -> RepairPlan:
    """Plan to remove the chosen groups, even whole ones."""
    numbers = np.unique(chosen)
    why_each = reasons(BY_CHOICE, pages=groups.pages_at(numbers), groups=numbers, detail=why)
    return RepairPlan(groups=numbers, outright=numbers, reasons=why_each)


def newest_taken(groups: PageGroups, plan: RepairPlan) -> int:
    """Return how many of the plan's pages are newer than all others of the profile's deployment.

    0 if the plan takes all of them, or if the store keeps no times. Many such pages suggest that
    the profile is not the one of the servers that wrote last.
    """
    span = groups.span(0)
    times = groups.newest_ns[span]
    taken = np.isin(np.arange(span.start, span.stop), plan.groups)
    if not groups.has_times or taken.all():
        return 0
    return int((times[taken] > times[~taken].max()).sum())
