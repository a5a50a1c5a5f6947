"""Packs as stores. A pack is one file with the objects, keys and profile of another store.

A pack is read by its index and written by appending. `formats.pack` defines the format. While a
pack is being written, it has no valid end, so only its writer, which holds a lock, can read it.
"""

from __future__ import annotations

import os
import threading
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace

from hicachectl.backends.base import (
    Limits,
    ReadResult,
    Result,
    Rows,
    Status,
    Traits,
    keys_of,
    scan_batch,
    scan_schema,
    values_of,
)
from hicachectl.backends.capabilities import Archive, FilePermissions, ReadsAhead, Resumable
from hicachectl.backends.disk.io import raise_denied, raise_lost, undo_on_error
from hicachectl.backends.disk.permissions import Permissions
from hicachectl.backends.pack.file import (
    ObjectReader,
    OtherContentError,
    RecordPlace,
    load_pack,
    open_pack,
)
from hicachectl.backends.pack.writer import PackWriter, free_bytes
from hicachectl.backends.urls import PackParams, StoreUrl, params_of
from hicachectl.formats.errors import (
    FormatError,
    UnsupportedByBackend,
    UsageError,
)
from hicachectl.formats.keys import grammar_of
from hicachectl.formats.pack.index import column_of
from hicachectl.formats.pack.records import DIGEST_BYTES, RECORD_BYTES
from hicachectl.formats.profile import dump_profile, parse_profile, stored_profile
from hicachectl.formats.wording import reason_of

if TYPE_CHECKING:
    from collections.abc import Collection, Generator

    from hicachectl.backends.pack.file import PackContents, PackEntries
    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.formats.pack.records import Metadata
    from hicachectl.formats.profile import Profile

SCAN_ROWS = 16384


