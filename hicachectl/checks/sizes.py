"""Check `sizes`: objects whose bytes are not what their deployment writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.deployments import UNRESOLVED, Member
from hicachectl.findings import findings
from hicachectl.listing import object_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.deployments import AffixTable
    from hicachectl.groups import BoolArray, PageGroups
    from hicachectl.inventory import IntArray, Inventory

UNKNOWN_SIZE = -1


def check_sizes(
    inventory: Inventory, groups: PageGroups, in_flight: BoolArray, scheme: str
) -> Iterator[pa.Table]:
    """Find truncated and oversized objects of settled groups."""
    expected = expected_sizes(inventory.table)[inventory.affix_ids]
    actual = inventory.objects.column("nbytes").fill_null(UNKNOWN_SIZE).to_numpy()
    settled = np.append(~in_flight, True)[groups.of_object]
    wrong = settled & (expected != UNKNOWN_SIZE) & (actual != UNKNOWN_SIZE) & (actual != expected)
    for code, severity, rows in (
        ("truncated", "error", np.flatnonzero(wrong & (actual < expected))),
        ("oversized", oversized_severity(scheme), np.flatnonzero(wrong & (actual > expected))),
    ):
        yield _wrong(inventory, code, severity, rows, expected[rows])


def oversized_severity(scheme: str) -> str:
    """Say how bad an object is that is too long, which is up to the store."""
    # SGLang reads the head of a file that is too long; Mooncake refuses such an object: a miss.
    return "warning" if scheme == "mooncake" else "error"


def expected_sizes(table: AffixTable) -> IntArray:
    """Return the bytes that objects of each affix should have; UNKNOWN_SIZE where nothing says.

    One more entry, the last, stands for foreign keys.
    """
    sizes = [
        UNKNOWN_SIZE
        if deployment == UNRESOLVED
        else _size(table.deployments[deployment].members[m])
        for deployment, m in zip(table.deployment_ids, table.member_ids, strict=True)
    ]
    return np.array([*sizes, UNKNOWN_SIZE], dtype=np.int64)


def _size(member: Member) -> int:
    return UNKNOWN_SIZE if member.nbytes is None else member.nbytes


def _wrong(
    inventory: Inventory, code: str, severity: str, rows: IntArray, expected: IntArray
) -> pa.Table:
    objects = object_rows(inventory, rows)
    actual = pc.cast(objects.column("nbytes"), pa.string())
    wanted = pc.cast(pa.array(expected), pa.string())
    return findings(
        code,
        severity,
        keys=objects.column("key").combine_chunks(),
        pages=objects.column("page"),
        pools=pc.cast(objects.column("pool"), pa.string()),
        parts=pc.cast(objects.column("part"), pa.string()),
        detail=pc.binary_join_element_wise(actual, " bytes, expected ", wanted, ""),
    )
