"""List the objects of some suffixes, least recently used pages first; remove pages and leftovers.

A listing keeps 49 bytes an object. It sleeps three quarters of the time, to leave the server its
processor. A removal never leaves an anchor that lacks its sidecars.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from array import array
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.backends.disk.directory import Trust
from hicachectl.backends.disk.io import entries_of, file_system_ns
from hicachectl.backends.disk.names import storable_ns
from hicachectl.backends.object_files.epochs import EpochReader, owner_of
from hicachectl.backends.object_files.tree import Temporaries, owner_in
from hicachectl.formats.objects import PAGE_DIGITS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from hicachectl.backends.file.folders import ObjectDirectory


_TEMPORARY_AGE_NS = 60 * 10**9  # no call of SGLang lasts so long
_CLOCKS_DIFFER_NS = 10**9
# Younger sidecars stay: a writer may be about to write their anchor.
_IN_FLIGHT_NS = 60 * 10**9
_SAMPLED = 64  # one of so many foreign objects is measured
_WORK_S, _REST_S = 0.002, 0.006


class _Trusted:
    """Whether files of a directory are regular and of trusted owners; asks once for each owner."""

    def __init__(self, directory: int) -> None:
        self._trust = Trust(os.fstat(directory), writes=True)
        self._directory = directory
        self._known: dict[tuple[int, int], bool] = {}

    def __call__(self, facts: os.stat_result) -> bool:
        """Return whether a file is one of ours."""
        owner = facts.st_uid, facts.st_gid
        known = self._known.get(owner)
        if known is None:
            known = self._known[owner] = self._trust.includes(facts, self._directory)
        return known and stat.S_ISREG(facts.st_mode)


@dataclass(slots=True)
class Listing:
    """Objects of some suffixes, by page, the least recently used page first.

    pages: uint8 [objects, 32]. kinds: position of each object's suffix; 0 is the anchor's.
    sizes: bytes. times: ns, when a page was last used or written; equal for its objects.
    listed, later: bytes of objects that were written before and after the listing began.
    stale: page and kind of objects before their epoch, not among the rows; anchors first.
    others: number of objects of other suffixes. others_bytes: about their bytes.
    """

    pages: NDArray[np.uint8]
    kinds: NDArray[np.uint8]
    sizes: NDArray[np.int64]
    times: NDArray[np.int64]
    listed: int = 0
    later: int = 0
    stale: list[tuple[str, int]] = field(default_factory=list)
    others: int = 0
    others_bytes: int = 0

    def page(self, row: int) -> str:
        """Return the page hash of a row."""
        digest: bytes = self.pages[row].tobytes()
        return digest.hex()

    def end_of_page(self, row: int) -> int:
        """Return the row after the last one of a row's page."""
        page, end = self.pages[row].tobytes(), row + 1
        while end < len(self.pages) and self.pages[end].tobytes() == page:
            end += 1
        return end

    def sizes_of(self, start: int, end: int) -> dict[int, int]:
        """Return the sizes of a page's rows, by kind."""
        kinds, sizes = self.kinds[start:end].tolist(), self.sizes[start:end].tolist()
        return dict(zip(kinds, sizes, strict=True))


