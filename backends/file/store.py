"""SGLang's file store: a directory with one file per object, named by the key.

Source: sglang srt/mem_cache/hicache_storage.py :: HiCacheFile. Only regular files are objects:
symbolic links are not followed; sub-directories, such as our `.hicachectl`, are ignored.
Temporary files of unfinished writes (SGLang: `.<32 hex>.tmp`, hicachectl:
`.hicachectl-<32 hex>.tmp`) are listed like objects, for a check to report.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np
import pyarrow as pa

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
    mtimes_of,
    scan_schema,
)
from hicachectl.backends.capabilities import (
    Announces,
    FilePermissions,
    Renames,
    Resumable,
    SideFiles,
    SystemCopy,
    Touch,
)
from hicachectl.backends.disk.copying import copy_bytes, write_bytes
from hicachectl.backends.disk.directory import Directory, Trust
from hicachectl.backends.disk.durable import (
    CREATE_FILE,
    NO_ROOM,
    make_directories,
    move_noreplace,
    sync_directory,
    sync_file_system,
)
from hicachectl.backends.disk.files import (
    LOST,
    OWN_PREFIX,
    VERSION,
    are_plain,
    check_key,
    check_new_key,
    is_file_name,
    read_ahead,
)
from hicachectl.backends.disk.permissions import NOBODY, Permissions, give_file
from hicachectl.backends.file.listing import SkippedEntries, ask_each, names_in, scan_directory
from hicachectl.backends.file.mover import FileMover
from hicachectl.backends.urls import StoreUrl
from hicachectl.formats.errors import StoreUnavailable, UnsupportedByBackend
from hicachectl.formats.wording import failed, reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator


_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO must not block
# The 16 bytes of a temporary name: 8 of the owner, 4 of the process, 4 of a counter.
_OWNER_BYTES, _TOKEN_BYTES = 8, 12
# Errors that every new file in the directory would get.
_NO_NEW_FILES = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_WORDS = {
    errno.ELOOP: "a symbolic link, not a regular file",
    errno.ENXIO: "not a regular file",  # also from opening a socket
    errno.ENAMETOOLONG: "the key is too long for a file name",
}
_VERSION_BYTES = VERSION.size


class _Ownership(NamedTuple):
    """Mode of new files before the umask; their user and group, or None to leave them."""

    mode: int
    owner: tuple[int, int] | None


class FileStore(Announces, FilePermissions, Renames, Resumable, SideFiles, SystemCopy, Touch):
    """A HiCacheFile directory; reads and listings create, resize and touch nothing."""

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

    def __init__(self, path: str | os.PathLike[str], opened: int | None = None) -> None:
        self.path = os.path.abspath(path)  # noqa: PTH100 - keeps names that are not UTF-8
        self._left_out = SkippedEntries()
        self._made: list[str] = []  # directories that `create` made, innermost first
        self._seen = self._limit = Permissions()  # of the files read; limit for the files written
        self._noting = threading.Lock()
        self._token = b""  # of temporary names
        self.own_temporaries(os.urandom(_OWNER_BYTES).hex(), sweep=False)
        self._numbers = count()
        self.url = str(StoreUrl("file", self.path))
        try:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            self._directory = (
                os.open(self.path, flags) if opened is None else os.open(".", flags, dir_fd=opened)
            )
        except OSError as error:
            raise self._unavailable(error) from error
        try:
            facts = os.stat(".", dir_fd=self._directory)  # listing needs r, everything else x
        except OSError as error:
            self.close()
            raise self._unavailable(error) from error
        self._use_owner(facts)

    def _use_owner(self, facts: os.stat_result) -> None:
        """As root, give new files the directory's owner and group."""
        self._owner = None if os.geteuid() or not facts.st_uid else (facts.st_uid, facts.st_gid)
        self._own_group = facts.st_gid if facts.st_mode & stat.S_ISGID else os.getegid()
        self._new = _Ownership(0o666, self._owner)

    def _for_new(self, permissions: Permissions) -> _Ownership:
        """Return mode and owner of a new file whose sources have these permissions."""
        owner = self._owner
        if owner is not None and permissions.may_own(owner[0]):
            return _Ownership(0o666 & permissions.for_group(owner[1]), owner)
        return _Ownership(0o666 & permissions.for_group(self._own_group), None)

    @classmethod
    def within(cls, directory: Directory) -> Self:
        """Open the store in an open directory, without looking up its path."""
        return cls(directory.path, directory.descriptor)

    @classmethod
    def from_url(cls, url: StoreUrl) -> Self:
        """Open the directory of a `file:` URL."""
        return cls(url.path)

    @classmethod
    def create(cls, url: StoreUrl) -> Self:
        """Open or create the directory of a `file:` URL, as SGLang does.

        `close` removes new directories that are still empty. Raises StoreUnavailable.
        """
        try:
            made = make_directories(url.path)
        except OSError as error:
            next_step = "check the path and the permissions of its parent directories"
            raise StoreUnavailable(
                failed(url.path, "create the directory", error, next_step)
            ) from error
        store = cls(url.path)
        store._made = made
        return store

    def readable_by(self, *, listing: bool = False) -> Permissions:
        """Return the permissions common to the directory and all files read."""
        directory = Permissions.within(os.fstat(self._directory))
        return directory if listing else self._seen.both(directory)

    def keep_private(self, permissions: Permissions, *, listing: bool = False) -> None:
        """Limit the modes of new files. listing: also of the directories that `create` made."""
        with self._noting:
            limit = self._limit = self._limit.both(permissions)
            self._new = self._for_new(limit)
        for directory in self._made if listing else ():
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                descriptor = os.open(directory, flags)
                try:
                    facts = os.fstat(descriptor)
                    mode = stat.S_IMODE(facts.st_mode)
                    os.fchmod(descriptor, mode & (limit.for_group(facts.st_gid) | ~0o777))
                finally:
                    os.close(descriptor)
            except OSError as error:
                raise self._unavailable(error) from error

    def _note_readable(self, modes: int, groups: set[int], owners: set[int]) -> None:
        """Record the permissions common to a call's files; modes: their bitwise AND."""
        group = groups.pop() if len(groups) == 1 else None
        owner = owners.pop() if len(owners) == 1 else NOBODY
        seen = Permissions(modes & 0o777 | 0o700, group, None if modes & 0o004 else owner)
        with self._noting:
            self._seen = self._seen.both(seen)

    def side_directory(self) -> Path:
        """Return the path of `.hicachectl`, which SGLang and its `clear()` ignore."""
        return Path(self.path) / os.fsdecode(OWN_PREFIX)

    def open_side_directory(self, *, writes: bool, makes: bool = False) -> Directory | None:
        """Open `.hicachectl` through the store's descriptor; None if it is missing.

        makes: create it if missing.
        """
        name, trust = os.fsdecode(OWN_PREFIX), self.trust(writes=writes)
        with Directory(os.dup(self._directory), self.path, trust) as here:
            if makes:
                return here.make_directory(name, exist_ok=True)
            return here.directory(name) if here.has(name) else None

    def trust(self, *, writes: bool) -> Trust:
        """Return the trust of the store's directory."""
        return Trust(os.fstat(self._directory), writes=writes)

    def close(self) -> None:
        """Close the directory; remove created directories that are empty."""
        descriptor, self._directory = self._directory, -1
        if descriptor >= 0:
            os.close(descriptor)
            with suppress(OSError):  # not empty
                for directory in self._made:
                    os.rmdir(directory)  # noqa: PTH106 - names that are not UTF-8

    def scan(self, columns: Collection[str] = ("nbytes", "mtime_ns")) -> Generator[Any, None, None]:
        """List every regular file; its columns are null if its stat fails."""
        self._left_out = SkippedEntries()
        schema = scan_schema(columns)
        try:
            yield from scan_directory(self._directory, self.path, schema, self._left_out)
        except OSError as error:
            raise self._unavailable(error) from error

    @property
    def remarks(self) -> tuple[str, ...]:
        """Report links, FIFOs, sockets and devices that the last listing left out."""
        if not self._left_out.count:
            return ()
        return (
            f"{self.path}: ignored {self._left_out.count} links, FIFOs, sockets or devices with "
            f"names of objects, such as {self._left_out.first}; only regular files are objects",
        )

    def read_into(
        self, rows: Rows, offsets: IntArray, capacities: IntArray, *, identify: bool = True
    ) -> ReadResult:
        """Read whole files whose size equals the row's capacity."""
        memory = self.memory(offsets, capacities, len(rows))
        statuses = np.zeros(len(rows), dtype=np.uint8)
        nbytes = np.full(len(rows), -1, dtype=np.int64)
        versions = bytearray(len(rows) * VERSION.size)
        errors: dict[int, str] = {}
        sizes = [-1] * len(rows)
        modes, groups, owners = 0o777, set[int](), set[int]()
        # This loop dominates reads of small objects: look up attributes once, and check keys
        # together.
        pack, read, here = VERSION.pack_into, self._read, self._directory
        keys = keys_of(rows)
        check = None if are_plain(keys) else check_key
        places = zip(keys, offsets.tolist(), capacities.tolist(), strict=True)
        for index, (key, offset, capacity) in enumerate(places):
            try:
                if check is not None:
                    check(key)
                size, facts = read(key, here, memory[offset : offset + capacity])
            except OSError as error:
                statuses[index] = self._failed(index, error, errors)
                continue
            sizes[index] = size
            modes &= facts.st_mode
            groups.add(facts.st_gid)
            owners.add(facts.st_uid)
            pack(
                versions,
                index * _VERSION_BYTES,
                facts.st_ino,
                facts.st_mtime_ns,
                facts.st_ctime_ns,
                facts.st_size,
            )
        if groups:
            self._note_readable(modes, groups, owners)
        nbytes[:] = sizes
        known = nbytes >= 0
        statuses[known & (nbytes < capacities)] = Status.SHORT
        statuses[known & (nbytes > capacities)] = Status.OVERSIZED
        fields = np.frombuffer(versions, dtype="<u8").reshape(
            len(rows), len(self.traits.version_fields)
        )
        return ReadResult(statuses, errors, nbytes=nbytes, versions=fields)

    def expect(self, rows: Rows, capacities: IntArray) -> None:
        """Let the system start reading files not yet in memory."""
        for key, capacity in zip(keys_of(rows), capacities.tolist(), strict=True):
            with suppress(OSError):  # the read will report the error
                check_key(key)
                descriptor = self._open(key, self._directory)
                try:
                    read_ahead(descriptor, capacity)
                finally:
                    os.close(descriptor)

    def write_from(
        self,
        rows: Rows,
        offsets: IntArray,
        sizes: IntArray,
        *,
        if_absent: bool,
    ) -> Result:
        """Write temporary files, sync them together, rename them, and sync the directory."""
        memory = self.memory(offsets, sizes, len(rows))
        times = mtimes_of(rows)
        places = list(zip(offsets.tolist(), sizes.tolist(), strict=True))

        def stage(index: int, errors: dict[int, str]) -> bytes:
            offset, size = places[index]
            fill = partial(write_bytes, memory[offset : offset + size])
            return self._write_temporary(fill, times[index])

        return self._publish(keys_of(rows), stage, if_absent=if_absent)

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
        within = Permissions.within(os.fstat(source._directory))
        files, nbytes, times = keys_of(origins), sizes.tolist(), mtimes_of(rows)

        def stage(index: int, errors: dict[int, str]) -> bytes | Status:
            try:
                check_key(files[index])
                descriptor = self._open(files[index], source._directory)
            except OSError as error:
                return source._failed(index, error, errors)
            try:
                return self._copy_temporary(
                    descriptor, nbytes[index], times[index], within, preserve=preserve
                )
            finally:
                os.close(descriptor)

        return self._publish(keys_of(rows), stage, if_absent=if_absent)

    def _publish(
        self,
        keys: list[bytes],
        stage: Callable[[int, dict[int, str]], bytes | Status],
        *,
        if_absent: bool,
    ) -> Result:
        """Create, sync and rename temporary files.

        stage: creates a row's file; returns its name, or a status.
        """
        statuses = np.zeros(len(keys), dtype=np.uint8)
        errors: dict[int, str] = {}
        written: dict[int, bytes] = {}

        def make(index: int) -> Status:
            check_new_key(keys[index])
            made = stage(index, errors)
            if isinstance(made, Status):
                return made
            written[index] = made
            return Status.OK

        def publish(index: int) -> Status:
            try:
                self._rename(written[index], keys[index], if_absent=if_absent)
            except FileNotFoundError as error:  # HiCacheFile.clear deletes temporary files too
                raise OSError(
                    errno.ECANCELED, "another process cleared the store; run again"
                ) from error
            del written[index]
            return Status.OK

        try:
            self._each(range(len(keys)), make, statuses, errors)
            staged = list(written)
            sync = partial(self._sync_data, list(written.values()))
            if staged and self._synced(sync, staged, statuses, errors):
                self._each(staged, publish, statuses, errors)
                self._synced(partial(sync_directory, self._directory), staged, statuses, errors)
        finally:
            for name in written.values():
                with suppress(OSError):
                    os.unlink(name, dir_fd=self._directory)
        return Result(statuses, errors)

    def delete(self, rows: Rows) -> Result:
        """Unlink files durably; a server can finish reading an open file."""
        keys = keys_of(rows)
        statuses = np.zeros(len(keys), dtype=np.uint8)
        errors: dict[int, str] = {}

        def unlink(index: int) -> Status:
            check_key(keys[index])
            os.unlink(keys[index], dir_fd=self._directory)
            return Status.OK

        self._each(range(len(keys)), unlink, statuses, errors)
        # After a crash, an anchor must not reappear without its sidecars.
        deleted = np.flatnonzero(statuses == Status.OK).tolist()
        if deleted:
            self._synced(partial(sync_directory, self._directory), deleted, statuses, errors)
        return Result(statuses, errors)

    def flush(self) -> None:
        """Sync the file system, because servers and killed runs leave files unsynced."""
        try:
            if not sync_file_system(self._directory):
                os.sync()
            sync_directory(self._directory)
        except OSError as error:
            raise self._unavailable(error) from error

    def own_temporaries(self, owner: str, *, sweep: bool) -> None:
        """Name temporary files after `owner`. sweep: remove existing files of this owner."""
        # Two processes with the same owner still get different names.
        self._token = owner.encode() + os.urandom(_TOKEN_BYTES - _OWNER_BYTES).hex().encode()
        if not sweep:
            return
        prefix = os.fsdecode(OWN_PREFIX) + f"-{owner}"
        try:
            for names in names_in(self._directory, SkippedEntries()):
                for name in names:
                    if name.startswith(prefix):
                        with suppress(FileNotFoundError):
                            os.unlink(name, dir_fd=self._directory)
        except OSError as error:
            raise self._unavailable(error) from error

    def exists(self, rows: Rows) -> BoolArray:
        """Return which keys are regular files, by one stat each."""
        keys = keys_of(rows)
        return np.fromiter(map(self._is_there, keys), dtype=np.bool_, count=len(keys))

    def touch(self, rows: Rows) -> BoolArray:
        """Set modification times to now.

        Servers that start later evict in the order of these times; running servers keep their own
        order in memory.
        """
        now = time.time_ns()
        touched = np.zeros(len(rows), dtype=np.bool_)
        for index, key in enumerate(keys_of(rows)):
            try:
                check_key(key)
                times = now + index, now + index
                os.utime(key, ns=times, dir_fd=self._directory, follow_symlinks=False)
                touched[index] = True
            except OSError as error:
                self._failed(index, error, {})
        return touched

    def look(self, rows: Rows, columns: Collection[str] = ("nbytes", "mtime_ns", "version")) -> Any:
        """List a few files again, by one stat each."""
        names = [os.fsdecode(key) for key in keys_of(rows) if is_file_name(key)]
        try:
            batch = ask_each(self._directory, scan_schema(columns), names)
        except OSError as error:
            raise self._unavailable(error) from error
        return pa.Table.from_batches([batch])

    def mover(self, directory: Directory) -> FileMover | None:
        """Return a mover to a directory; None if it is on another file system or mount."""
        target = os.dup(directory.descriptor)
        try:
            # Sub-volumes of one mount differ in st_dev. Between mounts, the rename fails with
            # EXDEV, even for a missing name.
            name = OWN_PREFIX + b"-" + os.urandom(16).hex().encode()
            crosses = os.fstat(target).st_dev != os.fstat(self._directory).st_dev
            try:
                os.rename(name, name, src_dir_fd=target, dst_dir_fd=self._directory)
            except FileNotFoundError:
                pass
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise self._unavailable(error) from error
                crosses = True
            if crosses:
                os.close(target)
                return None
        except BaseException:
            os.close(target)
            raise
        return FileMover(self._directory, target, self._failed)

    def free_bytes(self) -> int | None:
        """Return the file system's free bytes for users other than root."""
        space = os.fstatvfs(self._directory)
        return space.f_bavail * space.f_frsize

    # reading and writing one file

    @staticmethod
    def _open(key: bytes, here: int) -> int:
        """Open a file for reading, if possible (as its owner) without updating its atime."""
        try:
            return os.open(key, _READ_FLAGS | os.O_NOATIME, dir_fd=here)
        except PermissionError as error:
            if error.errno != errno.EPERM:
                raise
            return os.open(key, _READ_FLAGS, dir_fd=here)

    @classmethod
    def _read(cls, key: bytes, here: int, target: memoryview) -> tuple[int, os.stat_result]:
        """Return a file's size and stat; read the file if `target` has exactly that size."""
        descriptor = cls._open(key, here)
        try:
            facts = os.fstat(descriptor)
            size = facts.st_size
            if not stat.S_ISREG(facts.st_mode):
                raise OSError(errno.ENXIO, "")
            if size != len(target) or not size:
                return size, facts
            done = os.preadv(descriptor, (target,), 0)
            while 0 < done < size:
                count = os.preadv(descriptor, (target[done:],), done)
                if not count:  # truncated since it was opened
                    break
                done += count
            return done, facts
        finally:
            os.close(descriptor)

    def _is_there(self, key: bytes) -> bool:
        try:
            check_key(key)
            facts = os.stat(key, dir_fd=self._directory, follow_symlinks=False)
        except OSError as error:
            if error.errno in LOST:
                raise self._unavailable(error) from error
            return False
        return stat.S_ISREG(facts.st_mode)

    def _write_temporary(
        self, fill: Callable[[int], None], mtime_ns: int | None, new: _Ownership | None = None
    ) -> bytes:
        """Create an unsynced temporary file; return its name, which SGLang ignores."""
        mode, owner = new or self._new
        name = b"%s-%s%08x.tmp" % (OWN_PREFIX, self._token, next(self._numbers) & 0xFFFFFFFF)
        try:
            descriptor = os.open(name, CREATE_FILE, mode, dir_fd=self._directory)
        except OSError as error:
            if error.errno in _NO_NEW_FILES:
                next_step = "run as the server's user, and check that the file system is writable"
                raise StoreUnavailable(
                    failed(self.path, "write to the store", error, next_step)
                ) from error
            raise
        try:
            if owner is not None:
                give_file(descriptor, *owner)
            fill(descriptor)
            if mtime_ns is not None:
                os.utime(descriptor, ns=(mtime_ns, mtime_ns))
        except BaseException:
            with suppress(OSError):
                os.unlink(name, dir_fd=self._directory)
            raise
        finally:
            os.close(descriptor)
        return name

    def _copy_temporary(
        self, origin: int, size: int, mtime_ns: int | None, within: Permissions, *, preserve: bool
    ) -> bytes | Status:
        """Copy an open file to a temporary file; return its name, or a status.

        The source must have `size` bytes and stay unchanged. within: permissions of the source's
        directory. preserve: copy owner and mode.
        """
        before = os.fstat(origin)
        if not stat.S_ISREG(before.st_mode):
            raise OSError(errno.ENXIO, "")
        if before.st_size != size:
            return Status.SHORT if before.st_size < size else Status.OVERSIZED
        new = _Ownership(0o600, None)
        if not preserve:
            mode, owner = self._for_new(within.both(Permissions.of_file(before)))
            new = _Ownership(mode & before.st_mode | 0o600, owner)

        def fill(copy: int) -> None:
            if preserve:
                give_file(copy, before.st_uid, before.st_gid, mode=before.st_mode)
            copy_bytes(origin, size, copy)

        try:
            name = self._write_temporary(fill, mtime_ns, new)
        except EOFError:
            return Status.SHORT
        after = os.fstat(origin)
        if (after.st_size, after.st_mtime_ns) == (size, before.st_mtime_ns):
            return name
        os.unlink(name, dir_fd=self._directory)
        return Status.CHANGED

    def _rename(self, temporary: bytes, key: bytes, *, if_absent: bool) -> None:
        """Rename a temporary file to its key. Raises FileExistsError."""
        here = self._directory
        if if_absent:
            move_noreplace(here, temporary, here, key)
        else:
            os.replace(temporary, key, src_dir_fd=here, dst_dir_fd=here)

    def _sync_data(self, names: Collection[bytes]) -> None:
        """Sync files by one syncfs if possible, far cheaper than an fsync per file."""
        if sync_file_system(self._directory):
            return
        for name in names:
            descriptor = os.open(name, _READ_FLAGS, dir_fd=self._directory)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    # errors

    def _each(
        self,
        indices: Collection[int],
        act: Callable[[int], Status],
        statuses: np.ndarray[Any, np.dtype[np.uint8]],
        errors: dict[int, str],
    ) -> None:
        for index in indices:
            try:
                statuses[index] = act(index)
            except OSError as error:
                statuses[index] = self._failed(index, error, errors)

    def _synced(
        self,
        sync: Callable[[], None],
        indices: Collection[int],
        statuses: np.ndarray[Any, np.dtype[np.uint8]],
        errors: dict[int, str],
    ) -> bool:
        """Return whether a sync succeeds; if not, OK rows get the error."""
        try:
            sync()
        except OSError as error:
            for index in indices:
                if statuses[index] == Status.OK:
                    statuses[index] = self._failed(index, error, errors)
            return False
        return True

    def _failed(self, index: int, error: OSError, errors: dict[int, str]) -> Status:
        """Return the status for a failed system call.

        Raises StoreUnavailable if the store is lost.
        """
        if error.errno in LOST or self._removed(error):
            raise self._unavailable(error) from error
        if error.errno == errno.ENOENT:
            return Status.GONE
        if error.errno == errno.EEXIST:
            return Status.EXISTS
        errors[index] = _WORDS.get(error.errno or 0) or reason_of(error)
        return Status.FULL if error.errno in NO_ROOM else Status.ERROR

    def _removed(self, error: OSError) -> bool:
        if error.errno == errno.EBADF and self._directory < 0:
            raise ValueError("The store is closed")
        return error.errno == errno.ENOENT and not os.fstat(self._directory).st_nlink

    def _unavailable(self, error: OSError) -> StoreUnavailable:
        next_steps = {
            errno.ENOENT: "check the path, or create the directory",
            errno.ENOTDIR: "give the directory with the objects",
            errno.EACCES: "run as the server's user or as a member of its group",
        }
        next_step = next_steps.get(error.errno or 0, "check that the file system is mounted")
        return StoreUnavailable(failed(self.path, "use the store", error, next_step))
