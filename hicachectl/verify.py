"""Check a store against what its deployment should have written, and report."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hicachectl.checks.group import check_groups
from hicachectl.checks.names import check_names
from hicachectl.checks.sizes import check_sizes, refuse_contradiction
from hicachectl.findings import SEVERITIES, combine, severity_ranks
from hicachectl.groups import UNKNOWN, BoolArray, PageGroups
from hicachectl.inventory import Inventory, take_inventory
from hicachectl.selection import EVERYTHING, Selection, select

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pyarrow as pa

    from hicachectl.backends.base import Store
    from hicachectl.formats.profile import Profile

INFERRED = "inferred"
CHECKS = ("names", "groups", "sizes")


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a verification; `document` has the members of the JSON contract."""

    document: dict[str, Any]
    findings: pa.Table
    remarks: tuple[str, ...]

    def reaches(self, severity: str) -> bool:
        """Whether any finding is at least this severe."""
        return bool((severity_ranks(self.findings) >= SEVERITIES.index(severity)).any())


def verify_store(
    store: Store,
    profile: Profile | None,
    *,
    checks: tuple[str, ...] = CHECKS,
    selection: Selection = EVERYTHING,
    grace_seconds: float = 60.0,
    on_batch: Callable[[int], None] = lambda objects: None,
) -> Report:
    """Scan a store, run the checks, and gather what they find.

    Groups younger than the grace are in flight: no check judges them. Raises StoreUnavailable,
    and ProfileError where the profile cannot be the one that wrote the store.
    """
    started = time.monotonic()
    now_ns = time.time_ns()
    inventory = take_inventory(store, profile, on_batch=on_batch)
    refuse_contradiction(inventory)
    inventory = select(inventory, selection)
    groups = PageGroups(inventory)
    in_flight = groups.newest_ns > now_ns - int(grace_seconds * 1e9)
    found = combine(
        _run(checks, store, inventory, groups, in_flight, now_ns, int(grace_seconds * 1e9))
    )
    skipped = _skipped(checks, profile, groups)
    codes, counts = np.unique(found.column("code").to_pylist(), return_counts=True)
    document = {
        "store": store.url,
        "profile": profile_name(profile),
        "objects": len(inventory.objects),
        "pages": len(np.unique(groups.page_ids)),
        "bytes": int(groups.nbytes.sum()),
        "seconds": round(time.monotonic() - started, 3),
        "complete": True,
        "gone": 0,
        "in_flight": int(in_flight.sum()),
        "sampled": len(np.unique(groups.page_ids)),
        "repaired": 0,
        "quarantined": 0,
        "checks": list(checks),
        "skipped_checks": list(skipped),
        "findings": None,
        "counts": dict(zip(codes.tolist(), counts.tolist(), strict=True)),
    }
    return Report(document, found, tuple(f"{check}: {why}" for check, why in skipped.items()))


def profile_name(profile: Profile | None) -> str:
    """Name a profile in reports: its model, or that it was inferred."""
    return INFERRED if profile is None or profile.inferred else profile.model


def _run(
    checks: tuple[str, ...],
    store: Store,
    inventory: Inventory,
    groups: PageGroups,
    in_flight: BoolArray,
    now_ns: int,
    grace_ns: int,
) -> Iterator[pa.Table]:
    if "names" in checks:
        yield from check_names(inventory, now_ns=now_ns, grace_ns=grace_ns)
    if "groups" in checks:
        yield from check_groups(inventory, groups, in_flight)
    if "sizes" in checks:
        yield from check_sizes(inventory, groups, in_flight, store.scheme)


def _skipped(
    checks: tuple[str, ...], profile: Profile | None, groups: PageGroups
) -> dict[str, str]:
    """List what the checks could not look at, and why; said on stderr."""
    skipped = {}
    unjudged = int((groups.states == UNKNOWN).sum())
    if profile_name(profile) == INFERRED and len(groups):
        skipped["absent-pools"] = (
            "without a profile the store is measured against itself: a pool, part or rank that "
            "is absent everywhere cannot be noticed"
        )
    if unjudged and "groups" in checks:
        skipped["ambiguous-groups"] = (
            f"{unjudged} page groups have ambiguous keys and were not judged"
        )
    return skipped
