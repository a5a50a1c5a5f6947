"""The directories in which a store's files lie, and removals of files from them."""

from __future__ import annotations

import os
import stat
import threading
from abc import ABC, abstractmethod
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from hicachectl.backends.disk.directory import Directory
from hicachectl.backends.disk.durable import (
    exchange,
    is_linked,
    move_noreplace,
    sync_directory,
    sync_file_system,
)
from hicachectl.backends.disk.io import Closing, entries_of
from hicachectl.backends.disk.names import OWN_PREFIX
from hicachectl.backends.disk.permissions import give_file
from hicachectl.formats.errors import UntrustedError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from hicachectl.backends.concurrency import Concurrency

SIDE_DIRECTORY = os.fsdecode(OWN_PREFIX)
FOLDER_NAMES = frozenset(b"%02x" % number for number in range(256))
_TEMPORARY = OWN_PREFIX + b"-"
_OWNER_BYTES, _PROCESS_BYTES = 8, 4
_MANY = 8  # one syncfs takes less time than the syncs of this many directories


@dataclass(frozen=True, slots=True)
class Place:
    """A directory to list.

    path: path of `descriptor`, for faster calls.
    holds: takes names, and returns which of them belong in this directory: [n] bool. None for an
        outer directory in which all names belong. The path of such a directory may lead through
        links.
    """

    descriptor: int
    path: str
    holds: Callable[[list[str]], Sequence[bool]] | None = None


class ObjectTree(ABC):
    """Open directories with the files of one store. Several threads may use them at once.

    path: path in messages.
    descriptor: the outer directory, which gives new files its owner and group; negative after
        `close`.
    folders: whether files lie in folders inside an outer directory.
    side_files: whether the outer directory may have a `.hicachectl`.
    elsewhere: message that says why servers find no object outside its folder, and the next step.
    """

    path: str
    descriptor: int
    folders: bool
    side_files = True
    elsewhere = ""

    @property
    def roots(self) -> tuple[int, ...]:
        """Descriptors of the outer directories, which may lie on several file systems."""
        return (self.descriptor,)

    @abstractmethod
    def close(self) -> None:
        """Close all descriptors."""

    @abstractmethod
    def place(self, key: bytes) -> tuple[int, bytes]:
        """Return the descriptor of the directory with an object's file, and the file's name.

        key: a key that `disk.names.check_key` accepts.
        Raises OSError, such as FileNotFoundError for a missing folder, and UntrustedError.
        """

    @abstractmethod
    def place_for_new(self, key: bytes, nbytes: int = 0) -> tuple[int, bytes]:
        """Return `place` of a new object, after making its folder durably if it is missing.

        nbytes: size of the file.
        Raises as `place` does. Raises OSError if the key names no folder, or if the directory takes
        no file of this size.
        """

    @abstractmethod
    def temporary_name(self, key: bytes, token: bytes, number: int) -> bytes:
        """Return a name that SGLang ignores, for a temporary file beside an object's file.

        token: 24 hex digits of the process.
        number: number of the file in the process.
        """

    @abstractmethod
    def places(
        self, left_alone: list[str], concurrency: Concurrency | None = None
    ) -> Iterator[Place]:
        """Yield each directory with files, including the outer directories.

        left_alone: gets a message for each folder that is not trusted.
        concurrency: threads that open folders; None to open one folder after another.
        """

    def directories(self, concurrency: Concurrency | None = None) -> Iterator[int]:
        """Yield the descriptors of all directories with files. concurrency: see `places`."""
        return (place.descriptor for place in self.places([], concurrency))

    @abstractmethod
    def outer(self, *, writes: bool) -> Directory:
        """Return the outer directory itself. writes: the caller may create side files."""

    def sync(self, changed: Collection[int] | None = None) -> None:
        """Make the names in directories durable. Raises OSError.

        changed: descriptors of the directories; by default all directories with files.
        """
        if changed is None:
            changed = list(self.directories())
        if len(changed) < _MANY or not self.sync_file_systems():
            for descriptor in changed:
                sync_directory(descriptor)

    def sync_file_systems(self) -> bool:
        """Sync the file systems of all directories; return False if the system cannot."""
        return all(sync_file_system(root) for root in self.roots)


