"""Read and write markers, which are files in `.hicachectl/plugin/` of a file store.

Markers tell which file sizes include a trailer, so that listings need not open the objects.
"""

from __future__ import annotations

import os
import re
import threading
import time
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hicachectl.backends.disk.io import entries_of
from hicachectl.backends.object_files.epochs import suffixes_of
from hicachectl.backends.object_files.tree import SIDE_DIRECTORY
from hicachectl.formats.errors import FormatError, UntrustedError
from hicachectl.formats.marker import MAX_MARKER_BYTES, Marker, dump_marker, parse_marker
from hicachectl.formats.trailer import TRAILER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicachectl.backends.base import Rows
    from hicachectl.backends.disk.directory import Directory
    from hicachectl.backends.object_files.tree import ObjectTree
    from hicachectl.formats.arrays import IntArray
    from hicachectl.formats.errors import StoreUnavailable
    from hicachectl.formats.identity import Identity

MARKER_DIRECTORY = "plugin"
MAX_MARKERS = 1 << 16  # large, because markers of earlier identities stay in the store
_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{16}\.json")
_PATH = f"{SIDE_DIRECTORY}/{MARKER_DIRECTORY}"
# Two markers can be written within one tick of the file system's clock. Then the second marker does
# not change the times of the directory.
_TICK_S = 1.0

__all__ = ["MarkedSizes", "Marker", "read_markers", "write_marker"]


def write_marker(directory: Directory, marker: Marker) -> None:
    """Write a marker durably if it does not exist. Several processes may write it at once.

    directory: directory of the store.
    Raises OSError, UntrustedError.
    """
    with (
        directory.make_directory(SIDE_DIRECTORY, exist_ok=True) as side,
        side.make_directory(MARKER_DIRECTORY, exist_ok=True) as markers,
    ):
        if not markers.has(marker.name):
            markers.write(marker.name, dump_marker(marker), shared=True)


def read_markers(directory: Directory) -> list[Marker]:
    """Return the markers of a store, sorted by file name.

    directory: directory of the store. Files with other names, such as temporary files, are ignored.
    Raises OSError, UntrustedError, and FormatError, which names the file.
    """
    found: list[Marker] = []
    with (
        suppress(FileNotFoundError),
        directory.directory(SIDE_DIRECTORY) as side,
        side.directory(MARKER_DIRECTORY) as markers,
    ):
        for name in _names(markers):
            with suppress(FileNotFoundError):  # removed since it was listed
                found.append(_read(markers, name))
    return found


def _names(markers: Directory) -> list[str]:
    with entries_of(markers.descriptor) as entries:
        names = [entry.name for entry in islice(entries, MAX_MARKERS + 1)]
    if len(names) > MAX_MARKERS:
        raise FormatError(
            f"{markers.path}: has more than {MAX_MARKERS} files; remove the markers of identities "
            "that no server uses"
        )
    return sorted(name for name in names if _NAME.fullmatch(name))


def _read(markers: Directory, name: str) -> Marker:
    source = f"{markers.path}/{name}"
    marker = parse_marker(markers.read(name, MAX_MARKER_BYTES + 1), source)
    if marker.name != name:
        raise FormatError(f"{source}: its content belongs under {marker.name}; remove the file")
    return marker


class _Table(NamedTuple):
    """Markers as arrays.

    suffixes: distinct suffixes, binary.
    sizes: distinct sizes of files with a trailer, sorted, int64.
    pairs: for each marker, index of the suffix * len(sizes) + index of the size, sorted, int64.
    """

    suffixes: Any
    sizes: IntArray
    pairs: IntArray