class Sweeper:
    """The objects and temporary files of some suffixes in a directory: lists and removes them.

    suffixes: ends of file names, after the page hash. The first is the anchor's if has_anchor.
    clock_ns: the file system's time less ours, at the last listing.

    All methods raise OSError.
    """

    def __init__(
        self, directory: ObjectDirectory, suffixes: tuple[bytes, ...], *, has_anchor: bool
    ) -> None:
        self.epochs = [EpochReader(directory, suffix) for suffix in suffixes]
        self.clock_ns = 0
        self._directory = directory
        self._suffixes = suffixes
        self._has_anchor = has_anchor
        self._trusted = _Trusted(directory.descriptor)
        self._owners = {os.fsdecode(owner_of(suffix)) for suffix in suffixes}
        self._temporaries = Temporaries(directory, owner_of(suffixes[0]))

    def list(self, stopped: Callable[[], bool], *, measures: bool = True) -> Listing:
        """List the objects, and remove old temporary files of the suffixes.

        measures: with sizes and times; without, only stale objects are listed. stopped: asked
        often; ends the listing.
        """
        epochs = [epoch.look() for epoch in self.epochs]
        found = _Found(self._suffixes, epochs, self.now_ns(), measures=measures)
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
                        found.count_other(entry)
                elif measures or epochs[kind]:
                    with suppress(FileNotFoundError):
                        facts = entry.stat(follow_symlinks=False)
                        if self._trusted(facts):
                            found.add(name[:PAGE_DIGITS], kind, facts)
        return found.sorted()

    def now_ns(self) -> int:
        """Return the file system's time."""
        return file_system_ns(self._directory.descriptor)

    def _sweep(self, descriptor: int, name: str, found: _Found) -> None:
        """Remove a temporary file of the suffixes if its writer must have ended."""
        with suppress(OSError):
            facts = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            if not self._trusted(facts):
                return
            if facts.st_ctime_ns > found.begun_ns - _TEMPORARY_AGE_NS:
                found.listed += facts.st_size
            else:
                os.unlink(name, dir_fd=descriptor)

    def remove_page(self, page: str, sizes: Mapping[int, int], listed_ns: int) -> int:
        """Remove a page's objects, the anchor first; return the bytes that are free now.

        sizes: size of the listed object at each suffix's position.
        listed_ns: time of the last use, by the listing. A page that was used since, or
        is in flight, stays.
        """
        seen = {kind: self._look(self._key(page, kind)) for kind in sizes}
        gone = sum(size for kind, size in sizes.items() if seen[kind] is None)
        found = {kind: facts for kind, facts in seen.items() if facts is not None}
        if any(_used_ns(facts) > listed_ns for facts in found.values()):
            return gone
        if self._has_anchor:
            if 0 not in sizes and self._look(self._key(page, 0)) is not None:
                return gone  # the anchor was written since
            if self._is_in_flight(found):
                return gone
        freed = 0
        for kind in sorted(found):
            if self._temporaries.remove_seen(self._key(page, kind), found[kind], used_since=False):
                freed += found[kind].st_size
            elif kind == 0 and self._has_anchor:
                break  # it is in use again: its sidecars stay
        return gone + freed

    def remove_stale(self, page: str, kind: int, epoch_ns: int) -> int:
        """Remove an object if it is from before its epoch; return the bytes that are free now."""
        key = self._key(page, kind)
        seen = self._look(key)
        if seen is None or seen.st_ctime_ns > epoch_ns:
            return 0
        return seen.st_size if self._temporaries.remove_seen(key, seen, used_since=True) else 0

    def _is_in_flight(self, found: Mapping[int, os.stat_result]) -> bool:
        """Return whether a writer may be about to write the page's anchor.

        Sidecars come first: one that was written or kept after the anchor shows such a writer.
        """
        anchor_ns = _used_ns(found[0]) if 0 in found else 0
        now_ns = time.time_ns() + self.clock_ns
        oldest_ns, newest_ns = max(anchor_ns, now_ns - _IN_FLIGHT_NS), now_ns + _IN_FLIGHT_NS
        return any(oldest_ns < _used_ns(facts) < newest_ns for kind, facts in found.items() if kind)

    def _key(self, page: str, kind: int) -> bytes:
        return page.encode() + self._suffixes[kind]

    def _look(self, key: bytes) -> os.stat_result | None:
        """Return the stat of an object's file; None if it is missing. Raises OSError if foreign."""
        try:
            here, name = self._directory.place(key)
            facts = os.stat(name, dir_fd=here, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if not self._trusted(facts):
            raise OSError(errno.EPERM, "not a regular file of a trusted user")
        return facts


class _Found:
    """What a listing has found so far."""

    def __init__(
        self, suffixes: tuple[bytes, ...], epochs: Sequence[int], begun_ns: int, *, measures: bool
    ) -> None:
        """begun_ns: begin of the listing by the file system's clock."""
        self.begun_ns = begun_ns
        self.kind_of = {os.fsdecode(suffix): kind for kind, suffix in enumerate(suffixes)}
        self.listed = 0
        self._epochs = epochs
        self._measures = measures
        self._own_begun_ns = time.time_ns()
        self._later = 0
        self._pages = bytearray()
        self._kinds = array("B")
        self._sizes = array("q")
        self._times = array("q")
        self._stale: list[tuple[str, int]] = []
        self._others = self._sampled_bytes = 0

    def count_other(self, entry: os.DirEntry[str]) -> None:
        """Count an object of another suffix."""
        if self._measures and not self._others % _SAMPLED:
            with suppress(OSError):
                self._sampled_bytes += entry.stat(follow_symlinks=False).st_size
        self._others += 1

    def add(self, page: str, kind: int, facts: os.stat_result) -> None:
        """Add an object."""
        try:
            digest = bytes.fromhex(page)
        except ValueError:
            return
        if digest.hex() != page:  # capitals
            return
        if self._is_later(facts.st_mtime_ns):
            self._later += facts.st_size
        else:
            self.listed += facts.st_size
        if facts.st_ctime_ns <= self._epochs[kind]:
            self._stale.append((page, kind))
        elif self._measures:
            self._pages += digest
            self._kinds.append(kind)
            self._sizes.append(facts.st_size)
            self._times.append(storable_ns(max(facts.st_atime_ns, facts.st_mtime_ns)))

    def _is_later(self, mtime_ns: int) -> bool:
        """Return whether an object was written since the beginning; not if it is of the future."""
        if mtime_ns <= self.begun_ns:
            return False
        return mtime_ns - self.begun_ns <= time.time_ns() - self._own_begun_ns + _CLOCKS_DIFFER_NS

    def sorted(self) -> Listing:
        """Return the rows by page, least recently used first."""
        pages = np.frombuffer(self._pages, dtype=np.uint8).reshape(-1, 32)
        times = np.frombuffer(self._times, dtype=np.int64)
        # A quarter of its hash tells a page. Pages that share it would be taken for used together.
        quarters = pages.view(np.uint64)[:, 0]
        distinct, page_of = np.unique(quarters, return_inverse=True)
        latest = np.full(len(distinct), np.iinfo(np.int64).min)
        np.maximum.at(latest, page_of, times)
        used = latest[page_of]
        order = np.lexsort((quarters, used))
        self._stale.sort(key=lambda one: (one[1] != 0, one[0]))
        return Listing(
            pages=pages[order],
            kinds=np.frombuffer(self._kinds, dtype=np.uint8)[order],
            sizes=np.frombuffer(self._sizes, dtype=np.int64)[order],
            times=used[order],
            listed=self.listed,
            later=self._later,
            stale=self._stale,
            others=self._others,
            others_bytes=self._others * self._sampled_bytes // max(1, -(-self._others // _SAMPLED)),
        )


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


def kinds_of(suffixes: Mapping[bytes, bool], pools: tuple[str, ...]) -> tuple[bytes, ...]:
    """Return the suffixes whose objects go together, the anchor's first.

    suffixes: suffixes that a rank writes; True for the anchor's.
    pools: names that other servers of the same rank may store beside the anchor. Their objects go
    with it, too.
    """
    anchors = [suffix for suffix, is_anchor in suffixes.items() if is_anchor]
    beside = [b"." + pool.encode() + anchor for anchor in anchors for pool in pools]
    return tuple(dict.fromkeys([*anchors, *sorted(suffixes), *beside]))


def _used_ns(facts: os.stat_result) -> int:
    return max(facts.st_atime_ns, facts.st_mtime_ns)
