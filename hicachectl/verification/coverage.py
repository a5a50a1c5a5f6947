"""Gaps of a verification: checks that cannot run, and objects that no check judges."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicachectl.backends.capabilities import keeps_digests
from hicachectl.backends.page_tables import PageTables
from hicachectl.checks.registry import (
    DIGESTS,
    GROUPS,
    SIZES,
    Need,
    checks,
    reading_groups,
    value_groups,
)
from hicachectl.formats.spec import UNKNOWN_SIZE, object_specs
from hicachectl.formats.wording import GIVE_PROFILE, PAGES_COMPARED
from hicachectl.pages.group_table import UNKNOWN
from hicachectl.pages.naming import ambiguity_remark, deployment_document, deployment_text
from hicachectl.profiles.identities import expected_identities
from hicachectl.text.units import counted, first_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from hicachectl.backends.base import Store
    from hicachectl.formats.arrays import IntArray
    from hicachectl.formats.profile import Profile
    from hicachectl.formats.spec import ObjectSpec
    from hicachectl.pages.deployments import AffixTable
    from hicachectl.pages.tally import Tally
    from hicachectl.profiles.identities import Expected

_ALIKE = (
    {"bfloat16", "float16"},
    {"float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"},
)


def nothing_selected(tally: Tally, objects_read: int) -> bool:
    """Return whether no object was selected: nothing was checked."""
    return not (tally.groups or objects_read)


def reading_gaps(
    planned: Mapping[str, int],
    *,
    rows: int,
    reached: int,
    groups: int,
    in_flight: int,
    sampled: bool,
) -> Iterator[tuple[str, str]]:
    """Yield the name and the reason of each check that judged nothing, and of unread objects.

    planned: number of objects to read, by check; one object can serve several checks.
    rows: number of objects to read.
    reached: number of objects tried before the time limit.
    groups: number of page groups.
    """
    if groups and in_flight == groups:
        yield (
            "in-flight",
            f"every page group ({groups}) is younger than --grace; run again later, or give a "
            "shorter --grace",
        )
    for check, count in planned.items():
        if count:
            if not reached:
                yield check, "no object was read before --time-limit"
            continue
        if groups and in_flight == groups:
            why = "every page group is in flight"
        elif sampled:
            why = "the --sample slice has no page with such objects; give another --sample-slice"
        elif check in value_groups():
            why = "the profile describes none of the selected objects"
        else:
            why = "no selected object has a known size"
        yield check, f"no object was read: {why}"
    if reached < rows:
        yield (
            "unread-objects",
            f"not read before --time-limit: {rows - reached} of {counted(rows, 'object')}; give a "
            "longer --time-limit",
        )


def unmet_needs(
    store: Store, profile: Profile | None, *, collision: str = "", has_catalog: bool
) -> dict[Need, str]:
    """Return the needs that a store or request does not meet, with reason and next step.

    collision: why a given profile describes no objects.
    has_catalog: whether a catalog is compared with the store, or recorded.
    """
    columns = store.traits.columns
    unmet = {}
    if profile is None and "nbytes" not in columns:
        unmet[Need.SIZES] = f"{store.url} keeps no object sizes; {collision or GIVE_PROFILE}"
    if "replicas" not in columns:
        unmet[Need.REPLICAS] = f"{store.url} does not list the replicas of objects"
    if not isinstance(store, PageTables):
        unmet[Need.PAGE_TABLES] = f"{store.url} has no page tables"
    if profile is None or profile.inferred:
        unmet[Need.PROFILE] = (
            collision or f"no given profile describes the bytes of objects; {GIVE_PROFILE}"
        )
    elif not any(spec.tensors for spec in object_specs(profile, store.grammar)):
        unmet[Need.TENSORS] = (
            "the profile describes no values, only object sizes; give a profile made from "
            "--model-config"
        )
    if not (has_catalog or compares_own(store, expected_identities(store, profile))):
        unmet[Need.DIGESTS] = (
            "no recorded digests to compare with; give --catalog FILE and, to record digests, "
            "--update-catalog"
        )
    return unmet


def compares_own(store: Store, expected: Expected) -> bool:
    """Return whether reads compare objects with digests of the store, or with identities."""
    return keeps_digests(store) or bool(expected.marked and expected.identities)


def digest_gaps(compared: int, without: int, unknown: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the reason of what a store with digests left uncompared.

    compared: number of objects compared with their digests.
    without: number of objects without a digest.
    unknown: why identities cannot be compared, else "".
    """
    if unknown:
        yield "identities", f"not compared: {unknown}"
    if without:
        yield (
            "undigested-objects" if compared else DIGESTS.name,
            f"{counted(without, 'object')} without a digest in the store, so the bytes were not "
            "compared; to compare them with later ones, give --catalog FILE and --update-catalog",
        )


