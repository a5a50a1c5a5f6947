"""Check `sizes`: objects of a size that their deployment does not write."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.checks.codes import DESPITE, REFUSED_WHOLE
from hicachectl.checks.findings import deployment_findings, object_findings
from hicachectl.formats.keys import grammar_of
from hicachectl.formats.spec import UNKNOWN_SIZE, fits
from hicachectl.text.units import minute, written_between

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.checks.registry import CheckInput, CheckSums
    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.pages.deployments import AffixTable, Deployment, SeenSize, SizeMix
    from hicachectl.pages.inventory import Inventory


def check_sizes(given: CheckInput) -> Iterator[pa.Table]:
    """Yield truncated and oversized findings for objects that are not in flight."""
    inventory = given.inventory
    expected = inventory.table.expected_sizes[inventory.affix_ids]
    actual = inventory.objects.column("nbytes").fill_null(UNKNOWN_SIZE).to_numpy()
    for mix in inventory.table.mixes:
        if mix.stated == UNKNOWN_SIZE:
            common = [size.nbytes for size in mix.sizes]
            expected[_of_mix(inventory, mix) & ~np.isin(actual, common)] = common[0]
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


def _of_mix(inventory: Inventory, mix: SizeMix) -> BoolArray:
    """Return which objects are of the kind of a mix: [objects]."""
    return np.isin(inventory.affix_ids, mix.affix_ids)


def rows_of_mixes(inventory: Inventory) -> IntArray:
    """Return the objects that have a common size beside the one that a profile states.

    Their pages can be those of servers that run now.
    """
    actual = inventory.objects.column("nbytes").fill_null(UNKNOWN_SIZE).to_numpy()
    among = np.zeros(len(actual), dtype=np.bool_)
    for mix in inventory.table.mixes:
        if mix.others:
            among |= _of_mix(inventory, mix) & np.isin(actual, mix.others)
    return np.flatnonzero(among)


def check_mixed_sizes(given: CheckSums) -> Iterator[pa.Table]:
    """Yield mixed-sizes for each kind of object with several common sizes."""
    table, objects = given.table, given.tally.objects
    mixes = [mix for mix in table.mixes if objects[list(mix.affix_ids)].any()]
    newest = [max(size.newest_ns or 0 for size in mix.sizes) for mix in mixes]
    yield deployment_findings(
        "mixed-sizes",
        deployments=[_deployment_of(mix, table).label(table.grammar) for mix in mixes],
        written=[ns // 10**9 or None for ns in newest],
        pools=[mix.coordinate.pool for mix in mixes],
        parts=[mix.coordinate.part for mix in mixes],
        detail=[_described(mix) for mix in mixes],
    )


def _deployment_of(mix: SizeMix, table: AffixTable) -> Deployment:
    return table.deployments[table.deployment_ids[mix.affix_ids[0]]]


def _described(mix: SizeMix) -> str:
    model, shard = mix.coordinate.names.model, mix.coordinate.shard
    texts = [
        f"{size.nbytes} bytes on {size.pages} pages ({size.pages / mix.pages:.0%})" + _written(size)
        for size in mix.sizes
    ]
    facts = "; ".join([*texts, *filter(None, [_change(mix)]), _likely_reason(mix)])
    advice = "give --profile of the running servers to see which size is right"
    if mix.others:
        advice = (
            f"the profile states {mix.stated} bytes, but not all pages of another size are older, "
            "so their servers may run: compare with hicachectl profile --server; --repair leaves "
            f"these pages without {DESPITE}"
        )
    return f"model {model!r} {shard.sizes_text()}: {facts}; {advice}"


def _likely_reason(mix: SizeMix) -> str:
    one, two = (size.nbytes for size in mix.sizes[:2])
    ratio = max(one, two) / min(one, two)
    settings = "KV cache dtypes" if ratio == 2 else "layer counts, head counts"
    return f"the ratio {ratio:.4g} suggests different {settings} or page sizes"


def _written(size: SeenSize) -> str:
    if size.oldest_ns is None or size.newest_ns is None:
        return ""
    return f", {written_between(size.oldest_ns, size.newest_ns)}"


def _change(mix: SizeMix) -> str:
    """Return when the size changed, of the two most common ones; "" if the store keeps no times."""
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


def oversized_rule(grammar: str) -> str | None:
    """Return the severity rule of oversized objects, by the grammar of their keys."""
    return REFUSED_WHOLE if grammar_of(grammar).refuses_oversized else None


def _difference(actual: IntArray, expected: IntArray) -> pa.Array:
    """Return the actual and expected bytes of each object as text: [objects]."""
    has, wanted = (pc.cast(pa.array(sizes), pa.string()) for sizes in (actual, expected))
    return pc.binary_join_element_wise(has, " bytes, expected ", wanted, "")
