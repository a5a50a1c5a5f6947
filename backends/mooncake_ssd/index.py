"""Find the objects in the files of an SSD tier by reading all metadata.

A directory has buckets (`ID.bucket` with `ID.meta`) or an offset file (`kv_cache.data` with
`kv_cache.meta`). Directories `rank_{dp}_{tp}_{pp}_{cp}` below one root are one store. Links and
special files are never opened.
Source: Mooncake 0.3.13, mooncake-store/src/storage_backend.cpp :: BucketStorageBackend::Init,
OffsetAllocatorStorageBackend::TryRecoverFromMetadata, StorageBackend; sglang srt/mem_cache/storage/
mooncake_store/mooncake_store.py :: MooncakeStore.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.backends.base import as_table
from hicachectl.backends.capabilities import Loss
from hicachectl.backends.disk.io import closing_descriptor, raise_denied, undo_on_error
from hicachectl.formats.errors import FormatError, UnsupportedByBackend, UntrustedError
from hicachectl.formats.mooncake_ssd import (
    DEFAULT_TENANT,
    RECORD,
    TENANT_END,
    are_records,
    parse_bucket_meta,
    parse_offset_meta,
    parse_records,
    value_starts,
)
from hicachectl.formats.wording import reason_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicachectl.backends.base import Rows
    from hicachectl.backends.disk.directory import Directory
    from hicachectl.formats.arrays import IntArray
    from hicachectl.formats.mooncake_ssd import OffsetMeta

DATA_FILE, META_FILE = "kv_cache.data", "kv_cache.meta"

# file: index into the data files.
# start, value: positions of the object and of its value in the file, in bytes.
# size: stated bytes of the value.
# nbytes: bytes of the value that lie before the end of the file.
# sequence: id of the bucket, or number of the record; a newer object has a higher number.
OBJECT = np.dtype(
    [
        ("file", np.int64),
        ("start", np.int64),
        ("value", np.int64),
        ("size", np.int64),
        ("nbytes", np.int64),
        ("sequence", np.uint64),
    ]
)

_BUCKET_FILE = re.compile(r"([0-9]{1,18})\.(bucket|meta)")
_NO_DATA = "its data file is missing, so the objects are lost"
_RANK = re.compile(r"rank_\w+")
# Directory of Mooncake's default backend, file_per_key. It has folders a to p.
_FILE_PER_KEY = "file_per_key_dir"
_FILE_PER_KEY_FOLDERS = frozenset("abcdefghijklmnop")
# A bucket has 500 keys by default. The metadata of an offset file has at most 9.6 million nodes of
# 32 bytes.
_MAX_BUCKET_META_BYTES = 64 << 20
_MAX_OFFSET_META_BYTES = 1 << 30
_MAX_KEYS_BYTES = (1 << 31) - 1  # an Arrow array holds no more
_HEAD_BYTES = RECORD.itemsize + 512  # a record's header, and nearly every key
_RECORDS_AT_ONCE = 1 << 16


@dataclass(frozen=True, slots=True)
class Place:
    """A directory with files of the tier, and the stat of each entry."""

    directory: Directory
    entries: dict[str, os.stat_result]

    @property
    def state(self) -> list[tuple[str, int, int, int]]:
        """Name, inode, size and mtime of each entry, which change whenever a file does."""
        return [(n, f.st_ino, f.st_size, f.st_mtime_ns) for n, f in self.entries.items()]


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file with objects."""

    directory: Directory
    name: str
    st: os.stat_result
    is_bucket: bool  # False for an offset file, which has records

    @property
    def path(self) -> str:
        """The file's path, for messages."""
        return f"{self.directory.path}/{self.name}"


@dataclass(frozen=True, slots=True)
class Index:
    """The objects of a store, in the order of their files and places.

    keys: [n] binary.
    objects: [n] OBJECT.
    files: the data files.
    prefix: the tenant, as it precedes each key in the files.
    losses: objects that no client can read any more.
    remarks: messages about objects that the listing leaves out.
    """

    keys: Any
    objects: npt.NDArray[np.void]
    files: Sequence[DataFile]
    prefix: bytes
    losses: tuple[Loss, ...]
    remarks: tuple[str, ...]

    def stored_forms(self, key: bytes) -> tuple[bytes, bytes]:
        """Return the two forms that a key can have in files: with and without the tenant.

        Older files have keys without the tenant.
        """
        return self.prefix + key, key

    def find(self, rows: Rows) -> IntArray:
        """Return the row of each key in the index, -1 if missing: [n] int64.

        For a row whose locator is still right, no search is needed.
        """
        found = np.full(len(rows), -1, dtype=np.int64)
        if not len(self.keys) or not len(rows):
            return found
        keys = as_table(rows).column("key").combine_chunks()
        if "locator" in rows.schema.names:
            places = as_table(rows).column("locator").fill_null(-1).to_numpy()
            near = np.clip(places, 0, len(self.keys) - 1)
            same = pc.equal(self.keys.take(pa.array(near)), keys).to_numpy(zero_copy_only=False)
            found = np.where(same, near, -1).astype(np.int64)
        rest = np.flatnonzero(found < 0)
        if len(rest):
            wanted = pc.index_in(keys.take(pa.array(rest)), value_set=self.keys)
            found[rest] = wanted.fill_null(-1).to_numpy()
        return found


