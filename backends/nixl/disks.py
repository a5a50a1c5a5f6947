"""The directories of a NIXL store, usually one per disk.

Source: sglang srt/mem_cache/storage/nixl/nixl_utils.py :: NixlFileManager, nixl_routing.py.
"""

from __future__ import annotations

import errno
import os
import re
import resource
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.backends.disk.durable import make_directories
from hicachectl.backends.disk.files import OWN_PREFIX
from hicachectl.backends.object_files.tree import FOLDER_NAMES, FolderedDirectory, ObjectTree, Place
from hicachectl.formats.errors import UsageError
from hicachectl.formats.keys.nixl import hashes_of, route, routes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Self

    import numpy.typing as npt

    from hicachectl.backends.disk.directory import Directory

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# The last four digits of a temporary file's name are its directory and folder.
_TEMPORARY = re.compile(re.escape(OWN_PREFIX) + rb"-[0-9a-f]{28}([0-9a-f]{2})([0-9a-f]{2})\.tmp")
_SAMPLE = 64  # objects; by chance, all lie in one of two directories once in 2**63 stores
MAX_DIRECTORIES = 256  # temporary names have two digits for the directory


class NixlDisks(ObjectTree):
    """The open directories of a store, in order.

    high_watermark: percentage of a disk in use at which servers begin to remove objects.
    """

    folders = True
    side_files = False  # HiCacheNixl.clear removes every file below the directories
    elsewhere = (
        "the number and order of the directories decide where the file of a key lies, so give the "
        "URL those of the servers; otherwise no server finds the files"
    )

    def __init__(self, disks: Sequence[FolderedDirectory], *, high_watermark: float) -> None:
        """Take over open directories; `close` closes them."""
        self.path = ",".join(disk.path for disk in disks)
        self.high_watermark = high_watermark
        self._disks = tuple(disks)

    @classmethod
    def open(
        cls, paths: Sequence[str], *, high_watermark: float, made: list[str] | None = None
    ) -> Self:
        """Open directories; create those that are missing if `made` is given.

        made: gets the paths of new directories, innermost first. Raises OSError, and UsageError
        for a directory that is given twice.
        """
        _allow_descriptors(len(paths) * len(FOLDER_NAMES))
        with ExitStack() as opened:
            disks = []
            for path in paths:
                if made is not None:
                    made[:0] = make_directories(path)
                disks.append(FolderedDirectory(path, os.open(path, _OPEN)))
                opened.callback(disks[-1].close)
            facts = [os.fstat(disk.descriptor) for disk in disks]
            if len({(one.st_dev, one.st_ino) for one in facts}) < len(disks):
                raise UsageError(f"nixl://{','.join(paths)}: names a directory twice")
            opened.pop_all()
        return cls(disks, high_watermark=high_watermark)

    def close(self) -> None:
        """Close all descriptors."""
        for disk in self._disks:
            disk.close()

    @property
    def descriptor(self) -> int:  # type: ignore[override]
        """The first directory's descriptor."""
        return self._disks[0].descriptor

    @property
    def roots(self) -> tuple[int, ...]:
        """See `ObjectTree`."""
        return tuple(disk.descriptor for disk in self._disks)

    def outer(self, *, writes: bool) -> Directory:
        """Return the first directory. writes: the caller creates a file to learn its owner."""
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
                "objects; free space, or give their high_watermark",
            )
        return disk.folder(folder, makes=True), key

    def temporary_name(self, key: bytes, token: bytes, number: int) -> bytes:
        """See `ObjectTree`."""
        disk, folder = self._route(key)
        return b"%s-%s%04x%02x%s.tmp" % (OWN_PREFIX, token, number & 0xFFFF, disk, folder)

    def directories(self, left_alone: list[str]) -> Iterator[tuple[bytes | None, int]]:
        """See `ObjectTree`."""
        for disk in self._disks:
            yield from disk.existing_folders(left_alone)

    def places(self, left_alone: list[str]) -> Iterator[Place]:
        """Yield the folders, and the directories, where no file belongs.

        Their `holds` raise UsageError if directories of the servers are missing.
        """
        for number, disk in enumerate(self._disks):
            sample = _Sample(disk.path, len(self._disks))
            yield Place(disk.descriptor, disk.path, lambda names: [False] * len(names))
            for folder, descriptor in disk.existing_folders(left_alone):
                path = f"{disk.path}/{folder.decode()}"
                yield Place(descriptor, path, partial(self._holds, number, folder, sample))

    def _holds(self, number: int, folder: bytes, sample: _Sample, names: list[str]) -> list[bool]:
        keys = [os.fsencode(name) for name in names]
        hashes = hashes_of(keys)
        disks, folders = routes(hashes, len(self._disks))
        held = (disks == number) & (folders == int(folder, 16))
        sample.add(hashes[held])
        for at in np.flatnonzero([key.startswith(OWN_PREFIX) for key in keys]):
            held[at] = self._route(keys[at]) == (number, folder)
        found: list[bool] = held.tolist()
        return found

    def _route(self, name: bytes) -> tuple[int, bytes]:
        if match := _TEMPORARY.fullmatch(name):
            return int(match[1], 16) % len(self._disks), match[2]
        return route(name, len(self._disks))

    # space

    def free_bytes(self) -> int:
        """Return the bytes that can be written, evenly to all directories, below the watermark."""
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


class _Sample:
    """Objects of one directory, which tell whether some of the store's directories are missing.

    With n of k * n directories given, all files can lie where n directories would have them, and
    pages only look incomplete.
    """

    def __init__(self, path: str, directories: int) -> None:
        self._path = path
        self._directories = directories
        self._hashes: list[int] = []

    def add(self, hashes: npt.NDArray[np.uint64]) -> None:
        """Add objects until there are enough. Raises UsageError if directories are missing."""
        missing = _SAMPLE - len(self._hashes)
        if missing <= 0:
            return
        self._hashes += hashes[:missing].tolist()
        if len(self._hashes) < _SAMPLE:
            return
        turns = [(number >> 16) // self._directories for number in self._hashes]
        for times in range(2, MAX_DIRECTORIES // self._directories + 1):
            if len({turn % times for turn in turns}) == 1:
                raise UsageError(
                    f"{self._path}: has the objects of one of {times * self._directories} "
                    f"directories, but {self._directories} given; give all directories of its "
                    "servers, in their order, and an empty one for each that is lost"
                )


def _allow_descriptors(more: int) -> None:
    """Raise this process's limit of open files, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = soft + more
    with suppress(OSError, ValueError):
        top = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, top), hard))
