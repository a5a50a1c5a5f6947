"""Write a file store's objects as temporary files, sync them together, and rename them."""

from __future__ import annotations

import errno
import os
import stat
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hicachectl.backends.base import Result, Rows, Status, keys_of, values_of
from hicachectl.backends.disk.durable import move_noreplace
from hicachectl.backends.disk.io import (
    CREATE_FILE,
    NO_ROOM,
    OPEN_FILE,
    closing_descriptor,
    write_all,
    write_bytes,
)
from hicachectl.backends.disk.names import check_key, check_new_key, version_of
from hicachectl.backends.disk.permissions import Permissions, give_file
from hicachectl.backends.object_files.epochs import Epochs
from hicachectl.backends.object_files.listing import files_in
from hicachectl.backends.object_files.store_files import not_writable
from hicachectl.backends.object_files.tree import Temporaries, owner_in
from hicachectl.formats.errors import UntrustedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicachectl.backends.object_files.markers import Marker
    from hicachectl.backends.object_files.store_files import StoreFiles
    from hicachectl.backends.object_files.trailers import NewTrailers
    from hicachectl.formats.arrays import BoolArray, IntArray

# Errors that every new file in the directory would get.
_NO_NEW_FILES = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


class Ownership(NamedTuple):
    """Mode and owner of a new file.

    mode: mode before the umask.
    owner: user and group; None means the user and group of this process.
    """

    mode: int
    owner: tuple[int, int] | None


class Temporary(NamedTuple):
    """A file under a temporary name. directory: descriptor of its directory."""

    directory: int
    name: bytes


