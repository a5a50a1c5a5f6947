"""SGLang's file store: a directory with one file per object, named by the key.

Source: sglang srt/mem_cache/hicache_storage.py :: HiCacheFile. Only regular files are objects:
symbolic links are not followed; sub-directories, such as our `.hicachectl`, are ignored, except the
folders of a directory that is marked as having them (`folders`). Objects may have trailers
(`formats.trailer`); sizes are without them. Temporary files of unfinished writes (SGLang:
`.<32 hex>.tmp`, hicachectl: `.hicachectl-<32 hex>.tmp`) are listed like objects, for a check to
report.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from hicachectl.backends.base import (
    BoolArray,
    IntArray,
    Limits,
    ReadResult,
    Result,
    Rows,
    Status,
    Store,
    Traits,
    keys_of,
)
from hicachectl.backends.capabilities import (
    Announces,
    FilePermissions,
    Renames,
    Resumable,
    SideFiles,
    SystemCopy,
    Touch,
    Trailed,
)
from hicachectl.backends.disk.directory import Directory, Trust
from hicachectl.backends.disk.durable import sync_directory, sync_file_system
from hicachectl.backends.disk.files import OWN_PREFIX, check_key
from hicachectl.backends.disk.permissions import Permissions
from hicachectl.backends.file.copies import FileCopier, Origin
from hicachectl.backends.file.faults import Faults, unavailable
from hicachectl.backends.file.folders import SIDE_DIRECTORY, ObjectDirectory
from hicachectl.backends.file.lister import FileLister
from hicachectl.backends.file.mover import FileMover
from hicachectl.backends.file.reading import FileReader
from hicachectl.backends.file.sizes import MarkedSizes
from hicachectl.backends.file.trailers import NewTrailers, TrailerChecks
from hicachectl.backends.file.writing import FileWriter
from hicachectl.backends.urls import StoreUrl
from hicachectl.formats.errors import (
    StoreUnavailable,
    UnsupportedByBackend,
    UntrustedError,
    UsageError,
)
from hicachectl.formats.wording import failed, not_one_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping

    from hicachectl.formats.identity import Identity
    from hicachectl.formats.keys.base import Affix
    from hicachectl.formats.marker import Marker

FOLDERS = "hex2"  # value of the parameter "folders" of a URL
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class FileStore(
    Announces, FilePermissions, Renames, Resumable, SideFiles, SystemCopy, Touch, Trailed
):
    """A directory of objects; reads and listings create, resize and touch nothing."""

    limits: Limits = Limits(
        batch_objects=1024,  # with one syncfs per batch, writes take 1.2-1.5 times as long
        batch_bytes=256 << 20,
        parallel_reads=4,
        parallel_writes=2,
        forkable=True,  # reading needs only the directory's descriptor
    )
    grammar = "file"
    traits: ClassVar[Traits] = Traits(
        columns=frozenset({"nbytes", "mtime_ns", "version"}),
        version_fields=("inode", "mtime", "ctime", "size"),
        writes=True,
        deletes=True,
        lists_temporaries=True,
    )

    def __init__(
        self, path: str | os.PathLike[str], objects: ObjectDirectory | None = None
    ) -> None:
        """Open a directory. objects: the directory if it is open already; taken over."""
        self.path = os.path.abspath(path)  # noqa: PTH100 - keeps names that are not UTF-8
        self.url = str(StoreUrl("file", self.path))
        self._mark_problem = ""  # why the mark of folders is left alone
        try:
            self.objects = objects or self._opened(os.open(self.path, _OPEN_DIRECTORY))
        except OSError as error:
            raise unavailable(self.path, error) from error
        self._made: list[str] = []  # directories that `create` made, innermost first
        self._faults = Faults(self.objects)
        self._sizes = MarkedSizes(self.objects, self._faults)
        self._checks = TrailerChecks(self._sizes.facts)
        self._lister = FileLister(self.objects, self._sizes)
        self._reader = FileReader(self.objects, self._faults, self._sizes, self._checks)
        self._writer = FileWriter(self.objects, self._faults, self._sizes)

    def _opened(self, descriptor: int) -> ObjectDirectory:
        """Return a directory in its form; as flat, with a remark, if its mark is not trusted."""
        try:
            os.stat(".", dir_fd=descriptor)  # listing needs r, everything else x
            return ObjectDirectory.within(self.path, os.dup(descriptor))
        except (UntrustedError, PermissionError) as error:
            os.stat(".", dir_fd=descriptor)
            self._mark_problem = str(error)
            return ObjectDirectory(self.path, os.dup(descriptor), folders=False)
        finally:
            os.close(descriptor)

    @classmethod
    def within(cls, directory: Directory) -> Self:
        """Open the flat store in an open directory, without looking up its path."""
        opened = os.open(".", _OPEN_DIRECTORY, dir_fd=directory.descriptor)
        return cls(directory.path, ObjectDirectory(directory.path, opened, folders=False))

    @classmethod
    def from_url(cls, url: StoreUrl) -> Self:
        """Open the directory of a `file:` URL."""
        folders = _folders_in(url)
        store = cls(url.path)
        if folders and not store.objects.folders:
            store.close()
            raise UsageError(
                f"{store.path}: is not marked as having folders; leave out folders={FOLDERS}"
            )
        return store

    @classmethod
    def create(cls, url: StoreUrl) -> Self:
        """Open or create the directory of a `file:` URL, as SGLang does.

        `close` removes new directories that are still empty. Raises StoreUnavailable, UsageError.
        """
        made: list[str] = []
        try:
            objects = ObjectDirectory.create(url.path, folders=_folders_in(url), made=made)
        except OSError as error:
            next_step = "check the path and the permissions of its parent directories"
            raise StoreUnavailable(
                failed(url.path, "create the directory", error, next_step)
            ) from error
        store = cls(url.path, objects)
        store._made = made
        store.created = bool(made)
        return store

    # permissions and side files

    def readable_by(self, *, listing: bool = False) -> Permissions:
        """Return the permissions common to the directory and all files read."""
        directory = Permissions.within(os.fstat(self.objects.descriptor))
        return directory if listing else self._reader.seen.both(directory)

    def keep_private(self, permissions: Permissions, *, listing: bool = False) -> None:
        """Limit the modes of new files. listing: also of the directories that `create` made."""
        limit = self._writer.limit(permissions)
        for directory in self._made if listing else ():
            try:
                descriptor = os.open(directory, _OPEN_DIRECTORY | os.O_NOFOLLOW)
                try:
                    facts = os.fstat(descriptor)
                    mode = stat.S_IMODE(facts.st_mode)
                    os.fchmod(descriptor, mode & (limit.for_group(facts.st_gid) | ~0o777))
                finally:
                    os.close(descriptor)
            except OSError as error:
                raise unavailable(self.path, error) from error

    def side_directory(self) -> Path:
        """Return the path of `.hicachectl`, which SGLang and its `clear()` ignore."""
        return Path(self.path) / SIDE_DIRECTORY

    def open_side_directory(self, *, writes: bool, makes: bool = False) -> Directory | None:
        """Open `.hicachectl` through the store's descriptor; None if it is missing.

        makes: create it if missing.
        """
        with self.objects.outer(writes=writes) as here:
            if makes:
                return here.make_directory(SIDE_DIRECTORY, exist_ok=True)
            return here.directory(SIDE_DIRECTORY) if here.has(SIDE_DIRECTORY) else None

    def trust(self, *, writes: bool) -> Trust:
        """Return the trust of the store's directory."""
        return Trust(os.fstat(self.objects.descriptor), writes=writes)

    def close(self) -> None:
        """Close the directory; remove created directories that are empty."""
        if self.objects.descriptor >= 0:
            self.objects.close()
            with suppress(OSError):  # not empty
                for directory in self._made:
                    os.rmdir(directory)  # noqa: PTH106 - names that are not UTF-8

    # listing

    def scan(self, columns: Collection[str] = ("nbytes", "mtime_ns")) -> Generator[Any, None, None]:
        """List every regular file; its columns are null if its stat fails."""
        return self._lister.scan(columns)

    @property
    def remarks(self) -> tuple[str, ...]:
        """Report what the last listing left out."""
        remarks = list(self._lister.remarks)
        if problem := self._untrusted:
            remarks.append(f"{problem}; folders and trailers, if there are any, go unnoticed")
        return tuple(remarks)

    def look(self, rows: Rows, columns: Collection[str] = ("nbytes", "mtime_ns", "version")) -> Any:
        """List a few files again, by one stat each."""
        return self._lister.look(rows, columns)

    def exists(self, rows: Rows) -> BoolArray:
        """Return which keys are regular files, by one stat each."""
        return self._lister.exists(rows)

    @property
    def _untrusted(self) -> str:
        """Why the files in the side directory are left alone; "" if they are not."""
        return self._mark_problem or self._sizes.problem

    def _refuse_untrusted(self) -> None:
        """Raise UntrustedError before a change, if folders and trailers could go unnoticed."""
        self._sizes.current()
        if self._untrusted:
            raise UntrustedError(self._untrusted)

    # reading

    def read_into(
        self, rows: Rows, offsets: IntArray, capacities: IntArray, *, identify: bool = True
    ) -> ReadResult:
        """Read whole files whose size, less a trailer, equals the row's capacity."""
        memory = self.memory(offsets, capacities, len(rows))
        return self._reader.read(rows, memory, offsets, capacities)

    def expect(self, rows: Rows, capacities: IntArray) -> None:
        """Let the system start reading files not yet in memory."""
        self._reader.expect(rows, capacities)

    # trailers

    def markers(self) -> list[Marker]:
        """Return the markers in `.hicachectl/plugin`."""
        return list(self._sizes.current())

    def expect_identities(self, identities: Mapping[Affix, Identity]) -> None:
        """See `Trailed`."""
        self._checks.expect(identities)

    def write_trailers(self, identities: Mapping[Affix, Identity], digest: str) -> None:
        """See `Trailed`. Raises UsageError for an unknown digest."""
        self._writer.trailers = NewTrailers(identities, digest)

    def add_markers(self, markers: Iterable[Marker]) -> None:
        """See `Trailed`."""
        self._refuse_untrusted()
        try:
            self._sizes.ensure(set(markers))
        except OSError as error:
            raise unavailable(self.path, error) from error

    def remove_cleared(self, rows: Rows) -> Result:
        """Remove stale files, and sync their directories."""
        self._refuse_untrusted()
        keys = keys_of(rows)
        changed: set[int] = set()  # directories

        def remove(index: int) -> Status:
            check_key(keys[index])
            if not self._writer.remove_stale(keys[index]):
                return Status.GONE
            changed.add(self.objects.place(keys[index])[0])
            return Status.OK

        return self._removed(len(keys), remove, changed)

    def _removed(self, count: int, remove: Callable[[int], Status], changed: set[int]) -> Result:
        """Return the result of removing rows, and sync their directories.

        changed: gets these from `remove`.
        """
        statuses = np.zeros(count, dtype=np.uint8)
        errors: dict[int, str] = {}
        self._faults.each(range(count), remove, statuses, errors)
        # After a crash, an anchor must not reappear without its sidecars.
        removed = np.flatnonzero(statuses == Status.OK).tolist()
        if removed:
            sync = partial(self.objects.sync, changed)
            self._faults.synced(sync, removed, statuses, errors)
        return Result(statuses, errors)

    def read_trailers(self, rows: Rows) -> Any:
        """Read the last bytes of each object's file."""
        return self._reader.trailers(rows)

    @contextmanager
    def unchecked(self) -> Iterator[None]:
        """See `Trailed`."""
        with self._checks.suspended():
            yield

    # writing

    def write_from(
        self,
        rows: Rows,
        offsets: IntArray,
        sizes: IntArray,
        *,
        if_absent: bool,
    ) -> Result:
        """Write temporary files, sync them together, rename them, and sync their directories."""
        memory = self.memory(offsets, sizes, len(rows))
        self._refuse_untrusted()
        return self._writer.write(rows, memory, offsets, sizes, if_absent=if_absent)

    def can_copy_from(self, source: Store) -> bool:
        """Return whether a store is a file store."""
        return isinstance(source, FileStore)

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
        if not isinstance(source, FileStore):
            raise UnsupportedByBackend(
                f"{self.url}: cannot copy objects directly from {source.url}"
            )
        self._refuse_untrusted()
        origin = Origin(source.objects, source._faults, source._checks, source._sizes.current())
        copier = FileCopier(origin, self._writer, self._checks, preserve=preserve)
        return copier.copy(origins, rows, sizes, if_absent=if_absent)

    def delete(self, rows: Rows) -> Result:
        """Unlink files durably; a server can finish reading an open file."""
        self._refuse_untrusted()
        keys = keys_of(rows)
        changed: set[int] = set()  # directories

        def unlink(index: int) -> Status:
            check_key(keys[index])
            directory, name = self.objects.place(keys[index])
            os.unlink(name, dir_fd=directory)
            changed.add(directory)
            return Status.OK

        return self._removed(len(keys), unlink, changed)

    def flush(self) -> None:
        """Sync the file system, because servers and killed runs leave files unsynced."""
        descriptor = self.objects.descriptor
        try:
            if not sync_file_system(descriptor):
                os.sync()
            sync_directory(descriptor)
        except OSError as error:
            raise unavailable(self.path, error) from error

    def own_temporaries(self, owner: str, *, sweep: bool) -> None:
        """Name temporary files after `owner`. sweep: remove existing files of this owner."""
        try:
            self._writer.own_temporaries(owner, sweep=sweep)
        except OSError as error:
            raise unavailable(self.path, error) from error

    def touch(self, rows: Rows) -> BoolArray:
        """Set modification times to now.

        Servers that start later evict in the order of these times; running servers keep their own
        order in memory.
        """
        try:
            return self._writer.touch(keys_of(rows))
        except OSError as error:
            raise unavailable(self.path, error) from error

    def mover(self, directory: Directory) -> FileMover | None:
        """Return a mover to a directory; None if it is on another file system or mount."""
        self._refuse_untrusted()
        target, here = os.dup(directory.descriptor), self.objects.descriptor
        try:
            # Sub-volumes of one mount differ in st_dev. Between mounts, the rename fails with
            # EXDEV, even for a missing name.
            name = OWN_PREFIX + b"-" + os.urandom(16).hex().encode()
            crosses = os.fstat(target).st_dev != os.fstat(here).st_dev
            try:
                os.rename(name, name, src_dir_fd=target, dst_dir_fd=here)
            except FileNotFoundError:
                pass
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise unavailable(self.path, error) from error
                crosses = True
            if crosses:
                os.close(target)
                return None
        except BaseException:
            os.close(target)
            raise
        return FileMover(self.objects, target, self._faults, self._writer.remove_stale)

    def free_bytes(self) -> int | None:
        """Return the file system's free bytes for users other than root."""
        space = os.fstatvfs(self.objects.descriptor)
        return space.f_bavail * space.f_frsize


def _folders_in(url: StoreUrl) -> bool | None:
    """Return whether a URL asks for folders; None if it leaves the form open."""
    value = url.params.get("folders")
    if value not in (None, FOLDERS):
        raise UsageError(f"{url}: {not_one_of('folders', value, [FOLDERS])}")
    return None if value is None else True
