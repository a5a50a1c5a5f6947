"""Listings of a file store: its objects, and remarks about what is left out."""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from hicachectl.backends.base import keys_of, scan_schema
from hicachectl.backends.capabilities import Loss
from hicachectl.backends.disk.files import check_key, is_file_name
from hicachectl.backends.disk.io import raise_lost
from hicachectl.backends.object_files.cleared import Epochs
from hicachectl.backends.object_files.faults import unavailable
from hicachectl.backends.object_files.listing import LeftOut, ask_each, scan_places
from hicachectl.formats.errors import UntrustedError

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterator

    from hicachectl.backends.base import Rows
    from hicachectl.backends.object_files.sizes import MarkedSizes
    from hicachectl.backends.object_files.tree import ObjectTree
    from hicachectl.formats.arrays import BoolArray


_AHEAD_NS = 60 * 10**9  # clocks differ by less


class FileLister:
    """Lists the objects of one store, with sizes without trailers, and without stale objects.

    Only with the column `cleared_ns`, stale objects are listed. Raises StoreUnavailable.
    left_out: what is reported before the first scan.
    """

    def __init__(self, objects: ObjectTree, sizes: MarkedSizes, left_out: LeftOut) -> None:
        self._objects = objects
        self._sizes = sizes
        self._left_out = left_out

    def scan(self, columns: Collection[str]) -> Generator[Any, None, None]:
        """Yield batches of all objects as `Store.scan` does."""
        left_out = self._left_out = LeftOut()
        schema = scan_schema(columns)
        try:
            if "nbytes" in schema.names:
                self._sizes.current()
            finish = partial(self._finished, Epochs(self._objects), left_out)
            yield from scan_places(self._objects.places(left_out.folders), schema, left_out, finish)
        except OSError as error:
            raise unavailable(self._objects.path, error) from error

    def _finished(self, epochs: Epochs, left_out: LeftOut, batch: Any) -> Any:
        """Return a batch with sizes of objects, and with or without those that are stale.

        left_out: gets the number of stale objects, and of those with times in the future.
        """
        if "mtime_ns" in batch.schema.names:
            times, now_ns = batch.column("mtime_ns").fill_null(0).to_numpy(), time.time_ns()
            if count := int(np.count_nonzero(times > now_ns + _AHEAD_NS)):
                left_out.ahead.append((count, int(times.max()) - now_ns))
        batch = self._sizes.strip(batch)
        times = epochs.times(batch)
        if times is None:
            return batch
        left_out.cleared.append(len(times) - times.null_count)
        at = batch.schema.get_field_index("cleared_ns")
        if at < 0:
            return batch.filter(times.is_null())
        return batch.set_column(at, batch.schema.field(at), times)

    @property
    def remarks(self) -> list[str]:
        """Report what the last scan left out."""
        left_out, path = self._left_out, self._objects.path
        others, strangers = left_out.others, left_out.strangers
        remarks = list(left_out.folders)
        if others.count:
            remarks.append(
                f"{path}: ignored {others.count} links, FIFOs, sockets or devices with names of "
                f"objects, such as {others.first}; only regular files are objects"
            )
        if strangers.count:
            remarks.append(
                f"{path}: ignored {strangers.count} files that are no objects, such as "
                f"{strangers.first}"
            )
        remarks += map(str, self.losses)
        if left_out.ahead:
            counts, most_ns = zip(*left_out.ahead, strict=True)
            objects = "object is" if sum(counts) == 1 else "objects are"
            remarks.append(
                f"{path}: {sum(counts)} {objects} dated up to "
                f"{timedelta(seconds=max(most_ns) // 10**9)} ahead of this host's clock; compare "
                "it with the clocks of the file server and of the servers"
            )
        if count := sum(left_out.cleared):
            objects = "object" if count == 1 else "objects"
            remarks.append(
                f"{path}: {count} {objects} from before a server cleared the store, which no "
                f"server reads; hicachectl rm {path} --temporaries removes them"
            )
        return remarks

    @property
    def losses(self) -> tuple[Loss, ...]:
        """Report the objects that the last scan found where no server looks."""
        misplaced = self._left_out.misplaced
        if not misplaced.count:
            return ()
        least = "at least " if self._left_out.sampled else ""
        what = (
            f"ignored {least}{misplaced.count} files outside the folders of their keys, such as "
            f"{misplaced.first}; {self._objects.elsewhere}"
        )
        return (Loss("misplaced-object", self._objects.path, what),)

    def look(self, rows: Rows, columns: Collection[str]) -> Any:
        """Return a table of some keys as `Store.look` does."""
        schema = scan_schema(columns)
        try:
            if "nbytes" in schema.names:
                self._sizes.current()
            batch = ask_each(self._files(keys_of(rows)), schema)
            finished = self._finished(Epochs(self._objects), LeftOut(), batch)
        except OSError as error:
            raise unavailable(self._objects.path, error) from error
        return pa.Table.from_batches([finished])

    def _files(self, keys: list[bytes]) -> Iterator[tuple[int, str]]:
        """Yield directory and name of each key's file, unless there can be none."""
        for key in keys:
            if is_file_name(key):
                with suppress(FileNotFoundError, NotADirectoryError, UntrustedError):
                    directory, name = self._objects.place(key)
                    yield directory, os.fsdecode(name)

    def exists(self, rows: Rows) -> BoolArray:
        """Return which keys exist: [n] bool."""
        keys = keys_of(rows)
        try:
            is_there = partial(self._is_there, Epochs(self._objects))
        except OSError as error:
            raise unavailable(self._objects.path, error) from error
        return np.fromiter(map(is_there, keys), dtype=np.bool_, count=len(keys))

    def _is_there(self, epochs: Epochs, key: bytes) -> bool:
        try:
            check_key(key)
            directory, name = self._objects.place(key)
            facts = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except UntrustedError:
            return False
        except OSError as error:
            raise_lost(error, self._objects.path, "use the store")
            return False
        return stat.S_ISREG(facts.st_mode) and not (epochs and epochs.stale(key, facts))