class FileWriter:
    """Creates the files of one store.

    files: the files of the store.
    trailers: maker of trailers for new objects; None if new objects get no trailers.
    """

    def __init__(self, files: StoreFiles) -> None:
        self.trailers: NewTrailers | None = None
        self.files = files
        self._objects = files.objects
        self._limit = Permissions()  # limit of new files
        self._limiting = threading.Lock()
        self.temporaries = Temporaries(files.objects, os.urandom(8).hex().encode())
        st = os.fstat(files.objects.descriptor)
        # If this process runs as root, new files get the directory's owner and group.
        self._owner = None if os.geteuid() or not st.st_uid else (st.st_uid, st.st_gid)
        # In a set-group-ID directory, new files get the directory's group.
        self._own_group = st.st_gid if st.st_mode & stat.S_ISGID else os.getegid()
        self._new = Ownership(0o666, self._owner)

    # permissions

    def ownership(self, permissions: Permissions) -> Ownership:
        """Return mode and owner of a new file whose sources have these permissions."""
        owner = self._owner
        if owner is not None and permissions.may_own(owner[0]):
            return Ownership(0o666 & permissions.for_group(owner[1]), owner)
        return Ownership(0o666 & permissions.for_group(self._own_group), None)

    def limit(self, permissions: Permissions) -> Permissions:
        """Limit the permissions of new files by `permissions`, too. Return the resulting limit."""
        with self._limiting:
            limit = self._limit = self._limit.intersection(permissions)
            self._new = self.ownership(limit)
        return limit

    # objects

    def touch(self, keys: list[bytes], now: int) -> BoolArray:
        """Set the mtimes of existing objects to the present, in row order.

        Return which objects got a new mtime: [n] bool.
        now: the present in Unix nanoseconds, by the clock of the file system.
        Raises OSError, StoreUnavailable.
        """
        epochs = Epochs(self._objects)
        touched: dict[int, os.stat_result] = {}
        for index, key in enumerate(keys):
            try:
                check_key(key)
                directory, name = self._objects.place(key)
                st = os.stat(name, dir_fd=directory, follow_symlinks=False)
                if epochs.stale(key, st):  # a touch would make the stale object count as new
                    continue
                times = now + index, now + index
                os.utime(name, ns=times, dir_fd=directory, follow_symlinks=False)
                touched[index] = st
            except (OSError, UntrustedError) as error:
                self.files.status(index, error, {})
        for index in self._cleared_since(epochs, keys, touched):
            del touched[index]
        done = np.zeros(len(keys), dtype=np.bool_)
        done[list(touched)] = True
        return done

    def _cleared_since(
        self, epochs: Epochs, keys: list[bytes], touched: Mapping[int, os.stat_result]
    ) -> list[int]:
        """Remove touched objects that a `clear` since `epochs` made stale. Return their rows."""
        later = Epochs(self._objects)
        rows = [
            index
            for index, st in touched.items()
            if later.of(keys[index]) != epochs.of(keys[index]) and later.stale(keys[index], st)
        ]
        for index in rows:
            key = keys[index]
            with suppress(FileNotFoundError):
                here, name = self._objects.place(key)
                now = os.stat(name, dir_fd=here, follow_symlinks=False)
                if now.st_ino == touched[index].st_ino:
                    self.temporaries.remove_unchanged(key, now, even_if_read=True)
        return rows

    def write(
        self,
        rows: Rows,
        memory: memoryview,
        offsets: IntArray,
        sizes: IntArray,
        *,
        if_absent: bool,
    ) -> Result:
        """Write objects as `Store.write_from` does."""
        keys, times, trailers = keys_of(rows), values_of(rows, "mtime_ns"), self.trailers
        places = list(zip(offsets.tolist(), sizes.tolist(), strict=True))

        def stage(index: int, errors: dict[int, str]) -> Temporary:
            offset, size = places[index]
            value = memory[offset : offset + size]
            tail = trailers and trailers.make(keys[index], (value,), size)

            def fill(descriptor: int) -> None:
                write_bytes(value, descriptor)
                if tail:
                    write_all(descriptor, (tail,))

            nbytes = size + len(tail or b"")
            return self.write_temporary(keys[index], fill, times[index], nbytes=nbytes)

        markers = trailers.markers(keys, sizes.tolist()) if trailers else set()
        return self.publish(keys, stage, markers, self.naming(keys, if_absent=if_absent))

    def publish(
        self,
        keys: list[bytes],
        stage: Callable[[int, dict[int, str]], Temporary | Status],
        markers: set[Marker],
        name: Callable[[int, Temporary], Status],
    ) -> Result:
        """Write markers; create, sync and rename temporary files; sync their directories.

        stage: creates a row's temporary file. It returns the file, or a status without a file.
        name: gives a row's temporary file the name of the object. It returns the status.
        Several threads call `stage` and `name`.
        """
        statuses = np.zeros(len(keys), dtype=np.uint8)
        errors: dict[int, str] = {}
        written: dict[int, Temporary] = {}
        changed: set[int] = set()  # descriptors of directories

        def make(index: int) -> Status:
            check_new_key(keys[index])
            made = stage(index, errors)
            if isinstance(made, Status):
                return made
            written[index] = made
            return Status.OK

        def rename(index: int) -> Status:
            changed.add(written[index].directory)
            try:
                status = name(index, written[index])
            except FileNotFoundError as error:  # HiCacheFile.clear deletes temporary files too
                raise OSError(
                    errno.ECANCELED, "another process cleared the store; run again"
                ) from error
            if status == Status.OK:
                del written[index]
            return status

        every = range(len(keys))
        # Markers come before the files that they describe. Otherwise a listing could count a
        # trailer as part of an object.
        ensure = partial(self.files.sizes.ensure, markers)
        if not self.files.synced(ensure, every, statuses, errors):
            return Result(statuses, errors)
        try:
            self.files.each("create", every, make, statuses, errors)
            staged = list(written)
            sync = partial(self.sync_data, list(written.values()))
            if staged and self.files.synced(sync, staged, statuses, errors):
                self.files.each("rename", staged, rename, statuses, errors)
                names = partial(self._objects.sync, changed)
                self.files.synced(names, staged, statuses, errors)
        finally:
            self._remove_all(list(written.values()))
        return Result(statuses, errors)

    def _remove_all(self, files: list[Temporary]) -> None:
        def work(start: int, stop: int) -> None:
            for file in files[start:stop]:
                _remove(file)

        self.files.concurrency.each("remove", work, len(files))

    def naming(self, keys: list[bytes], *, if_absent: bool) -> Callable[[int, Temporary], Status]:
        """Return a function that gives a row's temporary file the name of the row's key."""

        def name(index: int, file: Temporary) -> Status:
            self._rename(file, keys[index], if_absent=if_absent)
            return Status.OK

        return name

    def _rename(self, file: Temporary, key: bytes, *, if_absent: bool) -> None:
        """Rename a temporary file to its key.

        if_absent: raise FileExistsError if the key has a file that is not stale.
        """
        here, name = file
        if not if_absent:
            os.replace(name, key, src_dir_fd=here, dst_dir_fd=here)
            return
        try:
            move_noreplace(here, name, here, key)
        except FileExistsError:
            if not self.remove_stale(key):
                raise
            move_noreplace(here, name, here, key)

    def remove_stale(self, key: bytes) -> bool:
        """Remove a key's file if a server's `clear` made it stale. Return whether it was removed.

        Raises OSError.
        """
        try:
            here, name = place = self._objects.place(key)
            st = os.stat(name, dir_fd=here, follow_symlinks=False)
        except FileNotFoundError:
            return False
        if not stat.S_ISREG(st.st_mode) or not Epochs(self._objects).stale(key, st):
            return False
        return self.temporaries.remove_unchanged(key, st, even_if_read=True, place=place)

    def remove(self, key: bytes, place: tuple[int, bytes], version: bytes | None) -> Status:
        """Remove a key's file.

        place: `ObjectTree.place` of the key.
        version: an object with another version stays, and the status is CHANGED. None removes any
            version.
        A full disk may have no room for the temporary name of `remove_unchanged`. Then the file is
        removed directly, even if a writer replaces the object right before the removal.
        Raises OSError.
        """
        here, name = place
        if version is None:
            os.unlink(name, dir_fd=here)
            return Status.OK
        st = os.stat(name, dir_fd=here, follow_symlinks=False)
        if not stat.S_ISREG(st.st_mode) or version_of(st) != version:
            return Status.CHANGED
        try:
            removed = self.temporaries.remove_unchanged(key, st, even_if_read=True, place=place)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            os.unlink(name, dir_fd=here)
            return Status.OK
        return Status.OK if removed else Status.CHANGED

    def sync_data(self, files: Sequence[Temporary]) -> None:
        """Sync files, by one syncfs if possible, which costs far less than an fsync of each."""
        if self._objects.sync_file_systems():
            return

        def work(start: int, stop: int) -> None:
            for directory, name in files[start:stop]:
                with closing_descriptor(os.open(name, OPEN_FILE, dir_fd=directory)) as descriptor:
                    os.fsync(descriptor)

        self.files.concurrency.each("sync", work, len(files))

    # temporary files

    def own_temporaries(self, owner: str, *, sweep: bool) -> None:
        """Name temporary files after `owner`. sweep: remove existing files of this owner.

        Raises OSError.
        """
        self.temporaries = Temporaries(self._objects, owner.encode())
        if not sweep:
            return
        for directory in self._objects.directories():
            for found in files_in(directory):
                for name in found.names:
                    if owner_in(name) == owner:
                        with suppress(FileNotFoundError, IsADirectoryError):
                            os.unlink(name, dir_fd=directory)

    def write_temporary(
        self,
        key: bytes,
        fill: Callable[[int], None],
        mtime_ns: int | None,
        new: Ownership | None = None,
        *,
        nbytes: int = 0,
    ) -> Temporary:
        """Create a temporary file beside a key's file, without a sync. SGLang ignores its name.

        fill: takes the file's descriptor, and writes the content.
        new: mode and owner; by default the mode and owner of all new files.
        nbytes: size of the whole file.
        """
        mode, owner = new or self._new
        directory, _ = self._objects.place_for_new(key, nbytes)
        name = self.temporaries.name(key)
        file = Temporary(directory, name)
        try:
            descriptor = os.open(name, CREATE_FILE, mode, dir_fd=directory)
        except OSError as error:
            if error.errno in _NO_NEW_FILES:
                raise not_writable(self._objects.path, error) from error
            raise
        try:
            if owner is not None:
                give_file(descriptor, *owner)
            fill(descriptor)
            if mtime_ns is not None:
                os.utime(descriptor, ns=(mtime_ns, mtime_ns))
        except BaseException:
            _remove(file)
            raise
        finally:
            os.close(descriptor)
        return file


def _remove(file: Temporary) -> None:
    with suppress(OSError):
        os.unlink(file.name, dir_fd=file.directory)
