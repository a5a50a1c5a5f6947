"""Check `sizes`: objects of a size that their deployment does not write."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.checks.codes import DESPITE, REFUSED_WHOLE
from hicachectl.checks.findings import findings, object_findings
from hicachectl.formats.keys import grammar_of
from hicachectl.formats.kinds.pool import pool_name
from hicachectl.formats.spec import UNKNOWN_SIZE, fits
from hicachectl.text.units import minute, written_between

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.checks.registry import CheckInput, CheckSums
    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.pages.deployments import AffixTable, SeenSize, SizeMix
    from hicachectl.pages.inventory import Inventory

# An MLA row of 512 + 64 values has 1152 bytes in bfloat16 and 656 bytes in fp8 with scales.
_SCALED_ROWS = Fraction(1152, 656)


def check_sizes(given: CheckInput) -> Iterator[pa.Table]:
    """Yield truncated and oversized findings for objects that are not in flight."""
    inventory = given.inventory
    expected = inventory.table.expected_sizes[inventory.affix_ids]
    actual = inventory.sizes
    for mix in inventory.table.mixes:
        # No profile says which of the common sizes is right, so each of them is accepted.
        if mix.stated == UNKNOWN_SIZE:
            common = [size.nbytes for size in mix.sizes]
            expected[_of_mix(inventory, mix) & ~np.isin(actual, common)] = common[0]
    judged = np.append(~given.in_flight, True)[given.groups.of_object]
    wrong = judged & ~fits(actual, expected)
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


def _of_mix(inventory: Inventory, mix: SizeMix) -> BoolArray:
    """Return which objects are of the kind of a mix: [objects]."""
    return np.isin(inventory.affix_ids, mix.affix_ids)


def rows_of_mixes(inventory: Inventory) -> IntArray:
    """Return the rows of objects with a common size that differs from the profile's.

    Servers that still run may have written the pages of these objects.
    """
    actual = inventory.sizes
    among = np.zeros(len(actual), dtype=np.bool_)
    for mix in inventory.table.mixes:
        if mix.others:
            among |= _of_mix(inventory, mix) & np.isin(actual, mix.others)
    return np.flatnonzero(among)


def check_mixed_sizes(given: CheckSums) -> Iterator[pa.Table]:
    """Yield a mixed-sizes finding for each kind of object with several common sizes."""
    table, objects = given.table, given.tally.objects
    mixes = [mix for mix in table.mixes if objects[list(mix.affix_ids)].any()]
    ratios = _ratios(table)
    owners = [table.deployment_ids[mix.affix_ids[0]] for mix in mixes]
    labels = [table.deployments[number].label(table.grammar) for number in owners]
    newest = [max(size.newest_ns or 0 for size in mix.sizes) for mix in mixes]
    details = [
        _described(mix, {ratio for pool, ratio in ratios[owner] if pool != mix.coordinate.pool})
        for mix, owner in zip(mixes, owners, strict=True)
    ]
    yield findings(
        "mixed-sizes",
        keys=pa.nulls(len(mixes), pa.string()),
        deployments=pa.array(labels, pa.string()),
        written_ns=pa.array([ns or None for ns in newest], pa.int64()),
        pools=pa.array([mix.coordinate.pool for mix in mixes], pa.string()),
        parts=pa.array([mix.coordinate.part for mix in mixes], pa.string()),
        detail=pa.array(details, pa.string()),
    )


def _described(mix: SizeMix, others: set[Fraction]) -> str:
    model, shard = mix.coordinate.names.model, mix.coordinate.shard
    texts = [
        f"{size.nbytes} bytes on {size.pages} pages ({size.pages / mix.pages:.0%})" + _written(size)
        for size in mix.sizes
    ]
    facts = "; ".join([*texts, *filter(None, [_change(mix)]), _likely_reason(mix, others)])
    advice = "give --profile of the running servers to see which size is right"
    if mix.others:
        advice = (
            f"the profile states {mix.stated} bytes, but not all pages of another size are older, "
            "so servers that write it may run; compare with hicachectl profile --server; --repair "
            f"without {DESPITE} leaves these pages"
        )
    return f"model {model!r} {shard.sizes_text()}: {facts}; {advice}"


def _written(size: SeenSize) -> str:
    if size.oldest_ns is None or size.newest_ns is None:
        return ""
    return f", {written_between(size.oldest_ns, size.newest_ns)}"


def _change(mix: SizeMix) -> str:
    """Return when one of the two most common sizes replaced the other; "" if times are unknown."""
    one, two = sorted(mix.sizes[:2], key=lambda size: size.oldest_ns or 0)
    if one.newest_ns is None or two.oldest_ns is None:
        return ""
    if one.newest_ns > two.oldest_ns:
        return "the writes of both sizes overlap in time, so servers with both settings may run"
    ends = dict.fromkeys((minute(one.newest_ns), minute(two.oldest_ns)))
    when = " and ".join(ends)
    return (
        f"the size changed from {one.nbytes} to {two.nbytes} bytes "
        f"{'between' if len(ends) > 1 else 'at'} {when} UTC"
    )


def _likely_reason(mix: SizeMix, others: set[Fraction]) -> str:
    ratio = _ratio(mix)
    if ratio == _SCALED_ROWS:
        return "the ratio suggests MLA rows in bfloat16 and in fp8 with scales"
    if others == {ratio}:
        seen, settings = ", the same in every pool,", ["page sizes"]
    else:  # Another page size would change the sizes of every pool by the same ratio.
        seen = ", not the same in every pool," if others else ""
        settings = ["KV cache dtypes"] if ratio == 2 else ["layer counts", "head counts"]
        settings += [] if others else ["page sizes"]
    shard = mix.coordinate.shard
    if shard.tp_rank is not None and shard.tp_size is None:  # Keys do not tell TP sizes apart.
        settings.append("TP sizes")
    first = ", ".join(settings[:-1])
    text = f"{first} or {settings[-1]}" if first else settings[-1]
    return f"the ratio {float(ratio):.4g}{seen} suggests different {text}"


def _ratio(mix: SizeMix) -> Fraction:
    one, two = (size.nbytes for size in mix.sizes[:2])
    return Fraction(max(one, two), min(one, two))


def _ratios(table: AffixTable) -> dict[int, set[tuple[str, Fraction]]]:
    """Return the pools of each deployment, with the ratio of their two most common sizes.

    The ratio is 1 for a pool with a single size.
    Mamba states are left out, because their size does not depend on the page size.
    """
    mixed = {affix: _ratio(mix) for mix in table.mixes for affix in mix.affix_ids}
    found: dict[int, set[tuple[str, Fraction]]] = defaultdict(set)
    for affix, (owner, spec) in enumerate(zip(table.deployment_ids, table.specs, strict=True)):
        if spec is None or pool_name(spec.pool).states:
            continue
        if affix in mixed or spec.nbytes > 0:
            found[owner].add((spec.pool, mixed.get(affix, Fraction(1))))
    return found


def oversized_rule(grammar: str) -> str | None:
    """Return the severity rule of oversized objects, by the grammar of their keys."""
    return REFUSED_WHOLE if grammar_of(grammar).refuses_oversized else None


def _difference(actual: IntArray, expected: IntArray) -> pa.Array:
    """Return the actual and expected bytes of each object as text: [objects]."""
    has, wanted = (pc.cast(pa.array(sizes), pa.string()) for sizes in (actual, expected))
    return pc.binary_join_element_wise(has, " bytes, expected ", wanted, "")
