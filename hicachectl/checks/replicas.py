"""Compare objects with recorded digests, and copies among ranks or among replicas."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.checks.catalogs import MISMATCH, REWRITTEN
from hicachectl.checks.codes import VERSIONS_RECUR
from hicachectl.checks.findings import object_findings
from hicachectl.formats.kinds import kind_of
from hicachectl.text.units import minute

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from hicachectl.checks.registry import CheckInput
    from hicachectl.formats.arrays import IntArray
    from hicachectl.formats.spec import ObjectSpec
    from hicachectl.pages.deployments import AffixTable, Deployment


NO_REPLICAS = -1


def replica_sets(table: AffixTable) -> npt.NDArray[np.int64]:
    """Return the replica set of each affix, or NO_REPLICAS: [affixes + 1].

    The last entry is for foreign keys. Objects of one page and set must be equal, because SGLang
    gives a head to several ranks if there are more TP ranks than KV heads
    (ModelConfig.get_num_kv_heads).
    """
    numbers: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for affix, (deployment, spec) in enumerate(zip(table.deployment_ids, table.specs, strict=True)):
        shared = None if spec is None else _shared_head(table.deployments[deployment], spec)
        if shared is not None:
            numbers[deployment, *shared].append(affix)
    sets = np.full(len(table.affixes) + 1, NO_REPLICAS, dtype=np.int64)
    for number, affixes in enumerate(found for found in numbers.values() if len(found) > 1):
        sets[affixes] = number
    return sets


def _shared_head(deployment: Deployment, spec: ObjectSpec) -> tuple[object, ...] | None:
    """Return a key that ranks with the same heads share; None if no head is shared."""
    profile, shard = deployment.profile, spec.coordinate.shard
    pool = None if profile is None else profile.pool(spec.pool)
    if profile is None or pool is None or shard.tp_rank is None:
        return None
    share = kind_of(pool).shared_shard(pool, shard.tp_rank, profile.tp)
    if share is None:
        return None
    return pool.name, spec.coordinate.part, shard.pp_rank, shard.cp_rank, share


def check_replicas(given: CheckInput) -> Iterator[pa.Table]:
    """Yield a replica-mismatch finding for each object that differs from the lowest rank's copy."""
    inventory, digests, digested = given.inventory, given.digests, given.digested
    if digests is None or digested is None:
        return
    sets = replica_sets(inventory.table)[inventory.affix_ids]
    chosen = (sets != NO_REPLICAS) & digested
    rows = np.flatnonzero(chosen)
    coordinates = (one.coordinate for one in inventory.table.resolved)
    ranks = np.array([*(c.shard.tp_rank or 0 if c else 0 for c in coordinates), 0])
    page_ids, _ = inventory.page_ranks(chosen)
    order = np.lexsort((ranks[inventory.affix_ids[rows]], sets[rows], page_ids))
    rows, page_ids = rows[order], page_ids[order]
    same_set = np.diff(sets[rows], prepend=NO_REPLICAS) == 0
    same_set &= np.diff(page_ids, prepend=-1) == 0
    firsts = np.maximum.accumulate(np.where(same_set, 0, np.arange(len(rows))))
    differs = (digests[rows] != digests[rows[firsts]]).any(axis=1)
    yield object_findings(
        inventory,
        np.sort(rows[differs]),
        "replica-mismatch",
        "bytes differ from the lowest TP rank's copy of the same KV heads",
    )


# NVMe over Fabrics ("nof") counts as memory.
_IN_MEMORY = pa.array(["memory", "nof"])


def check_placement(given: CheckInput) -> Iterator[pa.Table]:
    """Yield the replica-mismatch and disk-only findings of a listing with replicas."""
    inventory = given.inventory
    if "replicas" not in inventory.objects.column_names:  # an empty scan has no batch
        return
    column = inventory.objects.column("replicas").combine_chunks()
    counts = pc.list_value_length(column).fill_null(0).to_numpy().astype(np.int64)
    rows = np.flatnonzero(counts)
    replicas = column.flatten()
    starts = np.cumsum(counts[rows]) - counts[rows]
    sizes = replicas.field("nbytes").fill_null(-1).to_numpy()
    in_memory = pc.is_in(replicas.field("kind"), _IN_MEMORY).to_numpy(zero_copy_only=False)
    if not len(rows):
        return
    smallest, largest = (f.reduceat(sizes, starts) for f in (np.minimum, np.maximum))
    fast = np.logical_or.reduceat(in_memory, starts)
    uneven, detail = rows[smallest != largest], "replicas of the object differ in size"
    yield object_findings(inventory, uneven, "replica-mismatch", detail)
    yield object_findings(inventory, rows[~fast], "disk-only")


_DIFFER = "bytes differ from the recorded digest, but the store shows no rewrite since then"


def check_digests(given: CheckInput) -> Iterator[pa.Table]:
    """Yield digest-mismatch and re-recorded findings from a comparison with a catalog."""
    if given.compared is None:
        return
    differs = given.compared.outcome == MISMATCH
    rule = VERSIONS_RECUR if given.store.traits.versions_recur else None
    yield object_findings(
        given.inventory,
        given.compared.mismatched,
        "digest-mismatch",
        _last_right(given.compared.verified_ns[differs]),
        rule=rule,
    )
    rewritten = given.compared.rows[given.compared.outcome == REWRITTEN]
    yield object_findings(given.inventory, rewritten, "re-recorded")


def _last_right(verified_ns: IntArray) -> pa.Array:
    """Return the details of the findings. Each names the time when the bytes were last right."""
    times = {
        ns: f"{_DIFFER}; they were right on {minute(ns)} UTC" for ns in set(verified_ns.tolist())
    }
    return pa.array([times[ns] for ns in verified_ns.tolist()], pa.string())
