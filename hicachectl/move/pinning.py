"""Pin page groups so that the store evicts them last. Remove their pins."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from hicachectl.backends.base import Status
from hicachectl.backends.capabilities import Pins
from hicachectl.formats.errors import UnsupportedByBackend
from hicachectl.move.results import ROWS, page_columns
from hicachectl.pages.groups import UNKNOWN_BYTES
from hicachectl.text.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicachectl.backends.base import Store
    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.pages.groups import PageGroups

PIN_SECONDS = 1800.0  # Mooncake's default
PINNED = "pinned"
NOT_PINNED = "not-pinned"
WOULD_PIN = "would-pin"  # only dry runs say this
UNPINNED = "unpinned"
NOT_UNPINNED = "not-unpinned"
WOULD_UNPIN = "would-unpin"  # only dry runs say this

NEEDS_MASTER = "upgrade the master to Mooncake 0.3.14 or later"
# Most objects in each call, because a signal ends the run only after the present call.
_STEP = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PinReport:
    """Report of a run that pins page groups, or removes their pins.

    rows: a row of `ROWS` for each group.
    fine: [groups] whether all objects of the group were pinned, or unpinned, as wanted.
    objects: number of objects of the groups in `fine`.
    nbytes: bytes of the groups in `fine`; None if a size is unknown.
    until: Unix seconds at which the first of the pins ends; None if pins were removed.
    failures: number of objects with each error.
    """

    rows: pa.Table
    fine: BoolArray
    objects: int
    nbytes: int | None
    until: float | None
    failures: dict[str, int] = field(default_factory=dict)


def require_pins(store: Store, seconds: float) -> Pins:
    """Return the store if it can pin existing objects.

    Raises UnsupportedByBackend if it cannot. Raises the errors of `Pins.can_pin`.
    """
    if not isinstance(store, Pins):
        raise UnsupportedByBackend(
            f"{store.url}: cannot pin objects; only Mooncake can (mooncake: URLs)"
        )
    if not store.can_pin(seconds):
        raise UnsupportedByBackend(
            f"{store.url}: the master cannot pin objects that it has; {NEEDS_MASTER}"
        )
    return store


def pin_groups(
    store: Pins,
    groups: PageGroups,
    chosen: IntArray,
    seconds: float | None,
    *,
    dry_run: bool = False,
    on_progress: Callable[[int], None] = lambda objects: None,
) -> PinReport:
    """Pin all objects of the chosen groups, or remove their pins.

    A group counts as not pinned if one of its objects has vanished or cannot be pinned, even if its
    other objects are pinned.

    seconds: duration of the pins; None removes them.
    on_progress: takes the number of objects of each call.
    Raises StoreUnavailable, and UsageError as `Pins.pin` does.
    """
    until = None if seconds is None else time.time() + seconds
    rows, offsets = groups.objects_of(chosen)
    bad: BoolArray = np.zeros(len(rows), dtype=np.bool_)
    failures: dict[str, int] = {}
    if not dry_run:
        keys = groups.inventory.objects.column("key").take(pa.array(rows))
        bad, failures = pin_keys(store, keys, seconds, on_progress=on_progress)
    fine = ~np.logical_or.reduceat(bad, offsets[:-1]) if len(chosen) else np.zeros(0, np.bool_)
    counts, nbytes = np.diff(offsets), groups.nbytes[chosen]
    good, other = _states(pins=seconds is not None, dry_run=dry_run)
    columns = [
        *page_columns(groups, chosen),
        pa.array(counts),
        pa.array(nbytes, mask=nbytes == UNKNOWN_BYTES),
        pa.array([other, good]).take(pa.array(fine.astype(np.int8))),
    ]
    return PinReport(
        rows=pa.table(columns, schema=ROWS),
        fine=fine,
        objects=int(counts[fine].sum()),
        nbytes=groups.total_bytes(chosen[fine]),
        until=until,
        failures=failures,
    )


def pin_keys(
    store: Pins,
    keys: pa.ChunkedArray | pa.BinaryArray,
    seconds: float | None,
    *,
    on_progress: Callable[[int], None] = lambda objects: None,
) -> tuple[BoolArray, dict[str, int]]:
    """Pin objects, or remove their pins.

    Return whether each object failed: [keys], and the number of objects with each error. An object
    that vanished before its pin was removed is no failure.
    """
    bad = np.zeros(len(keys), dtype=np.bool_)
    failures: dict[str, int] = {}
    for start in range(0, len(keys), _STEP):
        some = pa.table({"key": keys.slice(start, _STEP)})
        result = store.unpin(some) if seconds is None else store.pin(some, seconds)
        wrong = ~result.ok
        if seconds is None:
            wrong &= result.statuses != Status.GONE
        bad[start : start + len(some)] = wrong
        for why in result.errors.values():
            failures[why] = failures.get(why, 0) + 1
        on_progress(len(some))
    return bad, failures


def failure_lines(failures: dict[str, int]) -> list[str]:
    """Return the errors as messages."""
    return [f"{counted(count, 'object')}: {why}" for why, count in failures.items()]


def _states(*, pins: bool, dry_run: bool) -> tuple[str, str]:
    """Return the state of a group for which all calls succeed, and the state of any other group."""
    if dry_run:
        return (WOULD_PIN if pins else WOULD_UNPIN), ""
    return (PINNED, NOT_PINNED) if pins else (UNPINNED, NOT_UNPINNED)