class MarkedSizes:
    """The markers of one store, read again when their directory changes.

    problem: reason for ignoring the markers; "" if they are used.
    """

    def __init__(
        self, objects: ObjectTree, unavailable: Callable[[OSError], StoreUnavailable]
    ) -> None:
        """Use an open tree. unavailable: returns the exception for a store that cannot be used."""
        self._objects = objects
        self._unavailable = unavailable
        self._lock = threading.Lock()
        self._state: tuple[int, ...] | None = None  # state of the directory when it was read
        self._since = 0.0  # `time.monotonic()` when the directory was first seen in this state
        self._settled = False  # whether a further marker is certain to change the state
        self._markers: list[Marker] = []
        self._known: set[Marker] = set()
        self._identities: dict[bytes, Identity] = {}  # identity of each hash
        self._table = _table([])  # replaced as a whole, because other threads may be using it
        self.problem = ""

    def current(self) -> list[Marker]:
        """Return the store's markers.

        Raises StoreUnavailable, UntrustedError and FormatError as `markers.read_markers` does.
        """
        with self._lock:
            try:
                self._refresh()
            except OSError as error:
                raise self._unavailable(error) from error
            return self._markers

    def identity_of(self, hash_: bytes) -> Identity | None:
        """Return the identity with a hash; None if the markers that were read last lack it."""
        return self._identities.get(hash_)

    def ensure(self, markers: set[Marker]) -> None:
        """Write the markers that the store lacks. Raises OSError, UntrustedError."""
        missing = markers - self._known
        if not missing:
            return
        with self._objects.outer(writes=True) as directory:
            for marker in missing:
                write_marker(directory, marker)
        self.current()
        with self._lock:
            self._known |= missing

    def strip(self, batch: Any) -> Any:
        """Return a scan's batch with `nbytes` less the trailers of marked objects.

        The markers are those that were read last, as in `payloads`.
        """
        if not len(self._table.pairs) or "nbytes" not in batch.schema.names:
            return batch
        import pyarrow as pa

        at = batch.schema.get_field_index("nbytes")
        column = batch.column(at)
        payloads = self.payloads(batch, column.fill_null(-1).to_numpy())
        unknown = column.is_null().to_numpy(zero_copy_only=False)
        stripped = pa.array(payloads, pa.int64(), mask=unknown)
        return batch.set_column(at, batch.schema.field(at), stripped)

    def payloads(self, rows: Rows, files: IntArray) -> IntArray:
        """Return the sizes of objects without their trailers, in bytes: [n] int64.

        rows: rows with the column `key`.
        files: [n] int64, size of each file in bytes.
        """
        import pyarrow as pa  # late, because the plug-in writes markers without it
        import pyarrow.compute as pc

        suffixes, sizes, pairs = self._table
        if not len(pairs):
            return files
        at = np.minimum(np.searchsorted(sizes, files), len(sizes) - 1)
        likely = np.flatnonzero(sizes[at] == files)
        if not len(likely):
            return files
        own = suffixes_of(rows.select(["key"]).take(pa.array(likely)))
        which = pc.index_in(own, value_set=suffixes).fill_null(-1).to_numpy().astype(np.int64)
        marked = np.isin(which * len(sizes) + at[likely], pairs) & (which >= 0)
        payloads = files.copy()
        payloads[likely[marked]] -= TRAILER_BYTES
        return payloads

    def _refresh(self) -> None:
        state, now = self._look(), time.monotonic()
        if state != self._state:
            self._state, self._since = state, now
        elif state is not None and self._settled:
            return
        markers: list[Marker] = []
        self.problem = ""
        if state is not None:
            with self._objects.outer(writes=False) as directory:
                try:
                    with suppress(FileNotFoundError), directory.directory(SIDE_DIRECTORY):
                        pass
                except (UntrustedError, PermissionError) as error:
                    self.problem = str(error)
                else:
                    markers = read_markers(directory)
        self._use(markers)
        # `now` and `_since` are of this host's clock, because the file system's clock may differ.
        self._settled = now - self._since > _TICK_S

    def _look(self) -> tuple[int, ...] | None:
        """Return numbers that change with the directory of the markers; None if it is missing."""
        if not self._objects.side_files:
            return None
        try:
            st = os.stat(_PATH, dir_fd=self._objects.descriptor, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:
            return (0, 0)  # reading the markers will report the error
        return st.st_ino, st.st_mtime_ns, st.st_ctime_ns

    def _use(self, markers: list[Marker]) -> None:
        if markers == self._markers:
            return
        self._markers, self._known = markers, set(markers)
        self._identities = {marker.identity.hash(): marker.identity for marker in markers}
        self._table = _table(markers)


def _table(markers: list[Marker]) -> _Table:
    import pyarrow as pa

    encoded = [marker.suffix.encode(errors="surrogatepass") for marker in markers]
    files = np.array([marker.nbytes + TRAILER_BYTES for marker in markers], dtype=np.int64)
    suffixes, sizes = sorted(set(encoded)), np.unique(files)
    at = {suffix: index for index, suffix in enumerate(suffixes)}
    which = np.array([at[suffix] for suffix in encoded], dtype=np.int64)
    pairs = np.unique(which * len(sizes) + np.searchsorted(sizes, files))
    return _Table(pa.array(suffixes, pa.binary()), sizes, pairs)