class FolderedDirectory(Closing):
    """An open directory, and its folders `00` to `ff`, each opened at its first use.

    Descriptors keep their numbers until `close`, because other threads may be using them.
    """

    def __init__(self, path: str, descriptor: int) -> None:
        """Take over a directory's descriptor, which `close` closes."""
        self.path = path
        self.descriptor = descriptor
        self._numbers: dict[bytes, int] = {}  # descriptor of each folder
        self._current: set[bytes] = set()  # folders opened since the directory was replaced
        self._opening = threading.Lock()
        self._making: dict[bytes, threading.Lock] = {}  # one lock for each folder

    def close(self) -> None:
        """Close all descriptors."""
        with self._opening:
            descriptors = [self.descriptor, *self._numbers.values()]
            self.descriptor = -1
            self._current = set()
            self._numbers.clear()
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)

    def outer(self, *, writes: bool) -> Directory:
        """Return the directory itself. writes: the caller may create files in it."""
        return Directory.again(self.descriptor, self.path, writes=writes)

    def existing_folders(
        self, left_alone: list[str], concurrency: Concurrency | None = None
    ) -> Iterator[tuple[bytes, int]]:
        """Yield name and descriptor of each folder. The arguments are as in `ObjectTree.places`."""
        with entries_of(self.descriptor) as entries:
            names = {os.fsencode(entry.name) for entry in entries}
        existing = sorted(FOLDER_NAMES & names)
        opened: list[int | str | None] = [None] * len(existing)

        def open_some(start: int, stop: int) -> None:
            opened[start:stop] = map(self._existing_folder, existing[start:stop])

        if concurrency is None:
            open_some(0, len(existing))
        else:
            concurrency.each("open", open_some, len(existing))
        for folder, found in zip(existing, opened, strict=True):
            if isinstance(found, str):
                left_alone.append(found)
            elif found is not None:
                yield folder, found

    def _existing_folder(self, name: bytes) -> int | str | None:
        """Return a folder's descriptor, or a message if it is not trusted; None if it is gone."""
        try:
            return self.folder(name, makes=False)
        except FileNotFoundError:
            return None
        except UntrustedError as error:
            return str(error)

    def folder(self, name: bytes, *, makes: bool) -> int:
        """Return a folder's descriptor. makes: make a missing folder.

        Raises OSError, and UntrustedError for a link or a folder of an untrusted owner.
        """
        if (number := self._open_number(name)) is not None:
            return number
        # A thread makes a folder durably before another thread writes to it. Existing folders are
        # opened by several threads at once.
        with self._making.setdefault(name, threading.Lock()) if makes else nullcontext():
            if makes and (number := self._open_number(name)) is not None:
                return number  # another thread has made the folder meanwhile
            while True:
                current = self._current
                opened = self._open_folder(os.fsdecode(name), makes=makes)
                with self._opening:
                    if self._current is current:
                        return self._keep(name, opened)
                os.close(opened)  # the directory was replaced or closed meanwhile

    def _open_number(self, name: bytes) -> int | None:
        """Return a folder's descriptor; None if the folder must be opened or made."""
        if name not in self._current:
            return None
        number = self._numbers[name]
        return number if is_linked(number) else None  # another process may have removed the folder

    def _keep(self, name: bytes, opened: int) -> int:
        """Give an opened folder its lasting descriptor. Return the descriptor's number."""
        number = self._numbers.setdefault(name, opened)
        if number != opened:  # a thread may be using the number, so it must lead to the new folder
            os.dup2(opened, number, inheritable=False)
            os.close(opened)
        self._current.add(name)
        return number

    def _open_folder(self, name: str, *, makes: bool) -> int:
        st = os.fstat(self.descriptor)
        with self.outer(writes=makes) as here:
            made = False
            if makes:
                with suppress(FileExistsError):
                    os.mkdir(name, st.st_mode & 0o777, dir_fd=self.descriptor)
                    made = True
            with here.directory(name) as opened:
                if made:
                    give_like(opened.descriptor, st)
                    here.sync()
                return os.dup(opened.descriptor)


def give_like(folder: int, outer: os.stat_result) -> None:
    """Give a new folder the owner, group and mode of the outer directory, for the same users."""
    give_file(folder, outer.st_uid, outer.st_gid)
    if os.fstat(folder).st_gid == outer.st_gid:
        os.fchmod(folder, stat.S_IMODE(outer.st_mode))


class _Names(NamedTuple):
    """Names for the temporary files of one process.

    process: id of the process.
    token: 24 hex digits.
    numbers: numbers of the next names.
    """

    process: int
    token: bytes
    numbers: Iterator[int]

    @classmethod
    def of(cls, owner: bytes) -> _Names:
        """Begin names of an owner for this process."""
        return cls(os.getpid(), owner + os.urandom(_PROCESS_BYTES).hex().encode(), count())


