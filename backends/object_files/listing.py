"""List the files of a store as batches of rows, with remarks on skipped files."""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import chain, compress, islice, repeat
from operator import not_
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np
import pyarrow as pa
from pyarrow.fs import FileType, LocalFileSystem

from hicachectl.backends.base import keys_of, scan_batch, scan_schema
from hicachectl.backends.capabilities import Loss, ReportsLosses
from hicachectl.backends.disk.durable import is_linked, is_named
from hicachectl.backends.disk.entries import DIRECTORY, REGULAR, UNKNOWN, entries_in
from hicachectl.backends.disk.io import LOST, raise_lost
from hicachectl.backends.disk.names import check_key, is_file_name, storable_ns, version_of
from hicachectl.backends.object_files.epochs import Epochs
from hicachectl.backends.object_files.store_files import usable
from hicachectl.formats.errors import UntrustedError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterable, Iterator

    from hicachectl.backends.base import Rows
    from hicachectl.backends.concurrency import Concurrency
    from hicachectl.backends.object_files.store_files import StoreFiles
    from hicachectl.backends.object_files.tree import Place
    from hicachectl.formats.arrays import BoolArray

SCAN_ROWS = 16384
_AHEAD_NS = 60 * 10**9  # the clocks of two hosts usually differ by less
# Names that HiCacheNixl and HiCacheFile give to objects.
_OBJECT = re.compile(r"[0-9a-f]{64}_|.*\.bin$", re.DOTALL)
_STAT, _LIST, _LOOK = "stat", "list", "look"  # kinds of calls for `Concurrency`
_OF_ARROW = {"nbytes", "mtime_ns"}  # columns that Arrow's stat gives
# Columns that need os.stat, because Arrow gives no inode and no atime.
_OF_PYTHON = {"atime_ns", "version"}


@dataclass(slots=True)
class SkippedEntries:
    """Count and first name of entries that a listing leaves out."""

    count: int = 0
    first: str = ""

    def add(self, name: str) -> None:
        """Count an entry."""
        self.count += 1
        self.first = self.first or name


@dataclass(slots=True)
class LeftOut:
    """Entries that a listing left out, and objects with doubtful times.

    others: links, FIFOs, sockets and devices named like objects.
    misplaced: files named like objects, outside the folders of their names.
    strangers: files not named like objects, in directories where they do not belong.
    cleared: for each batch, the number of objects from before a `clear`.
    ahead: for each batch, the number of objects dated ahead of this host's clock, and the largest
        lead in nanoseconds. These objects are listed.
    folders: messages about folders that are not trusted.
    sampled: whether only some files were looked at.
    """

    others: SkippedEntries = field(default_factory=SkippedEntries)
    misplaced: SkippedEntries = field(default_factory=SkippedEntries)
    strangers: SkippedEntries = field(default_factory=SkippedEntries)
    cleared: list[int] = field(default_factory=list)
    ahead: list[tuple[int, int]] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    sampled: bool = False

    def note_others(self, names: Iterable[str]) -> None:
        """Count irregular files that are named like objects."""
        for name in filter(_OBJECT.match, names):
            self.others.add(name)


@dataclass(frozen=True, slots=True)
class Names(Sequence[str]):
    """Names of files in one directory.

    place: the directory.
    names: names of the files.
    are_regular: whether the directory says that the files are regular. If not, each needs a stat.
    """

    place: Place
    names: list[str]
    are_regular: bool

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, chosen: int) -> str: ...
    @overload
    def __getitem__(self, chosen: slice) -> Names: ...
    def __getitem__(self, chosen: int | slice) -> str | Names:
        if isinstance(chosen, slice):
            return Names(self.place, self.names[chosen], self.are_regular)
        return self.names[chosen]


def scan_places(
    places: Iterable[Place],
    schema: Any,
    left_out: LeftOut,
    finish: Callable[[Any], Any],
    concurrency: Concurrency,
) -> Generator[Any, None, None]:
    """Yield the regular files of directories as batches with a scan's schema.

    left_out: gets the skipped entries.
    finish: changes each batch before it is yielded.
    concurrency: threads that list the directories and stat the files.
    Raises OSError.
    """
    lists = _names_of(places, left_out, concurrency)
    read = partial(_read, schema, concurrency)
    held: list[Any] = []
    rows = 0
    for batch, others in concurrency.stream(_STAT, read, lists, unlocked=True):
        left_out.note_others(others)
        held.append(batch)
        rows += len(batch)
        if rows >= SCAN_ROWS:
            yield finish(_joined(held))
            held, rows = [], 0
    if rows:
        yield finish(_joined(held))


