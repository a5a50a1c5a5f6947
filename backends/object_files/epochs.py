"""Epochs, by which `clear` makes all objects of a suffix misses at once, without removing them.

The epoch of a suffix is a time in the text of a file in `.hicachectl/`. An object is stale if its
ctime is not later than the epoch. A rename sets the ctime, so the ctime is the time at which an
object got its name. The ctime and the epoch are both times of the file system's
clock. Mtimes do not suffice, because copies keep them.

The first versions of the plug-in use only the ctime of the epoch's file, and overwrite the
beginning of its text with the suffix. So if the text does not have the present form, the ctime of
the file is the epoch. The ctime is later than the time in a text. Therefore the first versions take
a few more objects for stale.

Stale objects do not count as objects of the store. The plug-in removes them after a while.
"""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hicachectl.backends.disk.io import OPEN_FILE, closing_descriptor, file_system_ns
from hicachectl.backends.disk.names import OWN_PREFIX, VERSION
from hicachectl.formats.errors import UntrustedError
from hicachectl.formats.objects import PAGE_DIGITS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicachectl.backends.base import Rows
    from hicachectl.backends.disk.directory import Directory
    from hicachectl.backends.object_files.tree import ObjectTree
    from hicachectl.formats.arrays import IntArray

_OPEN_SIDE = OPEN_FILE | os.O_DIRECTORY
_PREFIX = b"epoch-"
_TEXT = re.compile(rb"epoch ([1-9][0-9]{0,18}) [^\n]*\n")  # Unix nanoseconds, the suffix
_MOST_BYTES = 4096
_CTIME = 2  # index of the ctime in a version
_LONGEST = 1 << 30  # binary_slice needs an end


def owner_of(suffix: bytes) -> bytes:
    """Return the 16 hex digits that name a suffix in `.hicachectl/` and in temporary names."""
    return blake2b(suffix, digest_size=8).hexdigest().encode()


def open_side(directory: ObjectTree) -> Directory:
    """Open `.hicachectl` of a directory; create it if missing. Raises OSError, UntrustedError."""
    with directory.outer(writes=True) as here:
        return here.make_directory(os.fsdecode(OWN_PREFIX), exist_ok=True)


def begin_epoch(directory: ObjectTree, suffixes: Iterable[bytes]) -> None:
    """Make all present objects of the suffixes stale. Raises OSError, UntrustedError."""
    with open_side(directory) as side:
        for suffix in suffixes:
            name = os.fsdecode(_name(suffix))
            with suppress(FileNotFoundError):
                st = os.stat(name, dir_fd=side.descriptor, follow_symlinks=False)
                side.check(name, st)
            try:
                now_ns = file_system_ns(side.descriptor)
                side.write(name, b"epoch %d %s\n" % (now_ns, suffix), shared=True)
            except OSError:  # for example on a full disk, where a file without a text still fits
                _begin_by_ctime(side, name)


def _begin_by_ctime(side: Directory, name: str) -> None:
    """Begin an epoch at the ctime of a file without a text, as the first plug-in versions did."""
    with closing_descriptor(side.open_lock(name)) as descriptor:
        os.truncate(descriptor, 0)
        os.utime(descriptor)  # sets the ctime


def _epoch_in(name: bytes, side: int) -> int:
    """Return a file's epoch.

    For an unreadable file, it is the file's ctime. For a file that is not regular, it is 0.
    """
    try:
        return _Epoch.read(name, side).time_ns
    except OSError:
        st = os.stat(name, dir_fd=side, follow_symlinks=False)
        return st.st_ctime_ns if stat.S_ISREG(st.st_mode) else 0


class _Epoch(NamedTuple):
    """An epoch, and the state of its file when it was read."""

    time_ns: int
    state: tuple[int, ...]

    @classmethod
    def read(cls, name: bytes, side: int, known: _Epoch | None = None) -> _Epoch:
        """Read an epoch. The file is opened, because NFS clients ask the server only then.

        known: the result of an earlier call, returned if the file is unchanged.
        Raises OSError.
        """
        descriptor = os.open(name, OPEN_FILE, dir_fd=side)
        try:
            st = os.fstat(descriptor)
            state = st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns
            if known is not None and known.state == state:
                return known
            text = _TEXT.fullmatch(os.pread(descriptor, _MOST_BYTES, 0))
        finally:
            os.close(descriptor)
        # `begin_epoch` writes no time later than the file's ctime.
        time_ns = min(int(text[1]), st.st_ctime_ns) if text else st.st_ctime_ns
        return cls(time_ns, state)


