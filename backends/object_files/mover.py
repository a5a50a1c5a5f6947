"""Renames between a file store and a quarantine run, which has the store's names and folders."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

from hicachectl.backends.base import Status
from hicachectl.backends.capabilities import Mover
from hicachectl.backends.disk import durable
from hicachectl.backends.disk.durable import move_noreplace
from hicachectl.backends.disk.names import check_key, check_new_key, version_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicachectl.backends.object_files.faults import StoreFiles
    from hicachectl.backends.object_files.tree import ObjectTree


class FileMover(Mover):
    """Mover of a file store."""

    def __init__(
        self, files: StoreFiles, run: ObjectTree, remove_stale: Callable[[bytes], bool]
    ) -> None:
        """Use the files of the store, and the open directories of the run.

        remove_stale: removes an object from before a `clear`; returns whether the key has one.
        """
        self._remove_stale = remove_stale
        self._files = files
        self._objects = files.objects
        self._run = run
        self._into_store: bool | None = None  # direction of the renames since the last flush

    def take(self, key: bytes, version: bytes | None = None) -> Status:
        """Rename the file into the run; CHANGED if the key has another version."""
        check_key(key)
        self._turn(into_store=False)
        try:
            here, name = self._objects.place(key)
            listed = os.stat(name, dir_fd=here, follow_symlinks=False)
            if not stat.S_ISREG(listed.st_mode) or version not in (None, version_of(listed)):
                return Status.CHANGED
            there, target = self._run.place_for_new(key, listed.st_size)
            if not durable.rename_noreplace(here, name, there, target):
                # A plain rename: after a link, the unlink could remove a writer's new file.
                os.rename(name, target, src_dir_fd=here, dst_dir_fd=there)
        except OSError as error:
            if not os.fstat(self._run.descriptor).st_nlink:
                raise OSError(
                    errno.ECANCELED, "the quarantine run was removed; run again"
                ) from error
            return self._missing(error)
        moved = os.stat(target, dir_fd=there, follow_symlinks=False)
        if moved.st_ino == listed.st_ino:
            return Status.OK
        # A writer renamed another file to the key between the two calls.
        if self.put_back(key) == Status.EXISTS:
            os.unlink(target, dir_fd=there)  # a writer replaced the key again
        return Status.CHANGED

    def put_back(self, key: bytes) -> Status:
        """Rename a file of the run into the store, without replacing an object there (EXISTS)."""
        check_new_key(key)
        self._turn(into_store=True)
        try:
            there, name = self._run.place(key)
            held = os.stat(name, dir_fd=there, follow_symlinks=False)
            if not stat.S_ISREG(held.st_mode):
                raise OSError(errno.EINVAL, "not a regular file in the quarantine")
            here, target = self._objects.place_for_new(key, held.st_size)
            try:
                move_noreplace(there, name, here, target)
            except FileExistsError:
                if not self._remove_stale(key):
                    return Status.EXISTS
                move_noreplace(there, name, here, target)
        except FileExistsError:
            return Status.EXISTS
        except OSError as error:
            return self._missing(error)
        return Status.OK

    def flush(self, *, into_store: bool) -> None:
        """Sync store and run, the one with the new names first.

        In the other order, an object could have neither name after a crash.
        """
        first, then = (self._objects, self._run) if into_store else (self._run, self._objects)
        first.sync()
        then.sync()
        self._into_store = None

    def _turn(self, *, into_store: bool) -> None:
        """Flush renames of the other direction, which need another order of syncs."""
        if self._into_store is (not into_store):
            self.flush(into_store=not into_store)
        self._into_store = into_store

    def _missing(self, error: OSError) -> Status:
        """Return GONE for a missing file; raise other errors."""
        if self._files.status(0, error, {}) == Status.GONE:
            return Status.GONE
        raise error
