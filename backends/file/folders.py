"""The directory of a file store: flat, or with 256 folders.

A flat directory is SGLang's form (hicache_storage.py :: HiCacheFile). In a directory with folders,
which `.hicachectl/folders` marks, the first two hex digits of a key name the folder of its file,
and the last two of a temporary file's name.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from hicachectl.backends.disk.directory import Directory, Trust
from hicachectl.backends.disk.durable import (
    is_linked,
    is_named,
    make_directories,
    sync_directory,
    sync_file_system,
)
from hicachectl.backends.disk.files import OWN_PREFIX
from hicachectl.backends.disk.permissions import give_file
from hicachectl.formats.errors import FormatError, UntrustedError, UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

SIDE_DIRECTORY = os.fsdecode(OWN_PREFIX)
FOLDERS_FILE = "folders"
_FORM = b"hex2\n"  # content of FOLDERS_FILE
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NAMES = {b"%02x" % number for number in range(256)}
_OWN_TEMPORARY = OWN_PREFIX + b"-"
_MANY = 8  # directories; one syncfs takes less time than so many syncs of directories
_OBJECT = re.compile(r"[0-9a-f]{64}[._]")


def folder_of(name: bytes) -> bytes | None:
    """Return the folder that a file belongs to in a directory with folders.

    None for a name without one: such a file lies beside the folders.
    """
    folder = name[-6:-4] if name.startswith(_OWN_TEMPORARY) else name[:2]
    return folder if folder in _NAMES else None


class ObjectDirectory:
    """An open directory of objects. Several threads may use it at once.

    descriptor: of the directory. path: as given. folders: whether it has folders.
    Descriptors keep their numbers until `close`, also when `reopen` makes the directory again.
    """

    def __init__(self, path: str, descriptor: int, *, folders: bool) -> None:
        """Take over a directory's descriptor; `close` closes it."""
        self.path = path
        self.descriptor = descriptor
        self.folders = folders
        self._numbers: dict[bytes, int] = {}  # descriptors, by folder
        self._current: set[bytes] = set()  # folders whose descriptor was opened since `reopen`
        self._opening = threading.Lock()

    @classmethod
    def open(cls, path: str) -> Self:
        """Open a directory, in the form that it has; its path may lead through links.

        Raises OSError, UntrustedError for a mark that is not trusted, FormatError for an unknown
        one.
        """
        return cls.within(path, os.open(path, _OPEN))

    @classmethod
    def within(cls, path: str, descriptor: int) -> Self:
        """Take over the descriptor of an open directory; otherwise like `open`."""
        try:
            return cls(path, descriptor, folders=_is_marked(path, descriptor))
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def create(
        cls, path: str, *, folders: bool | None = None, made: list[str] | None = None
    ) -> Self:
        """Open a directory; create it, with its parents, if it is missing.

        folders: the form of a new or empty directory; None for flat, or as the directory is
        marked. made: gets the paths of new directories, innermost first.
        Raises OSError, and UsageError for a directory of the other form.
        """
        new = make_directories(path)
        if made is not None:
            made.extend(new)
        descriptor = os.open(path, _OPEN)
        try:
            return cls(path, descriptor, folders=_settle(path, descriptor, folders))
        except BaseException:
            os.close(descriptor)
            raise

    def close(self) -> None:
        """Close all descriptors."""
        with self._opening:
            descriptors = [self.descriptor, *self._numbers.values()]
            self.descriptor = -1
            self._numbers.clear()
            self._current.clear()
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # places of objects

    def is_folder(self, name: bytes) -> bool:
        """Return whether a directory of this name holds objects."""
        return self.folders and name in _NAMES

    def place(self, key: bytes) -> tuple[int, bytes]:
        """Return the descriptor of the directory with an object's file, and the file's name.

        key: as `disk.files.check_key` accepts it. Raises OSError, such as FileNotFoundError for a
        missing folder, and UntrustedError.
        """
        folder = folder_of(key) if self.folders else None
        return (self.descriptor if folder is None else self._folder(folder, makes=False)), key

    def place_for_new(self, key: bytes) -> tuple[int, bytes]:
        """Return `place` of a new object, after making its folder durably if it is missing.

        Raises also OSError for a key that names no folder.
        """
        if not self.folders:
            return self.descriptor, key
        folder = folder_of(key)
        if folder is None:
            raise OSError(0, "the key does not start with the hex digits that name its folder")
        return self._folder(folder, makes=True), key

    def temporary_name(self, key: bytes, token: bytes, number: int) -> bytes:
        """Return the name of a temporary file beside an object's file; SGLang ignores it.

        token: 24 hex digits of the process. number: counts its files.
        """
        folder = folder_of(key) if self.folders else None
        if folder is None:
            return b"%s%s%08x.tmp" % (_OWN_TEMPORARY, token, number & 0xFFFFFFFF)
        return b"%s%s%06x%s.tmp" % (_OWN_TEMPORARY, token, number & 0xFFFFFF, folder)

    def directories(self, left_alone: list[str]) -> Iterator[tuple[bytes | None, int]]:
        """Yield each directory with files: its folder, or None for the outer one; its descriptor.

        left_alone: gets a message for each folder that is not trusted.
        """
        yield None, self.descriptor
        for folder in sorted(_NAMES) if self.folders else ():
            try:
                yield folder, self._folder(folder, makes=False)
            except FileNotFoundError:
                continue
            except UntrustedError as error:
                left_alone.append(str(error))

    def sync(self, changed: Collection[int] | None = None) -> None:
        """Make the names in directories durable. Raises OSError.

        changed: their descriptors; default: every directory with files.
        """
        if changed is None:
            changed = [descriptor for _, descriptor in self.directories([])]
        if len(changed) < _MANY or not sync_file_system(self.descriptor):
            for descriptor in changed:
                sync_directory(descriptor)

    def outer(self, *, writes: bool) -> Directory:
        """Return the directory itself, for side files. writes: the caller may create some."""
        return _directory(self.path, self.descriptor, writes=writes)

    # directories that vanish

    @property
    def vanished(self) -> bool:
        """Return whether the path names this directory no longer. Raises OSError if unknown."""
        try:
            return not is_named(self.descriptor, self.path, follow=True)
        except NotADirectoryError:
            return True

    def reopen(self, *, makes: bool = True) -> None:
        """Open what the path names now.

        makes: make it again, with its mark, if it is missing; else take it in the form that it has.
        Calls that use the earlier directory at this time may fail. Raises like `create` or `open`.
        """
        if makes:
            make_directories(self.path)
        opened = os.open(self.path, _OPEN)
        try:
            folders = _settle(self.path, opened, self.folders if makes else None)
            with self._opening:
                if self.descriptor < 0:
                    raise ValueError("The directory is closed")
                os.dup2(opened, self.descriptor, inheritable=False)
                self._current.clear()
                self.folders = folders
        finally:
            os.close(opened)

    # folders

    def _folder(self, folder: bytes, *, makes: bool) -> int:
        """Return a folder's descriptor. makes: make a missing folder."""
        if folder in self._current:
            number = self._numbers[folder]
            if is_linked(number):  # another process may have removed the folder
                return number
        with self._opening:
            opened = self._open_folder(os.fsdecode(folder), makes=makes)
            number = self._numbers.setdefault(folder, opened)
            if number != opened:  # a thread may be using the number: give it the new folder
                os.dup2(opened, number, inheritable=False)
                os.close(opened)
            self._current.add(folder)
        return number

    def _open_folder(self, name: str, *, makes: bool) -> int:
        facts = os.fstat(self.descriptor)
        with self.outer(writes=makes) as here:
            made = False
            if makes:
                with suppress(FileExistsError):
                    os.mkdir(name, facts.st_mode & 0o777, dir_fd=self.descriptor)
                    made = True
            with here.directory(name) as opened:
                if made:
                    _give_like(opened.descriptor, facts)
                    here.sync()
                return os.dup(opened.descriptor)


