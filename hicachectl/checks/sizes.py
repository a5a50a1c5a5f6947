"""Check `sizes`: objects of a size that their deployment does not write."""

from __future__ import annotations

from datetime import UTC, datetime
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.checks.codes import REFUSED_WHOLE
from hicachectl.checks.findings import findings, object_findings
from hicachectl.formats.spec import UNKNOWN_SIZE, fits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.checks.registry import CheckInput, CheckSums
    from hicachectl.pages.deployments import AffixTable, SizeMix
    from hicachectl.pages.inventory import IntArray

_SCALED_ROWS = Fraction(1152, 656)  # bytes of an MLA row of 512 + 64 values


def check_sizes(given: CheckInput) -> Iterator[pa.Table]:
    """Yield truncated and oversized findings for objects that are not in flight."""
    inventory = given.inventory
    expected = expected_sizes(inventory.table)[inventory.affix_ids]
    actual = inventory.objects.column("nbytes").fill_null(UNKNOWN_SIZE).to_numpy()
    # Objects of no common size are compared with the most common size.
    for mix in inventory.table.mixes:
        established = np.isin(actual, [size.nbytes for size in mix.sizes])
        of_mix = np.isin(inventory.affix_ids, mix.affix_ids)
        expected[of_mix & ~established] = mix.sizes[0].nbytes
    settled = np.append(~given.in_flight, True)[given.groups.of_object]
    wrong = settled & ~fits(actual, expected)
    for code, rule, rows in (
        ("truncated", None, np.flatnonzero(wrong & (actual < expected))),
        (
            "oversized",
            oversized_rule(given.store.grammar),
            np.flatnonzero(wrong & (actual > expected)),
        ),
    ):
        detail = _difference(actual[rows], expected[rows])
        yield object_findings(inventory, rows, code, detail, rule=rule)


def check_mixed_sizes(given: CheckSums) -> Iterator[pa.Table]:
    """Yield mixed-sizes for each kind of object with several common sizes."""
    objects = given.tally.objects
    mixes = [mix for mix in given.table.mixes if objects[list(mix.affix_ids)].any()]
    yield findings(
        "mixed-sizes",
        keys=pa.nulls(len(mixes), pa.string()),
        pools=pa.array([mix.coordinate.pool for mix in mixes], pa.string()),
        parts=pa.array([mix.coordinate.part for mix in mixes], pa.string()),
        detail=pa.array([_described(mix) for mix in mixes], pa.string()),
    )


def _described(mix: SizeMix) -> str:
    model, shard = mix.coordinate.model, mix.coordinate.shard
    texts = [
        f"{size.nbytes} bytes on {size.pages} pages ({size.pages / mix.pages:.0%})"
        + _written(size.oldest_ns, size.newest_ns)
        for size in mix.sizes
    ]
    return (
        f"model {model!r} {shard.sizes_text()}: {'; '.join(texts)}; {_likely_reason(mix)}; "
        "give --profile of the running servers to see which size is right"
    )


def _written(oldest_ns: int | None, newest_ns: int | None) -> str:
    if oldest_ns is None or newest_ns is None:
        return ""
    oldest, newest = (
        datetime.fromtimestamp(ns // 10**9, UTC).strftime("%Y-%m-%d %H:%M")
        for ns in (oldest_ns, newest_ns)
    )
    return f", written {oldest} to {newest} UTC" if oldest != newest else f", written {oldest} UTC"


def _likely_reason(mix: SizeMix) -> str:
    one, two = (size.nbytes for size in mix.sizes[:2])
    ratio = Fraction(max(one, two), min(one, two))
    if ratio == 2:
        return "the ratio 2 suggests different KV cache dtypes or page sizes"
    if ratio == _SCALED_ROWS:
        return "the ratio suggests MLA rows in bfloat16 and in fp8 with scales"
    text = f"{float(ratio):.4g}"
    return f"the ratio {text} suggests different page sizes, layer counts or head counts"


def oversized_rule(grammar: str) -> str | None:
    """Return the severity rule of oversized objects, by the grammar of their keys."""
    # SGLang reads the start of an oversized file; Mooncake refuses such an object: a miss.
    return REFUSED_WHOLE if grammar == "mooncake" else None


def expected_sizes(table: AffixTable) -> IntArray:
    """Return the expected bytes of an object by affix, [affixes + 1]; UNKNOWN_SIZE if not known.

    The last entry is for foreign keys.
    """
    sizes = [UNKNOWN_SIZE if spec is None else spec.nbytes for spec in table.specs]
    return np.array([*sizes, UNKNOWN_SIZE], dtype=np.int64)


def _difference(actual: IntArray, expected: IntArray) -> pa.Array:
    """Return the actual and expected bytes of each object as text: [objects]."""
    has, wanted = (pc.cast(pa.array(sizes), pa.string()) for sizes in (actual, expected))
    return pc.binary_join_element_wise(has, " bytes, expected ", wanted, "")
