"""The directory of a file store: flat, or with 256 folders.

A flat directory is SGLang's form (hicache_storage.py :: HiCacheFile). The file
`.hicachectl/folders` marks a directory with folders. There, a file lies in the folder whose name is
the first two hex digits of its key. The name of a temporary file of hicachectl has the two digits
of its folder before `.tmp`.
"""

from __future__ import annotations

import os
import re
from functools import partial
from typing import TYPE_CHECKING, Self

from hicachectl.backends.disk.directory import Directory
from hicachectl.backends.disk.durable import is_named, make_directories
from hicachectl.backends.disk.io import (
    OPEN_DIRECTORY,
    closing_descriptor,
    entries_of,
    undo_on_error,
)
from hicachectl.backends.disk.names import OWN_PREFIX
from hicachectl.backends.object_files.tree import (
    FOLDER_NAMES,
    SIDE_DIRECTORY,
    FolderedDirectory,
    ObjectTree,
    Place,
)
from hicachectl.formats.errors import FormatError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hicachectl.backends.concurrency import Concurrency

FOLDERS_FILE = "folders"
_FORM = b"hex2\n"  # content of FOLDERS_FILE
_OWN_TEMPORARY = OWN_PREFIX + b"-"
_OBJECT = re.compile(r"[0-9a-f]{64}[._]")


def folder_of(name: bytes) -> bytes | None:
    """Return the folder to which a file belongs in a directory with folders.

    Return None for a name without the digits of a folder. Such a file lies beside the folders.
    """
    folder = name[-6:-4] if name.startswith(_OWN_TEMPORARY) else name[:2]
    return folder if folder in FOLDER_NAMES else None


class ObjectDirectory(FolderedDirectory, ObjectTree):
    """An open directory of objects.

    path: the path by which the directory was opened.
    Descriptors keep their numbers until `close`, even if `reopen` makes the directory again.
    """

    elsewhere = (
        "no server finds them, because HiCacheFile cannot share a directory with folders; give "
        "HiCacheFile a directory of its own, and migrate"
    )

    def __init__(self, path: str, descriptor: int, *, folders: bool) -> None:
        """Take over a directory's descriptor; `close` closes it."""
        super().__init__(path, descriptor)
        self.folders = folders

    @classmethod
    def open(cls, path: str) -> Self:
        """Open a directory in the form that its mark states. Its path may lead through links.

        Raises OSError. Raises UntrustedError for a mark that is not trusted, and FormatError for an
        unknown mark.
        """
        return cls.within(path, os.open(path, OPEN_DIRECTORY))

    @classmethod
    def within(cls, path: str, descriptor: int) -> Self:
        """Take over the descriptor of an open directory; otherwise like `open`."""
        with undo_on_error(partial(os.close, descriptor)):
            return cls(path, descriptor, folders=_is_marked(path, descriptor))

    @classmethod
    def create(
        cls, path: str, *, folders: bool | None = None, made: list[str] | None = None
    ) -> Self:
        """Open a directory; create it, with its parents, if it is missing.

        folders: whether a new or empty directory gets folders. None keeps the form of an existing
            directory, and makes a new directory flat.
        made: gets the paths of new directories, innermost first.
        Raises OSError, and UsageError for a directory of the other form.
        """
        new = make_directories(path)
        if made is not None:
            made.extend(new)
        descriptor = os.open(path, OPEN_DIRECTORY)
        with undo_on_error(partial(os.close, descriptor)):
            return cls(path, descriptor, folders=_ensure_form(path, descriptor, folders))

    # places of objects

    def is_folder(self, name: bytes) -> bool:
        """Return whether a directory of this name holds objects."""
        return self.folders and name in FOLDER_NAMES

    def place(self, key: bytes) -> tuple[int, bytes]:
        """See `ObjectTree`."""
        folder = folder_of(key) if self.folders else None
        return (self.descriptor if folder is None else self.folder(folder, makes=False)), key

    def place_for_new(self, key: bytes, nbytes: int = 0) -> tuple[int, bytes]:
        """See `ObjectTree`."""
        if not self.folders:
            return self.descriptor, key
        folder = folder_of(key)
        if folder is None:
            raise OSError(0, "the key does not start with the hex digits that name its folder")
        return self.folder(folder, makes=True), key

    def temporary_name(self, key: bytes, token: bytes, number: int) -> bytes:
        """See `ObjectTree`."""
        folder = folder_of(key) if self.folders else None
        if folder is None:
            return b"%s%s%08x.tmp" % (_OWN_TEMPORARY, token, number & 0xFFFFFFFF)
        return b"%s%s%06x%s.tmp" % (_OWN_TEMPORARY, token, number & 0xFFFFFF, folder)

    def places(
        self, left_alone: list[str], concurrency: Concurrency | None = None
    ) -> Iterator[Place]:
        """See `ObjectTree`."""
        if not self.folders:
            yield Place(self.descriptor, self.path)
            return
        yield Place(self.descriptor, self.path, _holder(None))
        for folder, descriptor in self.existing_folders(left_alone, concurrency):
            yield Place(descriptor, f"{self.path}/{folder.decode()}", _holder(folder))

    # directories that vanish

    @property
    def vanished(self) -> bool:
        """Return whether the path no longer names this directory.

        Raises OSError if the path cannot be looked up.
        """
        try:
            return not is_named(self.descriptor, self.path, follow=True)
        except NotADirectoryError:
            return True

    def reopen(self, *, makes: bool = True) -> None:
        """Open the directory that the path names now, in place of the earlier directory.

        makes: whether to make a missing directory again, and to require the earlier form. If False,
            open the directory in whatever form it has.
        Calls that still use the earlier directory may fail. Raises as `create` or `open` does.
        """
        if makes:
            make_directories(self.path)
        with closing_descriptor(os.open(self.path, OPEN_DIRECTORY)) as opened:
            folders = _ensure_form(self.path, opened, self.folders if makes else None)
            with self._opening:
                if self.descriptor < 0:
                    raise ValueError("The directory is closed")
                os.dup2(opened, self.descriptor, inheritable=False)
                self._current = set()
                self.folders = folders