def _give_like(folder: int, outer: os.stat_result) -> None:
    """Give a new folder its directory's owner, group and mode: who uses one uses the other."""
    give_file(folder, outer.st_uid, outer.st_gid)
    if os.fstat(folder).st_gid == outer.st_gid:
        os.fchmod(folder, stat.S_IMODE(outer.st_mode))


def _directory(path: str, descriptor: int, *, writes: bool) -> Directory:
    return Directory(os.dup(descriptor), path, Trust(os.fstat(descriptor), writes=writes))


def _is_marked(path: str, descriptor: int) -> bool:
    """Return whether a directory is marked as having folders."""
    try:
        with (
            _directory(path, descriptor, writes=False) as here,
            here.directory(SIDE_DIRECTORY) as side,
        ):
            content = side.read(FOLDERS_FILE, len(_FORM) + 1)
    except FileNotFoundError:
        return False
    if content != _FORM:
        raise FormatError(
            f"{path}/{SIDE_DIRECTORY}/{FOLDERS_FILE}: not a form that this release knows; "
            "use a newer hicachectl"
        )
    return True


def _settle(path: str, descriptor: int, folders: bool | None) -> bool:
    """Return whether a directory has folders; mark an empty one if it shall have.

    Raises UsageError for a directory of the other form.
    """
    marked = _is_marked(path, descriptor)
    if folders is None or folders is marked:
        return marked
    if marked:
        raise UsageError(f"{path}: has folders; leave the form of the directory open")
    if _has_flat_objects(descriptor):
        raise UsageError(
            f"{path}: has objects outside folders; give an empty directory, and migrate"
        )
    with (
        _directory(path, descriptor, writes=True) as here,
        here.make_directory(SIDE_DIRECTORY, exist_ok=True) as side,
    ):
        side.write(FOLDERS_FILE, _FORM, shared=True)
    return True


def _has_flat_objects(descriptor: int) -> bool:
    own = os.open(".", _OPEN, dir_fd=descriptor)
    try:
        with os.scandir(own) as entries:
            return any(_OBJECT.match(entry.name) for entry in entries)
    finally:
        os.close(own)
