"""Checks of a listing: keys, page groups, and the store as a whole."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.backends.capabilities import ReportsLosses
from hicachectl.checks.codes import COSTS_HITS_ONLY, POOLS_APART
from hicachectl.checks.findings import findings, object_findings
from hicachectl.formats.keys.base import TEMPORARY_PATTERN
from hicachectl.formats.keys.table import pages_of
from hicachectl.pages.group_table import ORPHAN
from hicachectl.pages.listing import key_text
from hicachectl.pages.naming import (
    ambiguity_remedy,
    ambiguous_affixes,
    deployment_document,
    deployment_text,
    place_text,
    same_model,
)
from hicachectl.pages.tally import NO_NEWEST
from hicachectl.text.units import counted, human_size, written_between

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.checks.registry import CheckInput, CheckListing, CheckSums
    from hicachectl.formats.arrays import IntArray
    from hicachectl.formats.objects import Shard
    from hicachectl.pages.deployments import Deployment
    from hicachectl.pages.groups import Missing, PageGroups
    from hicachectl.pages.inventory import Inventory


def check_stamp(given: CheckInput) -> Iterator[pa.Table]:
    """Yield a stamp-mismatch finding for each difference between the run and the stamp."""
    details = pa.array(given.stamp_differences, pa.string())
    yield findings("stamp-mismatch", keys=pa.nulls(len(details), pa.string()), detail=details)


def check_collision(given: CheckListing) -> Iterator[pa.Table]:
    """Yield a colliding-keys finding if ranks of the deployment share the names of objects."""
    if given.collision:
        yield findings("colliding-keys", keys=pa.nulls(1, pa.string()), detail=given.collision)


def check_losses(given: CheckListing) -> Iterator[pa.Table]:
    """Yield a finding for each `Loss` that the listing found.

    A loss that is younger than the grace period is left out, because a server may still be at work.
    """
    for loss in given.store.losses if isinstance(given.store, ReportsLosses) else ():
        if loss.changed_ns <= given.grace_start_ns:
            yield findings(
                loss.code, keys=pa.array([_readable(loss.place)]), detail=_readable(loss.what)
            )


def _readable(text: str) -> str:
    r"""Return a text with each byte that is not UTF-8 written \xNN, as in keys."""
    return os.fsencode(text).decode("utf-8", "backslashreplace")


def check_other_deployments(given: CheckSums) -> Iterator[pa.Table]:
    """Yield a finding for each other deployment of the profile's model, with other sizes or tag."""
    table, tally = given.table, given.tally
    own = table.deployments[0]  # The profile's deployment comes first.
    of_affix = np.array(table.deployment_ids, dtype=np.int64)
    unsized = frozenset(of_affix[tally.unsized[: len(of_affix)] > 0].tolist())
    found = [
        (number, deployment)
        for number, deployment in enumerate(table.deployments)
        if number and tally.states[number].any() and same_model(deployment, own, table.grammar)
    ]
    labels = [deployment.label(table.grammar) for _, deployment in found]
    newest = [int(tally.newest_ns[number]) or None for number, _ in found]
    details = [
        _described(deployment, number, given, sized=number not in unsized)
        for number, deployment in found
    ]
    yield findings(
        "other-deployment",
        keys=pa.nulls(len(found), pa.string()),
        deployments=pa.array(labels, pa.string()),
        written_ns=pa.array(newest, pa.int64()),
        detail=pa.array(details, pa.string()),
    )


def _described(deployment: Deployment, number: int, given: CheckSums, *, sized: bool) -> str:
    own, tally = given.table.deployments[0], given.tally
    pages = counted(int(tally.states[number].sum()), "page")
    nbytes = int(tally.nbytes[number]) if sized else 0
    oldest_ns, newest_ns = (int(times[number]) for times in (tally.oldest_ns, tally.newest_ns))
    written = "" if newest_ns == NO_NEWEST else written_between(oldest_ns, newest_ns)
    facts = ", ".join(filter(None, [human_size(nbytes) if nbytes else "", written]))
    return (
        f"{pages} at {place_text(deployment, own)}{f' ({facts})' if facts else ''}; servers of the "
        f"profile ({deployment_text(deployment_document(own))}) do not ask for these keys"
    )