def _joined(batches: list[Any]) -> Any:
    """Join batches into one."""
    if len(batches) == 1:
        return batches[0]
    whole = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return whole[0] if whole else batches[0]


def _names_of(
    places: Iterable[Place], left_out: LeftOut, concurrency: Concurrency
) -> Generator[Names, None, None]:
    """Yield the names of files that belong in their directories, some thousand at a time.

    The first names of several directories are read at once, because most folders have no further
    names.
    """

    def begin(some: Sequence[Place]) -> list[tuple[Place, Iterator[Found]]]:
        begun: list[tuple[Place, Iterator[Found]]] = []
        for place in some:
            following = files_in(place.descriptor)
            # A second call tells whether the first call returned all names.
            first = list(islice(following, 2))
            begun.append((place, chain(first, following)))
        return begun

    for begun in concurrency.stream(_LIST, begin, ([place] for place in places), unlocked=True):
        for place, every in begun:
            for found in every:
                left_out.note_others(found.others)
                names = held_names(found.names, place, left_out)
                for start in range(0, len(names), SCAN_ROWS):
                    part = names[start : start + SCAN_ROWS]
                    yield Names(place, part, found.are_regular)


def _read(schema: Any, concurrency: Concurrency, part: Names) -> tuple[Any, list[str]]:
    """Return a batch of the regular files, and the names of other files that are no directories."""
    place, others = part.place, list[str]()
    links = place.holds is None
    if part.are_regular:
        waits = concurrency.waits(_STAT)
        read = batch_reader(place.descriptor, place.path, schema, links=links, waits=waits)
        return read(part.names), others
    files = zip(repeat(place.descriptor), part.names)
    return ask_each(files, schema, others), others


def held_names(names: list[str], place: Place, left_out: LeftOut) -> list[str]:
    """Return the names that belong in a directory. Count the other names in `left_out`."""
    if place.holds is None:
        return names
    held = place.holds(names)
    if all(held):
        return names
    for name in compress(names, map(not_, held)):
        skipped = left_out.misplaced if _OBJECT.match(name) else left_out.strangers
        skipped.add(f"{place.path}/{name}")
    return list(compress(names, held))


class Found(NamedTuple):
    """Names of files in a directory.

    names: names of regular files.
    are_regular: whether the directory says that the files are regular. If not, each needs a stat.
    others: names of links, FIFOs, sockets and devices.
    """

    names: list[str]
    are_regular: bool = True
    others: Sequence[str] = ()


def files_in(directory: int) -> Iterator[Found]:
    """Yield the names of a directory's files, some thousand at a time. Raises OSError."""
    for names, kinds in entries_in(directory):
        if (kinds == REGULAR).all():
            yield Found(names)
            continue
        unknown = list(compress(names, kinds == UNKNOWN))
        if unknown:
            yield Found(unknown, are_regular=False)
        others = list(compress(names, ~np.isin(kinds, (REGULAR, UNKNOWN, DIRECTORY))))
        yield Found(list(compress(names, kinds == REGULAR)), others=others)


def batch_reader(
    directory: int, path: str, schema: Any, *, links: bool = True, waits: bool = False
) -> Callable[[list[str]], Any]:
    """Return the cheapest function that takes names and returns a batch with `schema`.

    links: the path may lead through links.
    waits: whether a stat waits for a file server.
    """

    def only_names(names: list[str]) -> Any:
        return scan_batch(schema, {"key": _key_array(names)}, len(names))

    if waits and os.path.lexists(_by_descriptor(directory)):
        # This path takes longer to look up, but needs no request to a file server.
        path, links = _by_descriptor(directory), True
    # Arrow accepts only UTF-8 names.
    fast = path.isascii() and not _OF_PYTHON & set(schema.names)

    def read(names: list[str]) -> Any:
        if fast and "".join(names).isascii():
            with suppress(OSError):  # if stat fails for one file, Arrow fails the batch
                batch = _ask_arrow(path, schema, names)
                if batch is not None and (links or is_named(directory, path)):
                    return batch
        return ask_each(zip(repeat(directory), names), schema)

    return read if (_OF_ARROW | _OF_PYTHON) & set(schema.names) else only_names


