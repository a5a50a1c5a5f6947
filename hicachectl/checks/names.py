"""Check `names`: keys that SGLang does not write, or that have several readings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.checks.findings import findings, object_findings
from hicachectl.formats.keys.base import TEMPORARY_PATTERN
from hicachectl.formats.keys.table import pages_of
from hicachectl.pages.ambiguity import ambiguous_affixes, remedy
from hicachectl.pages.listing import key_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.checks.registry import CheckInput, CheckSums
    from hicachectl.formats.arrays import IntArray
    from hicachectl.pages.inventory import Inventory


def check_names(given: CheckInput) -> Iterator[pa.Table]:
    """Yield foreign-object and stale-temporary findings, from keys alone."""
    inventory, grace_start_ns = given.inventory, given.now_ns - given.grace_ns
    cleared = inventory.cleared_rows
    foreign = np.setdiff1d(np.flatnonzero(inventory.is_foreign), cleared, assume_unique=True)
    yield from _foreign(inventory, foreign, grace_start_ns)
    yield cleared_objects(inventory, cleared, grace_start_ns)


def check_ambiguous_keys(given: CheckSums) -> Iterator[pa.Table]:
    """Yield one ambiguous-key finding for each ambiguous affix, with its smallest key."""
    table, tally = given.table, given.tally
    described = ambiguous_affixes(table, tally.objects)
    keys = pa.array([tally.first_keys[affix] for affix in described], pa.binary())
    starts = table.page_starts[np.array([*described], dtype=np.int64)]
    details = [f"{text}; {remedy(table)}" for text in described.values()]
    yield findings(
        "ambiguous-key",
        keys=key_text(keys),
        pages=pages_of(keys, starts),
        detail=pa.array(details, pa.string()),
    )


def stale_temporaries(objects: pa.Table | pa.RecordBatch, grace_start_ns: int) -> pa.BooleanArray:
    """Return which files are temporary and were not written after grace_start_ns.

    objects: has key and mtime_ns; an unknown time counts as old.
    grace_start_ns: Unix nanoseconds.
    """
    temporary = pc.match_substring_regex(objects.column("key"), TEMPORARY_PATTERN)
    old = pc.less_equal(pc.fill_null(objects.column("mtime_ns"), 0), grace_start_ns)
    stale = pc.and_(temporary, old)
    return stale.combine_chunks() if isinstance(stale, pa.ChunkedArray) else stale


def cleared_objects(inventory: Inventory, rows: IntArray, grace_start_ns: int) -> pa.Table:
    """Return a stale-temporary finding for each object that a `clear` made a miss.

    rows: cleared objects. A server removes them in the background.
    grace_start_ns: Unix nanoseconds; objects that were cleared later are left out.
    """
    if len(rows):
        cleared_ns = inventory.take(rows, ["cleared_ns"]).column("cleared_ns").to_numpy()
        rows = rows[cleared_ns <= grace_start_ns]
    return object_findings(
        inventory,
        rows,
        "stale-temporary",
        "from before a server cleared the store; no server reads the object, so removing it is "
        "safe",
    )


def _foreign(inventory: Inventory, rows: IntArray, grace_start_ns: int) -> Iterator[pa.Table]:
    objects = inventory.take(rows, ["key", "mtime_ns"])
    keys = objects.column("key")
    temporary = pc.match_substring_regex(keys, TEMPORARY_PATTERN).to_numpy()
    warm_up, grammar = np.zeros(len(keys), dtype=np.bool_), inventory.table.grammar
    if grammar.warm_ups:
        warm_up = pc.match_substring_regex(keys, grammar.warm_ups).to_numpy()
    stale = stale_temporaries(objects, grace_start_ns).to_numpy(zero_copy_only=False)
    for code, chosen, detail in (
        (
            "stale-temporary",
            stale,
            "temporary file of an unfinished write; no server reads the file, so removing it is "
            "safe",
        ),
        ("foreign-object", warm_up, f"warm-up key of a {grammar.title} client, not a page"),
        (
            "foreign-object",
            ~(temporary | warm_up),
            "not a key that SGLang writes; no server reads the object",
        ),
    ):
        yield object_findings(inventory, rows[chosen], code, detail)
