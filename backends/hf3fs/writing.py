"""Write pages to 3FS as SGLang does: reserve at the metadata server, write in place, confirm.

A reserved page that is neither confirmed nor released is leaked. The server reuses such a page only
after a start from an older snapshot, a clear of the table, or `verify --repair` with
--writers-stopped. Each reservation therefore runs in its own thread, which interrupts do not reach.
The server does not check releases. So this module releases a page at most once, and never releases
a page to which a key may map.
Source: sglang srt/mem_cache/storage/hf3fs/mini_3fs_metadata_server.py :: RankMetadata.
"""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.backends.base import Result, Status
from hicachectl.backends.disk.io import raise_lost, undo_on_error
from hicachectl.backends.hf3fs.data_files import CHECK_3FS_MOUNT
from hicachectl.formats.errors import HicacheError, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from hicachectl.backends.hf3fs.data_files import DataFiles
    from hicachectl.backends.hf3fs.metadata import MetadataClient
    from hicachectl.backends.page_tables import TableName

MOST_RESERVED = 128  # most pages reserved at once; SGLang's STORAGE_BATCH_SIZE

_NO_ROOM = "the server's page is beyond the end of the file; check whether the file was truncated"
_NO_PAGE = "the server returned a page beyond the end of the table"
_OTHERS = "another writer stored the key first; that object is kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageWrites:
    """Pages to write to one table.

    path: data file of the table.
    names: [n] keys as the server has them.
    pages: [n] bytes of each page.
    num_pages: number of pages that fit into the file. A reservation of more pages at once makes the
        server fail and leak pages.
    table_pages: number of pages of the table by the file or by the snapshot, whichever is larger.
        If the server returns a page beyond this number, the page is never released.
    if_absent: whether to keep existing objects.
    """

    table: TableName
    path: str
    names: Sequence[str]
    pages: Sequence[memoryview]
    num_pages: int
    table_pages: int
    if_absent: bool


def write_pages(server: MetadataClient, files: DataFiles, wanted: PageWrites) -> Result:
    """Write pages. Return OK, EXISTS or ERROR for each page. Raises StoreUnavailable."""
    names, pages = wanted.names, wanted.pages
    statuses = np.full(len(names), Status.ERROR, dtype=np.uint8)
    errors: dict[int, str] = {}
    if not wanted.num_pages:
        missing = f"{wanted.path}: the file is missing or smaller than a page; check the 3FS mount"
        return Result(statuses, dict.fromkeys(range(len(names)), missing))
    for places in _distinct_batches(names, min(MOST_RESERVED, wanted.num_pages)):
        some = replace(wanted, names=[names[n] for n in places], pages=[pages[n] for n in places])
        outcome = _run_to_its_end(_Reservation(server, files, some))
        statuses[places] = outcome.statuses
        errors |= {places[n]: why for n, why in outcome.errors.items()}
    return Result(statuses, errors)


def _distinct_batches(names: Sequence[str], most: int) -> list[list[int]]:
    """Return indices in batches of distinct keys, as `reserve` needs."""
    batches: list[list[int]] = []
    seen: set[str] = set()
    for place, name in enumerate(names):
        if not batches or len(batches[-1]) == most or name in seen:
            batches.append([])
            seen.clear()
        batches[-1].append(place)
        seen.add(name)
    return batches


def _run_to_its_end(reservation: _Reservation) -> Result:
    """Run a reservation in a thread.

    An interrupt stops the writes, and is raised after the reserved pages have been released.
    """
    with (
        ThreadPoolExecutor(1, thread_name_prefix="hicachectl-write") as pool,
        undo_on_error(reservation.stop.set),
    ):
        return pool.submit(reservation.run).result()


class _StoppedError(Exception):
    """The program was interrupted."""


