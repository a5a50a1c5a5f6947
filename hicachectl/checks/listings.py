"""Checks of a store as a whole: its stamp, objects that servers lost, ranks with the same keys."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pyarrow as pa

from hicachectl.backends.capabilities import Losing
from hicachectl.checks.findings import findings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.checks.registry import CheckInput, CheckListing


def check_stamp(given: CheckInput) -> Iterator[pa.Table]:
    """Yield a stamp-mismatch finding for each difference from the stamp."""
    details = pa.array(given.stamp_differences, pa.string())
    yield findings("stamp-mismatch", keys=pa.nulls(len(details), pa.string()), detail=details)


def check_collision(given: CheckListing) -> Iterator[pa.Table]:
    """Yield a colliding-keys finding if ranks of the deployment share the names of objects."""
    if given.collision:
        yield findings("colliding-keys", keys=pa.nulls(1, pa.string()), detail=given.collision)


def check_losses(given: CheckListing) -> Iterator[pa.Table]:
    """Yield a finding for each loss that the listing found, unless a server may still write it."""
    for loss in given.store.losses if isinstance(given.store, Losing) else ():
        if loss.changed_ns <= given.grace_start_ns:
            yield findings(
                loss.code, keys=pa.array([_readable(loss.place)]), detail=_readable(loss.what)
            )


def _readable(text: str) -> str:
    """Return a text with file names as keys are written: other bytes than UTF-8 escaped."""
    return os.fsencode(text).decode("utf-8", "backslashreplace")
