"""Remove an object's file only if it is the one that was looked at."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from hicachectl.backends.disk.durable import move_noreplace

if TYPE_CHECKING:
    from hicachectl.backends.object_files.tree import ObjectTree


def remove_seen(
    objects: ObjectTree,
    key: bytes,
    seen: os.stat_result,
    temporary: bytes,
    *,
    used_since: bool,
) -> bool:
    """Remove an object's file if it is the one seen; return whether.

    It is taken away first and looked at then, since a writer can replace or touch it at any time: a
    touch that found the name shows here. used_since: also remove a file that was used since; a
    stale one must not come back under its name, which would make it new. temporary: an unused name
    of ours. Raises OSError.
    """
    try:
        here, name = objects.place(key)
        os.rename(name, temporary, src_dir_fd=here, dst_dir_fd=here)
    except FileNotFoundError:
        return False
    taken = os.stat(temporary, dir_fd=here, follow_symlinks=False)
    same = _state(taken) == _state(seen) and (used_since or taken.st_atime_ns == seen.st_atime_ns)
    if not same:
        with suppress(FileExistsError):  # replaced once more
            move_noreplace(here, temporary, here, name)
            return False
    os.unlink(temporary, dir_fd=here)
    return same


def _state(facts: os.stat_result) -> tuple[int, ...]:
    """Return what changes when a file is replaced or written, but not when it is renamed."""
    return facts.st_ino, facts.st_size, facts.st_mtime_ns