class Temporaries:
    """The temporary files of one owner in a tree, which SGLang ignores.

    Their names have 16 bytes in hex digits: 8 of the owner, 4 of the process, 4 of a counter.
    """

    def __init__(self, objects: ObjectTree, owner: bytes) -> None:
        """owner: 16 hex digits. Two processes with the same owner still get different names."""
        self._objects = objects
        self._owner = owner
        self._names = _Names.of(owner)

    def name(self, key: bytes) -> bytes:
        """Return a new name for a file beside an object's file."""
        names = self._own_names()
        return self._objects.temporary_name(key, names.token, next(names.numbers))

    def outer_name(self) -> bytes:
        """Return a new random name for a file in an outer directory."""
        token = self._own_names().token
        return b"%s%s%s.tmp" % (_TEMPORARY, token, os.urandom(4).hex().encode())

    def _own_names(self) -> _Names:
        """Return this process's names. A forked process must not go on with its parent's names."""
        names = self._names
        if names.process != os.getpid():
            names = self._names = _Names.of(self._owner)
        return names

    def remove_unchanged(
        self,
        key: bytes,
        seen: os.stat_result,
        *,
        even_if_read: bool,
        place: tuple[int, bytes] | None = None,
    ) -> bool:
        """Remove an object's file if it is as in an earlier stat. Return whether it was removed.

        The file is renamed before it is compared, because a writer can replace or touch it at any
        moment. A changed file gets its name back.
        seen: the stat of the object's file.
        even_if_read: also remove a file that was read since. Callers set it for a stale file, which
            must not get its name back. The rename would give the file a new ctime, so the file
            would count as new.
        place: `ObjectTree.place` of the key, if known.
        Raises OSError.
        """
        temporary = self.name(key)
        try:
            here, name = place or self._objects.place(key)
            os.rename(name, temporary, src_dir_fd=here, dst_dir_fd=here)
        except FileNotFoundError:
            return False
        taken = os.stat(temporary, dir_fd=here, follow_symlinks=False)
        used = taken.st_atime_ns != seen.st_atime_ns and not even_if_read
        same = _state(taken) == _state(seen) and not used
        if not same:
            with suppress(FileExistsError):  # a writer has made another file of this name
                move_noreplace(here, temporary, here, name)
                return False
        os.unlink(temporary, dir_fd=here)
        return same

    def replace_unchanged(self, temporary: bytes, key: bytes, seen: os.stat_result) -> bool:
        """Put a temporary file in place of an object's file that has not changed since a stat.

        Return False if a writer has replaced the object's file. The two names are exchanged before
        the old file is compared. So the object's name always names a whole file, and a file that
        another process removes stays removed. On a file system that cannot exchange names, a plain
        rename follows right after a comparison.
        seen: the stat of the object's file.
        Raises OSError, and FileNotFoundError if one of the files is gone.
        """
        here, name = self._objects.place(key)
        now = os.stat(name, dir_fd=here, follow_symlinks=False)
        if _state(now) != _state(seen):
            return False
        if now.st_atime_ns != seen.st_atime_ns:  # the object was read since
            os.utime(temporary, ns=(now.st_atime_ns, now.st_mtime_ns), dir_fd=here)
        ours = os.stat(temporary, dir_fd=here, follow_symlinks=False)
        if not exchange(here, temporary, name):
            os.replace(temporary, name, src_dir_fd=here, dst_dir_fd=here)
            return True
        taken = os.stat(temporary, dir_fd=here, follow_symlinks=False)
        if _state(taken) == _state(seen):
            os.unlink(temporary, dir_fd=here)
            return True
        exchange(here, temporary, name)
        taken = os.stat(temporary, dir_fd=here, follow_symlinks=False)
        # If a writer has replaced the file once more, the last writer's file keeps the name.
        if taken.st_ino != ours.st_ino:
            exchange(here, temporary, name)
        return False


def owner_in(name: str) -> str:
    """Return the owner that the name of a temporary file states; "" for other names."""
    start = len(_TEMPORARY)
    is_ours = name.startswith(os.fsdecode(_TEMPORARY)) and name.endswith(".tmp")
    return name[start : start + 2 * _OWNER_BYTES] if is_ours else ""


def _state(st: os.stat_result) -> tuple[int, ...]:
    """Return the stat fields that a write or a replacement changes, and a rename does not."""
    return st.st_ino, st.st_size, st.st_mtime_ns