def open_places(root: Directory) -> list[Place]:
    """Open the directories of a store: the root, and then its rank directories.

    Raises OSError and UntrustedError. Raises UnsupportedByBackend for files of Mooncake's
    file_per_key backend, and for a directory that has only other files.
    """
    entries = root.entries()
    places = [Place(root, entries)]
    with undo_on_error(partial(close_places, places)):
        for name, st in entries.items():
            if _RANK.fullmatch(name) and stat.S_ISDIR(st.st_mode):
                directory = root.directory(name)
                places.append(Place(directory, directory.entries()))
        for place in places:
            folders = {n for n, f in place.entries.items() if stat.S_ISDIR(f.st_mode)}
            if _FILE_PER_KEY in folders or (folders and folders <= _FILE_PER_KEY_FOLDERS):
                raise UnsupportedByBackend(
                    f"{place.directory.path}: written by Mooncake's file_per_key backend, but only "
                    "buckets and offset files are read; name the mooncake:// store of its master"
                )
        strangers = sorted(name for name in entries if name != "lost+found")
        if strangers and not any(map(_is_known, strangers)):
            raise UnsupportedByBackend(
                f"{root.path}: has {strangers[0]}, but no files of Mooncake's SSD tier: no "
                f"ID.bucket, no {DATA_FILE}, and no rank_* directories; check the path"
            )
    return places


def _is_known(name: str) -> bool:
    return bool(
        name in (DATA_FILE, META_FILE) or _BUCKET_FILE.fullmatch(name) or _RANK.fullmatch(name)
    )


def close_places(places: Sequence[Place]) -> None:
    """Close the rank directories; the root belongs to the caller."""
    for place in places[1:]:
        place.directory.close()


def read_index(places: Sequence[Place], tenant: str) -> Index:
    """Read all metadata.

    Raises OSError. Raises UnsupportedByBackend for files of an unknown form, and for too many keys.
    Files with damaged metadata are left out, and become losses of the index.
    """
    reader = _Reader(tenant)
    for place in places:
        reader.read_place(place)
    return reader.index()