def _holder(folder: bytes | None) -> Callable[[list[str]], list[bool]]:
    """Return a function that tells which files belong in a folder.

    folder: name of the folder; None for files that belong beside the folders.
    """
    if folder is None:
        return lambda names: [folder_of(os.fsencode(name)) is None for name in names]
    text = os.fsdecode(folder)
    return lambda names: [
        name.startswith(text) or folder_of(os.fsencode(name)) == folder for name in names
    ]


def _is_marked(path: str, descriptor: int) -> bool:
    """Return whether a directory is marked as having folders."""
    try:
        with (
            Directory.again(descriptor, path, writes=False) as here,
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


def _ensure_form(path: str, descriptor: int, folders: bool | None) -> bool:
    """Mark a directory that has no objects and is to get folders. Return whether it has folders.

    folders: see `ObjectDirectory.create`.
    Raises UsageError for a directory of the other form.
    """
    marked = _is_marked(path, descriptor)
    if folders is None or folders is marked:
        return marked
    if marked:
        raise UsageError(
            f"{path}: has folders, but was to be flat; open the store again, in the form that the "
            "directory has now"
        )
    if _has_flat_objects(descriptor):
        raise UsageError(
            f"{path}: has objects outside folders; give an empty directory, and migrate"
        )
    with (
        Directory.again(descriptor, path, writes=True) as here,
        here.make_directory(SIDE_DIRECTORY, exist_ok=True) as side,
    ):
        mark_folders(side)
    return True


def mark_folders(side: Directory) -> None:
    """Mark a directory durably as having folders. Raises OSError.

    side: the `.hicachectl` of the directory.
    """
    side.write(FOLDERS_FILE, _FORM, shared=True)


def _has_flat_objects(descriptor: int) -> bool:
    with entries_of(descriptor) as entries:
        return any(_OBJECT.match(entry.name) for entry in entries)