def impossible_checks(groups: Collection[str], unmet: Mapping[Need, str]) -> dict[str, str]:
    """Return the reason and next step for each group without a check that can run."""
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


def rank_gaps(unranked: int) -> Iterator[tuple[str, str]]:
    """Yield the name and the reason of ranks left uncompared. unranked: objects."""
    if unranked:
        yield (
            "ranks",
            f"{counted(unranked, 'object')} with a trailer that names no rank, so bytes of another "
            "rank would go unnoticed; hicachectl migrate --trailers write names the rank",
        )


def indistinct_dtypes(specs: Iterable[ObjectSpec]) -> Iterator[tuple[str, str]]:
    """Yield at most one name and reason if dtypes of checked values may be others of equal width.

    Random bits are finite numbers in most dtypes, so values alone do not show the dtype.
    specs: objects whose values were checked.
    """
    assumed: dict[str, set[str]] = {}
    for spec in specs:
        for tensor in spec.tensors:
            if any(tensor.dtype in alike for alike in _ALIKE):
                assumed.setdefault(spec.pool, set()).add(tensor.dtype)
    if assumed:
        texts = [f"{pool}: {', '.join(sorted(found))}" for pool, found in sorted(assumed.items())]
        yield (
            "dtypes",
            f"values do not prove the dtypes of the profile ({'; '.join(texts)}), because dtypes "
            "of one width look alike; compare the profile with the servers' --kv-cache-dtype",
        )


def unjudged(
    table: AffixTable, tally: Tally, chosen: Collection[str], profile: Profile | None
) -> Iterator[tuple[str, str]]:
    """Yield the name and the reason of everything that the chosen groups of checks cannot judge.

    profile: None if expectations come from the store.
    """
    if profile is None and tally.groups:
        yield (
            "absent-pools",
            f"without a given profile, {PAGES_COMPARED}",
        )
    ambiguous = int(tally.states[:, UNKNOWN].sum())
    if ambiguous and GROUPS.name in chosen:
        why = ambiguity_remark(table, tally.objects)
        yield "ambiguous-groups", f"{counted(ambiguous, 'page group')} with ambiguous keys: {why}"
    profiled = bool(table.deployments) and table.deployments[0].profile is not None
    if profiled and tally.states[1:-1].any():
        others = (
            deployment_text(deployment_document(deployment))
            for deployment, states in zip(table.deployments[1:], tally.states[1:-1], strict=True)
            if states.any()
        )
        why = f"objects of {first_of(others)} that the profile does not describe: "
        yield "other-deployments", why + "they were only compared with each other"
    unlisted = {s.pool for d in table.deployments for s in d.specs if not s.listed}
    if unlisted:
        yield (
            "unlisted-pools",
            f"{', '.join(sorted(unlisted))}: in the store, but not in the profile; add the pools "
            "to the profile if servers use them",
        )
    if SIZES.name in chosen:
        if sizeless := _pools_without_size(table, tally.objects):
            yield SIZES.name, f"{', '.join(sizeless)}: no size is common to most objects"
        if known := int(tally.unsized[:-1].sum()):
            yield SIZES.name, f"the store lists no size for {counted(known, 'object')}"
    unreadable = int(tally.unsized[table.expected_sizes == UNKNOWN_SIZE].sum())
    if unreadable and not reading_groups().isdisjoint(chosen):
        yield (
            "unread-objects",
            f"not read, because the store lists no size: {counted(unreadable, 'object')}; give "
            "--profile or --allow-leases",
        )


def _pools_without_size(table: AffixTable, objects: IntArray) -> list[str]:
    mixed = {affix for mix in table.mixes for affix in mix.affix_ids}
    specs = [
        spec for affix, spec in enumerate(table.specs) if objects[affix] and affix not in mixed
    ]
    return sorted({spec.pool for spec in specs if spec and spec.nbytes == UNKNOWN_SIZE})
