"""Renames between a file store and a directory, such as a quarantine."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

from hicachectl.backends.base import Status
from hicachectl.backends.capabilities import Mover
from hicachectl.backends.disk import durable
from hicachectl.backends.disk.durable import move_noreplace, sync_directory
from hicachectl.backends.disk.files import check_key, check_new_key, version_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicachectl.backends.object_files.faults import Faults
    from hicachectl.backends.object_files.tree import ObjectTree


class FileMover(Mover):
    """Mover of a file store."""

    def __init__(
        self,
        objects: ObjectTree,
        there: int,
        faults: Faults,
        remove_stale: Callable[[bytes], bool],
    ) -> None:
        """Use the store's directory, and the descriptor of the other, which `close` closes.

        remove_stale: removes an object from before a `clear`; returns whether the key has one.
        """
        self._remove_stale = remove_stale
        self._objects = objects
        self._there = there
        self._faults = faults
        self._into_store: bool | None = None  # direction of the renames since the last flush

    def take(self, key: bytes, name: str, version: bytes | None = None) -> Status:
        """Rename the file into the other directory; CHANGED if the key has another version."""
        target = os.fsencode(name)
        check_key(key)
        check_key(target)
        self._turn(into_store=False)
        try:
            here, _ = self._objects.place(key)
            listed = os.stat(key, dir_fd=here, follow_symlinks=False)
            if not stat.S_ISREG(listed.st_mode) or version not in (None, version_of(listed)):
                return Status.CHANGED
            if not durable.rename_noreplace(here, key, self._there, target):
                # A plain rename: after a link, the unlink could remove a writer's new file.
                os.rename(key, target, src_dir_fd=here, dst_dir_fd=self._there)
        except OSError as error:
            if not os.fstat(self._there).st_nlink:
                raise OSError(
                    errno.ECANCELED, "the quarantine directory was removed; run again"
                ) from error
            return self._missing(error)
        moved = os.stat(target, dir_fd=self._there, follow_symlinks=False)
        if moved.st_ino == listed.st_ino:
            return Status.OK
        # A writer renamed another file to the key between the two calls.
        if self.put_back(name, key) == Status.EXISTS:
            os.unlink(target, dir_fd=self._there)  # a writer replaced the key again
        return Status.CHANGED

    def put_back(self, name: str, key: bytes) -> Status:
        """Rename a file to its key in the store, without replacing an object there (EXISTS)."""
        source = os.fsencode(name)
        check_key(source)
        check_new_key(key)
        self._turn(into_store=True)
        try:
            held = os.stat(source, dir_fd=self._there, follow_symlinks=False)
            if not stat.S_ISREG(held.st_mode):
                raise OSError(errno.EINVAL, "not a regular file in the quarantine")
            here, _ = self._objects.place_for_new(key, held.st_size)
            try:
                move_noreplace(self._there, source, here, key)
            except FileExistsError:
                if not self._remove_stale(key):
                    return Status.EXISTS
                move_noreplace(self._there, source, here, key)
        except FileExistsError:
            return Status.EXISTS
        except OSError as error:
            return self._missing(error)
        return Status.OK

    def drop_double(self, key: bytes, name: str) -> None:
        """Unlink the key if both names are hard links to one file."""
        target = os.fsencode(name)
        check_key(key)
        check_key(target)
        with suppress(FileNotFoundError):
            here, _ = self._objects.place(key)
            facts = os.stat(key, dir_fd=here, follow_symlinks=False)
            if os.path.samestat(facts, os.stat(target, dir_fd=self._there, follow_symlinks=False)):
                os.unlink(key, dir_fd=here)

    def flush(self, *, into_store: bool) -> None:
        """Sync store and directory, the one with the new names first.

        In the other order, an object could have neither name after a crash.
        """
        if into_store:
            self._objects.sync()
        sync_directory(self._there)
        if not into_store:
            self._objects.sync()
        self._into_store = None

    def _turn(self, *, into_store: bool) -> None:
        """Flush renames of the other direction, which need another order of syncs."""
        if self._into_store is (not into_store):
            self.flush(into_store=not into_store)
        self._into_store = into_store

    def close(self) -> None:
        """Close the other directory."""
        descriptor, self._there = self._there, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _missing(self, error: OSError) -> Status:
        """Return GONE for a missing file; raise other errors."""
        if self._faults.status(0, error, {}) == Status.GONE:
            return Status.GONE
        raise error