def _ask_arrow(path: str, schema: Any, names: list[str]) -> Any:
    """Return a batch with size and mtime from Arrow's stat; None if a time may be wrong.

    Times after the year 2262 do not fit Arrow's 64 bits, and become negative.
    """
    prefix = path + "/"
    infos = LocalFileSystem().get_file_info([prefix + name for name in names])
    sizes = [info.size for info in infos]
    if None in sizes:  # vanished, or no longer a file
        kept = [info.type == FileType.File for info in infos]
        names = [name for name, keep in zip(names, kept, strict=True) if keep]
        infos = [info for info, keep in zip(infos, kept, strict=True) if keep]
        sizes = [info.size for info in infos]
    times = [info.mtime_ns for info in infos]
    if min(times, default=0) < 0:
        return None
    columns = {
        "key": _key_array(names),
        "nbytes": pa.array(sizes, pa.int64()),
        "mtime_ns": pa.array(times, pa.int64()),
    }
    return scan_batch(schema, columns, len(names))


def _by_descriptor(directory: int) -> str:
    """Return a path of an open directory (proc(5))."""
    return f"/proc/self/fd/{directory}"


def ask_each(files: Iterable[tuple[int, str]], schema: Any, others: list[str] | None = None) -> Any:
    """Return a batch of the existing files, by a stat of each. Columns are null if the stat fails.

    files: descriptor of the directory, and name, of each file.
    others: gets the names of links, FIFOs, sockets and devices.
    Raises OSError if the file system is unreachable.
    """
    found: list[str] = []
    rows: list[tuple[int | None, int | None, int | None, bytes | None]] = []
    row: tuple[int | None, int | None, int | None, bytes | None]
    for directory, name in files:
        try:
            st = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno in LOST:
                raise
            row = (None, None, None, None)
        else:
            if not stat.S_ISREG(st.st_mode):
                if others is not None and not stat.S_ISDIR(st.st_mode):
                    others.append(name)
                continue
            mtime_ns, atime_ns = storable_ns(st.st_mtime_ns), storable_ns(st.st_atime_ns)
            row = st.st_size, mtime_ns, atime_ns, version_of(st)
        found.append(name)
        rows.append(row)
    sizes, times, reads, versions = zip(*rows, strict=True) if rows else ((), (), (), ())
    columns = {
        "key": _key_array(found),
        "nbytes": pa.array(sizes, pa.int64()),
        "mtime_ns": pa.array(times, pa.int64()),
        "atime_ns": pa.array(reads, pa.int64()),
        "version": pa.array(versions, pa.binary()),
    }
    return scan_batch(schema, columns, len(found))


def _key_array(names: list[str]) -> Any:
    """Return file names as a binary array, without a bytes object per name."""
    joined = os.fsencode("".join(names))
    lengths = list(map(len, names))
    if sum(lengths) != len(joined):
        lengths = [len(os.fsencode(name)) for name in names]
    offsets = np.zeros(len(names) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(joined)]
    return pa.Array.from_buffers(pa.binary(), len(names), buffers)


