"""Remove pages' objects from a directory, without leaving an anchor that lacks its sidecars."""

from __future__ import annotations

import errno
import os
import time
from typing import TYPE_CHECKING

from hicachectl.backends.object_files.epochs import owner_of
from hicachectl.backends.object_files.tree import remove_seen

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicachectl.backends.file.folders import ObjectDirectory
    from hicachectl.backends.sglang.sweeping import Trusted

# A writer may have written or kept a page's sidecars, and still be about to write its anchor.
_IN_FLIGHT_NS = 60 * 10**9


class Remover:
    """Removes objects of some suffixes. All methods raise OSError.

    suffixes: of file names, after the page hash; the first is the anchor's if has_anchor.
    clock_ns: the file system's time less ours.
    """

    def __init__(
        self,
        directory: ObjectDirectory,
        suffixes: tuple[bytes, ...],
        trusted: Trusted,
        *,
        has_anchor: bool,
    ) -> None:
        self.clock_ns = 0
        self._trusted = trusted
        self._directory = directory
        self._suffixes = suffixes
        self._has_anchor = has_anchor
        self._token = owner_of(suffixes[0]) + os.urandom(4).hex().encode()
        self._numbers = 0

    def remove_page(self, page: str, sizes: Mapping[int, int], listed_ns: int) -> int:
        """Remove a page's objects, the anchor first; return the bytes that are free now.

        sizes: of the listed objects, by their suffix's position. listed_ns: when the page was last
        used, as it was listed. A page that was used since, or is in flight, stays.
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
            if self._remove(self._key(page, kind), found[kind]):
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
        return seen.st_size if self._remove(key, seen, used_since=True) else 0

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

    def _remove(self, key: bytes, seen: os.stat_result, *, used_since: bool = False) -> bool:
        """Remove an object's file as `remove_seen` does."""
        self._numbers += 1
        temporary = self._directory.temporary_name(key, self._token, self._numbers)
        return remove_seen(self._directory, key, seen, temporary, used_since=used_since)


def _used_ns(facts: os.stat_result) -> int:
    return max(facts.st_atime_ns, facts.st_mtime_ns)
