"""Choose a sample of the pages of a store, and find changes of dtype in it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.checks.changes import check_changes
from hicachectl.checks.registry import CheckSums
from hicachectl.pages.census import byte_sum
from hicachectl.verification.request import Sample

if TYPE_CHECKING:
    import pyarrow as pa

    from hicachectl.pages.inventory import Inventory
    from hicachectl.verification.verify import PartCheck

_SAMPLE_BYTES = 1 << 30  # most bytes to read
_DAY = 86400


def day_sample(inventory: Inventory, pages: int) -> Sample:
    """Return a slice of about `pages` pages, or fewer, with at most about _SAMPLE_BYTES.

    The day decides which slice of this size is returned.
    inventory: inventory with at least one page.
    """
    paged = ~inventory.is_foreign
    hashes = np.sort(inventory.page_words(paged, 0))
    stored = len(hashes) - int((hashes[1:] == hashes[:-1]).sum())
    most = int(_SAMPLE_BYTES * stored / max(1, byte_sum(inventory.known_sizes)))
    slices = max(1, round(stored / max(1, min(pages, most))))
    # The day picks a page, and the slice is the slice of this page, so it is not empty.
    page = int(hashes[int(time.time() // _DAY) % len(hashes)]) >> 32
    return Sample(slices, page % slices)


def changes_of(part: PartCheck) -> list[pa.Table]:
    """Return the findings about changes of dtype or layout among the pages that were read."""
    sums = CheckSums(part.groups.inventory.table, part.result.tally, part.result.evidence)
    return [found for found in check_changes(sums) if len(found)]