@dataclass(slots=True)
class _Reservation:
    """One batch, from reservation to confirmation or release.

    held: pages neither confirmed nor released, by index in the batch.
    """

    server: MetadataClient
    files: DataFiles
    batch: PageWrites
    stop: threading.Event = field(default_factory=threading.Event)
    held: dict[int, int] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)

    def run(self) -> Result:
        names, if_absent = self.batch.names, self.batch.if_absent
        statuses = np.full(len(names), Status.EXISTS, dtype=np.uint8)
        there = self._existing(range(len(names)))
        asked = [n for n in range(len(names)) if not (if_absent and n in there)]
        try:
            self._reserve(asked, there)
            written = self._write()
            arrived = self._existing(written) if if_absent else set()
            ours = [n for n in written if n not in arrived]
            self._confirm(ours, [names[n] for n in ours if n in there])
            statuses[ours] = Status.OK
        except _StoppedError:
            pass  # _run_to_its_end raises the interrupt
        finally:
            if self.held:
                self._release()
        statuses[list(self.errors)] = Status.ERROR
        return Result(statuses, self.errors)

    def _existing(self, places: Iterable[int]) -> set[int]:
        """Return the indices whose keys the server has."""
        asked = list(places)
        if not asked:
            return set()
        names = [self.batch.names[n] for n in asked]
        answer = self.server.exists(*self.batch.table, names)
        return {n for n, there in zip(asked, answer, strict=True) if there}

    def _reserve(self, places: Sequence[int], there: Container[int]) -> None:
        """Reserve a page for each index.

        If a key is to be replaced, the page is reserved under a random name, because a reservation
        under the key's own name returns the old page. The server does not keep the names of
        reserved pages.
        """
        if not places:
            return
        names = self.batch.names
        asked = [f"{names[n]}.{os.urandom(8).hex()}" if n in there else names[n] for n in places]
        try:
            answer = self.server.reserve(*self.batch.table, asked)
        except HicacheError as error:
            raise self._stranded(str(error), len(places)) from error
        taken = {n: i for n, (existed, i) in zip(places, answer, strict=True) if not existed}
        if len(set(taken.values())) < len(taken):  # pages would overwrite each other
            raise self._stranded(
                f"{self.server.url}: the 3FS metadata server gave one page to several keys",
                len(taken),
            )
        self.held = {n: index for n, index in taken.items() if index < self.batch.table_pages}
        self.errors = dict.fromkeys(set(taken) - set(self.held), f"{self.batch.path}: {_NO_PAGE}")
        if not self.batch.if_absent:
            self.errors |= dict.fromkeys(set(places) - set(taken), _OTHERS)

    def _write(self) -> list[int]:
        """Write every held page; return the indices of the synced pages."""
        written = []
        for n, index in self.held.items():
            if self.stop.is_set():
                raise _StoppedError
            page = self.batch.pages[n]
            try:
                self.files.write(self.batch.path, index * len(page), page)
                written.append(n)
            except OSError as error:
                self.errors[n] = self._message(error)
        if written:
            try:
                self.files.sync(self.batch.path)
            except OSError as error:
                self.errors |= dict.fromkeys(written, self._message(error))
                return []
        return written

    def _message(self, error: OSError) -> str:
        raise_lost(error, self.batch.path, "write the data file", CHECK_3FS_MOUNT)
        words = {errno.EFBIG: _NO_ROOM, errno.ENOENT: "no such data file"}
        return f"{self.batch.path}: cannot write: {words.get(error.errno or 0, error.strerror)}"

    def _confirm(self, written: Sequence[int], replaced: Sequence[str]) -> None:
        """Confirm the written pages and release the others, in one atomic call.

        If the call fails, ask the server which pages the keys have now. The pages stay in `held`,
        to be released, only if the call had no effect.
        replaced: keys whose old pages are freed first.
        """
        table, held = self.batch.table, self.held
        if replaced:
            # This frees the current pages. Readers miss the keys until the new pages are confirmed.
            self.server.delete(*table, replaced)
        if not held:
            return
        pairs = [(self.batch.names[n], held[n]) for n in written]
        rest = [index for n, index in held.items() if n not in set(written)]
        self.held = {}  # emptied first, because after the call a release could free a mapped page
        try:
            self.server.confirm(*table, pairs, rest)
        except BaseException as error:
            if pairs:
                current = self._looked_up([name for name, _ in pairs], len(held))
                if not any(now == index for now, (_, index) in zip(current, pairs, strict=True)):
                    self.held = held
            elif isinstance(error, HicacheError):
                raise self._stranded(str(error), len(held)) from error
            raise

    def _looked_up(self, names: Sequence[str], held: int) -> list[int | None]:
        try:
            return self.server.page_indices(*self.batch.table, names)
        except HicacheError as error:
            raise self._stranded(str(error), held) from error

    def _release(self) -> None:
        held, self.held = list(self.held.values()), {}
        try:
            self.server.confirm(*self.batch.table, [], held)
        except HicacheError as error:
            raise self._stranded(str(error), len(held)) from error

    def _stranded(self, reason: str, count: int) -> StoreUnavailable:
        rank, namespace = self.batch.table
        return StoreUnavailable(
            f"{reason}; {count} pages of {rank}:{namespace} may stay reserved; if verify reports "
            "page-leaked, release them with verify --repair and --writers-stopped"
        )
