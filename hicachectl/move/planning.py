"""Which page groups are to be taken away, and why: plans for `verify --repair` and `rm`."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.checks.findings import SCHEMA, combine, reasons, severity_ranks
from hicachectl.checks.registry import SEVERITIES, absent_codes
from hicachectl.formats.keys.table import FOREIGN, KeySplitter
from hicachectl.pages.deployments import UNRESOLVED
from hicachectl.requests.page_lists import NamedGroups
from hicachectl.text.vocabulary import STATES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from hicachectl.formats.keys.base import Affix
    from hicachectl.pages.deployments import Deployment
    from hicachectl.pages.groups import PageGroups
    from hicachectl.pages.inventory import IntArray
    from hicachectl.requests.files import PageList

_NOBODY = -1


@dataclass(frozen=True, slots=True)
class RepairPlan:
    """Groups to take away.

    groups: their numbers, rising. outright: those of them that go whatever their objects are.
    reasons: rows of findings.SCHEMA; about: [reasons] the group of each, rising.
    unplaced: by code, how many findings ask for repair but are about no group: foreign keys, the
        whole store.
    """

    groups: IntArray
    outright: IntArray
    reasons: pa.Table
    about: IntArray
    unplaced: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Criteria:
    """Which groups `rm` takes: those that meet all that is given.

    model: "/" or "-" alike. tp, pp, cp: sizes as `ls` shows them. all_deployments: whether a page
    that is listed without a group may name the groups of several deployments. before: Unix
    seconds; older is what was last written to before. Groups of ambiguous keys meet no filter:
    the state "unknown" or a list of pages must name them.
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
        """Return the numbers of the groups that meet them. A group without times is never old.

        store: for the message of UsageError, raised where a bare page names several groups.
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
        return np.flatnonzero(keep)

    @property
    def filters(self) -> bool:
        """Whether anything but a list of pages and the states is asked for."""
        return self.before is not None or not self._fits_any

    @property
    def _fits_any(self) -> bool:
        """Whether groups of no known deployment meet what is asked of a deployment."""
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


def plan_repair(groups: PageGroups, found: pa.Table, *, codes: Collection[str] = ()) -> RepairPlan:
    """Plan to take away every group with an error, and those with a finding of other `codes`.

    A finding is about the group that its key belongs to, be the object there or missing; one
    without a key is about all groups of its page. Groups of ambiguous keys stay.
    """
    wanted = severity_ranks(found) == SEVERITIES.index("error")
    named = pc.is_in(found.column("code"), value_set=pa.array(list(codes), pa.string()))
    chosen = found.take(pa.array(np.flatnonzero(wanted | named.to_numpy())))
    rows, about = _place(groups, chosen)
    order = np.argsort(about, kind="stable")
    return RepairPlan(
        groups=np.unique(about),
        outright=np.zeros(0, dtype=np.int64),
        reasons=chosen.take(pa.array(rows[order])),
        about=about[order],
        unplaced=Counter(np.delete(chosen.column("code").to_numpy(), rows).tolist()),
    )


def plan_removal(groups: PageGroups, chosen: IntArray, why: str) -> RepairPlan:
    """Plan to take away the chosen groups, whatever they hold."""
    numbers = np.unique(chosen)
    return RepairPlan(numbers, numbers, _outright(groups, numbers, "removed", why), numbers)


def with_descendants(
    plan: RepairPlan, groups: PageGroups, chains: Iterable[Sequence[str]]
) -> RepairPlan:
    """Add the groups that stand after a removed page in a chain: nothing can hit them any more.

    chains: page hashes of each, in order.
    """
    removed = _pages_by_deployment(groups, plan.groups)
    unreachable: dict[int, set[str]] = defaultdict(set)
    for chain in chains:
        for deployment, pages in removed.items():
            first = next((n for n, page in enumerate(chain) if page in pages), len(chain))
            unreachable[deployment].update(chain[first + 1 :])
    found = [
        groups.find(deployment, pa.array(sorted(pages), pa.string()))
        for deployment, pages in unreachable.items()
    ]
    numbers = np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *found]))
    new = np.setdiff1d(numbers[numbers != _NOBODY], plan.groups)
    why = "a page before it in its chain is taken away, so that no server can reach it"
    about = np.concatenate([plan.about, new])
    order = np.argsort(about, kind="stable")
    reasons = pa.concat_tables([plan.reasons, _outright(groups, new, "descendant", why)])
    return RepairPlan(
        groups=np.union1d(plan.groups, new),
        outright=np.union1d(plan.outright, new),
        reasons=reasons.take(pa.array(order)),
        about=about[order],
        unplaced=plan.unplaced,
    )


def _place(groups: PageGroups, found: pa.Table) -> tuple[IntArray, IntArray]:
    """Pair findings with groups: [pairs] rows of `found`, [pairs] group numbers.

    Groups of ambiguous keys get none: what is ambiguous does not go because of a profile.
    """
    keys = pc.cast(found.column("key"), pa.binary()).combine_chunks()
    pages, affix_ids = (splitter := KeySplitter()).split(pc.fill_null(keys, b""))
    homes: dict[Affix, set[int]] = defaultdict(set)
    for number, deployment in enumerate(groups.deployments):
        for spec in deployment.specs:
            homes[spec.affix].add(number)
    keyed = affix_ids != FOREIGN
    keyless = ~keyed & keys.is_null().to_numpy(zero_copy_only=False)
    # A key that two models have is about the object there, or about one that the other lacks.
    owners = groups.owners(keys)
    lacks = pc.is_in(found.column("code"), value_set=pa.array(absent_codes())).to_numpy()
    owned = np.flatnonzero((owners != _NOBODY) & ~lacks)
    owned = owned[groups.deployment_ids[owners[owned]] != UNRESOLVED]
    rows: list[IntArray] = [owned]
    about: list[IntArray] = [owners[owned]]
    # Of thousands of deployments, findings are about a few.
    named: dict[int, list[int]] = defaultdict(list)
    for affix_id, affix in enumerate(splitter.affixes):
        for number in homes[affix]:
            named[number].append(affix_id)
    for number in range(len(groups.deployments)) if keyless.any() else sorted(named):
        at_home = np.zeros(len(splitter.affixes) + 1, dtype=np.bool_)
        at_home[named[number]] = True
        here = at_home[affix_ids] & keyed & (lacks | (owners == _NOBODY))
        for mine, names in (
            (np.flatnonzero(here), pages),
            (np.flatnonzero(keyless), found.column("page").combine_chunks()),
        ):
            numbers = groups.find(number, names.take(pa.array(mine)))
            placed = (numbers != _NOBODY) & (numbers != owners[mine])
            rows.append(mine[placed])
            about.append(numbers[placed])
    return np.concatenate(rows), np.concatenate(about)


def _pages_by_deployment(groups: PageGroups, numbers: IntArray) -> dict[int, set[str]]:
    return {
        deployment: set(
            groups.pages_at(numbers[groups.deployment_ids[numbers] == deployment]).to_pylist()
        )
        for deployment in np.unique(groups.deployment_ids[numbers]).tolist()
        if deployment != UNRESOLVED
    }


def _outright(groups: PageGroups, numbers: IntArray, code: str, why: str) -> pa.Table:
    if not len(numbers):
        return SCHEMA.empty_table()
    return combine([reasons(code, pages=groups.pages_at(numbers), detail=why)])
