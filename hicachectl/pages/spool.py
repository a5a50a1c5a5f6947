"""Scanned objects, in memory or, beyond a number, in files by the first byte of their page hash."""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hicachectl.backends.base import take_rows
from hicachectl.formats.keys.table import FOREIGN, KeySplitter, page_starts, page_words
from hicachectl.io.interrupts import persistent
from hicachectl.pages.census import Census

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from hicachectl.backends.disk.directory import Directory
    from hicachectl.formats.keys.base import Affix

Ids = npt.NDArray[np.int32]

AFFIX_ID = pa.field("affix_id", pa.int32(), nullable=False)
MEMORY_ROWS = 2_000_000  # about 300 MB
_BUCKETS = 256
_BUCKET_SHIFT = np.uint64(56)  # leaves the first byte of a word
_BATCH_ROWS = 65_536


class Spool:
    """Collects a scan and counts its objects; a context manager.

    All objects of a page are in one piece.
    """

    def __init__(
        self, schema: pa.Schema, folder: Directory | None = None, memory_rows: int = MEMORY_ROWS
    ) -> None:
        """Prepare for batches of a schema.

        folder: for files, from `memory_rows` objects on; None keeps all objects in memory.
        """
        self.rows = 0
        self._schema = schema
        self._folder = folder
        self._memory_rows = memory_rows
        self._splitter = KeySplitter()
        self._batches: list[pa.RecordBatch] = []
        self._ids: list[Ids] = [np.empty(0, dtype=np.int32)]
        self._buckets: _Buckets | None = None
        self._counted: list[Census] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._buckets is not None:
            self._buckets.close()

    @property
    def affixes(self) -> list[Affix]:
        """The affix of each affix id."""
        return self._splitter.affixes

    def fill(self, batches: Iterable[pa.RecordBatch], on_batch: Callable[[int], None]) -> None:
        """Take a scan's batches. on_batch: takes the number of objects of each. Raises OSError."""
        held = 0
        with persistent() as check:
            for batch in batches:
                self._batches.append(batch)
                self._ids.append(self._identified(batch))
                self.rows += len(batch)
                held += len(batch)
                on_batch(len(batch))
                check()
                if self._folder is not None and held >= self._memory_rows:
                    self._spill(self._folder)
                    held = 0
        if self._buckets is not None and self._folder is not None:
            self._spill(self._folder)
            self._buckets.finish()

    def census(self) -> Census:
        """Count all objects."""
        if not self._counted:
            return Census.of(*self._held())
        return Census.total(self._counted)

    def pieces(self, affix_ids: Ids | None = None) -> Iterator[tuple[pa.Table, Ids]]:
        """Yield all objects and their affix ids, in the same order each time.

        affix_ids: replaces the affix ids of the scan.
        """
        start = 0
        for objects, ids in [self._held()] if self._buckets is None else self._buckets.read():
            end = start + len(ids)
            yield objects, ids if affix_ids is None else affix_ids[start:end]
            start = end

    def _identified(self, batch: pa.RecordBatch) -> Ids:
        """Return each object's affix id; FOREIGN for objects that a `clear` made misses."""
        keys, cleared = batch.column("key"), "cleared_ns" in batch.schema.names
        if not cleared or batch.column("cleared_ns").null_count == len(batch):
            return self._splitter.identify(keys)
        kept = batch.column("cleared_ns").is_null()
        ids = np.full(len(batch), FOREIGN, dtype=np.int32)
        ids[kept.to_numpy(zero_copy_only=False)] = self._splitter.identify(keys.filter(kept))
        return ids

    def _held(self) -> tuple[pa.Table, Ids]:
        if len(self._ids) > 2:
            self._ids = [self._ids[0], np.concatenate(self._ids)]
        return pa.Table.from_batches(self._batches, schema=self._schema), self._ids[-1]

    def _spill(self, folder: Directory) -> None:
        """Move the objects in memory to the files of their buckets."""
        if self._buckets is None:
            self._buckets = _Buckets(folder, self._schema.append(AFFIX_ID))
        if not self._batches:
            return
        starts = page_starts(self.affixes)
        batches = zip(self._batches, self._ids[1:], strict=True)
        buckets = np.concatenate([_buckets_of(batch, starts[own]) for batch, own in batches])
        objects, ids = self._held()
        self._counted.append(Census.of(objects, ids))
        self._buckets.write(objects.append_column(AFFIX_ID, pa.array(ids)), buckets)
        self._batches, self._ids = [], self._ids[:1]


def _buckets_of(batch: pa.RecordBatch, starts: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Return the first byte of each page hash; 0 for a key without one."""
    buckets = np.zeros(len(batch), dtype=np.uint8)
    rows = np.flatnonzero(starts >= 0)
    buckets[rows] = page_words(batch.column("key"), rows, starts[rows], 0) >> _BUCKET_SHIFT
    return buckets


class _Buckets:
    """Temporary files by the first byte of a page hash."""

    def __init__(self, folder: Directory, schema: pa.Schema) -> None:
        self._folder = folder
        self._schema = schema
        self._closing = ExitStack()
        self._files: dict[int, tuple[Any, Any]] = {}  # and their writers

    def write(self, objects: pa.Table, buckets: npt.NDArray[np.uint8]) -> None:
        """Append objects to their buckets."""
        order = np.argsort(buckets, kind="stable")
        edges = np.searchsorted(buckets[order], np.arange(_BUCKETS + 1)).tolist()
        ordered = take_rows(objects, order).combine_chunks()
        for number, (start, end) in enumerate(pairwise(edges)):
            if start < end:
                rows = ordered.slice(start, end - start)
                self._writer(number).write_table(rows, max_chunksize=_BATCH_ROWS)

    def finish(self) -> None:
        """End the files; only `read` and `close` may follow."""
        for file, writer in self._files.values():
            writer.close()
            file.flush()

    def read(self) -> Iterator[tuple[pa.Table, Ids]]:
        """Yield the objects of each bucket, and their affix ids."""
        for _, (file, _) in sorted(self._files.items()):
            file.seek(0)
            table = pa.ipc.open_stream(file).read_all()
            ids = table.column(AFFIX_ID.name).to_numpy()
            yield table.drop_columns([AFFIX_ID.name]), ids

    def _writer(self, number: int) -> Any:
        """Return the writer of a bucket; create the file for its first objects."""
        if number not in self._files:
            name = f"spool-{number:02x}"
            file = os.fdopen(self._folder.create(name), "r+b")
            self._closing.callback(self._remove, name)
            self._closing.enter_context(file)
            options = pa.ipc.IpcWriteOptions(compression="zstd")
            self._files[number] = file, pa.ipc.new_stream(file, self._schema, options=options)
        return self._files[number][1]

    def close(self) -> None:
        """Remove the files."""
        self._closing.close()

    def _remove(self, name: str) -> None:
        with suppress(OSError):
            self._folder.remove(name)
