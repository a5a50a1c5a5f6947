"""Check `names`: keys that are no object of SGLang's, or that several readings fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.findings import findings
from hicachectl.formats.keys.file import TEMPORARY_PATTERN
from hicachectl.formats.keys.mooncake import WARM_UP_PATTERN
from hicachectl.listing import key_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.formats.objects import Coordinate
    from hicachectl.inventory import Inventory


def check_names(inventory: Inventory, *, now_ns: int, grace_ns: int) -> Iterator[pa.Table]:
    """Find foreign-object, stale-temporary and ambiguous-key, from names alone."""
    resolved = inventory.table.resolved
    is_object = inventory.by_affix(tuple(bool(r.readings) for r in resolved), 0) != 0
    yield from _foreign(inventory, np.flatnonzero(~is_object), now_ns - grace_ns)
    for number, affix in enumerate(inventory.table.affixes):
        if resolved[number].ambiguous:
            rows = np.flatnonzero(inventory.affix_ids == number)
            yield _ambiguous(inventory, rows, affix, resolved[number].readings)


def _foreign(inventory: Inventory, rows: np.ndarray, settled_ns: int) -> Iterator[pa.Table]:
    objects = inventory.objects.take(pa.array(rows))
    keys = objects.column("key").combine_chunks()
    temporary = pc.match_substring_regex(keys, TEMPORARY_PATTERN)
    warm_up = pc.match_substring_regex(keys, WARM_UP_PATTERN)
    settled = pc.less_equal(
        pc.fill_null(objects.column("mtime_ns"), 0), settled_ns
    ).combine_chunks()
    yield findings(
        "stale-temporary",
        "warning",
        keys=key_text(keys.filter(pc.and_(temporary, settled))),
        detail="left by a write that did not finish; nothing reads it, safe to delete",
    )
    yield findings(
        "foreign-object",
        "info",
        keys=key_text(keys.filter(warm_up)),
        detail="warm-up key of a Mooncake client",
    )
    yield findings(
        "foreign-object",
        "info",
        keys=key_text(keys.filter(pc.invert(pc.or_(temporary, warm_up)))),
        detail="not a key that SGLang writes",
    )


def _ambiguous(
    inventory: Inventory, rows: np.ndarray, affix: tuple[str, str], readings: tuple[Coordinate, ...]
) -> pa.Table:
    """One finding for the affix, at its first object: its readings fit all of them alike."""
    objects = inventory.objects.slice(int(rows[0]), 1)
    example = "".join((affix[0], "<hash>", affix[1]))
    meanings = " or ".join(_words(reading) for reading in readings)
    return findings(
        "ambiguous-key",
        "warning",
        keys=key_text(objects.column("key").combine_chunks()),
        pages=objects.column("page"),
        detail=f"{len(rows)} keys {example} can be {meanings}; give a profile to tell",
    )


def _words(reading: Coordinate) -> str:
    shard = reading.shard
    axes = ("tp", "pp", "cp", "dcp")
    ranks = [
        f"{axis} rank {getattr(shard, f'{axis}_rank')} of {getattr(shard, f'{axis}_size') or '?'}"
        for axis in axes
        if getattr(shard, f"{axis}_rank") is not None
    ]
    return " ".join([f"{reading.pool} of model {reading.model!r}", *ranks])
