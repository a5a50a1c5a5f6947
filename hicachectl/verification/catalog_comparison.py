"""Compare digested objects with the catalog of a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from hicachectl.backends.base import take_rows
from hicachectl.checks.catalogs import (
    MISMATCH,
    Comparison,
    Digested,
    carry_forward,
    compare,
)

if TYPE_CHECKING:
    from hicachectl.backends.base import Store
    from hicachectl.formats.arrays import IntArray
    from hicachectl.formats.catalog import Catalog
    from hicachectl.pages.inventory import Inventory
    from hicachectl.verification.reading import ReadingResult
    from hicachectl.verification.request import VerifyRequest


@dataclass(frozen=True, slots=True)
class CatalogComparison:
    """Objects digested for a catalog, compared with the catalog; none without one.

    rows: [n] rows of the objects in the inventory.
    records: digests of the objects.
    compared: comparison of each object with its entry.
    """

    rows: IntArray
    records: Digested
    compared: Comparison

    @property
    def mismatched(self) -> IntArray:
        """Rows of the objects that differ from the catalog without a rewrite."""
        mismatched: IntArray = self.rows[self.compared.outcome == MISMATCH]
        return mismatched

    def updated(
        self, catalog: Catalog | None, listed: Inventory, store: str, now_ns: int
    ) -> Catalog:
        """Return the catalog of the listed objects after this run, without cleared ones."""
        usable = np.ones(len(listed.objects), dtype=np.bool_)
        usable[listed.cleared_rows] = False
        keys = listed.objects.column("key").filter(pa.array(usable)).combine_chunks()
        outcome = self.compared.outcome
        return carry_forward(
            catalog, self.records, outcome, store=store, present=keys, now_ns=now_ns
        )


def compare_with_catalog(
    store: Store, request: VerifyRequest, inventory: Inventory, reading: ReadingResult
) -> CatalogComparison:
    """Compare the digested objects of a reading with the request's catalog."""
    digested = reading.digested if request.compares_catalog else reading.digested[:0]
    rows = np.flatnonzero(digested)
    records = _records(store, inventory, rows, reading)
    compared = Comparison.nothing(len(rows))
    if request.catalog is not None:
        fields = request.identity or store.traits.version_fields
        compared = compare(request.catalog, records, fields)
    return CatalogComparison(rows, records, compared)


def _records(
    store: Store, inventory: Inventory, rows: IntArray, reading: ReadingResult
) -> Digested:
    some = rows if len(rows) < len(inventory.objects) else None
    objects = inventory.objects.select(["key", "nbytes"])
    if some is not None:
        objects = take_rows(objects, some)
    pools = [r.coordinate.pool if r.coordinate else None for r in inventory.table.resolved]
    ids = pa.array(inventory.affix_ids[rows], mask=inventory.affix_ids[rows] < 0)
    return Digested(
        keys=objects.column("key").combine_chunks(),
        pages=inventory.pages(some).combine_chunks(),
        pools=pa.array(pools, pa.string()).take(ids),
        nbytes=objects.column("nbytes").fill_null(0).to_numpy(),
        identities=reading.versions[rows],
        identity_fields=store.traits.version_fields,
        digests=reading.digests[rows],
    )
