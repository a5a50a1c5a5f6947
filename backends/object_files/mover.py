"""Renames between a file store and a quarantine run, which has the store's names and folders."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from hicachectl.backends.base import Result, Rows, Status, keys_of, values_of
from hicachectl.backends.capabilities import Mover
from hicachectl.backends.disk import durable
from hicachectl.backends.disk.durable import move_noreplace
from hicachectl.backends.disk.names import check_key, check_new_key, version_of
from hicachectl.formats.wording import reason_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicachectl.backends.base import StatusArray
    from hicachectl.backends.object_files.store_files import StoreFiles
    from hicachectl.backends.object_files.tree import ObjectTree


class FileMover(Mover):
    """Mover of a file store."""

    def __init__(
        self, files: StoreFiles, run: ObjectTree, remove_stale: Callable[[bytes], bool]
    ) -> None:
        """Use the files of the store, and the open directories of the run.

        remove_stale: removes an object from before a `clear`; returns whether it removed one.
        """
        self._remove_stale = remove_stale
        self._files = files
        self._objects = files.objects
        self._run = run
        self._into_store: bool | None = None  # direction of the renames since the last flush

    def take(self, rows: Rows) -> Result:
        """Rename files into the run. The status is CHANGED if a key has another version."""
        keys, versions = keys_of(rows), values_of(rows, "version")
        statuses = np.zeros(len(keys), dtype=np.uint8)
        errors: dict[int, str] = {}
        raced: list[int] = []

        def take(index: int) -> Status:
            try:
                status = self._take(keys[index], versions[index])
            except FileExistsError as error:  # the run has a file of this name, not the store
                errors[index] = reason_of(error)
                return Status.ERROR
            if status is None:
                raced.append(index)
            return Status.CHANGED if status is None else status

        self._set_direction(into_store=False)
        try:
            self._files.each("take", range(len(keys)), take, statuses, errors)
        finally:  # an error or a signal must not keep a writer's new files in the run
            if raced:
                self._return(rows, raced, statuses, errors)
        return Result(statuses, errors)

    def _return(
        self, rows: Rows, raced: list[int], statuses: StatusArray, errors: dict[int, str]
    ) -> None:
        """Put back files that a writer had just written, unless the store has newer files.

        raced: rows of the files.
        statuses, errors: get the rows that cannot be put back.
        """
        keys = keys_of(rows)
        back = self.put_back(rows.take(pa.array(raced)))
        for place, index in enumerate(raced):
            if back.statuses[place] == Status.EXISTS:  # a writer replaced the key again
                there, target = self._run.place(keys[index])
                os.unlink(target, dir_fd=there)
            elif place in back.errors:
                statuses[index], errors[index] = Status.ERROR, back.errors[place]
        self._set_direction(into_store=False)

    def _take(self, key: bytes, version: bytes | None) -> Status | None:
        """Rename a file into the run. Return None if a writer had just replaced the file."""
        check_key(key)
        try:
            here, name = self._objects.place(key)
            listed = os.stat(name, dir_fd=here, follow_symlinks=False)
            if not stat.S_ISREG(listed.st_mode) or version not in (None, version_of(listed)):
                return Status.CHANGED
            there, target = self._run.place_for_new(key, listed.st_size)
            if not durable.rename_noreplace(here, name, there, target):
                # A link and an unlink would be two steps. If a writer replaced the file between
                # them, the unlink would remove the writer's file. A rename is one step.
                os.rename(name, target, src_dir_fd=here, dst_dir_fd=there)
        except OSError as error:
            if not os.fstat(self._run.descriptor).st_nlink:
                raise OSError(
                    errno.ECANCELED, "the quarantine run was removed; run again"
                ) from error
            raise
        moved = os.stat(target, dir_fd=there, follow_symlinks=False)
        return Status.OK if moved.st_ino == listed.st_ino else None

    def put_back(self, rows: Rows) -> Result:
        """Rename files of the run into the store.

        If the store has an object already, the file stays in the run, and the status is EXISTS.
        """
        keys = keys_of(rows)
        statuses = np.zeros(len(keys), dtype=np.uint8)
        errors: dict[int, str] = {}
        self._set_direction(into_store=True)
        self._files.each(
            "put back",
            range(len(keys)),
            lambda index: self._put_back(keys[index]),
            statuses,
            errors,
        )
        return Result(statuses, errors)

    def _put_back(self, key: bytes) -> Status:
        check_new_key(key)
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
        return Status.OK

    def flush(self, *, into_store: bool) -> None:
        """Sync store and run, beginning with the side that has the new names.

        In the other order, an object could have neither name after a crash.
        """
        first, then = (self._objects, self._run) if into_store else (self._run, self._objects)
        first.sync()
        then.sync()
        self._into_store = None

    def _set_direction(self, *, into_store: bool) -> None:
        """Flush renames of the other direction, which need another order of syncs."""
        if self._into_store is (not into_store):
            self.flush(into_store=not into_store)
        self._into_store = into_store
