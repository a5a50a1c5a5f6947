"""What a store holds: its scan as one Arrow table, every key understood."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hicachectl.deployments import UNRESOLVED, AffixTable, Member, assign_affixes
from hicachectl.formats.keys.base import codec_for
from hicachectl.formats.keys.table import KeySplitter

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicachectl.backends.base import Store
    from hicachectl.formats.profile import Profile

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Inventory:
    """All objects of a store.

    objects: columns of the scan (key binary, nbytes and mtime_ns int64) plus
             page (string, null for a foreign key).
    affix_ids: int32 a row, index into `affixes`, negative for a foreign key.
    """

    objects: pa.Table
    affix_ids: npt.NDArray[np.int32]
    table: AffixTable

    def by_affix(self, values: tuple[int, ...], missing: int) -> IntArray:
        """Spread a list indexed by affix id over the rows; `missing` for foreign keys."""
        padded = np.array([*values, missing], dtype=np.int64)
        return padded[self.affix_ids]


def take_inventory(
    store: Store,
    profile: Profile | None = None,
    *,
    on_batch: Callable[[int], None] = lambda objects: None,
) -> Inventory:
    """Scan a store and understand its keys.

    on_batch is told the number of objects of each batch as it arrives. Memory: about 250 bytes
    an object. Raises StoreUnavailable.
    """
    splitter = KeySplitter()
    batches: list[pa.RecordBatch] = []
    ids: list[npt.NDArray[np.int32]] = [np.empty(0, dtype=np.int32)]
    for batch in store.scan(("key", "nbytes", "mtime_ns")):
        pages, affix_ids = splitter.split(batch.column("key"))
        batches.append(batch.append_column("page", pages))
        ids.append(affix_ids)
        on_batch(len(batch))
    table = assign_affixes(splitter.affixes, codec_for(store.scheme), profile)
    objects = pa.Table.from_batches(batches, schema=batches[0].schema if batches else _SCHEMA)
    affix_ids = np.concatenate(ids)
    return Inventory(objects, affix_ids, _with_common_sizes(table, objects, affix_ids))


def _with_common_sizes(
    table: AffixTable, objects: pa.Table, affix_ids: npt.NDArray[np.int32]
) -> AffixTable:
    """Let inferred members expect the size that more than half of their kind have."""
    listed = objects.column("nbytes").fill_null(-1).to_numpy()
    kinds: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for number, (deployment, member) in enumerate(
        zip(table.deployment_ids, table.member_ids, strict=True)
    ):
        if deployment != UNRESOLVED and table.deployments[deployment].profile is None:
            kinds[deployment, *_size_kind(table.deployments[deployment].members[member])].append(
                number
            )
    sizes = {
        kind: _common_size(listed[np.isin(affix_ids, numbers)]) for kind, numbers in kinds.items()
    }
    deployments = tuple(
        deployment
        if deployment.profile is not None
        else replace(
            deployment,
            members=tuple(
                replace(m, nbytes=sizes[number, *_size_kind(m)]) for m in deployment.members
            ),
        )
        for number, deployment in enumerate(table.deployments)
    )
    return replace(table, deployments=deployments)


def _size_kind(member: Member) -> tuple[object, ...]:
    """Equal for members of equal size: pools differ by stage and CP rank, not by TP rank."""
    coordinate = member.coordinate
    return coordinate.pool, coordinate.part, coordinate.shard.pp_rank, coordinate.shard.cp_rank


def _common_size(sizes: IntArray) -> int | None:
    values, counts = np.unique(sizes[sizes >= 0], return_counts=True)
    if not len(counts) or 2 * counts.max() <= len(sizes):
        return None
    return int(values[counts.argmax()])


_SCHEMA = pa.schema(
    {"key": pa.binary(), "nbytes": pa.int64(), "mtime_ns": pa.int64(), "page": pa.string()}
)