class EpochReader:
    """The epoch of one suffix, as the last call of `look` found it.

    time_ns: the epoch, Unix nanoseconds; 0 if there is none.
    """

    def __init__(self, directory: ObjectTree, suffix: bytes) -> None:
        self.time_ns = 0
        self._directory = directory
        self._name = _name(suffix)
        self._epoch: _Epoch | None = None

    def look(self) -> int:
        """Read the epoch into `time_ns`, and return it. If the file is unreadable, keep `time_ns`.

        Call `look` once in each call that SGLang makes. Several threads may call it at once.
        """
        try:
            side = os.open(OWN_PREFIX, _OPEN_SIDE, dir_fd=self._directory.descriptor)
            try:
                epoch = _Epoch.read(self._name, side, self._epoch)
            finally:
                os.close(side)
        except FileNotFoundError:
            self._epoch, self.time_ns = None, 0
            return 0
        except OSError:
            return self.time_ns
        self._epoch, self.time_ns = epoch, epoch.time_ns
        return epoch.time_ns

    def stale(self, st: os.stat_result) -> bool:
        """Return whether an object got its name before the epoch, or at the same time."""
        return st.st_ctime_ns <= self.time_ns


def _name(suffix: bytes) -> bytes:
    return _PREFIX + owner_of(suffix)


def suffixes_of(rows: Rows) -> Any:
    """Return the part of each key after its page hash, as a binary array."""
    import pyarrow.compute as pc  # late, because the import takes 20 ms at start-up

    return pc.binary_slice(rows.column("key"), PAGE_DIGITS, _LONGEST)


class Epochs:
    """The epochs of a directory, read once. An instance without epochs is false.

    A directory has no epochs if its `.hicachectl` is missing, unreadable or not trusted.
    """

    def __init__(self, objects: ObjectTree) -> None:
        """Read the epochs. Raises OSError."""
        self._objects = objects
        self._by_owner: dict[bytes, int] = {}
        self._by_suffix: dict[bytes, int] = {}
        if not objects.side_files:
            return
        with (
            suppress(FileNotFoundError, PermissionError, UntrustedError),
            objects.outer(writes=False) as here,
            here.directory(os.fsdecode(OWN_PREFIX)) as side,
        ):
            for name in map(os.fsencode, os.listdir(side.descriptor)):  # noqa: PTH208 - no path
                if name.startswith(_PREFIX):
                    with suppress(FileNotFoundError):
                        owner = name.removeprefix(_PREFIX)
                        self._by_owner[owner] = _epoch_in(name, side.descriptor)

    def __bool__(self) -> bool:
        return bool(self._by_owner)

    def of(self, key: bytes) -> int:
        """Return the epoch of a key's suffix, Unix nanoseconds; 0 if it has none."""
        suffix = key[PAGE_DIGITS:]
        if suffix not in self._by_suffix:
            self._by_suffix[suffix] = self._by_owner.get(owner_of(suffix), 0)
        return self._by_suffix[suffix]

    def stale(self, key: bytes, st: os.stat_result) -> bool:
        """Return whether a key's file is stale."""
        return st.st_ctime_ns <= self.of(key)

    def times(self, batch: Any) -> Any | None:
        """Return the epoch of each stale object, int64, null for other objects.

        Return None if no object is stale.

        batch: batch of a scan. Without the column `version`, each object whose suffix has an epoch
            costs a stat.
        Raises OSError.
        """
        if not self or not len(batch):
            return None
        import pyarrow as pa  # the plug-in works without it

        suffixes = suffixes_of(batch).dictionary_encode()
        own = [self._by_owner.get(owner_of(end), 0) for end in suffixes.dictionary.to_pylist()]
        epochs = np.array(own, dtype=np.int64)[suffixes.indices.to_numpy()]
        rows = np.flatnonzero(epochs)
        stale = rows[self._ctimes(batch, rows) <= epochs[rows]]
        if not len(stale):
            return None
        fresh = np.ones(len(batch), dtype=np.bool_)
        fresh[stale] = False
        return pa.array(epochs, pa.int64(), mask=fresh)

    def _ctimes(self, batch: Any, rows: IntArray) -> IntArray:
        """Return the ctimes of some rows' files: [rows] int64, the maximum for missing files."""
        import pyarrow as pa

        ctimes = np.full(len(rows), np.iinfo(np.int64).max)
        if "version" in batch.schema.names:
            versions = batch.column("version").take(pa.array(rows)).to_pylist()
            found = (None if v is None else VERSION.unpack(v)[_CTIME] for v in versions)
        else:
            keys = batch.column("key").take(pa.array(rows)).to_pylist()
            found = (None if st is None else st.st_ctime_ns for st in map(self._look, keys))
        for place, ctime in enumerate(found):
            if ctime is not None:
                ctimes[place] = ctime
        return ctimes

    def _look(self, key: bytes) -> os.stat_result | None:
        with suppress(FileNotFoundError):
            here, name = self._objects.place(key)
            return os.stat(name, dir_fd=here, follow_symlinks=False)
        return None
