"""What a verification covers: checks that cannot run, and objects that no check judges."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hicachectl.backends.hf3fs.page_tables import PageTables
from hicachectl.checks.registry import GROUPS, SIZES, Need, checks, reading_groups, value_groups
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


def reading_gaps(
    planned: Mapping[str, int],
    *,
    rows: int,
    reached: int,
    groups: int,
    in_flight: int,
    sampled: bool,
) -> Iterator[tuple[str, str]]:
    """Give each check that judged nothing, and the objects left unread, with the reason.

    planned: objects to read, by check that reads; one object can serve several checks. rows: all
    objects to read; reached: those that were tried before the time limit. groups: page groups to
    judge, of which some are in flight.
    """
    if groups and in_flight == groups:
        yield "in-flight", f"all {groups} page groups are younger than --grace"
    for check, count in planned.items():
        if count:
            if not reached:
                yield check, "no object was read before --time-limit"
            continue
        if groups and in_flight == groups:
            why = "every page group is in flight"
        elif sampled:
            why = "--sample chose no page with such objects; give another --sample-slice"
        elif check in value_groups():
            why = "the profile describes none of the selected objects"
        else:
            why = "the size of no selected object is known"
        yield check, f"no object was read: {why}"
    if reached < rows:
        yield "unread-objects", f"{rows - reached} of {rows} were not read before --time-limit"


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
            for check in checks()
            if check.group and check.group.name == group
        ]
        if reasons and all(reasons):
            impossible[group] = reasons[0][0]
    return impossible


def indistinct_dtypes(checkers: Iterable[ValueChecker]) -> Iterator[tuple[str, str]]:
    """Name the dtypes of checked values that another dtype of the same width could be.

    Random bits are finite numbers in most dtypes, so that values alone do not tell. Gives at most
    one pair, of a name for what was not checked and the reason, as `unjudged` does.
    """
    assumed: dict[str, set[str]] = {}
    for checker in checkers:
        for tensor in checker.expected.tensors:
            if any(tensor.dtype in alike for alike in _ALIKE):
                assumed.setdefault(checker.expected.coordinate.pool, set()).add(tensor.dtype)
    if assumed:
        texts = [f"{pool} as {', '.join(sorted(found))}" for pool, found in sorted(assumed.items())]
        yield (
            "dtypes",
            f"{'; '.join(texts)}: values do not tell dtypes of the same width apart; compare the "
            "profile with --kv-cache-dtype of the servers",
        )


def unjudged(
    inventory: Inventory, groups: PageGroups, chosen: Collection[str], profile: Profile | None
) -> Iterator[tuple[str, str]]:
    """Give what of a store the chosen groups of checks do not understand, and why.

    profile: a real one; None where the store itself says what to expect.
    """
    table = inventory.table
    if profile is None and len(groups):
        yield (
            "absent-pools",
            "without a real profile the store is measured against itself: a pool, part or rank "
            "that is absent everywhere cannot be noticed",
        )
    ambiguous = int((groups.states == UNKNOWN).sum())
    if ambiguous and GROUPS.name in chosen:
        why = f"{ambiguous} page groups have ambiguous keys: {ambiguity_remark(inventory)}"
        yield "ambiguous-groups", why
    profiled = bool(table.deployments) and table.deployments[0].profile is not None
    if profiled and (groups.deployment_ids > 0).any():
        others = sorted({deployment.model for deployment in table.deployments[1:]})
        why = f"objects of {', '.join(others)} that the profile does not describe were "
        yield "other-deployments", why + "measured against themselves"
    unlisted = {s.pool for d in groups.deployments for s in d.specs if not s.listed}
    if unlisted:
        yield (
            "unlisted-pools",
            f"{', '.join(sorted(unlisted))}: in the store, but not in the profile",
        )
    unsized = inventory.affix_ids[inventory.objects.column("nbytes").is_null().to_numpy()]
    if SIZES.name in chosen:
        if sizeless := _pools_without_size(inventory):
            yield SIZES.name, f"{', '.join(sizeless)}: no size that most objects share"
        if known := int((unsized >= 0).sum()):
            yield SIZES.name, f"the store lists no size for {known} objects"
    unreadable = int((expected_sizes(table)[unsized] == UNKNOWN_SIZE).sum())
    if unreadable and not reading_groups().isdisjoint(chosen):
        yield (
            "unread-objects",
            f"{unreadable} objects were not read, since the store lists no size for them; give a "
            "profile, or --allow-leases",
        )


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
