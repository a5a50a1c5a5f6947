"""Operations of stores that keep each object in a file."""

from __future__ import annotations

import errno
import os
import stat
import time
from contextlib import contextmanager, suppress
from functools import partial, wraps
from typing import TYPE_CHECKING, ClassVar, Concatenate, ParamSpec, TypeVar

import numpy as np

from hicachectl.backends.base import (
    Capacity,
    Limits,
    ReadResult,
    Result,
    Rows,
    Status,
    Store,
    Traits,
    keys_of,
    values_of,
)
from hicachectl.backends.capabilities import (
    Digesting,
    FilePermissions,
    FileTimes,
    InFiles,
    Mounted,
    ReadsAhead,
    Renames,
    Resumable,
    Spreads,
    SystemCopy,
    Touch,
)
from hicachectl.backends.disk.durable import sync_directory
from hicachectl.backends.disk.io import (
    CREATE_FILE,
    NO_ROOM,
    OPEN_DIRECTORY,
    OPEN_FILE,
    closing_descriptor,
    file_system_ns,
)
from hicachectl.backends.disk.names import check_key
from hicachectl.backends.disk.permissions import Permissions
from hicachectl.backends.object_files.copies import FileCopier
from hicachectl.backends.object_files.listing import FileListings, LeftOut
from hicachectl.backends.object_files.mover import FileMover
from hicachectl.backends.object_files.reading import FileReader
from hicachectl.backends.object_files.store_files import (
    StoreFiles,
    not_writable,
    unavailable,
    usable,
)
from hicachectl.backends.object_files.writing import FileWriter
from hicachectl.formats.errors import UnsupportedByBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator

    import numpy.typing as npt

    from hicachectl.backends.concurrency import Concurrency
    from hicachectl.backends.object_files.tree import ObjectTree
    from hicachectl.formats.arrays import BoolArray, IntArray

_P = ParamSpec("_P")
_R = TypeVar("_R")
_NOT_WRITABLE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


def _in_turn(
    method: Callable[Concatenate[ObjectFiles, _P], _R],
) -> Callable[Concatenate[ObjectFiles, _P], _R]:
    """Make a method hold a `Concurrency.turn`, so that its calls count among those at once."""

    @wraps(method)
    def within(store: ObjectFiles, /, *args: _P.args, **named: _P.kwargs) -> _R:
        with store.concurrency.turn():
            return method(store, *args, **named)

    return within


