"""Listings of objects that are stale since a server's `clear` (`epochs`)."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from hicachectl.backends.disk.files import VERSION
from hicachectl.backends.object_files.epochs import owner_of, read_epochs
from hicachectl.backends.object_files.sizes import MOST_BYTES
from hicachectl.formats.objects import PAGE_DIGITS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicachectl.backends.object_files.tree import ObjectTree
    from hicachectl.formats.arrays import IntArray

_CTIME = 2  # field of a version


class Epochs:
    """The epochs of a directory at one moment; false if it has none."""

    def __init__(self, objects: ObjectTree) -> None:
        """Read the epochs. Raises OSError."""
        self._objects = objects
        self._by_owner: Mapping[bytes, int] = read_epochs(objects)
        self._by_suffix: dict[bytes, int] = {}

    def __bool__(self) -> bool:
        return bool(self._by_owner)

    def of(self, key: bytes) -> int:
        """Return the epoch of a key's suffix, Unix nanoseconds; 0 without one."""
        suffix = key[PAGE_DIGITS:]
        if suffix not in self._by_suffix:
            self._by_suffix[suffix] = self._by_owner.get(owner_of(suffix), 0)
        return self._by_suffix[suffix]

    def stale(self, key: bytes, facts: os.stat_result) -> bool:
        """Return whether a key's file is stale."""
        return facts.st_ctime_ns <= self.of(key)

    def times(self, batch: Any) -> Any | None:
        """Return int64: the epoch of each stale object, null for others; None if none is stale.

        batch: with `key`; one stat for each object with an epoch, unless it has `version`.
        Raises OSError.
        """
        if not self or not len(batch):
            return None
        import pyarrow.compute as pc  # imported late: costs 20 ms at start-up

        keys = batch.column("key")
        suffixes = pc.binary_slice(keys, PAGE_DIGITS, MOST_BYTES).dictionary_encode()
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
        """Return the ctime of some rows' files: [rows], the latest for files that are gone."""
        ctimes = np.full(len(rows), np.iinfo(np.int64).max)
        if "version" in batch.schema.names:
            versions = batch.column("version").take(pa.array(rows)).to_pylist()
            found = (None if one is None else VERSION.unpack(one)[_CTIME] for one in versions)
        else:
            keys = batch.column("key").take(pa.array(rows)).to_pylist()
            found = (None if one is None else one.st_ctime_ns for one in map(self._look, keys))
        for place, ctime in enumerate(found):
            if ctime is not None:
                ctimes[place] = ctime
        return ctimes

    def _look(self, key: bytes) -> os.stat_result | None:
        with suppress(FileNotFoundError):
            here, name = self._objects.place(key)
            return os.stat(name, dir_fd=here, follow_symlinks=False)
        return None
