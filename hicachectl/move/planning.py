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

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.pages.groups import PageGroups
    from hicachectl.verification.part_result import Refusal

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


def plan_repair(found: pa.Table, *, codes: Collection[str] = ()) -> RepairPlan:
    """Plan to remove every group with an error or with a finding of one of `codes`.

    found: findings as `checks.findings.located` returns them: findings.LOCATED_SCHEMA.
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