class FileListings(ReportsLosses):
    """Lists a store's objects. Sizes in the listings exclude trailers.

    Stale objects (see `epochs`) are listed only with the column `cleared_ns`. Methods raise
    StoreUnavailable.
    """

    def __init__(self, files: StoreFiles, left_out: LeftOut) -> None:
        """left_out: entries to report before the first scan."""
        self._files = files
        self._left_out = left_out

    def scan(self, columns: Collection[str] = ("nbytes", "mtime_ns")) -> Generator[Any, None, None]:
        """List every regular file. The columns of a file are null if its stat fails."""
        left_out = self._left_out = LeftOut()
        objects, schema = self._files.objects, scan_schema(columns)
        with usable(objects.path):
            if "nbytes" in schema.names:
                self._files.sizes.current()
            finish = partial(self._finished, Epochs(objects), left_out)
            calls = self._files.concurrency
            places = objects.places(left_out.folders, calls)
            yield from scan_places(places, schema, left_out, finish, calls)
            # If an outer directory was removed meanwhile, the listing may lack objects.
            if not all(map(is_linked, objects.roots)):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    def _finished(self, epochs: Epochs, left_out: LeftOut, batch: Any) -> Any:
        """Subtract trailers from a batch's sizes, and drop its stale objects.

        A batch with the column `cleared_ns` keeps its stale objects.
        left_out: gets the number of stale objects, and of objects dated in the future.
        """
        if "mtime_ns" in batch.schema.names:
            times, now_ns = batch.column("mtime_ns").fill_null(0).to_numpy(), time.time_ns()
            if count := int(np.count_nonzero(times > now_ns + _AHEAD_NS)):
                left_out.ahead.append((count, int(times.max()) - now_ns))
        if "nbytes" in batch.schema.names:
            # A marker is written before the first file that it describes. The sizes were read
            # before this, so the markers read now include those of every file in the batch.
            self._files.sizes.current()
        batch = self._files.sizes.strip(batch)
        times = epochs.times(batch)
        if times is None:
            return batch
        left_out.cleared.append(len(times) - times.null_count)
        at = batch.schema.get_field_index("cleared_ns")
        if at < 0:
            return batch.filter(times.is_null())
        return batch.set_column(at, batch.schema.field(at), times)

    @property
    def remarks(self) -> tuple[str, ...]:
        """Report the entries that the last listing left out, and objects dated in the future."""
        left_out, path = self._left_out, self._files.objects.path
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
            are = "object is" if count == 1 else "objects are"
            remarks.append(
                f"{path}: {count} {are} from before a server cleared the store, so no server "
                f"reads them; hicachectl rm {path} --temporaries removes them"
            )
        return tuple(remarks)

    @property
    def losses(self) -> tuple[Loss, ...]:
        """Report the files that the last listing found outside the folders of their keys."""
        misplaced, objects = self._left_out.misplaced, self._files.objects
        if not misplaced.count:
            return ()
        least = "at least " if self._left_out.sampled else ""
        what = (
            f"ignored {least}{misplaced.count} files outside the folders of their keys, such as "
            f"{misplaced.first}; {objects.elsewhere}"
        )
        return (Loss("misplaced-object", objects.path, what),)

    def look(self, rows: Rows, columns: Collection[str] = ("nbytes", "mtime_ns", "version")) -> Any:
        """List some files again, by one stat for each file."""
        objects, calls = self._files.objects, self._files.concurrency
        schema, keys = scan_schema(columns), keys_of(rows)
        batches = {0: ask_each((), schema)}

        def ask(start: int, stop: int) -> None:
            batches[start] = ask_each(self._places(keys[start:stop]), schema)

        with usable(objects.path):
            if "nbytes" in schema.names:
                self._files.sizes.current()
            calls.each(_LOOK, ask, len(keys))
            batch = _joined([batches[start] for start in sorted(batches)])
            finished = self._finished(Epochs(objects), LeftOut(), batch)
        return pa.Table.from_batches([finished])

    def _places(self, keys: list[bytes]) -> Iterator[tuple[int, str]]:
        """Yield directory and name of each key's file. Skip keys that can have no file."""
        for key in keys:
            if is_file_name(key):
                with suppress(FileNotFoundError, NotADirectoryError, UntrustedError):
                    directory, name = self._files.objects.place(key)
                    yield directory, os.fsdecode(name)

    def exists(self, rows: Rows) -> BoolArray:
        """Return which keys are regular files from after the last clear, by a stat for each."""
        objects, calls = self._files.objects, self._files.concurrency
        keys = keys_of(rows)
        found = np.zeros(len(keys), dtype=np.bool_)

        def ask(start: int, stop: int) -> None:
            for index in range(start, stop):
                found[index] = self._has_file(epochs, keys[index])

        with usable(objects.path):
            epochs = Epochs(objects)
            calls.each(_LOOK, ask, len(keys))
        return found

    def _has_file(self, epochs: Epochs, key: bytes) -> bool:
        try:
            check_key(key)
            directory, name = self._files.objects.place(key)
            st = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except UntrustedError:
            return False
        except OSError as error:
            raise_lost(error, self._files.objects.path, "use the store")
            return False
        return stat.S_ISREG(st.st_mode) and not (epochs and epochs.stale(key, st))
