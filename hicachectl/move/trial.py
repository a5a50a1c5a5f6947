"""Trial removals. The first pages of a move show whether the destination keeps its copies.

Two mounts of one directory, or two addresses of one server, can be one place. A page removed from
the source would then be gone from the destination, too. The first pages therefore leave the source
one by one. Each page stays in memory until a second read finds it in the destination.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from hicachectl.backends.arena import Arena, place
from hicachectl.backends.base import Status, attached, in_batches, keys_of
from hicachectl.backends.capabilities import Confirm, Trailed, keep_as_private
from hicachectl.formats.errors import StoreUnavailable
from hicachectl.formats.trailer import DEFAULT_DIGEST
from hicachectl.formats.wording import one_place
from hicachectl.move.order import GroupObjects, publish
from hicachectl.move.results import GroupStatus, MoveResult
from hicachectl.move.withdrawal import withdraw_listed
from hicachectl.profiles.identities import markers_of
from hicachectl.text.units import counted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicachectl.backends.base import Result, Store
    from hicachectl.formats.arrays import IntArray
    from hicachectl.formats.identity import Identity
    from hicachectl.formats.keys.base import Affix
    from hicachectl.move.survey import Survey
    from hicachectl.pages.groups import PageGroups

PAGES = 3  # more than one, because a destination that evicts can lose one or two pages by itself


class Trial:
    """Removals of single pages, until the destination has kept a copy of one of them.

    passed: whether the destination kept the copy of a page that left the source.
    """

    def __init__(self, source: Store, destination: Store, groups: PageGroups) -> None:
        """Prepare the trial. groups: page groups of the source."""
        self.passed = False
        self._source = source
        self._destination = destination
        self._groups = groups
        self._lost = 0

    def remove(self, survey: Survey, item: int) -> MoveResult | None:
        """Remove a page from the source, and write it back if the destination has lost it.

        Call this while no arena is attached to the stores.
        item: row of the survey.
        If the page cannot be read into memory, leave the page alone and return None.
        Raises StoreUnavailable, also if the destination has lost PAGES pages.
        """
        numbers = survey.groups[[item]]
        stores = (self._source, self._destination)
        page = _Page(*stores, self._groups, survey, item)
        named = any(store.limits.named_arena for store in stores)
        with Arena(max(page.nbytes, 1), named=named) as arena, attached(arena, *stores):
            if not page.hold():
                return None
            is_safe = False
            try:
                removed = withdraw_listed(self._source, self._groups, numbers)
                is_safe = not removed.objects or page.is_in_destination()
            finally:
                stuck = "" if is_safe else page.write_back()
        if is_safe:
            self.passed |= removed.objects > 0
            return removed
        self._lost += 1
        if self._lost == PAGES:
            self.finish()
        back = f"it cannot be written back: {stuck}" if stuck else "it was written back"
        result = MoveResult.of(removed.pages)
        why = f"the destination lost the page at the same time, and {back}"
        result.fail(0, GroupStatus.FAILED, None, why)
        return result

    def finish(self) -> None:
        """Raise StoreUnavailable if the destination has lost every page that left the source."""
        if self.passed or not self._lost:
            return
        where = self._destination.url
        evidence = f"{counted(self._lost, 'page')} removed from SRC left {where} at the same time"
        if self._destination.traits.evicts:
            evidence += " (or DST evicts new pages at once)"
        evidence += "; the removed pages are back in SRC"
        raise StoreUnavailable(one_place(self._source.url, evidence, "--move"))


class _Page:
    """A page of the source, and its copies in the destination.

    nbytes: size of the arena to attach to both stores before the first call.
    """

    def __init__(
        self, source: Store, destination: Store, groups: PageGroups, survey: Survey, item: int
    ) -> None:
        """Lay out the memory. Objects of the source come first, then their copies."""
        inventory = groups.inventory
        rows, _ = groups.objects_of(survey.groups[[item]])
        listed = inventory.objects.column_names
        columns = [name for name in ("key", "mtime_ns", "locator") if name in listed]
        _, targets, self._copied = survey.touched.objects(np.array([item]))
        keys = survey.keys(np.full(len(targets), item), targets)
        self._source, self._destination = source, destination
        self._objects, self._sizes = inventory.take(rows, columns), survey.sizes[rows]
        self._anchors = inventory.table.anchors[inventory.affix_ids[rows]]
        self._copies = pa.table({"key": keys})
        sizes = np.concatenate([self._sizes, self._copied])
        self._is_known = len(self._copied) > 0 and sizes.min() >= 0
        offsets, self.nbytes = place(np.maximum(sizes, 0))
        self._offsets, self._back = offsets[: len(rows)], offsets[len(rows) :]
        self._held = np.zeros(0, dtype=np.int64)

    def hold(self) -> bool:
        """Read the page. Return whether all objects that it still has are in memory.

        A killed run may have removed some of the listed objects.
        """
        if not self._is_known:
            return False
        self._trailers = _trailers_of(self._source, self._objects)
        read = read_now(self._source, self._objects, self._offsets, self._sizes)
        self._held = np.flatnonzero(read.ok)
        return bool((read.ok | (read.statuses == Status.GONE)).all())

    def is_in_destination(self) -> bool:
        """Read the copies. Return whether the destination has all of them."""
        return read_now(self._destination, self._copies, self._back, self._copied).all_ok

    def write_back(self) -> str:
        """Write missing objects back to the source. Return why the write failed, or ""."""
        store, count = self._source, len(self._objects)
        keep_as_private(store, store)
        if isinstance(store, Trailed):
            store.write_trailers(*self._trailers)

        def write(places: IntArray) -> Result:
            sizes = self._sizes[places]

            def call(span: slice) -> Result:
                rows = self._objects.take(pa.array(places[span]))
                offsets = self._offsets[places[span]]
                return store.write_from(rows, offsets, sizes[span], if_absent=True)

            return in_batches(sizes, store.limits, call)

        keys = self._objects.column("key").combine_chunks()
        result = MoveResult.of(pa.array([""]))
        publish(
            GroupObjects(keys, np.zeros(count, dtype=np.int64), self._anchors),
            self._held,
            result,
            write=write,
            undo=lambda places: store.undo_writes(self._objects.take(pa.array(places))),
        )
        if result.statuses[0] in (GroupStatus.DONE, GroupStatus.RACED):
            return ""
        return next((problem.detail for problem in result.problems), "no room")


def read_now(store: Store, rows: pa.Table, offsets: IntArray, sizes: IntArray) -> Result:
    """Read objects at their present places, even if a listing has other places of the objects."""
    read = store.read_into
    if isinstance(store, Confirm) and store.confirms:
        read = store.read_confirmed

    def call(span: slice) -> Result:
        objects = rows.slice(span.start, span.stop - span.start)
        return read(objects, offsets[span], sizes[span], identify=False)

    return in_batches(sizes, store.limits, call)


def _trailers_of(store: Store, objects: pa.Table) -> tuple[Mapping[Affix, Identity], str]:
    """Return the identities in the trailers of objects, by affix, and the digest algorithm."""
    markers = markers_of(store)
    if not markers or not isinstance(store, Trailed):
        return {}, DEFAULT_DIGEST
    identities = store.read_trailers(objects).column("identity").to_pylist()
    pairs = list(zip(keys_of(objects), identities, strict=True))
    used = [
        marker
        for marker in markers
        if any(
            identity == marker.identity.hash() and key.endswith(marker.suffix.encode())
            for key, identity in pairs
        )
    ]
    digest = next((marker.digest for marker in used), DEFAULT_DIGEST)
    return {("", marker.suffix): marker.identity for marker in used}, digest
