"""SGLang's Mooncake store: objects in the memory of a cluster, listed by its master.

Listings and queries use the master's HTTP service and change neither leases nor eviction order. The
data client connects at the first read or write.
Source: sglang srt/mem_cache/storage/mooncake_store/mooncake_store.py :: MooncakeStore.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import pyarrow as pa

from hicachectl.backends.arena import Arena, place
from hicachectl.backends.base import (
    Capacity,
    Limits,
    ReadResult,
    Result,
    Rows,
    Status,
    Traits,
    as_table,
    batch_spans,
    scan_batch,
    scan_schema,
)
from hicachectl.backends.capabilities import (
    Condition,
    Leases,
    Pins,
    RacyWrites,
    Serviced,
    Touch,
)
from hicachectl.backends.disk.io import undo_on_error
from hicachectl.backends.mooncake.client import (
    MISSING,
    NOT_TRANSFERRED,
    Code,
    MooncakeClient,
    message_of,
)
from hicachectl.backends.mooncake.master import VERSION_BYTES, MasterAdmin, key_texts
from hicachectl.backends.mooncake.settings import MooncakeSettings, settings_from
from hicachectl.formats.errors import UsageError
from hicachectl.formats.eviction import Policy

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Hashable, Iterator, Sequence

    import numpy.typing as npt

    from hicachectl.backends.urls import StoreUrl
    from hicachectl.formats.arrays import BoolArray, IntArray

    Codes = npt.NDArray[np.int64]

SCAN_ROWS = 16384
LEASE_SECONDS = 10.0  # the master's --default_kv_lease_ttl in Mooncake 0.3.13
_LEASE_POLL_SECONDS = 0.5
_LEASE_RETRIES = 3  # most retries of a read whose lease ended too early, as on a busy machine
_TCP = "tcp"
_CARD_READERS = 4  # reads at once if the network card copies; not measured on an RDMA network
_WITH_MESSAGE = (Status.ERROR, Status.UNREACHABLE)
_NOT_TEXT = "the key is not UTF-8, which Mooncake does not support"
_PIN_TOO_LONG = "longer than the master's --max_kv_soft_pin_ttl; give a shorter time"
_EVICTED_AT_ONCE = (
    "evicted right after the write, because the cluster is full; remove pages, or add a storage "
    "process"
)
_READ_BACK_BYTES = 64 << 20  # most bytes that one call reads back


class MooncakeStore(Leases, Pins, RacyWrites, Serviced, Touch):
    """The default tenant's objects in a cluster. This client contributes no memory."""

    limits: Limits = Limits(
        batch_objects=128,  # SGLang's batches have 128 pages
        batch_bytes=256 << 20,
        parallel_reads=2,  # one read starts while the other ends
    )
    grammar = "mooncake"
    traits: ClassVar[Traits] = Traits(
        columns=frozenset({"nbytes", "version", "replicas"}),
        version_fields=("size", "segment", "address"),
        writes=True,
        deletes=True,
        evicts=True,
        versions_recur=True,  # freed memory is reused, so a new object can get an old version
        logs_natively=True,
    )
    lease_wait_seconds: float = 2 * LEASE_SECONDS

    def __init__(self, settings: MooncakeSettings) -> None:
        self._settings = settings
        if settings.protocol != _TCP:
            # The network card copies, so threads can process earlier objects meanwhile.
            self.limits = replace(self.limits, parallel_reads=_CARD_READERS)
        self.url = str(settings)
        self._admin = MasterAdmin(settings.admin)
        self._client: MooncakeClient | None = None
        self._closed = False
        self._kept: list[Any] = []  # arenas that hanging calls may still write to
        self._registered: int | None = None  # address of the arena
        self._opening = threading.Lock()
        self._pin_seconds: float | None = None
        with undo_on_error(self.close):
            self._admin.check()

    @property
    def places(self) -> tuple[Hashable, ...]:
        """Return the cluster's segments, or the URL if the cluster has none.

        The segments identify the cluster, because a storage process belongs to one master.
        """
        segments = frozenset((one.name, one.endpoint) for one in self._admin.segments())
        return (segments or self.url,)

    @classmethod
    def from_url(cls, url: StoreUrl) -> Self:
        """Connect to the master that the URL, the environment or SGLang's config names."""
        return cls(settings_from(url, os.environ))

    def close(self) -> None:
        """Leave the cluster."""
        self.detach()
        self._closed = True
        client, self._client = self._client, None
        if client is not None:
            client.close()
        self._admin.close()

    def attach(self, arena: Arena) -> None:
        """Register the arena for transfers."""
        self.detach()
        self._data().register(arena.address, arena.nbytes)
        self._registered = arena.address
        super().attach(arena)

    def detach(self) -> None:
        """Unregister the arena."""
        if self._registered is not None and self._client is not None:
            if self._client.abandoned and self.arena is not None:
                self._kept.append(self.arena.array)  # the reference keeps the memory mapped
            else:
                self._client.unregister(self._registered)
        self._registered = None
        super().detach()

    # listing

    def scan(self, columns: Collection[str] = ("nbytes", "mtime_ns")) -> Generator[Any, None, None]:
        """List the default tenant's objects with a readable replica.

        Objects that are removed or incomplete at the time of the query are left out. Keys with a
        comma cannot be queried, so their size is null. With `allow_leases`, their size comes from
        calls that grant leases.
        """
        schema = scan_schema(columns)
        for keys in self._admin.key_batches(SCAN_ROWS):
            yield self._described(schema, keys)

    def look(self, rows: Rows, columns: Collection[str] = ("nbytes", "mtime_ns", "version")) -> Any:
        """Query a few objects again. Keys with commas are looked up in a full listing."""
        keys = _key_array(rows)
        answer = self._admin.query(keys)
        unaskable = _unaskable(answer)
        if unaskable.any():
            listed = self._listed(keys.filter(pa.array(unaskable)))
            known = pa.array(~unaskable | _is_in(keys, listed))
            keys, answer = keys.filter(known), answer.filter(known)
        return pa.Table.from_batches([self._batch(scan_schema(columns), keys, answer)])

    def exists(self, rows: Rows) -> BoolArray:
        """Return which objects exist and are readable."""
        return self._found(rows)[0]

    def _found(self, rows: Rows) -> tuple[BoolArray, BoolArray]:
        """Return the result of `exists`, and which keys another writer has begun to write: [n]."""
        keys = _key_array(rows)
        answer = self._admin.query(keys)
        unaskable = _unaskable(answer)
        there: BoolArray = _codes(answer) == 0
        if unaskable.any():
            there |= unaskable & _is_in(keys, self._listed(keys.filter(pa.array(unaskable))))
        return there, _codes(answer) == Code.REPLICA_IS_NOT_READY

    def eviction(self) -> Policy:
        """See `Store`."""
        return Policy.MOONCAKE

    def conditions(self) -> Iterator[Condition]:
        """Yield the condition of the cluster's segments."""
        segments = self._admin.segments()
        usable = [one for one in segments if one.status == "OK"]
        if not usable:
            problem = (
                "No storage process gives the cluster memory, so nothing is stored; start a "
                "storage process"
            )
            yield Condition("segments", "", problem, is_lost=True)
            return
        capacity = sum(one.capacity_bytes for one in usable)
        used = sum(one.used_bytes for one in usable) / max(1, capacity)
        text = (
            f"Segments: {len(usable)}, {capacity / (1 << 30):.1f} GiB in all, {used:.0%} used; "
            "the master evicts above its --eviction_high_watermark_ratio, by default 90%"
        )
        leaving = len(segments) - len(usable)
        problem = (
            f"{leaving} of the cluster's {len(segments)} segments cannot be used; see whether "
            "their storage processes run"
        )
        yield Condition("segments", text, problem if leaving else "")

    def free_bytes(self) -> int | None:
        """Return the free bytes of the cluster's segments."""
        return self._admin.free_bytes()

    def capacity(self) -> Capacity | None:
        """Return the size of the cluster's segments."""
        return Capacity(self._admin.capacity_bytes())

    def _described(self, schema: Any, keys: Any) -> Any:
        """Return a batch of listed keys; query the master only if a column needs it."""
        if not set(schema.names) & {"nbytes", "version", "replicas"}:
            return scan_batch(schema, {"key": keys}, len(keys))
        return self._batch(schema, keys, self._admin.query(keys))

    def _batch(self, schema: Any, keys: Any, answer: Any) -> Any:
        unaskable = _unaskable(answer)
        sizes = answer.column("nbytes")
        if self.allow_leases and unaskable.any():
            sizes = self._leased_sizes(keys, sizes, np.flatnonzero(unaskable))
        kept = pa.array((_codes(answer) == 0) | unaskable)
        columns = {
            "key": keys.filter(kept),
            "nbytes": sizes.filter(kept),
            "version": answer.column("version").filter(kept).cast(pa.binary()),
            "replicas": answer.column("replicas").filter(kept),
        }
        return scan_batch(schema, columns, len(columns["key"]))

    def _leased_sizes(self, keys: Any, sizes: Any, places: IntArray) -> Any:
        """Query sizes by calls that grant leases, one for each key."""
        found = sizes.to_pylist()
        asked = key_texts(keys.take(pa.array(places)))
        for place_, key in zip(places.tolist(), asked, strict=True):
            size = Code.OBJECT_NOT_FOUND if key is None else self._data().size(key)
            found[place_] = size if size > 0 else None
        return pa.array(found, pa.int64())

    def _listed(self, wanted: Any) -> Any:
        """Return the wanted keys that the master lists."""
        found = [
            keys.filter(pa.array(_is_in(keys, wanted)))
            for keys in self._admin.key_batches(SCAN_ROWS)
        ]
        return pa.concat_arrays(found or [pa.array([], pa.binary())])

    # data

    def read_into(
        self, rows: Rows, offsets: IntArray, capacities: IntArray, *, identify: bool = True
    ) -> ReadResult:
        """Read whole objects. The lease of a read keeps the object until its version is queried."""
        self.memory(offsets, capacities, len(rows))
        keys = key_texts(rows.column("key"))
        codes = np.full(len(rows), Code.INVALID_PARAMS, dtype=np.int64)
        chosen = np.array([key is not None for key in keys], dtype=np.bool_) & (capacities > 0)
        places = np.flatnonzero(chosen)
        if len(places):
            names = [keys[at] or "" for at in places.tolist()]
            addresses = self._addresses(offsets[places])
            codes[places] = self._transferred(names, addresses, capacities[places].tolist())
        nbytes = np.where(codes > 0, codes, -1)
        statuses = np.full(len(rows), Status.ERROR, dtype=np.uint8)
        statuses[codes == capacities] = Status.OK
        statuses[(codes > 0) & (codes < capacities)] = Status.SHORT
        statuses[np.isin(codes, MISSING)] = Status.GONE
        versions = np.zeros((len(rows), len(self.traits.version_fields)), dtype=np.uint64)
        unclear = (statuses == Status.ERROR) | (identify & (statuses == Status.OK))
        if unclear.any():
            self._clear_up(keys, rows, np.flatnonzero(unclear), statuses, nbytes, versions)
            statuses[(statuses == Status.ERROR) & (nbytes > capacities)] = Status.OVERSIZED
        statuses[(statuses == Status.ERROR) & np.isin(codes, NOT_TRANSFERRED)] = Status.UNREACHABLE
        errors = {
            at: _NOT_TEXT if keys[at] is None else message_of(int(codes[at]))
            for at in np.flatnonzero(np.isin(statuses, _WITH_MESSAGE)).tolist()
        }
        return ReadResult(statuses, errors, nbytes=nbytes, versions=versions)

    def _transferred(
        self, keys: Sequence[str], addresses: list[int], capacities: list[int]
    ) -> Codes:
        """Read objects. If an object's lease ended too early, read this object again."""
        codes = self._data().get_into(keys, addresses, capacities)
        for at in np.flatnonzero(codes == Code.LEASE_EXPIRED).tolist() * _LEASE_RETRIES:
            if codes[at] == Code.LEASE_EXPIRED:
                codes[at] = self._data().get_into([keys[at]], [addresses[at]], [capacities[at]])[0]
        return codes

    def _clear_up(
        self,
        keys: Sequence[str | None],
        rows: Rows,
        places: IntArray,
        statuses: npt.NDArray[np.uint8],
        nbytes: IntArray,
        versions: npt.NDArray[np.uint64],
    ) -> None:
        """Query the versions of objects that were read, and the existence and sizes of the rest.

        Queries of keys with commas grant leases, as reads do.
        """
        answer = self._admin.query(_key_array(rows).take(pa.array(places)))
        codes, sizes = _codes(answer), answer.column("nbytes").fill_null(-1).to_numpy()
        known = codes == 0
        versions[places[known]] = _version_rows(answer.column("version").filter(pa.array(known)))
        failed = statuses[places] == Status.ERROR
        statuses[places[failed & np.isin(codes, MISSING)]] = Status.GONE
        nbytes[places[failed & known]] = sizes[failed & known]
        for at in places[failed & _unaskable(answer)].tolist():
            key = keys[at]
            nbytes[at] = max(-1, self._data().size(key)) if key is not None else -1

    def write_from(
        self, rows: Rows, offsets: IntArray, sizes: IntArray, *, if_absent: bool
    ) -> Result:
        """Put objects and read them back, because a put of an existing key also succeeds.

        If `confirms_writes` is False, nothing is read back, and the status is OK even if another
        writer has put the key after our query. If `if_absent` is False, an existing object is
        removed first, as in `delete`. A full cluster evicts objects that have neither a lease nor a
        pin. FULL: after that, there is still too little space.
        """
        self.memory(offsets, sizes, len(rows))
        keys = key_texts(rows.column("key"))
        statuses = np.zeros(len(rows), dtype=np.uint8)
        errors: dict[int, str] = {}
        for at, key in enumerate(keys):
            if key is None or not sizes[at]:
                statuses[at] = Status.ERROR
                errors[at] = _NOT_TEXT if key is None else "Mooncake cannot store empty objects"
        begun = self._make_room(rows, statuses, errors, if_absent=if_absent)
        places = np.flatnonzero(statuses == Status.OK)
        if len(places):
            codes = self._data().put_from(
                [keys[at] or "" for at in places],
                self._addresses(offsets[places]),
                sizes[places].tolist(),
                pin_seconds=self._pin_seconds,
            )
            statuses[places[codes == Code.EXISTS]] = Status.EXISTS
            _note_errors(statuses, errors, places, codes, (0, Code.EXISTS))
            if self._pin_seconds is not None:
                refused = places[codes == Code.INVALID_PARAMS]
                errors |= dict.fromkeys(refused.tolist(), f"The pin is {_PIN_TOO_LONG}")
            self._mark_begun(rows, places[(codes == 0) & begun[places]], statuses)
            if self.confirms_writes:
                put = places[(codes == 0) & (statuses[places] == Status.OK)]
                self._read_back(keys, put, offsets[put], sizes[put], statuses, errors)
        return Result(statuses, errors)

    def _make_room(
        self,
        rows: Rows,
        statuses: npt.NDArray[np.uint8],
        errors: dict[int, str],
        *,
        if_absent: bool,
    ) -> BoolArray:
        """With `if_absent`, set EXISTS for existing objects. Otherwise remove existing objects.

        Return which keys another writer has begun to write: [rows].
        """
        fine = np.flatnonzero(statuses == Status.OK)
        chosen = as_table(rows).take(pa.array(fine))
        begun = np.zeros(len(rows), dtype=np.bool_)
        if if_absent:
            there, begun[fine] = self._found(chosen)
            statuses[fine[there]] = Status.EXISTS
            return begun
        removed = self.delete(chosen)
        for index, why in removed.errors.items():
            statuses[fine[index]] = Status.ERROR
            errors[int(fine[index])] = why
        return begun

    def _mark_begun(self, rows: Rows, places: IntArray, statuses: npt.NDArray[np.uint8]) -> None:
        """Set EXISTS for objects that another writer has not finished.

        Our put of such a key reports success but stores nothing. If that writer was killed, the
        key is blocked for the master's --put_start_discard_timeout_sec.
        """
        if len(places):
            readable = self.exists(as_table(rows).take(pa.array(places)))
            statuses[places[~readable]] = Status.EXISTS

    def _read_back(
        self,
        keys: Sequence[str | None],
        places: IntArray,
        offsets: IntArray,
        sizes: IntArray,
        statuses: npt.NDArray[np.uint8],
        errors: dict[int, str],
    ) -> None:
        """Compare stored objects with our bytes. Set EXISTS for an object with other bytes.

        Another writer stored such an object. Set ERROR for an object that cannot be read back.
        """
        assert self.arena is not None
        for chunk in batch_spans(sizes, _READ_BACK_BYTES, self.limits.batch_objects):
            where, total = place(sizes[chunk])
            with Arena(total) as copy:
                names = [keys[at] or "" for at in places[chunk].tolist()]
                codes = self._read_copy(names, copy, where, sizes[chunk])
                for index, (at, code) in enumerate(zip(places[chunk], codes.tolist(), strict=True)):
                    size = int(sizes[chunk][index])
                    mine = self.arena.view(int(offsets[chunk][index]), size)
                    if code == Code.OBJECT_NOT_FOUND:
                        statuses[at] = Status.ERROR
                        errors[int(at)] = _EVICTED_AT_ONCE
                    elif code < 0 and code != Code.INVALID_PARAMS:
                        statuses[at] = Status.ERROR
                        errors[int(at)] = f"cannot be read back: {message_of(code)}"
                    elif code != size or not np.array_equal(
                        copy.view(int(where[index]), size), mine
                    ):
                        statuses[at] = Status.EXISTS

    def _read_copy(
        self, keys: Sequence[str], copy: Arena, offsets: IntArray, sizes: IntArray
    ) -> Codes:
        client = self._data()
        client.register(copy.address, copy.nbytes)
        try:
            return self._transferred(keys, (copy.address + offsets).tolist(), sizes.tolist())
        finally:
            client.unregister(copy.address)

    def pin_writes(self, seconds: float) -> None:
        """Set soft pins on written objects."""
        self._pin_seconds = seconds

    def can_pin(self, seconds: float) -> bool:
        """Return whether the master can pin stored objects; masters before 0.3.14 cannot."""
        answer = self._admin.can_pin(_milliseconds(seconds))
        if answer is None:
            raise self._pin_too_long(seconds)
        return answer

    def pin(self, rows: Rows, seconds: float) -> Result:
        """Set soft pins, which grant no leases."""
        result, codes = self._pinned(rows, _milliseconds(seconds))
        # No key is empty, so the invalid parameter can only be the time.
        if (codes == Code.INVALID_PARAMS).any():
            raise self._pin_too_long(seconds)
        return result

    def unpin(self, rows: Rows) -> Result:
        """Remove soft pins."""
        return self._pinned(rows, None)[0]

    def _pinned(self, rows: Rows, milliseconds: int | None) -> tuple[Result, Codes]:
        """Set or remove soft pins; also return the master's codes."""
        keys = key_texts(_key_array(rows))
        places = np.flatnonzero([key is not None for key in keys])
        codes = np.full(len(rows), Code.INVALID_KEY, dtype=np.int64)
        codes[places] = self._admin.pin([keys[at] or "" for at in places], milliseconds)
        statuses = np.zeros(len(rows), dtype=np.uint8)
        errors: dict[int, str] = {}
        missing = np.isin(codes, MISSING)
        statuses[missing] = Status.GONE
        _note_errors(statuses, errors, np.arange(len(rows)), codes, (0, *MISSING))
        not_text = np.flatnonzero(codes == Code.INVALID_KEY).tolist()
        return Result(statuses, errors | dict.fromkeys(not_text, _NOT_TEXT)), codes

    def _pin_too_long(self, seconds: float) -> UsageError:
        return UsageError(f"{self.url}: pins of {seconds:.0f} s are {_PIN_TOO_LONG}")

    def delete(self, rows: Rows) -> Result:
        """Remove objects after readers' leases have ended; never force removal."""
        keys = key_texts(rows.column("key"))
        codes = np.full(len(rows), Code.OBJECT_NOT_FOUND, dtype=np.int64)
        pending = np.flatnonzero([key is not None for key in keys])
        deadline = time.monotonic() + self.lease_wait_seconds
        while len(pending):
            codes[pending] = self._data().remove([keys[at] or "" for at in pending])
            pending = pending[codes[pending] == Code.HAS_LEASE]
            if time.monotonic() >= deadline:
                break
            if len(pending):
                time.sleep(_LEASE_POLL_SECONDS)
        statuses = np.zeros(len(rows), dtype=np.uint8)
        errors: dict[int, str] = {}
        statuses[codes == Code.OBJECT_NOT_FOUND] = Status.GONE
        _note_errors(statuses, errors, np.arange(len(rows)), codes, (0, Code.OBJECT_NOT_FOUND))
        return Result(statuses, errors)

    def touch(self, rows: Rows) -> BoolArray:
        """Grant leases batch by batch; return which objects exist.

        Leases delay eviction, because the master evicts objects in the order in which leases end.
        """
        keys = key_texts(rows.column("key"))
        codes = np.zeros(len(rows), dtype=np.int64)
        for start in range(0, len(rows), self.limits.batch_objects):
            some = slice(start, start + self.limits.batch_objects)
            codes[some] = self._data().lease([key or "" for key in keys[some]])
        touched: BoolArray = codes == 1
        return touched

    def _data(self) -> MooncakeClient:
        with self._opening:
            if self._closed:
                raise ValueError("The store is closed")
            if self._client is None:
                self._client = MooncakeClient(self._settings)
            return self._client

    def _addresses(self, offsets: IntArray) -> list[int]:
        if self.arena is None:
            raise ValueError("No arena is attached; call attach first")
        addresses: list[int] = (self.arena.address + offsets).tolist()
        return addresses