class PackStore(ReadsAhead, Archive, FilePermissions, Resumable):
    """One pack file, open for reading or, by `create`, for writing.

    grammar: key grammar of the store that the keys come from.
    """

    limits: Limits = Limits(
        batch_objects=256,
        batch_bytes=64 << 20,  # each batch ends with one fdatasync
        parallel_reads=4,
        forkable=True,  # reading needs only the file's descriptor
    )
    traits: ClassVar[Traits] = Traits(
        columns=frozenset({"nbytes", "mtime_ns", "locator", "version"}),
        version_fields=("digest_0", "digest_1", "digest_2", "digest_3"),
        writes=True,
        live=False,
        append_only=True,
        keeps_digests=True,
    )

    def __init__(self, path: str, *, writable: bool = False) -> None:
        """Open a pack. Raises StoreUnavailable, and FormatError if the pack is not valid."""
        self.path = os.path.abspath(path)  # noqa: PTH100 - keeps names that are not UTF-8
        self.url = str(StoreUrl("pack", self.path))
        self._of_thread = threading.local()
        self._writer = PackWriter(self.path) if writable else None
        self._listed: PackContents | PackEntries
        if self._writer is not None:
            self._descriptor = self._writer.descriptor
            self._pack_id = self._writer.pack_id
            self._listed = self._writer.entries
            return
        self._descriptor = open_pack(self.path, os.O_RDONLY)
        with undo_on_error(partial(os.close, self._descriptor)):
            finished = load_pack(self._descriptor, self.path)
        self._pack_id, self._finished = finished.pack_id, finished
        self._listed = finished

    @classmethod
    def from_url(cls, url: StoreUrl) -> Self:
        """Open a valid pack for reading."""
        store = cls(url.path)
        store._check_keys_parameter(url)
        return store

    @classmethod
    def create(cls, url: StoreUrl) -> Self:
        """Open a pack for writing. The pack may be new, cut off or valid."""
        store = cls(url.path, writable=True)
        with undo_on_error(store.close):
            if (keys := params_of(url, PackParams).keys) is not None:
                store.use_grammar(keys)
        return store

    def readable_by(self, *, listing: bool = False) -> Permissions:
        """Return which users may read the pack file."""
        return Permissions.of_file(os.fstat(self._descriptor))

    def keep_private(self, permissions: Permissions, *, listing: bool = False) -> None:
        """Limit the mode of the pack file."""
        if self._writer is not None:
            self._writer.keep_private(permissions)

    def close(self) -> None:
        """Close the pack. If this store has written to it, finish it first."""
        descriptor, self._descriptor = self._descriptor, -1
        if self._writer is not None:
            self._writer.close()
        elif descriptor >= 0:
            os.close(descriptor)

    def flush(self) -> None:
        """Sync the pack, because a killed writer may have left unsynced records."""
        if self._writer is not None:
            self._writer.sync()

    @property
    def grammar(self) -> str:
        """Return the grammar of the keys; "file" while a new pack has none."""
        return self._metadata.grammar or "file"

    @property
    def open_grammar(self) -> bool:
        """Return whether the pack is open for writing, and its grammar is not set yet."""
        return self._writer is not None and not self._metadata.grammar

    def use_grammar(self, name: str) -> None:
        """Set the grammar of the keys to write. A pack with objects accepts only their grammar."""
        grammar_of(name)
        if self._writer is not None:
            self._writer.use_metadata(grammar=name)
        elif name != self.grammar:
            raise UnsupportedByBackend(
                f"{self.url}: the pack has {self.grammar} keys, not {name} keys; "
                "write to a new pack"
            )

    def recorded_profile(self) -> Profile | None:
        """Return the recorded profile; None if there is none.

        Also return None for keys of the grammar `unified`, which a profile cannot describe. Raises
        ProfileError.
        """
        text = "" if self.grammar == "unified" else self._metadata.profile
        return parse_profile(text, source=f"{self.path}: profile") if text else None

    def use_profile(self, profile: Profile, *, looks_only: bool = False) -> None:
        """Record the profile of the next writes. Ignore an inferred, and so incomplete, profile."""
        if self._writer is None or profile.inferred:
            return
        profile = stored_profile(profile)
        recorded = self.recorded_profile()
        if self._writer.entries and not (recorded is not None and recorded.weights):
            # The weights of the objects that are already in the pack are unknown.
            profile = replace(profile, weights="", draft_weights="")
        if profile != recorded:
            self._writer.use_metadata(profile=dump_profile(profile))

    @property
    def remarks(self) -> tuple[str, ...]:
        """Report the state of an unfinished pack that was opened for writing."""
        return () if self._writer is None else self._writer.remarks

    def scan(self, columns: Collection[str] = ("nbytes", "mtime_ns")) -> Generator[Any, None, None]:
        """List the index. The version of an object is its digest."""
        schema = scan_schema(columns)
        for batch in self._listed.table().to_batches(max_chunksize=SCAN_ROWS):
            yield _scanned(batch, schema)

    def read_into(
        self, rows: Rows, offsets: IntArray, capacities: IntArray, *, identify: bool = True
    ) -> ReadResult:
        """Read and decompress objects whose size equals the row's capacity.

        The status is ERROR if the record differs from the index, and DAMAGED if the content differs
        from its digest.
        """
        memory = self.memory(offsets, capacities, len(rows))
        places = self._listed.places(rows)
        sizes = [-1 if place is None else place.nbytes for place in places]
        nbytes = np.array(sizes, dtype=np.int64)
        digests = [bytes(DIGEST_BYTES) if place is None else place.digest for place in places]
        statuses = np.where(nbytes < capacities, Status.SHORT, Status.OK).astype(np.uint8)
        statuses[nbytes > capacities] = Status.OVERSIZED
        statuses[nbytes < 0] = Status.GONE
        errors: dict[int, str] = {}
        keys, starts, fits = keys_of(rows), offsets.tolist(), (statuses == Status.OK).tolist()
        reader = self._reader()
        for index, place in enumerate(places):
            if place is None or not fits[index]:
                continue
            start = starts[index]
            try:
                reader.read(keys[index], place, memory[start : start + place.nbytes])
            except (OSError, FormatError) as error:
                damaged = isinstance(error, OtherContentError)
                statuses[index] = Status.DAMAGED if damaged else Status.ERROR
                errors[index] = self._failed(error, place)
        versions = np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, DIGEST_BYTES // 8)
        return ReadResult(statuses, errors, nbytes=nbytes, versions=versions)

    def expect(self, rows: Rows, capacities: IntArray) -> None:
        """Let the system start to read the records of these objects."""
        for place in filter(None, self._listed.places(rows)):
            os.posix_fadvise(self._descriptor, place.offset, place.length, os.POSIX_FADV_WILLNEED)

    def write_from(
        self, rows: Rows, offsets: IntArray, sizes: IntArray, *, if_absent: bool
    ) -> Result:
        """Append objects, compressed if that makes them smaller, with one sync at the end."""
        if self._writer is None:
            raise UnsupportedByBackend(
                f"{self.url}: the pack is open for reading only; open it with create=True"
            )
        memory = self.memory(offsets, sizes, len(rows))
        starts, ends = offsets.tolist(), (offsets + sizes).tolist()
        objects = [memory[start:end] for start, end in zip(starts, ends, strict=True)]
        keys, times = keys_of(rows), values_of(rows, "mtime_ns")
        return Result(*self._writer.write(keys, times, objects, if_absent=if_absent))

    def own_temporaries(self, owner: str, *, sweep: bool) -> None:
        """Take over the pack of a killed run, so that `close` finishes the pack."""
        if self._writer is not None:
            self._writer.may_finish = True

    def undo_writes(self, rows: Rows) -> Result:
        """Leave objects out of the new index. Their bytes stay in the file."""
        if self._writer is None:
            return super().undo_writes(rows)
        existed = self._writer.withdraw(keys_of(rows))
        return Result(np.where(existed, Status.OK, Status.GONE).astype(np.uint8))

    def exists(self, rows: Rows) -> BoolArray:
        """Return which keys the index has."""
        places = self._listed.places(rows)
        return np.array([place is not None for place in places], dtype=np.bool_)

    def look(self, rows: Rows, columns: Collection[str] = ("nbytes", "mtime_ns", "version")) -> Any:
        """List a few objects again, from the index."""
        schema = scan_schema(columns)
        batches = self._listed.look(rows).to_batches()
        return pa.Table.from_batches([_scanned(batch, schema) for batch in batches], schema=schema)

    def free_bytes(self) -> int | None:
        """Return the free bytes for objects, without bytes that only root may fill."""
        objects = 0 if self._writer is None else len(self._writer.entries)
        return max(0, free_bytes(self._descriptor, objects))

    def summary(self) -> dict[str, Any]:
        """Return the numbers of `hicachectl pack info` as JSON types."""
        listed = self._listed.table()
        head = RECORD_BYTES * len(listed) + (
            pc.sum(pc.binary_length(listed.column("key"))).as_py() or 0
        )
        planes = pc.value_counts(listed.column("planes").combine_chunks()).to_pylist()
        profile = self.recorded_profile()
        return {
            "grammar": self.grammar,
            "model": None if profile is None else profile.model,
            "written_by": self._metadata.version,
            "objects": len(listed),
            "bytes": int(column_of(listed, "nbytes").sum()),
            "stored_bytes": int(column_of(listed, "length").sum()) - head,
            "file_bytes": os.fstat(self._descriptor).st_size,
            "planes": {
                str(p["values"]): p["counts"] for p in sorted(planes, key=itemgetter("values"))
            },
        }

    @property
    def _metadata(self) -> Metadata:
        return self._finished.metadata if self._writer is None else self._writer.metadata

    def _reader(self) -> ObjectReader:
        reader: ObjectReader | None = getattr(self._of_thread, "reader", None)
        if reader is None:
            reader = self._of_thread.reader = ObjectReader(self._descriptor, self._pack_id)
        return reader

    def _failed(self, error: OSError | FormatError, place: RecordPlace) -> str:
        """Return the message for an error of one object.

        Raises StoreUnavailable if the file system is unreachable, DeniedError if this user may not
        read the pack.
        """
        if isinstance(error, FormatError):
            return f"damaged: {error} (offset {place.offset})"
        raise_lost(error, self.path, "read the pack")
        raise_denied(error, self.path)
        return reason_of(error)

    def _check_keys_parameter(self, url: StoreUrl) -> None:
        keys = params_of(url, PackParams).keys
        if keys not in (None, self.grammar):
            self.close()
            raise UsageError(
                f"{url}: the pack has {self.grammar} keys, not {keys} keys; leave out keys="
            )


def _scanned(batch: Any, schema: Any) -> Any:
    """Return a batch of entries with a scan's schema. Columns that packs lack are null."""
    names = {"locator": "offset", "version": "digest"}
    columns = {
        field.name: batch.column(name).cast(field.type)
        for field in schema
        if (name := names.get(field.name, field.name)) in batch.schema.names
    }
    return scan_batch(schema, columns, len(batch))