def check_names(given: CheckInput) -> Iterator[pa.Table]:
    """Yield the foreign-object and stale-temporary findings, which need no bytes of objects."""
    inventory, grace_start_ns = given.inventory, given.now_ns - given.grace_ns
    cleared = inventory.cleared_rows
    foreign = np.setdiff1d(np.flatnonzero(inventory.is_foreign), cleared, assume_unique=True)
    yield from _foreign(inventory, foreign, grace_start_ns)
    yield cleared_objects(inventory, cleared, grace_start_ns)


def check_ambiguous_keys(given: CheckSums) -> Iterator[pa.Table]:
    """Yield one ambiguous-key finding for each ambiguous affix, with its smallest key."""
    table, tally = given.table, given.tally
    described = ambiguous_affixes(table, tally.objects)
    keys = pa.array([tally.first_keys[affix] for affix in described], pa.binary())
    starts = table.page_starts[np.array([*described], dtype=np.int64)]
    details = [f"{text}; {ambiguity_remedy(table)}" for text in described.values()]
    yield findings(
        "ambiguous-key",
        keys=key_text(keys),
        pages=pages_of(keys, starts),
        detail=pa.array(details, pa.string()),
    )


def stale_temporaries(objects: pa.Table | pa.RecordBatch, grace_start_ns: int) -> pa.BooleanArray:
    """Return which objects are temporary files that were last written before the grace period.

    objects: objects with the columns key and mtime_ns. An unknown time counts as old.
    grace_start_ns: start of the grace period, Unix nanoseconds.
    """
    temporary = pc.match_substring_regex(objects.column("key"), TEMPORARY_PATTERN)
    old = pc.less_equal(pc.fill_null(objects.column("mtime_ns"), 0), grace_start_ns)
    stale = pc.and_(temporary, old)
    return stale.combine_chunks() if isinstance(stale, pa.ChunkedArray) else stale


def cleared_objects(inventory: Inventory, rows: IntArray, grace_start_ns: int) -> pa.Table:
    """Return a stale-temporary finding for each object that a `clear` made a miss.

    rows: rows of the cleared objects.
    grace_start_ns: start of the grace period, Unix nanoseconds. Objects that were cleared later are
        left out, because servers may still be removing them in the background.
    """
    if len(rows):
        cleared_ns = inventory.take(rows, ["cleared_ns"]).column("cleared_ns").to_numpy()
        rows = rows[cleared_ns <= grace_start_ns]
    return object_findings(
        inventory,
        rows,
        "stale-temporary",
        "from before a server cleared the store; no server reads the object, so removing it is "
        "safe",
    )


def _foreign(inventory: Inventory, rows: IntArray, grace_start_ns: int) -> Iterator[pa.Table]:
    objects = inventory.take(rows, ["key", "mtime_ns"])
    keys = objects.column("key")
    temporary = pc.match_substring_regex(keys, TEMPORARY_PATTERN).to_numpy()
    warm_up, grammar = np.zeros(len(keys), dtype=np.bool_), inventory.table.grammar
    if grammar.warm_ups:
        warm_up = pc.match_substring_regex(keys, grammar.warm_ups).to_numpy()
    stale = stale_temporaries(objects, grace_start_ns).to_numpy(zero_copy_only=False)
    for code, chosen, detail in (
        (
            "stale-temporary",
            stale,
            "temporary file of an unfinished write; no server reads the file, so removing it is "
            "safe",
        ),
        ("foreign-object", warm_up, f"warm-up key of a {grammar.title} client, not a page"),
        (
            "foreign-object",
            ~(temporary | warm_up),
            "not a key that SGLang writes; no server reads the object",
        ),
    ):
        yield object_findings(inventory, rows[chosen], code, detail)


