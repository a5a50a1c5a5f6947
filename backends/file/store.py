"""SGLang's file store: a directory with one file per object, named by the key.

Source: sglang srt/mem_cache/hicache_storage.py :: HiCacheFile. Only regular files are objects.
Symbolic links are not followed, and sub-directories such as `.hicachectl` are ignored. A directory
that is marked as having folders (`folders`) has its objects in its folders. Objects may have
trailers (`formats.trailer`), which do not count in the sizes of objects. Temporary files of
unfinished writes (SGLang: `.<32 hex>.tmp`, hicachectl: `.hicachectl-<32 hex>.tmp`) are listed like
objects, so that a check can report them.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from hicachectl.backends.base import Result, Rows, Status, keys_of
from hicachectl.backends.capabilities import OtherFiles, SideFiles, Trailed
from hicachectl.backends.disk.directory import Directory, Trust
from hicachectl.backends.disk.io import CHECK_MOUNT, OPEN_DIRECTORY, closing_descriptor, errors_as
from hicachectl.backends.disk.names import OWN_PREFIX, check_key
from hicachectl.backends.file.folders import ObjectDirectory, folder_of
from hicachectl.backends.object_files.epochs import Epochs
from hicachectl.backends.object_files.store import ObjectFiles
from hicachectl.backends.object_files.store_files import usable
from hicachectl.backends.object_files.trailers import NewTrailers
from hicachectl.backends.object_files.tree import SIDE_DIRECTORY
from hicachectl.backends.urls import FileParams, StoreUrl, params_of
from hicachectl.formats.errors import StoreUnavailable, UntrustedError, UsageError
from hicachectl.formats.eviction import Policy

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.formats.identity import Identity
    from hicachectl.formats.keys.base import Affix
    from hicachectl.formats.marker import Marker


class FileStore(ObjectFiles, OtherFiles, SideFiles, Trailed):
    """A directory of objects, and its side files."""

    grammar = "file"
    objects: ObjectDirectory

    def __init__(
        self, path: str | os.PathLike[str], objects: ObjectDirectory | None = None
    ) -> None:
        """Open a directory.

        objects: the directory if it is open already; this store takes it over, and closes it.
        """
        path = os.path.abspath(path)  # noqa: PTH100 - keeps names that are not UTF-8
        self._mark_problem = ""  # reason for ignoring the mark of folders; empty if it is trusted
        with usable(path):
            objects = objects or self._opened(path, os.open(path, OPEN_DIRECTORY))
        super().__init__(objects, path, str(StoreUrl("file", path)))

    def _opened(self, path: str, descriptor: int) -> ObjectDirectory:
        """Open a directory as flat or with folders, as its mark says.

        A mark that is not trusted is ignored, so that the directory counts as flat. A remark says
        so.
        """
        with closing_descriptor(descriptor):
            # This raises without the right to search the directory (x). To open and to list it, the
            # right to read is enough.
            os.stat(".", dir_fd=descriptor)
            try:
                return ObjectDirectory.within(path, os.dup(descriptor))
            except (UntrustedError, PermissionError) as error:
                self._mark_problem = str(error)
                return ObjectDirectory(path, os.dup(descriptor), folders=False)

    @classmethod
    def from_url(cls, url: StoreUrl) -> Self:
        """Open the directory of a `file:` URL."""
        store = cls(url.path)
        if params_of(url, FileParams).folders and not store.objects.folders:
            store.close()
            raise UsageError(f"{store.path}: is not marked as having folders; leave out folders=")
        return store

    @classmethod
    def create(cls, url: StoreUrl) -> Self:
        """Open or create the directory of a `file:` URL, as SGLang does.

        `close` removes new directories that are still empty. Raises StoreUnavailable, UsageError.
        """
        made: list[str] = []
        folders = params_of(url, FileParams).folders is not None or None
        next_step = "check the path and the permissions of its parent directories"
        with errors_as(StoreUnavailable, url.path, "create the directory", next_step):
            objects = ObjectDirectory.create(url.path, folders=folders, made=made)
        store = cls(url.path, objects)
        store._made = made
        store.created = (store.path,) if made else ()
        return store

    # side files

    def side_directory(self) -> Path:
        """Return the path of `.hicachectl`, which SGLang and its `clear()` ignore."""
        return Path(self.path) / SIDE_DIRECTORY

    def open_side_directory(self, *, writes: bool, makes: bool = False) -> Directory | None:
        """Open `.hicachectl` through the store's descriptor; None if it is missing.

        makes: whether to create a missing directory.
        """
        with self.objects.outer(writes=writes) as here:
            if makes:
                return here.make_directory(SIDE_DIRECTORY, exist_ok=True)
            return here.directory(SIDE_DIRECTORY) if here.has(SIDE_DIRECTORY) else None

    def other_files(self, objects: Any) -> tuple[list[str], list[str]]:
        """See `OtherFiles`. Folders of objects are not among the directories."""
        directories: list[str] = []
        others: list[str] = []
        with (
            errors_as(StoreUnavailable, self.path, "read the directory", CHECK_MOUNT),
            os.scandir(self.path) as entries,
        ):
            for entry in entries:
                is_directory = entry.is_dir(follow_symlinks=False)
                if entry.name == os.fsdecode(OWN_PREFIX) or (
                    is_directory and self.objects.is_folder(os.fsencode(entry.name))
                ):
                    continue
                (directories if is_directory else others).append(entry.name)
        if self.objects.folders:
            keys = map(os.fsdecode, objects.column("key").to_pylist())
            others += [key for key in keys if folder_of(os.fsencode(key)) is not None]
        return directories, others

    def trust(self, *, writes: bool) -> Trust:
        """Return the users who may own files below the store's directory."""
        return Trust(os.fstat(self.objects.descriptor), writes=writes)

    # listing

    @property
    def remarks(self) -> tuple[str, ...]:
        """Report what the last listing left out, and side files that are not trusted."""
        remarks = super().remarks
        if problem := self._untrusted:
            remarks += (f"{problem}; folders and trailers, if there are any, go unnoticed",)
        return remarks

    @property
    def _untrusted(self) -> str:
        """Reason for ignoring the files in the side directory; "" if they are trusted."""
        return self._mark_problem or self._files.sizes.problem

    def _refuse_untrusted(self) -> None:
        """Raise UntrustedError before a change, if folders and trailers could go unnoticed."""
        self._files.sizes.current()
        if self._untrusted:
            raise UntrustedError(self._untrusted)

    # trailers

    def markers(self) -> list[Marker]:
        """Return the markers in `.hicachectl/plugin`."""
        return list(self._files.sizes.current())

    def expect_identities(self, identities: Mapping[Affix, Identity]) -> None:
        """See `Trailed`."""
        self._files.checks.expect(identities)

    def write_trailers(self, identities: Mapping[Affix, Identity], digest: str) -> None:
        """See `Trailed`. Raises UsageError for an unknown digest."""
        self._writer.trailers = NewTrailers(identities, digest)

    def adopt(self, rows: Rows, sizes: IntArray) -> Result:
        """See `Trailed`."""
        from hicachectl.backends.object_files.adoption import FileAdopter

        self._refuse_untrusted()
        trailers = self._writer.trailers
        assert trailers is not None, "write_trailers comes first"
        return FileAdopter(self._files, self._writer, trailers).adopt(rows, sizes)

    def eviction(self) -> Policy:
        """Return the policy of the plug-in if it has written to the store, else HiCacheFile's."""
        return Policy.PLUGIN if self.markers() else Policy.HICACHEFILE

    def add_markers(self, markers: Iterable[Marker]) -> None:
        """See `Trailed`."""
        self._refuse_untrusted()
        with usable(self.path):
            self._files.sizes.ensure(set(markers))

    def cleared_since(self, rows: Rows, since_ns: int) -> BoolArray:
        """See `Trailed`."""
        with usable(self.path):
            epochs = Epochs(self.objects)
        return np.array([epochs.of(key) >= since_ns for key in keys_of(rows)], dtype=np.bool_)

    def remove_cleared(self, rows: Rows) -> Result:
        """Remove the files of objects that a `clear` made misses, and sync their directories."""
        self._refuse_untrusted()
        keys = keys_of(rows)
        changed: set[int] = set()  # descriptors of directories

        def remove(index: int) -> Status:
            check_key(keys[index])
            if not self._writer.remove_stale(keys[index]):
                return Status.GONE
            changed.add(self.objects.place(keys[index])[0])
            return Status.OK

        return self._removed(len(keys), remove, changed)

    def read_trailers(self, rows: Rows) -> Any:
        """Read the last bytes of each object's file."""
        return self._reader.trailers(rows)

    @contextmanager
    def unchecked(self) -> Iterator[None]:
        """See `Trailed`."""
        with self._files.checks.suspended():
            yield
