"""Count the objects and the bytes of a store.

Sums of sizes have an upper bound, because a store may list any sizes. Sums up to 2**53 bytes are
exact. Larger sums are rounded to floating point numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hicachectl.formats.keys.table import FOREIGN
from hicachectl.formats.spec import UNKNOWN_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicachectl.formats.arrays import IntArray


# If this many objects, or pages, of a kind have one size, that size is not damage.
SEVERAL = 3
_GROUPED = ["affix", "size"]
_SCHEMA = pa.schema(
    [
        ("affix", pa.int32()),
        ("size", pa.int64()),
        ("objects", pa.int64()),
        ("oldest_ns", pa.int64()),
        ("newest_ns", pa.int64()),
    ]
)


@dataclass(frozen=True)
class Census:
    """Number and write times of the objects of each affix and size.

    counts: a table of _SCHEMA, sorted. The affix is FOREIGN for foreign keys, the size UNKNOWN_SIZE
        if the store lists none. Times are Unix nanoseconds, null if not known.
    """

    counts: pa.Table

    @classmethod
    def of(cls, objects: pa.Table, affix_ids: npt.NDArray[np.int32]) -> Census:
        """Count objects.

        objects: table with the column nbytes, and perhaps mtime_ns.
        affix_ids: [objects].
        """
        without = "mtime_ns" not in objects.column_names
        times = pa.nulls(len(objects), pa.int64()) if without else objects.column("mtime_ns")
        sizes = objects.column("nbytes").fill_null(UNKNOWN_SIZE)
        each = np.ones(len(objects), dtype=np.int8)
        columns = (affix_ids, sizes, each, times, times)
        return cls._summed(pa.table(dict(zip(_SCHEMA.names, columns, strict=True))))

    @classmethod
    def total(cls, parts: Iterable[Census]) -> Census:
        """Return the sum of several censuses."""
        return cls._summed(pa.concat_tables([_SCHEMA.empty_table(), *(p.counts for p in parts)]))

    def of_kinds(self, kind_of: IntArray) -> Census:
        """Return the counts with the kind of each affix in the column `affix`.

        kind_of: [affixes + 1] number of each affix's kind. Objects of a negative kind are left out.
        """
        kinds = kind_of[self.affixes]
        counts = self.counts.set_column(0, _SCHEMA.field(0), pa.array(kinds.astype(np.int32)))
        return self._summed(counts.filter(pa.array(kinds >= 0)))

    @classmethod
    def _summed(cls, counts: pa.Table) -> Census:
        """Add up the rows that have the same affix and size."""
        aggregates = [("objects", "sum"), ("oldest_ns", "min"), ("newest_ns", "max")]
        counts = counts.group_by(_GROUPED).aggregate(aggregates)
        counts = counts.select([*_GROUPED, *map("_".join, aggregates)])
        counts = counts.rename_columns(_SCHEMA.names).cast(_SCHEMA)
        return cls(counts.sort_by([(name, "ascending") for name in _GROUPED]))

    @cached_property
    def affixes(self) -> IntArray:
        """Affix id of each count."""
        return self._column("affix").astype(np.int64)

    @cached_property
    def sizes(self) -> IntArray:
        """Object size of each count."""
        return self._column("size")

    @cached_property
    def objects(self) -> IntArray:
        """Number of objects of each count."""
        return self._column("objects")

    def by_affix(self) -> dict[int, dict[int, int]]:
        """Return the number of objects by affix and size, without foreign keys."""
        found: dict[int, dict[int, int]] = {}
        rows = zip(self.affixes.tolist(), self.sizes.tolist(), self.objects.tolist(), strict=True)
        for affix, size, count in rows:
            if affix != FOREIGN:
                found.setdefault(affix, {})[size] = count
        return found

    def _column(self, name: str) -> IntArray:
        values: IntArray = self.counts.column(name).to_numpy()
        return values


# The sum of two such numbers still fits into 64 bits. Records of runs accept no larger number.
MOST_BYTES = 2**61


def byte_sums(sizes: npt.NDArray[Any], owners: npt.NDArray[Any], count: int) -> IntArray:
    """Return the sum of the sizes of each owner, at most MOST_BYTES: [count] int64.

    sizes, owners: [objects]; sizes are not negative.
    """
    sums = np.bincount(owners, weights=sizes, minlength=count)
    bounded: IntArray = np.minimum(sums, MOST_BYTES).astype(np.int64)
    return bounded


def byte_sum(sizes: npt.NDArray[Any]) -> int:
    """Return the sum of sizes, at most MOST_BYTES."""
    return min(int(sizes.sum(dtype=np.float64)), MOST_BYTES)


def column_sums(
    sizes: pa.ChunkedArray | pa.Array, owners: npt.NDArray[Any], count: int
) -> pa.Int64Array:
    """Return `byte_sums` of a column: [count], null if a size is unknown."""
    unknown = np.zeros(count, dtype=np.bool_)
    unknown[owners[np.asarray(sizes.is_null())]] = True
    return pa.array(byte_sums(_numbers(sizes), owners, count), mask=unknown)


def column_sum(sizes: pa.ChunkedArray | pa.Array) -> int | None:
    """Return `byte_sum` of a column; None if a size is unknown."""
    return None if sizes.null_count else byte_sum(_numbers(sizes))


def _numbers(sizes: pa.ChunkedArray | pa.Array) -> IntArray:
    numbers: IntArray = np.asarray(sizes.fill_null(0))
    return numbers
