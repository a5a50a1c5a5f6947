"""What a verification covers: checks that cannot run, and objects that no check judges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.backends.hf3fs.page_tables import PageTables
from hicachectl.checks.registry import Need, checks_of, reading_groups, value_groups
from hicachectl.checks.sizes import expected_sizes
from hicachectl.formats.spec import UNKNOWN_SIZE, object_specs
from hicachectl.pages.ambiguity import ambiguity_remark
from hicachectl.pages.group_table import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from hicachectl.backends.base import Store
    from hicachectl.checks.values import ValueChecker
    from hicachectl.formats.profile import Profile
    from hicachectl.pages.groups import PageGroups
    from hicachectl.pages.inventory import Inventory


_ALIKE = (
    {"bfloat16", "float16"},
    {"float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Counts of objects to read and page groups to judge, and how far the run came.

    planned: objects to read, by check that reads; one object can serve several checks. rows: all
    objects to read; reached: those that were tried before the time limit.
    """

    planned: Mapping[str, int]
    rows: int
    reached: int
    groups: int
    in_flight: int
    sampled: bool

    def gaps(self) -> Iterator[tuple[str, str]]:
        """Give each check that judged nothing, and the objects left unread, with the reason."""
        if self.groups and self.in_flight == self.groups:
            yield "in-flight", f"all {self.groups} page groups are younger than --grace"
        for check, count in self.planned.items():
            if not count:
                yield check, f"no object was read: {self._nothing_planned(check)}"
            elif not self.reached:
                yield check, "no object was read before --time-limit"
        if self.reached < self.rows:
            left = self.rows - self.reached
            yield "unread-objects", f"{left} of {self.rows} were not read before --time-limit"

    def _nothing_planned(self, check: str) -> str:
        if self.groups and self.in_flight == self.groups:
            return "every page group is in flight"
        if self.sampled:
            return "--sample chose no page with such objects; give another --sample-slice"
        if check in value_groups():
            return "the profile describes none of the selected objects"
        return "the size of no selected object is known"


def unmet_needs(store: Store, profile: Profile | None, *, has_catalog: bool) -> dict[Need, str]:
    """Return what checks cannot have on a store, with the reason and the remedy.

    has_catalog: a catalog is compared with the store, or recorded.
    """
    columns = store.traits.columns
    unmet = {}
    if profile is None and "nbytes" not in columns:
        unmet[Need.SIZES] = (
            f"{store.url} keeps no object sizes; give --profile, --model-config or --server"
        )
    if "replicas" not in columns:
        unmet[Need.REPLICAS] = f"{store.url} does not list the replicas of objects"
    if not isinstance(store, PageTables):
        unmet[Need.PAGE_TABLES] = f"{store.url} has no page tables"
    if profile is None or profile.inferred:
        unmet[Need.PROFILE] = (
            "nothing says what the bytes of an object are; give --profile, --model-config or "
            "--server"
        )
    elif not any(spec.tensors for spec in object_specs(profile, store.grammar)):
        unmet[Need.TENSORS] = (
            "the profile describes no values, only object sizes; give one made from --model-config"
        )
    if not has_catalog and not store.traits.keeps_digests:
        unmet[Need.DIGESTS] = (
            "no digests are recorded; give --catalog FILE, with --update-catalog to begin one"
        )
    return unmet


def impossible_checks(groups: Collection[str], unmet: Mapping[Need, str]) -> dict[str, str]:
    """Return the reason and the remedy for each group of checks none of which can run."""
    impossible = {}
    for group in groups:
        reasons = [
            [why for need, why in unmet.items() if need in check.needs]
            for check in checks_of(group)
        ]
        if reasons and all(reasons):
            impossible[group] = reasons[0][0]
    return impossible


def indistinct_dtypes(checkers: Iterable[ValueChecker]) -> dict[str, str]:
    """Name the dtypes of checked values that another dtype of the same width could be.

    Random bits are finite numbers in most dtypes, so that values alone do not tell.
    """
    assumed: dict[str, set[str]] = {}
    for checker in checkers:
        for tensor in checker.expected.tensors:
            if any(tensor.dtype in alike for alike in _ALIKE):
                assumed.setdefault(checker.expected.coordinate.pool, set()).add(tensor.dtype)
    if not assumed:
        return {}
    texts = [f"{pool} as {', '.join(sorted(found))}" for pool, found in sorted(assumed.items())]
    return {
        "dtypes": f"{'; '.join(texts)}: values do not tell dtypes of the same width apart; compare "
        "the profile with --kv-cache-dtype of the servers"
    }


def unjudged(
    inventory: Inventory, groups: PageGroups, checks: Collection[str], *, inferred: bool
) -> dict[str, str]:
    """List what of a store the given checks do not understand, and why.

    inferred: no real profile says what to expect.
    """
    table = inventory.table
    skipped = {}
    if inferred and len(groups):
        skipped["absent-pools"] = (
            "without a real profile the store is measured against itself: a pool, part or rank "
            "that is absent everywhere cannot be noticed"
        )
    ambiguous = int((groups.states == UNKNOWN).sum())
    if ambiguous and "groups" in checks:
        skipped["ambiguous-groups"] = (
            f"{ambiguous} page groups have ambiguous keys: {ambiguity_remark(inventory)}"
        )
    profiled = bool(table.deployments) and table.deployments[0].profile is not None
    others = {d.model for d in table.deployments[1:]} if profiled else set()
    seen = set(groups.deployment_ids.tolist())
    if profiled and any(number in seen for number in range(1, len(table.deployments))):
        skipped["other-deployments"] = (
            f"objects of {', '.join(sorted(others))} that the profile does not describe were "
            "measured against themselves"
        )
    unlisted = {s.pool for d in groups.deployments for s in d.specs if not s.listed}
    if unlisted:
        skipped["unlisted-pools"] = (
            f"{', '.join(sorted(unlisted))}: in the store, but not in the profile"
        )
    sizeless = _pools_without_size(inventory)
    if sizeless and "sizes" in checks:
        skipped["sizes"] = f"{', '.join(sizeless)}: no size that most objects share"
    unsized = inventory.affix_ids[inventory.objects.column("nbytes").is_null().to_numpy()]
    unlisted_sizes = int((unsized >= 0).sum())
    if unlisted_sizes and "sizes" in checks:
        why = f"the store lists no size for {unlisted_sizes} objects"
        skipped["sizes"] = "; ".join([*filter(None, [skipped.get("sizes")]), why])
    unreadable = int((expected_sizes(inventory.table)[unsized] == UNKNOWN_SIZE).sum())
    if unreadable and not reading_groups().isdisjoint(checks):
        skipped["unread-objects"] = (
            f"{unreadable} objects were not read, since the store lists no size for them; give a "
            "profile, or --allow-leases"
        )
    return skipped


def _pools_without_size(inventory: Inventory) -> list[str]:
    table = inventory.table
    mixed = {affix for mix in table.mixes for affix in mix.affix_ids}
    present = np.unique(inventory.affix_ids)
    pools = set()
    for affix in set(present[present >= 0].tolist()) - mixed:
        spec = table.spec(affix)
        if spec is not None and spec.nbytes == UNKNOWN_SIZE:
            pools.add(spec.pool)
    return sorted(pools)
