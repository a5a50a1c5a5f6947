"""Check `names`: keys that SGLang does not write, or that have several readings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.checks.findings import findings
from hicachectl.formats.keys.file import TEMPORARY_PATTERN
from hicachectl.formats.keys.mooncake import WARM_UP_PATTERN
from hicachectl.pages.ambiguity import ambiguous_affixes, remedy
from hicachectl.pages.listing import key_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.checks.registry import CheckInput
    from hicachectl.pages.inventory import Inventory


def check_names(given: CheckInput) -> Iterator[pa.Table]:
    """Yield foreign-object, stale-temporary and ambiguous-key findings, from keys alone."""
    inventory = given.inventory
    foreign = np.flatnonzero(inventory.is_foreign)
    yield from _foreign(inventory, foreign, given.now_ns - given.grace_ns)
    yield from _ambiguous(inventory)


def stale_temporaries(objects: pa.Table | pa.RecordBatch, settled_ns: int) -> pa.BooleanArray:
    """Return which files are temporary and not written after settled_ns (Unix nanoseconds).

    objects: has key and mtime_ns; an unknown time counts as old.
    """
    temporary = pc.match_substring_regex(objects.column("key"), TEMPORARY_PATTERN)
    settled = pc.less_equal(pc.fill_null(objects.column("mtime_ns"), 0), settled_ns)
    stale = pc.and_(temporary, settled)
    return stale.combine_chunks() if isinstance(stale, pa.ChunkedArray) else stale


def _foreign(inventory: Inventory, rows: np.ndarray, settled_ns: int) -> Iterator[pa.Table]:
    objects = inventory.take(rows)
    keys = objects.column("key").combine_chunks()
    temporary = pc.match_substring_regex(keys, TEMPORARY_PATTERN)
    warm_up = pc.match_substring_regex(keys, WARM_UP_PATTERN)
    yield findings(
        "stale-temporary",
        keys=key_text(keys.filter(stale_temporaries(objects, settled_ns))),
        detail="temporary file of an unfinished write; no server reads the file, so removing it "
        "is safe",
    )
    yield findings(
        "foreign-object",
        keys=key_text(keys.filter(warm_up)),
        detail="warm-up key of a Mooncake client, not a page",
    )
    yield findings(
        "foreign-object",
        keys=key_text(keys.filter(pc.invert(pc.or_(temporary, warm_up)))),
        detail="not a key that SGLang writes; no server reads the object",
    )


def _ambiguous(inventory: Inventory) -> Iterator[pa.Table]:
    """Yield one finding for each ambiguous affix, with its first key."""
    described = ambiguous_affixes(inventory)
    if not described:
        return
    distinct, first = np.unique(inventory.affix_ids, return_index=True)
    rows = first[np.searchsorted(distinct, list(described))]
    keys = inventory.take(rows, ["key"]).column("key").combine_chunks()
    details = [f"{text}; {remedy(inventory)}" for text in described.values()]
    yield findings(
        "ambiguous-key",
        keys=key_text(keys),
        pages=inventory.pages(rows),
        detail=pa.array(details, pa.string()),
    )