class _Reader:
    """Collects the objects and the remarks of an index."""

    def __init__(self, tenant: str) -> None:
        self._prefix = tenant.encode("utf-8", "surrogateescape") + TENANT_END
        self._default = tenant == DEFAULT_TENANT
        self._files: list[DataFile] = []
        self._keys: list[bytes] = []
        self._key_bytes = 0
        # One array for each bucket, or for each _RECORDS_AT_ONCE records of an offset file.
        self._objects: list[npt.NDArray[np.void]] = []
        self._buckets = 0
        self._losses: list[Loss] = []
        self._nameless: Loss | None = None  # the first offset file without metadata
        self._special: list[str] = []  # paths with names of ranks that are no directories
        self._others: dict[bytes, int] = {}  # number of objects of each other tenant

    def read_place(self, place: Place) -> None:
        """Read the buckets and the offset file of a directory."""
        self._special += [
            f"{place.directory.path}/{name}"
            for name, st in place.entries.items()
            if _RANK.fullmatch(name) and not stat.S_ISDIR(st.st_mode)
        ]
        files = [n for n, st in place.entries.items() if not stat.S_ISDIR(st.st_mode)]
        if DATA_FILE in files or META_FILE in files:
            self._read_offset_file(place, files)
        found: dict[str, dict[str, str]] = {"bucket": {}, "meta": {}}
        for name in files:
            if match := _BUCKET_FILE.fullmatch(name):
                found[match[2]][match[1]] = name
        buckets, metas = found["bucket"], found["meta"]
        self._buckets += len(metas)
        path = place.directory.path
        for name in (name for id_, name in buckets.items() if id_ not in metas):
            what = (
                "no .meta file says which objects the bucket has, because a crash interrupted the "
                "write; a restart of the client deletes the bucket"
            )
            self._lose(f"{path}/{name}", what, place.entries[name])
        for name in (name for id_, name in metas.items() if id_ not in buckets):
            self._lose(f"{path}/{name}", _NO_DATA)
        for id_ in sorted(metas.keys() & buckets.keys(), key=int):
            try:
                self._read_bucket(place, int(id_), metas[id_], buckets[id_])
            except PermissionError as error:
                raise_denied(error, f"{path}/{metas[id_]}")
                raise
            except (FormatError, UntrustedError, FileNotFoundError) as error:
                source = f"{path}/{metas[id_]}"
                what = f"the objects of the bucket are left out: {_reason(source, error)}"
                self._lose(source, what)

    def _read_bucket(self, place: Place, number: int, meta: str, name: str) -> None:
        source = f"{place.directory.path}/{meta}"
        st = place.entries[name]
        place.directory.check(name, st)
        parsed = parse_bucket_meta(_read(place, meta, _MAX_BUCKET_META_BYTES, source), source)
        self._files.append(DataFile(place.directory, name, st, is_bucket=True))
        key_sizes = np.fromiter(map(len, parsed.keys), dtype=np.int64, count=len(parsed.keys))
        objects = np.zeros(len(parsed.keys), dtype=OBJECT)
        objects["start"], objects["size"] = parsed.starts, parsed.sizes
        objects["value"], objects["sequence"] = parsed.starts + key_sizes, number
        self._add(parsed.keys, objects)

    def _read_offset_file(self, place: Place, files: Sequence[str]) -> None:
        path = place.directory.path
        if META_FILE not in files:
            what = (
                f"no {META_FILE} says which objects it has, because Mooncake ran without "
                "MOONCAKE_OFFSET_PERSIST_MODE, or with the value relaxed and ended before its "
                "first checkpoint; the objects cannot be recovered"
            )
            self._lose(f"{path}/{DATA_FILE}", what, place.entries[DATA_FILE])
            self._nameless = self._nameless or self._losses[-1]
            return
        if DATA_FILE not in files:
            self._lose(f"{path}/{META_FILE}", _NO_DATA)
            return
        source = f"{path}/{META_FILE}"
        try:
            data = _read(place, META_FILE, _MAX_OFFSET_META_BYTES, source)
            meta = parse_offset_meta(data, source)
        except FormatError as error:
            what = f"the objects of {DATA_FILE} are left out: {_reason(source, error)}"
            self._lose(source, what)
            return
        with closing_descriptor(place.directory.open_file(DATA_FILE)) as descriptor:
            st = os.fstat(descriptor)
            self._files.append(DataFile(place.directory, DATA_FILE, st, is_bucket=False))
            torn = late = 0
            for at in range(0, len(meta.starts), _RECORDS_AT_ONCE):
                counts = self._read_records(descriptor, meta, slice(at, at + _RECORDS_AT_ONCE))
                torn, late = torn + counts[0], late + counts[1]
        path = self._files[-1].path
        if torn:
            what = f"{torn} records are left out, because their headers are damaged"
            self._lose(path, what, st)
        if late:
            what = (
                f"{late} records are left out, because they are newer than the last checkpoint; a "
                "restart of the client drops them"
            )
            self._lose(path, what, st)

    def _read_records(self, descriptor: int, meta: OffsetMeta, some: slice) -> tuple[int, int]:
        """Read records of the offset file, and add those that a restart of Mooncake would keep.

        Returns how many records have damaged headers, and how many are newer than the checkpoint.
        """
        places, size = meta.starts[some].tolist(), RECORD.itemsize
        heads = [os.pread(descriptor, _HEAD_BYTES, place) for place in places]
        records = parse_records(b"".join(head[:size].ljust(size, b"\0") for head in heads))
        sound = are_records(records, meta.sizes[some])
        late = sound & (records["sequence"] >= np.uint64(meta.sequence))
        chosen = np.flatnonzero(sound & ~late).tolist()
        lengths = records["key_bytes"].tolist()
        keys = [_key(descriptor, places[row], heads[row], lengths[row]) for row in chosen]
        cut = sum(len(key) < lengths[row] for row, key in zip(chosen, keys, strict=True))
        kept = [
            row
            for row, key in zip(chosen, keys, strict=True)
            if len(key) == lengths[row] and key not in meta.evicted
        ]
        known = dict(zip(chosen, keys, strict=True))
        objects = np.zeros(len(kept), dtype=OBJECT)
        objects["start"] = meta.starts[some][kept]
        objects["value"] = objects["start"] + value_starts(
            records["key_bytes"][kept].astype(np.int64)
        )
        objects["size"], objects["sequence"] = (
            records[name][kept] for name in ("value_bytes", "sequence")
        )
        self._add([known[row] for row in kept], objects)
        return int((~sound).sum()) + cut, int(late.sum())

    def _lose(self, place: str, what: str, st: os.stat_result | None = None) -> None:
        """Note a loss.

        st: stat of a file that a client may be writing; else None.
        """
        changed_ns = 0 if st is None else st.st_mtime_ns
        self._losses.append(Loss("lost-objects", place, what, changed_ns))

    def _add(self, stored: list[bytes], objects: npt.NDArray[np.void]) -> None:
        """Add our tenant's objects in the last file, and count the objects of other tenants."""
        names = [self._name(key) for key in stored]
        objects["file"] = len(self._files) - 1
        kept = [name for name in names if name is not None]
        self._key_bytes += sum(map(len, kept))
        if self._key_bytes > _MAX_KEYS_BYTES:
            raise UnsupportedByBackend(
                f"{self._files[-1].path}: the keys up to this file have more than 2 GiB; open the "
                "directory of one rank"
            )
        self._keys += kept
        self._objects.append(objects[[name is not None for name in names]])

    def _name(self, stored: bytes) -> bytes | None:
        """Return a stored key without its tenant; None for a key of another tenant."""
        if stored.startswith(self._prefix):
            return stored[len(self._prefix) :]
        tenant, end, _ = stored.partition(TENANT_END)
        if not end and self._default:
            return stored
        tenant = tenant if end else DEFAULT_TENANT.encode()
        self._others[tenant] = self._others.get(tenant, 0) + 1
        return None

    def index(self) -> Index:
        """Return the objects.

        Of several objects with the same key, the newest whole object counts, or else the newest.

        Raises UnsupportedByBackend if the store is a single offset file without metadata.
        """
        if self._nameless is not None and len(self._losses) == 1 and not self._files:
            raise UnsupportedByBackend(str(self._nameless))
        keys = pa.array(self._keys, pa.binary())
        objects = np.concatenate([np.zeros(0, dtype=OBJECT), *self._objects])
        ends = np.array([file.st.st_size for file in self._files], dtype=np.int64)
        objects["nbytes"] = np.clip(ends[objects["file"]] - objects["value"], 0, objects["size"])
        codes = keys.dictionary_encode().indices.to_numpy()
        whole = objects["nbytes"] == objects["size"]
        order = np.lexsort((objects["sequence"], whole, codes))
        kept = order[np.diff(codes[order], append=-1) != 0]
        kept = kept[np.lexsort((objects["start"][kept], objects["file"][kept]))]
        cut = np.bincount(objects["file"][kept[~whole[kept]]], minlength=len(self._files))
        for number in np.flatnonzero(cut).tolist():
            file = self._files[number]
            what = f"{cut[number]} objects lie partly or wholly behind the end of the file"
            self._lose(file.path, what, file.st)
        return Index(
            keys.take(pa.array(kept)),
            objects[kept],
            self._files,
            self._prefix,
            tuple(self._losses),
            tuple(self._remarks(older=len(order) - len(kept))),
        )

    def _remarks(self, *, older: int) -> Iterator[str]:
        if not self._files:
            yield "No objects: the directory has no bucket with metadata and no offset file"
        if self._buckets:
            yield (
                "Objects that were removed from the cluster may still be listed, because Mooncake "
                "never updates the .meta file of a bucket"
            )
        yield from self._grouped_losses()
        names = ", ".join(repr(os.fsdecode(name)) for name in sorted(self._others)[:3])
        notes = (
            (
                len(self._special),
                "ranks are left out, because they are links or files; the first is "
                f"{(self._special or [''])[0]}",
            ),
            (older, "older objects are left out, because a newer object has the same key"),
            (
                sum(self._others.values()),
                f"objects of other tenants are left out ({names}); tenant=NAME in the URL lists "
                "another tenant",
            ),
        )
        yield from (f"{count} {text}" for count, text in notes if count)

    def _grouped_losses(self) -> Iterator[str]:
        """Yield one remark for all files that lost objects in the same way."""
        places: dict[str, list[str]] = {}
        for loss in self._losses:
            places.setdefault(loss.what, []).append(loss.place)
        for what, found in places.items():
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            yield f"{found[0]}{more}: {what}"


def _read(place: Place, name: str, most: int, source: str) -> bytes:
    too_large = place.entries[name].st_size > most
    if too_large or len(data := place.directory.read(name, most + 1)) > most:
        raise FormatError(f"{source}: larger than {most} bytes, so not Mooncake's metadata")
    return data


def _key(descriptor: int, start: int, head: bytes, length: int) -> bytes:
    """Return a record's stored key, or its beginning if the file ends within the key."""
    size = RECORD.itemsize
    if length <= _HEAD_BYTES - size:
        return head[size : size + length]
    return os.pread(descriptor, length, start + size)


def _reason(source: str, error: Exception) -> str:
    said = reason_of(error) if isinstance(error, OSError) else str(error)
    return said.removeprefix(f"{source}: ")
