"""Check `digests`: objects whose bytes are no longer those that a catalog recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicachectl.checks.catalogs import MISMATCH, REWRITTEN
from hicachectl.pages.listing import object_findings

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

    from hicachectl.pages.inventory import IntArray, Inventory


def check_digests(
    inventory: Inventory,
    rows: IntArray,
    outcome: npt.NDArray[np.int8],
    *,
    identities_recur: bool,
) -> Iterator[pa.Table]:
    """Report what a comparison with a catalog found; outcome: [rows] of `catalogs.compare`.

    identities_recur: an object can have the identity that another had, so that nothing shows
    whether it was rewritten.
    """
    severity = "warning" if identities_recur else "error"
    for value, code, how_bad, detail in (
        (MISMATCH, "digest-mismatch", severity, "other bytes than recorded, and not rewritten"),
        (REWRITTEN, "re-recorded", "info", "rewritten since it was recorded"),
    ):
        yield object_findings(inventory, rows[outcome == value], code, how_bad, detail)
