"""Check `digests`: compare the bytes of objects with a catalog."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hicachectl.checks.catalogs import MISMATCH, REWRITTEN
from hicachectl.checks.codes import VERSIONS_RECUR
from hicachectl.checks.findings import object_findings

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from hicachectl.checks.registry import CheckInput


def check_digests(given: CheckInput) -> Iterator[pa.Table]:
    """Yield digest-mismatch and re-recorded findings from a comparison with a catalog."""
    if given.digested is None or given.compared is None:
        return
    rows = np.flatnonzero(given.digested)
    mismatches = rows[given.compared == MISMATCH]
    rule = VERSIONS_RECUR if given.store.traits.versions_recur else None
    yield object_findings(given.inventory, mismatches, "digest-mismatch", rule=rule)
    rewritten = rows[given.compared == REWRITTEN]
    yield object_findings(given.inventory, rewritten, "re-recorded")