class ObjectFiles(
    FileListings,
    ReadsAhead,
    Digesting,
    FilePermissions,
    FileTimes,
    InFiles,
    Mounted,
    Renames,
    Resumable,
    Spreads,
    SystemCopy,
    Touch,
):
    """Store of files named by their keys. Reads and listings create, resize and touch no file."""

    limits: Limits = Limits(
        # A batch ends with one syncfs. With this many objects, writes take 1.2 to 1.5 times as long
        # as without any sync.
        batch_objects=1024,
        batch_bytes=256 << 20,
        parallel_reads=4,
        forkable=True,  # reading needs only descriptors
    )
    traits: ClassVar[Traits] = Traits(
        columns=frozenset({"nbytes", "mtime_ns", "atime_ns", "version"}),
        version_fields=("inode", "mtime", "ctime", "size"),
        writes=True,
        deletes=True,
        lists_temporaries=True,
    )

    def __init__(
        self, objects: ObjectTree, path: str, url: str, left_out: LeftOut | None = None
    ) -> None:
        """Use an open tree, which `close` closes.

        path: the store's path, for messages.
        left_out: files that `remarks` reports before a listing.
        """
        self.path = path
        self.url = url
        self.objects = objects
        self._clock_ns: int | None = None  # the file system's time less `time.monotonic_ns()`
        self._made: list[str] = []  # directories that `create` made, innermost first
        super().__init__(StoreFiles(objects), left_out or LeftOut())
        self._reader = FileReader(self._files)
        self._writer = FileWriter(self._files)

    def _refuse_untrusted(self) -> None:
        """Raise UntrustedError before a change that the store's side files do not allow."""

    @property
    def places(self) -> tuple[Hashable, ...]:
        """Return (st_dev, st_ino) of each outer directory, which all paths to it have in common."""
        stats = [os.fstat(root) for root in self.objects.roots]
        return tuple((st.st_dev, st.st_ino) for st in stats)

    @property
    def concurrency(self) -> Concurrency:
        """See `Spreads`."""
        return self._files.concurrency

    def place_of(self, key: bytes) -> tuple[int, bytes]:
        """See `InFiles`."""
        check_key(key)
        return self.objects.place(key)

    @contextmanager
    def probe(self) -> Iterator[bytes]:
        """Keep a file in each outer directory during the block, but none in `.hicachectl`.

        Another client may remember that `.hicachectl` was missing. No client remembers anything
        about a random name in a directory that it has open. If this process is killed, a later run
        of the same owner removes the file.
        """
        name = self._writer.temporaries.outer_name()
        made: list[int] = []
        try:
            for root in self.objects.roots:
                try:
                    os.close(os.open(name, CREATE_FILE, 0o600, dir_fd=root))
                except OSError as error:
                    if error.errno not in NO_ROOM:
                        raise not_writable(self.path, error) from error
                else:
                    made.append(root)
            yield name
        finally:
            for root in made:
                with suppress(OSError):  # a server's `clear` may have removed the file
                    os.unlink(name, dir_fd=root)

    def shows(self, name: bytes) -> bool:
        """Return whether an outer directory has the file, by opening it. Unreadable files count."""
        for root in self.objects.roots:
            try:
                os.close(os.open(name, OPEN_FILE, dir_fd=root))
            except FileNotFoundError:
                continue
            except PermissionError:
                pass
            except OSError as error:
                raise unavailable(self.path, error) from error
            return True
        return False

    def close(self) -> None:
        """Close the directories. Remove directories that `create` made if they are empty."""
        self._files.concurrency.close()
        if self.objects.descriptor >= 0:
            self.objects.close()
            with suppress(OSError):  # not empty
                for directory in self._made:
                    os.rmdir(directory)  # noqa: PTH106 - names that are not UTF-8

    def readable_by(self, *, listing: bool = False) -> Permissions:
        """Return the permissions common to the directory and all files read.

        listing: whether to leave out the files.
        """
        directory = Permissions.within(os.fstat(self.objects.descriptor))
        return directory if listing else self._reader.seen.intersection(directory)

    def clock_ns(self) -> int:
        """See `FileTimes`."""
        if self._clock_ns is None:
            roots = self.objects.roots
            refusals: list[OSError] = []
            with usable(self.path):
                times = list(_times(roots, refusals))
                if refusals:
                    times += _times(self.objects.directories(), refusals)
            if not times:
                raise not_writable(self.path, refusals[0])
            self._clock_ns = min(times) - time.monotonic_ns()
        return self._clock_ns + time.monotonic_ns()

    def keep_private(self, permissions: Permissions, *, listing: bool = False) -> None:
        """Limit the modes of new files. listing: also limit the directories that `create` made."""
        limit = self._writer.limit(permissions)
        for directory in self._made if listing else ():
            with (
                usable(self.path),
                closing_descriptor(os.open(directory, OPEN_DIRECTORY | os.O_NOFOLLOW)) as opened,
            ):
                st = os.fstat(opened)
                mode = stat.S_IMODE(st.st_mode)
                os.fchmod(opened, mode & (limit.for_group(st.st_gid) | ~0o777))

    @_in_turn
    def read_into(
        self, rows: Rows, offsets: IntArray, capacities: IntArray, *, identify: bool = True
    ) -> ReadResult:
        """Read whole files whose size, less a trailer, equals the row's capacity."""
        memory = self.memory(offsets, capacities, len(rows))
        return self._reader.read(rows, memory, offsets, capacities, identify=identify)

    @_in_turn
    def digest(
        self, rows: Rows, capacities: IntArray, wanted: BoolArray
    ) -> tuple[ReadResult, npt.NDArray[np.uint8]]:
        """See `Digesting`."""
        return self._reader.digest(rows, capacities, wanted)

    def expect(self, rows: Rows, capacities: IntArray) -> None:
        """Let the system start to read those files that are not in memory yet."""
        self._reader.expect(rows, capacities)

    @_in_turn
    def write_from(
        self, rows: Rows, offsets: IntArray, sizes: IntArray, *, if_absent: bool
    ) -> Result:
        """Write temporary files, sync them together, rename them, and sync their directories."""
        memory = self.memory(offsets, sizes, len(rows))
        self._refuse_untrusted()
        return self._writer.write(rows, memory, offsets, sizes, if_absent=if_absent)

    def can_copy_from(self, source: Store) -> bool:
        """Return whether a store keeps its objects in files, too."""
        return isinstance(source, ObjectFiles)

    @_in_turn
    def copy_from(
        self,
        source: Store,
        origins: Rows,
        rows: Rows,
        sizes: IntArray,
        *,
        if_absent: bool,
        preserve: bool = False,
    ) -> Result:
        """Let the system copy files, then sync and rename them as in `write_from`."""
        if not isinstance(source, ObjectFiles):
            raise UnsupportedByBackend(
                f"{self.url}: cannot copy objects directly from {source.url}"
            )
        self._refuse_untrusted()
        copier = FileCopier(source._files, self._writer, preserve=preserve)
        return copier.copy(origins, rows, sizes, if_absent=if_absent)

    @_in_turn
    def delete(self, rows: Rows) -> Result:
        """Remove files durably. A server that has a file open can finish its read.

        rows: rows of the objects. If they have the column `version`, an object with another version
            stays, and its status is CHANGED.
        """
        self._refuse_untrusted()
        keys, versions = keys_of(rows), values_of(rows, "version")
        changed: set[int] = set()  # descriptors of directories

        def remove(index: int) -> Status:
            check_key(keys[index])
            place = self.objects.place(keys[index])
            status = self._writer.remove(keys[index], place, versions[index])
            if status == Status.OK:
                changed.add(place[0])
            return status

        return self._removed(len(keys), remove, changed)

    def _removed(self, count: int, remove: Callable[[int], Status], changed: set[int]) -> Result:
        """Remove rows, and sync their directories.

        remove: removes the object of a row. Called in several threads.
        changed: descriptors of the directories, which `remove` adds.
        """
        statuses = np.zeros(count, dtype=np.uint8)
        errors: dict[int, str] = {}
        self._files.each("remove", range(count), remove, statuses, errors)
        # After a crash, an anchor must not reappear without its sidecars.
        removed = np.flatnonzero(statuses == Status.OK).tolist()
        if removed:
            sync = partial(self.objects.sync, changed)
            self._files.synced(sync, removed, statuses, errors)
        return Result(statuses, errors)

    @_in_turn
    def flush(self) -> None:
        """Sync the file systems, because servers and killed runs leave files unsynced."""
        with usable(self.path):
            if not self.objects.sync_file_systems():
                os.sync()
            for root in self.objects.roots:
                sync_directory(root)

    def own_temporaries(self, owner: str, *, sweep: bool) -> None:
        """Name temporary files after `owner`. sweep: remove existing files of this owner."""
        with usable(self.path):
            self._writer.own_temporaries(owner, sweep=sweep)

    @_in_turn
    def touch(self, rows: Rows) -> BoolArray:
        """Set modification times to the present.

        Servers that start later evict in the order of these times. Running servers keep their own
        order in memory.
        """
        with usable(self.path):
            return self._writer.touch(keys_of(rows), self.clock_ns())

    def mover(self, run: Store) -> FileMover | None:
        """Return a mover to a quarantine run.

        Return None if the run does not keep objects in files, or is on another file system or
        mount.
        """
        if not isinstance(run, ObjectFiles):
            return None
        self._refuse_untrusted()
        target = run.objects.descriptor
        if any(self._crosses(target, root) for root in self.objects.roots):
            return None
        return FileMover(self._files, run.objects, self._writer.remove_stale)

    def _crosses(self, target: int, root: int) -> bool:
        """Return whether two directories are on different file systems or mounts."""
        if os.fstat(target).st_dev != os.fstat(root).st_dev:
            return True
        # Between mounts of one file system, the rename fails with EXDEV, even for a missing name.
        name = self._writer.temporaries.outer_name()
        try:
            os.rename(name, name, src_dir_fd=target, dst_dir_fd=root)
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise unavailable(self.path, error) from error
            return True
        return False

    def free_bytes(self) -> int | None:
        """Return the file system's free bytes for users other than root."""
        space = os.fstatvfs(self.objects.descriptor)
        return space.f_bavail * space.f_frsize

    def capacity(self) -> Capacity | None:
        """Return the size of the file system less the blocks reserved for root, as df does."""
        space = os.fstatvfs(self.objects.descriptor)
        blocks = space.f_blocks - space.f_bfree + space.f_bavail
        return Capacity(blocks * space.f_frsize, space.f_frsize)


def _times(directories: Iterable[int], refusals: list[OSError]) -> Iterator[int]:
    """Yield the time of each directory's file system.

    refusals: gets the errors of directories to which this user may not write.
    """
    for directory in directories:
        try:
            yield file_system_ns(directory)
        except OSError as error:
            if error.errno not in _NOT_WRITABLE:
                raise
            refusals.append(error)