_CODES = ("missing-pool", "missing-part", "missing-rank")
_POOL, _PART, _RANK = range(len(_CODES))


def check_groups(given: CheckInput) -> Iterator[pa.Table]:
    """Yield findings for incomplete groups that are not in flight.

    If the group has its anchor, there is one finding for each missing object: missing-rank,
    missing-part or missing-pool. If the anchor is missing, there is an orphan-sidecar finding for
    each object of the group.
    """
    groups, judged = given.groups, ~given.in_flight
    for missing in groups.missing():
        counted = judged[missing.groups] & (groups.states[missing.groups] != ORPHAN)
        lacking = replace(missing, groups=missing.groups[counted], specs=missing.specs[counted])
        yield from _missing(groups, lacking)
    yield object_findings(
        given.inventory,
        groups.rows_in((groups.states == ORPHAN) & judged),
        "orphan-sidecar",
        rule=POOLS_APART if given.store.traits.evicts_pools_apart else None,
    )


def _missing(groups: PageGroups, missing: Missing) -> Iterator[pa.Table]:
    """Yield the findings about the missing objects of one deployment."""
    specs = missing.deployment.specs
    costs_hits_only = np.array([spec.costs_hits_only for spec in specs])[missing.specs]
    code_ids = _code_ids(groups, missing)
    pools = pa.array([spec.pool for spec in specs])
    parts = pa.array([spec.coordinate.part for spec in specs], pa.string())
    for rule, of_rule in ((None, ~costs_hits_only), (COSTS_HITS_ONLY, costs_hits_only)):
        for code_id, code in enumerate(_CODES):
            chosen = np.flatnonzero(of_rule & (code_ids == code_id))
            if not len(chosen):
                continue
            own = replace(missing, groups=missing.groups[chosen], specs=missing.specs[chosen])
            yield findings(
                code,
                keys=key_text(groups.keys_of(own)),
                pages=groups.pages_at(own.groups),
                pools=pools.take(pa.array(own.specs)),
                parts=parts.take(pa.array(own.specs)),
                groups=own.groups,
                rule=rule,
            )


def _code_ids(groups: PageGroups, missing: Missing) -> IntArray:
    """Return the finding code of each missing object: [missing] indices into _CODES.

    An object counts as a missing part if its rank has another part of the pool. Otherwise, it
    counts as a missing pool if its rank has an anchor and the object is neither an anchor nor
    `trailing`. All other objects count as a missing rank.
    """
    specs, table = missing.deployment.specs, groups.tables[missing.deployment_id]
    own = missing.groups - groups.span(missing.deployment_id).start
    siblings: dict[tuple[str, Shard], list[int]] = {}
    for number, spec in enumerate(specs):
        siblings.setdefault((spec.pool, spec.coordinate.shard), []).append(number)
    anchors = [number for number, spec in enumerate(specs) if spec.anchor]
    code_ids = np.full(len(own), _RANK, dtype=np.int64)
    for number, rows in _by_value(missing.specs):
        spec = specs[number]
        if not spec.anchor and not spec.trailing:
            serving = [n for n in anchors if specs[n].shares_rank(spec)]
            code_ids[rows[table.has_any(own[rows], serving)]] = _POOL
        if spec.coordinate.part is not None:
            parts = siblings[spec.pool, spec.coordinate.shard]
            code_ids[rows[table.has_any(own[rows], parts)]] = _PART
    return code_ids


def _by_value(values: IntArray) -> Iterator[tuple[int, IntArray]]:
    """Yield each distinct value with its indices, ascending."""
    order = np.argsort(values, kind="stable")
    distinct, starts = np.unique(values[order], return_index=True)
    yield from zip(distinct.tolist(), np.split(order, starts[1:]), strict=False)
