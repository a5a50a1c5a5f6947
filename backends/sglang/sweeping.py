"""List and remove the objects and old temporary files of some suffixes in a directory.

A listing keeps 49 bytes per object. The thread that lists sleeps three quarters of the time, to
leave processor time to the server. A removal never leaves an anchor without its sidecars.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.backends.disk.directory import Trust
from hicachectl.backends.disk.io import entries_of, file_system_ns
from hicachectl.backends.disk.names import storable_ns
from hicachectl.backends.object_files.epochs import EpochReader, owner_of
from hicachectl.backends.object_files.tree import Temporaries, owner_in
from hicachectl.formats.kinds.pool import pool_names
from hicachectl.formats.objects import PAGE_DIGITS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from hicachectl.backends.file.folders import ObjectDirectory


# A temporary file older than this has no writer any more, because no call of SGLang lasts so long.
_TEMPORARY_AGE_NS = 60 * 10**9
_CLOCKS_DIFFER_NS = 10**9  # tolerance between the file system's clock and ours
# Sidecars younger than this stay, because a writer may be about to write their anchor.
_IN_FLIGHT_NS = 60 * 10**9
_WORK_S, _REST_S = 0.002, 0.006
# Page hash, position of the suffix, size in bytes, and time in nanoseconds of an object.
_ROW = struct.Struct("<32sBqq")
_ROWS = np.dtype([("page", "<u8", 4), ("kind", "u1"), ("size", "<i8"), ("time", "<i8")])


class _Trusted:
    """Tells whether a file is regular and has a trusted owner. Each owner is checked once."""

    def __init__(self, directory: int) -> None:
        self._trust = Trust(os.fstat(directory), writes=True)
        self._directory = directory
        self._known: dict[tuple[int, int], bool] = {}

    def __call__(self, st: os.stat_result) -> bool:
        """Return whether the file with this stat is regular and has a trusted owner."""
        owner = st.st_uid, st.st_gid
        known = self._known.get(owner)
        if known is None:
            known = self._known[owner] = self._trust.includes(st, self._directory)
        return known and stat.S_ISREG(st.st_mode)


class Listing:
    """The listed objects of some suffixes, by page, and totals of their bytes.

    The kind of an object is the position of its suffix.

    rows: array of `_ROWS`, the least recently used page first. All rows of a page have the same
        time, at which the last of the page's objects was used or written.
    left: bytes of the pages that `take_page` has not yet returned.
    listed: bytes of the objects that were written before the listing began.
    later: bytes of the objects that were written since the listing began.
    stale: page and kind of objects older than their epoch, anchors first. Stale objects have no
        rows.
    others: number of objects of other suffixes.
    epochs: epoch of each kind.
    kind_of: kind of each suffix; the anchor's is 0.
    """

    def __init__(
        self, suffixes: Sequence[bytes], epochs: Sequence[int], begun_ns: int, *, measures: bool
    ) -> None:
        """Begin without objects.

        begun_ns: time at which the listing began, by the file system's clock.
        measures: whether to make rows. If False, only stale objects are kept.
        """
        self.begun_ns, self.epochs = begun_ns, epochs
        self.kind_of = {os.fsdecode(suffix): kind for kind, suffix in enumerate(suffixes)}
        self.listed = self.later = self.left = self.others = 0
        self.stale: list[tuple[str, int]] = []
        self.rows = np.empty(0, _ROWS)
        self._added = bytearray()  # rows, until they are sorted
        self._next = 0
        self._measures = measures
        self._own_begun_ns = time.time_ns()

    def add(self, page: str, kind: int, st: os.stat_result) -> None:
        """Add an object, unless its name has no page hash."""
        try:
            digest = bytes.fromhex(page)
        except ValueError:
            return
        if digest.hex() != page:  # SGLang's page hashes have no capital letters
            return
        if self._is_later(st.st_mtime_ns):
            self.later += st.st_size
        else:
            self.listed += st.st_size
        if st.st_ctime_ns <= self.epochs[kind]:
            self.stale.append((page, kind))
        elif self._measures:
            used_ns = storable_ns(_used_ns(st))
            self._added += _ROW.pack(digest, kind, st.st_size, used_ns)
            self.left += st.st_size

    def _is_later(self, mtime_ns: int) -> bool:
        """Return whether an object was written since the listing began; False for a future time."""
        if mtime_ns <= self.begun_ns:
            return False
        return mtime_ns - self.begun_ns <= time.time_ns() - self._own_begun_ns + _CLOCKS_DIFFER_NS

    def sort(self) -> None:
        """Sort the added objects into rows."""
        rows = np.frombuffer(self._added, _ROWS)
        # A page is identified by the first quarter of its hash. Two pages that share that quarter
        # get one time.
        quarters = rows["page"][:, 0]
        distinct, page_of = np.unique(quarters, return_inverse=True)
        latest = np.full(len(distinct), np.iinfo(np.int64).min)
        np.maximum.at(latest, page_of, rows["time"])
        used = latest[page_of]
        order = np.lexsort((quarters, used))
        self.rows = rows[order]
        self.rows["time"] = used[order]
        self._added = bytearray()
        self.stale.sort(key=lambda one: (one[1] != 0, one[0]))

    def take_page(self) -> tuple[str, dict[int, int], int] | None:
        """Return hash, sizes by kind, and time of the next page; None after the last page."""
        start = end = self._next
        if start == len(self.rows):
            return None
        page = self.rows["page"][start].tobytes()
        while end < len(self.rows) and self.rows["page"][end].tobytes() == page:
            end += 1
        taken, self._next = self.rows[start:end], end
        self.left -= int(taken["size"].sum())
        sizes = dict(zip(taken["kind"].tolist(), taken["size"].tolist(), strict=True))
        return page.hex(), sizes, int(taken["time"][0])


class Sweeper:
    """Lists and removes the objects and old temporary files of some suffixes in a directory.

    suffixes: ends of file names, after the page hash. The first is the anchor's if has_anchor.
    clock_ns: the file system's time minus this host's, at the last listing.
    evicted: number of pages whose anchor `remove_page` has removed.

    Each method can raise OSError.
    """

    def __init__(
        self, directory: ObjectDirectory, suffixes: tuple[bytes, ...], *, has_anchor: bool
    ) -> None:
        self.clock_ns = 0
        self.evicted = 0
        self._epochs = [EpochReader(directory, suffix) for suffix in suffixes]
        self._directory = directory
        self._suffixes = suffixes
        self._has_anchor = has_anchor
        self._trusted = _Trusted(directory.descriptor)
        self._owners = {os.fsdecode(owner_of(suffix)) for suffix in suffixes}
        self._temporaries = Temporaries(directory, owner_of(suffixes[0]))

    def look(self) -> Sequence[int]:
        """Return the epoch of each suffix as it is now."""
        return [epoch.look() for epoch in self._epochs]

    def list(self, stopped: Callable[[], bool], *, measures: bool = True) -> Listing:
        """List the objects, and remove old temporary files of the suffixes.

        measures: whether to list all objects, with sizes and times. If False, only stale objects
            are listed.
        stopped: called often; True ends the listing.
        """
        found = Listing(self._suffixes, self.look(), self.now_ns(), measures=measures)
        self._trusted = _Trusted(self._directory.descriptor)
        self.clock_ns = found.begun_ns - time.time_ns()
        for descriptor in self._directory.directories():
            for entry in _at_leisure(descriptor, stopped):
                name = entry.name
                kind = found.kind_of.get(name[PAGE_DIGITS:])
                if kind is None:
                    if owner_in(name) in self._owners:
                        self._sweep(descriptor, name, found)
                    elif name.endswith(".bin"):
                        found.others += 1
                elif measures or found.epochs[kind]:
                    with suppress(FileNotFoundError):
                        st = entry.stat(follow_symlinks=False)
                        if self._trusted(st):
                            found.add(name[:PAGE_DIGITS], kind, st)
        found.sort()
        return found

    def now_ns(self) -> int:
        """Return the file system's time."""
        return file_system_ns(self._directory.descriptor)

    def _sweep(self, descriptor: int, name: str, found: Listing) -> None:
        """Remove a temporary file if it is so old that its writer must have ended."""
        with suppress(OSError):
            st = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            if not self._trusted(st):
                return
            if st.st_ctime_ns > found.begun_ns - _TEMPORARY_AGE_NS:
                found.listed += st.st_size
            else:
                os.unlink(name, dir_fd=descriptor)

    def remove_page(self, page: str, sizes: Mapping[int, int], listed_ns: int) -> int:
        """Remove a page's objects, the anchor first.

        The page stays if it is in flight, or was used after the listing.
        sizes: size of each listed object by its kind.
        listed_ns: time of the page's last use, as listed.
        Returns the bytes of the listed objects that are gone now, whoever removed them.
        """
        seen = {kind: self._look(self._key(page, kind)) for kind in sizes}
        gone = sum(size for kind, size in sizes.items() if seen[kind] is None)
        found = {kind: st for kind, st in seen.items() if st is not None}
        if any(_used_ns(st) > listed_ns for st in found.values()):
            return gone
        if self._has_anchor:
            if 0 not in sizes and self._look(self._key(page, 0)) is not None:
                return gone  # the anchor has been written since the listing
            if self._is_in_flight(found):
                return gone
        freed = 0
        for kind in sorted(found):
            if self._temporaries.remove_unchanged(
                self._key(page, kind), found[kind], even_if_read=False
            ):
                freed += found[kind].st_size
                self.evicted += kind == 0 and self._has_anchor
            elif kind == 0 and self._has_anchor:
                break  # the anchor is in use again, so its sidecars stay
        return gone + freed

    def remove_stale(self, page: str, kind: int, epoch_ns: int) -> int:
        """Remove an object if it is older than its epoch; return the bytes that this frees."""
        key = self._key(page, kind)
        seen = self._look(key)
        if seen is None or seen.st_ctime_ns > epoch_ns:
            return 0
        return (
            seen.st_size if self._temporaries.remove_unchanged(key, seen, even_if_read=True) else 0
        )

    def _is_in_flight(self, found: Mapping[int, os.stat_result]) -> bool:
        """Return whether a writer may be about to write the page's anchor.

        Writers write sidecars first, so a sidecar that is newer than the anchor shows a writer.
        """
        anchor_ns = _used_ns(found[0]) if 0 in found else 0
        now_ns = time.time_ns() + self.clock_ns
        oldest_ns, newest_ns = max(anchor_ns, now_ns - _IN_FLIGHT_NS), now_ns + _IN_FLIGHT_NS
        return any(oldest_ns < _used_ns(st) < newest_ns for kind, st in found.items() if kind)

    def _key(self, page: str, kind: int) -> bytes:
        return page.encode() + self._suffixes[kind]

    def _look(self, key: bytes) -> os.stat_result | None:
        """Return the stat of an object's file; None if the file is missing.

        Raises OSError for a file that is not a regular file of a trusted user.
        """
        try:
            here, name = self._directory.place(key)
            st = os.stat(name, dir_fd=here, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if not self._trusted(st):
            raise OSError(errno.EPERM, "not a regular file of a trusted user")
        return st


def _at_leisure(directory: int, stopped: Callable[[], bool]) -> Iterator[os.DirEntry[str]]:
    """Yield a directory's entries; rest three quarters of the time."""
    with entries_of(directory) as entries:
        begun = time.monotonic()
        for number, entry in enumerate(entries):
            if not number % 32 and time.monotonic() - begun > _WORK_S:
                if stopped():
                    return
                time.sleep(_REST_S)
                begun = time.monotonic()
            yield entry


def kinds_of(suffixes: Mapping[bytes, bool]) -> tuple[bytes, ...]:
    """Return the suffixes of the objects that are evicted together, the anchor's first.

    suffixes: suffixes that a rank writes; the anchor's has the value True.
    The result has the suffixes of all pools that other servers of the same rank may store beside
    the anchor.
    """
    anchors = [suffix for suffix, is_anchor in suffixes.items() if is_anchor]
    names = [pool.name.encode() for pool in pool_names()]
    beside = [b"." + name + anchor for anchor in anchors for name in names]
    return tuple(dict.fromkeys([*anchors, *sorted(suffixes), *beside]))


def _used_ns(st: os.stat_result) -> int:
    return max(st.st_atime_ns, st.st_mtime_ns)