def _milliseconds(seconds: float) -> int:
    """Return a duration in milliseconds; at least 1, because pins of 0 ms protect nothing."""
    return max(1, round(seconds * 1000))


def _note_errors(
    statuses: npt.NDArray[np.uint8],
    errors: dict[int, str],
    places: IntArray,
    codes: Codes,
    fine: tuple[int, ...],
) -> None:
    """Record the errors of rows at `places`, except for codes in `fine`."""
    for at, code in zip(places.tolist(), codes.tolist(), strict=True):
        if code not in fine:
            statuses[at] = Status.FULL if code == Code.NO_SPACE else Status.ERROR
            errors[at] = message_of(code)


def _key_array(rows: Rows) -> Any:
    """Return the keys of rows as a binary array."""
    keys = rows.column("key")
    return keys.combine_chunks() if isinstance(keys, pa.ChunkedArray) else keys


def _codes(answer: Any) -> Codes:
    """Return the master's codes; 1 for keys that cannot be queried."""
    codes: Codes = answer.column("code").fill_null(1).to_numpy().astype(np.int64)
    return codes


def _unaskable(answer: Any) -> BoolArray:
    found: BoolArray = answer.column("code").is_null().to_numpy(zero_copy_only=False)
    return found


def _is_in(keys: Any, some: Any) -> BoolArray:
    import pyarrow.compute as pc  # imported late, because the import takes 20 ms

    found: BoolArray = pc.is_in(keys, value_set=some).to_numpy(zero_copy_only=False)
    return found


def _version_rows(versions: Any) -> npt.NDArray[np.uint64]:
    """Return versions as numbers: [n, fields] uint64, 0 for objects that are only on disk."""
    joined = b"".join(versions.fill_null(b"\0" * VERSION_BYTES).to_pylist())
    return np.frombuffer(joined, dtype="<u8").reshape(len(versions), VERSION_BYTES // 8)
