"""Check `digests`: compare the bytes of objects with a catalog."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from hicachectl.checks.catalogs import MISMATCH, REWRITTEN
from hicachectl.checks.codes import VERSIONS_RECUR
from hicachectl.checks.findings import object_findings
from hicachectl.text.units import minute

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.checks.registry import CheckInput
    from hicachectl.formats.arrays import IntArray

_DIFFER = "bytes differ from the recorded digest, but the store shows no rewrite since then"


def check_digests(given: CheckInput) -> Iterator[pa.Table]:
    """Yield digest-mismatch and re-recorded findings from a comparison with a catalog."""
    if given.digested is None or given.compared is None:
        return
    rows, outcome = np.flatnonzero(given.digested), given.compared.outcome
    differs = outcome == MISMATCH
    rule = VERSIONS_RECUR if given.store.traits.versions_recur else None
    yield object_findings(
        given.inventory,
        rows[differs],
        "digest-mismatch",
        _details(given.compared.verified_ns[differs]),
        rule=rule,
    )
    rewritten = rows[outcome == REWRITTEN]
    yield object_findings(given.inventory, rewritten, "re-recorded")


def _details(verified_ns: IntArray) -> pa.Array:
    """Return what is wrong with each object, and when its bytes were last right."""
    times = {
        ns: f"{_DIFFER}; they were right on {minute(ns)} UTC" for ns in set(verified_ns.tolist())
    }
    return pa.array([times[ns] for ns in verified_ns.tolist()], pa.string())
