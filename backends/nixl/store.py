"""SGLang's NIXL store on local files: one file per object, in folders of one or more directories.

The key of an object, and the number and order of the directories, determine the place of its file
(`formats.keys.nixl`). Files in other places are no objects. Servers use no temporary files, so an
object can be short while it is written. The directories have no side files, because a server's
`clear` removes every file below them. Side files lie in the directory that the URL names for them.
Source: sglang srt/mem_cache/storage/nixl/, nixl_utils.py :: NixlFileManager, nixl_routing.py.
"""

from __future__ import annotations

import errno
import os
import re
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.backends.capabilities import ClearRemovesAll, SideFiles
from hicachectl.backends.disk.directory import Directory, Trust, existing_part
from hicachectl.backends.disk.durable import make_directories
from hicachectl.backends.disk.io import OPEN_DIRECTORY, allow_descriptors, undo_on_error
from hicachectl.backends.disk.names import OWN_PREFIX
from hicachectl.backends.object_files.listing import (
    LeftOut,
    files_in,
    held_names,
)
from hicachectl.backends.object_files.store import ObjectFiles
from hicachectl.backends.object_files.store_files import unavailable
from hicachectl.backends.object_files.tree import FOLDER_NAMES, FolderedDirectory, ObjectTree, Place
from hicachectl.backends.urls import SIDE_PARAMETER, NixlParams, params_of
from hicachectl.formats.errors import StoreUnavailable, UsageError
from hicachectl.formats.keys.nixl import BUFFERED, DIRECT, hashes_of, route, routes
from hicachectl.formats.wording import failed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Self

    from hicachectl.backends.base import Capacity
    from hicachectl.backends.concurrency import Concurrency
    from hicachectl.backends.urls import StoreUrl

_GRAMMARS = {"on": DIRECT, "off": BUFFERED}
# The last four digits of a temporary file's name are its directory and folder.
_TEMPORARY = re.compile(re.escape(OWN_PREFIX) + rb"-[0-9a-f]{28}([0-9a-f]{2})([0-9a-f]{2})\.tmp")
# Number of objects to look at in a directory. The chance that the keys of so many objects all
# choose the same one of two directories is 2**-63.
_SAMPLE = 64
_LOOKED = 1024  # files to look at in a directory
MAX_DIRECTORIES = 256  # temporary names have two digits for the directory


class NixlDisks(ObjectTree):
    """The open directories of a store, in order.

    high_watermark: percentage of a disk in use at which servers begin to remove objects.
    sample: files outside the folders of their keys, among the first files of each directory.
    """

    folders = True
    side_files = False  # HiCacheNixl.clear removes every file below the directories
    elsewhere = (
        "the number and order of the directories decide where the file of a key lies, so give all "
        "directories of the servers in the URL, in their order; otherwise no server finds the files"
    )

    def __init__(
        self, disks: Sequence[FolderedDirectory], *, high_watermark: float, complete: bool = False
    ) -> None:
        """Take over open directories; `close` closes them. Raises as `open` does.

        complete: whether servers are known to use only these directories now, even if they used
            more directories before.
        """
        self.path = ",".join(disk.path for disk in disks)
        self.high_watermark = high_watermark
        self._disks = tuple(disks)
        self.sample = self._sampled(complete=complete)

    @classmethod
    def open(
        cls,
        paths: Sequence[str],
        *,
        high_watermark: float,
        complete: bool = False,
        made: list[str] | None = None,
    ) -> Self:
        """Open directories; create missing directories if `made` is given.

        made: gets the paths of new directories, innermost first.
        Raises OSError. Raises UsageError for a directory that is given twice, or if `paths` lacks
        directories of the servers.
        """
        allow_descriptors(len(paths) * len(FOLDER_NAMES))
        with ExitStack() as opened:
            opened.callback(_remove_empty, [] if made is None else made)
            disks = []
            for path in paths:
                if made is not None:
                    made[:0] = make_directories(path)
                disks.append(FolderedDirectory(path, os.open(path, OPEN_DIRECTORY)))
                opened.callback(disks[-1].close)
            stats = [os.fstat(disk.descriptor) for disk in disks]
            if len({(st.st_dev, st.st_ino) for st in stats}) < len(disks):
                raise UsageError(
                    f"nixl://{','.join(paths)}: names a directory twice; name each directory once"
                )
            tree = cls(disks, high_watermark=high_watermark, complete=complete)
            opened.pop_all()
        return tree

    @classmethod
    def of_run(cls, path: str, descriptor: int) -> Self:
        """Take over the open directory of a quarantine run, which no server fills."""
        allow_descriptors(len(FOLDER_NAMES))
        return cls([FolderedDirectory(path, descriptor)], high_watermark=100, complete=True)

    def close(self) -> None:
        """Close all descriptors."""
        for disk in self._disks:
            disk.close()

    @property
    def descriptor(self) -> int:  # type: ignore[override]
        """Descriptor of the first directory."""
        return self._disks[0].descriptor

    @property
    def roots(self) -> tuple[int, ...]:
        """See `ObjectTree`."""
        return tuple(disk.descriptor for disk in self._disks)

    def outer(self, *, writes: bool) -> Directory:
        """Return the first directory.

        writes: whether a file may be created in it to learn the owner of new files.
        """
        return self._disks[0].outer(writes=writes)

    # places of objects

    def place(self, key: bytes) -> tuple[int, bytes]:
        """See `ObjectTree`."""
        disk, folder = self._route(key)
        return self._disks[disk].folder(folder, makes=False), key

    def place_for_new(self, key: bytes, nbytes: int = 0) -> tuple[int, bytes]:
        """See `ObjectTree`. Raises OSError if servers would remove objects to make room."""
        number, folder = self._route(key)
        disk = self._disks[number]
        if self._room(disk) <= nbytes:
            raise OSError(
                errno.ENOSPC,
                f"{disk.path} would be {self.high_watermark:g} % full, and servers would remove "
                "objects; free space, or give the servers' high_watermark",
            )
        return disk.folder(folder, makes=True), key

    def temporary_name(self, key: bytes, token: bytes, number: int) -> bytes:
        """See `ObjectTree`."""
        disk, folder = self._route(key)
        return b"%s-%s%04x%02x%s.tmp" % (OWN_PREFIX, token, number & 0xFFFF, disk, folder)

    def places(
        self, left_alone: list[str], concurrency: Concurrency | None = None
    ) -> Iterator[Place]:
        """Yield each directory, in which no file belongs directly, and then its folders."""
        for number, disk in enumerate(self._disks):
            yield Place(disk.descriptor, disk.path, lambda names: [False] * len(names))
            yield from self._folders(number, left_alone, concurrency)

    def _folders(
        self, number: int, left_alone: list[str], concurrency: Concurrency | None = None
    ) -> Iterator[Place]:
        disk = self._disks[number]
        for folder, descriptor in disk.existing_folders(left_alone, concurrency):
            holds = partial(self._holds, number, folder)
            yield Place(descriptor, f"{disk.path}/{folder.decode()}", holds)

    def _holds(self, number: int, folder: bytes, names: list[str]) -> list[bool]:
        keys = [os.fsencode(name) for name in names]
        disks, folders = routes(hashes_of(keys), len(self._disks))
        held = (disks == number) & (folders == int(folder, 16))
        # The name of a temporary file states its directory and folder.
        for at in np.flatnonzero([key.startswith(OWN_PREFIX) for key in keys]):
            held[at] = self._route(keys[at]) == (number, folder)
        found: list[bool] = held.tolist()
        return found

    def _sampled(self, *, complete: bool) -> LeftOut:
        """Look at some files of each directory. Return the files outside the folders of their keys.

        Two mistakes in the URL make the other checks mislead. If the URL has n of the k * n
        directories of the servers, all files can lie where a store of n directories has them, and
        pages only look incomplete. If the URL has another order, most files have wrong places, and
        a repair would remove the remaining files.
        complete: see `__init__`.
        Raises OSError. Raises UsageError for both mistakes, except with `complete`.
        """
        left_out, given = LeftOut(), len(self._disks)
        for number, disk in enumerate(self._disks):
            before = left_out.misplaced.count
            # Servers choose the directory by (hash >> 16) modulo the number of directories. If
            # servers have `times` times as many directories as `given`, the quotients
            # (hash >> 16) // given of the objects in one directory are equal modulo `times`.
            quotients = [(found >> 16) // given for found in self._some_objects(number, left_out)]
            misplaced = left_out.misplaced.count - before
            if complete or max(len(quotients), misplaced) < _SAMPLE:
                continue
            if misplaced > len(quotients):
                raise UsageError(
                    f"{disk.path}: {misplaced} of {misplaced + len(quotients)} files lie where "
                    "servers with these directories do not look; give all directories of its "
                    "servers, in their order; if the URL has them in this order, add "
                    f"directories={given} to the URL"
                )
            for times in range(2, MAX_DIRECTORIES // given + 1):
                if len({quotient % times for quotient in quotients}) == 1:
                    raise UsageError(
                        f"{disk.path}: has the objects of one of {times * given} directories, but "
                        f"the URL has {given}; give all directories of its servers, in their "
                        "order, and an empty directory for each lost one; if servers now use only "
                        f"the given directories, add directories={given} to the URL"
                    )
        return LeftOut(misplaced=left_out.misplaced, sampled=True)

    def _some_objects(self, number: int, left_out: LeftOut) -> list[int]:
        """Return the hashes of some objects in a directory.

        They are `_SAMPLE` or more, or fewer if the first `_LOOKED` files have fewer objects.
        """
        found: list[int] = []
        looked = 0
        for place in self._folders(number, []):
            for names, *_ in files_in(place.descriptor):
                some = [os.fsencode(name) for name in held_names(names[:_LOOKED], place, left_out)]
                found += hashes_of(key for key in some if not key.startswith(OWN_PREFIX)).tolist()
                looked += len(names)
                if len(found) >= _SAMPLE or looked >= _LOOKED:
                    return found
        return found

    def _route(self, name: bytes) -> tuple[int, bytes]:
        if match := _TEMPORARY.fullmatch(name):
            return int(match[1], 16) % len(self._disks), match[2]
        return route(name, len(self._disks))

    # space

    def free_bytes(self) -> int:
        """Return the bytes that fit below the watermark, if all directories get equal shares."""
        by_device: dict[int, list[FolderedDirectory]] = {}
        for disk in self._disks:
            by_device.setdefault(os.fstat(disk.descriptor).st_dev, []).append(disk)
        rooms = (self._room(disks[0]) // len(disks) for disks in by_device.values())
        return max(0, min(rooms)) * len(self._disks)

    def _room(self, disk: FolderedDirectory) -> int:
        """Return the bytes that fit below the watermark (HiCacheL3Cleaner._disk_usage_pct)."""
        space = os.fstatvfs(disk.descriptor)
        total, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
        return int(free - total * (1 - self.high_watermark / 100))


def _remove_empty(directories: Sequence[str]) -> None:
    with suppress(OSError):
        for directory in directories:
            os.rmdir(directory)  # noqa: PTH106 - names that are not UTF-8


class NixlStore(ObjectFiles, ClearRemovesAll):
    """The directories of a `nixl:` URL."""

    objects: NixlDisks

    def __init__(self, url: StoreUrl, *, made: list[str] | None = None) -> None:
        """Open the directories of a URL.

        made: see `NixlDisks.open`.
        """
        params = params_of(url, NixlParams)
        self._grammar = _GRAMMARS[params.direct_io]
        paths = _directories_in(url, params.directories)
        try:
            objects = NixlDisks.open(
                paths,
                high_watermark=params.high_watermark,
                complete=params.directories is not None,
                made=made,
            )
        except OSError as error:
            if made is None:
                raise unavailable(str(error.filename or url.path), error) from error
            next_step = "check the path and the permissions of its parent directories"
            raise StoreUnavailable(
                failed(url.path, "create the directories", error, next_step)
            ) from error
        super().__init__(objects, objects.path, str(url), objects.sample)
        self._made = made or []
        self.created = tuple(path for path in map(os.path.abspath, paths) if path in self._made)

    @property
    def grammar(self) -> str:
        """See `Store`. Servers with and without direct I/O divide pages differently."""
        return self._grammar

    @classmethod
    def from_url(cls, url: StoreUrl) -> NixlStore:
        """Open the directories of a URL."""
        return _class_for(url)(url)

    @classmethod
    def create(cls, url: StoreUrl) -> NixlStore:
        """Open or create the directories, as SGLang does. `close` removes new empty directories."""
        return _class_for(url)(url, made=[])

    @property
    def directories(self) -> tuple[Path, ...]:
        """Return the directories of the URL, in order."""
        return tuple(Path(path) for path in self.path.split(","))

    def free_bytes(self) -> int | None:
        """Return the bytes that fit below the servers' high watermark."""
        return self.objects.free_bytes()

    def capacity(self) -> Capacity | None:
        """Return None, because a removal may add nothing to `free_bytes`.

        That is so while the disks stay fuller than the watermark allows.
        """
        return None


class NixlStoreWithSideFiles(NixlStore, SideFiles):
    """The directories of a `nixl:` URL that names a directory for side files."""

    def __init__(self, url: StoreUrl, *, made: list[str] | None = None) -> None:
        """See `NixlStore`. Raises UsageError if side files would lie inside the store."""
        self._side = Path(url.params[SIDE_PARAMETER])
        if not self._side.is_absolute():
            raise UsageError(f"{url}: {SIDE_PARAMETER}: give an absolute path")
        super().__init__(url, made=made)
        with undo_on_error(self.close):
            self.refuse_inside(self._side, f"{url}: {SIDE_PARAMETER}")

    def side_directory(self) -> Path:
        """Return the directory that the URL names."""
        return self._side

    def open_side_directory(self, *, writes: bool, makes: bool = False) -> Directory | None:
        """Open the directory that the URL names for side files; None if it is missing.

        makes: whether to create a missing directory.
        """
        trust = self.trust(writes=writes)
        return Directory.at(self._side, writes=writes, makes=makes, trust=trust)

    def trust(self, *, writes: bool) -> Trust:
        """Return the users who may own side files. New files get no more readers than the store."""
        trust = Trust(existing_part(self._side)[0].stat(), writes=writes)
        trust.permissions = trust.permissions.intersection(self.readable_by(listing=True))
        return trust


def _class_for(url: StoreUrl) -> type[NixlStore]:
    return NixlStoreWithSideFiles if SIDE_PARAMETER in url.params else NixlStore


def _directories_in(url: StoreUrl, stated: int | None) -> list[str]:
    """Return the directories of a URL, in order (hicache_nixl.py :: _parse_storage_dirs).

    stated: number of directories in the URL's parameters; None if missing.
    """
    paths = [path.strip() for path in url.path.split(",")]
    for path in paths:
        if not path.startswith("/"):
            raise UsageError(
                f"{url}: each directory must be an absolute path, as in nixl:///disk0,/disk1"
            )
    if len(paths) > MAX_DIRECTORIES:
        raise UsageError(f"{url}: has {len(paths)} directories; give at most {MAX_DIRECTORIES}")
    if stated not in (None, len(paths)):
        raise UsageError(
            f"{url}: directories is {stated}, but the URL has {len(paths)}; give all "
            "directories of the servers, and their number"
        )
    return paths
