"""HTTP client of a Mooncake master's admin service. It changes pins, but no object and no lease.

Endpoints: `/health` and, for the default tenant only, `/get_all_keys`, `/batch_query_keys`,
`/get_segments_detail`, `/api/v1/soft_pin` and `/api/v1/soft_unpin`. Masters before 0.3.12 extend
leases on `/batch_query_keys`, so `check` refuses such masters. Masters before 0.3.14 cannot pin.
Source: Mooncake mooncake-store/src/master_admin_service.cpp, include/types.h :: ErrorCode. The
endpoints of pins were tried on 0.3.14.
"""

from __future__ import annotations

import http.client
import re
import secrets
import string
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from hashlib import blake2b
from itertools import chain, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.backends.http import HttpService, Reply
from hicachectl.backends.mooncake.client import Code
from hicachectl.backends.mooncake.settings import split_address
from hicachectl.formats.errors import FormatError
from hicachectl.formats.forms import decode

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

TIMEOUT_S = 15.0  # seconds for a whole answer, or for each block of a listing
# Measured with 100,000 keys of 83 bytes: compared with URLs of 80 KiB, URLs of 40 KiB took 20 %
# longer, and URLs of 160 and 320 KiB took 10 % longer. A second request in flight saved 20 to 25 %
# of the time. A third request saved nothing (the master has 4 threads).
URL_BYTES = 80 << 10
IN_FLIGHT = 2
MAX_KEY_BYTES = 1 << 20
MAX_OBJECT_BYTES = 1 << 40
MAX_LISTING_BYTES = 64 << 30  # about 700 million keys
PIN_KEYS = 4096  # the most that the master accepts in one request

_SAFE = b",-./:_~" + (string.ascii_letters + string.digits).encode()  # the comma separates keys
_UNSAFE = re.compile(b"[^" + re.escape(_SAFE) + b"]")
_ESCAPES = {bytes([byte]): b"%%%02X" % byte for byte in range(256)}
_PROBE = "hicachectl-probe-"
_PIN, _UNPIN = "/api/v1/soft_pin", "/api/v1/soft_unpin"

VERSION_BYTES = 24
REPLICA_TYPE = pa.struct([("kind", pa.string()), ("location", pa.string()), ("nbytes", pa.int64())])
ANSWER_SCHEMA = pa.schema(
    [
        ("code", pa.int32()),
        ("nbytes", pa.int64()),
        ("version", pa.binary(VERSION_BYTES)),
        ("replicas", pa.list_(REPLICA_TYPE)),
    ]
)

_WRONG_PORT = "give the master's --metrics_port (9003 by default) as the admin port"
_OLD_MASTER = "upgrade the master to Mooncake 0.3.12 or later"

_SEGMENT_FIELDS = {
    "name": "segment_name",
    "endpoint": "te_endpoint",
    "used_bytes": "allocator_used_bytes",
    "capacity_bytes": "allocator_capacity_bytes",
}


class Segment(msgspec.Struct, frozen=True, rename=_SEGMENT_FIELDS):
    """Memory that one storage process contributes to the cluster."""

    name: str
    endpoint: str  # equals the endpoint in a replica's location
    protocol: str
    status: str  # "OK", or a stage of the segment's removal
    used_bytes: int
    capacity_bytes: int


# Replies. Decoding fails for a missing field or a wrong type.

# The master's names of the fields of replicas.
_BUFFER_FIELDS = {
    "nbytes": "size_",
    "address": "buffer_address_",
    "location": "transport_endpoint_",
}
_DISK_FIELDS = {"location": "file_path", "nbytes": "object_size"}
_LOCAL_FIELDS = {"nbytes": "object_size", "location": "transport_endpoint"}


class _Buffer(msgspec.Struct, gc=False, rename=_BUFFER_FIELDS):
    nbytes: int
    address: int
    location: str


class _DiskFile(msgspec.Struct, gc=False, rename=_DISK_FIELDS):
    location: str
    nbytes: int


class _LocalDisk(msgspec.Struct, gc=False, rename=_LOCAL_FIELDS):
    nbytes: int
    location: str


class _Item(msgspec.Struct, gc=False):
    ok: bool
    error: str | None
    values: list[_Buffer] | None
    disk_values: list[_DiskFile] | None
    local_disk_values: list[_LocalDisk] | None
    nof_values: list[_Buffer] | None


class _BatchReply(msgspec.Struct):
    data: dict[str, _Item]


class _HealthReply(msgspec.Struct):
    role: str
    ha_state: str
    service_ready: bool
    leader_address: str | None = None


class _PinRequest(msgspec.Struct, omit_defaults=True):
    keys: list[str]
    ttl_ms: int | None = None


class _Pinned(msgspec.Struct, gc=False):
    key: str
    error_code: Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]


class _PinReply(msgspec.Struct):
    results: list[_Pinned]


class _SegmentsReply(msgspec.Struct):
    segments: list[Segment]


_HEALTH = msgspec.json.Decoder(_HealthReply)
_SEGMENTS = msgspec.json.Decoder(_SegmentsReply)
_BATCH = msgspec.json.Decoder(_BatchReply)
_PINNED = msgspec.json.Decoder(_PinReply)
_NO_BUFFERS = [_Buffer(0, 0, "")]
# Kinds of replicas, by the members of `_Item` that list them.
_KINDS = {
    "values": "memory",
    "nof_values": "nof",
    "disk_values": "disk",
    "local_disk_values": "local_disk",
}
_LOCATION, _NBYTES = attrgetter("location"), attrgetter("nbytes")


class MasterAdmin:
    """HTTP client of one master; threads may share it. Every failure raises StoreUnavailable.

    address: host:port of the metrics and admin service.
    """

    def __init__(self, address: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self.address = address
        host, port = split_address(address, "the admin address")
        self._http = HttpService(
            host, port, who="Mooncake master", hint=_WRONG_PORT, timeout_s=timeout_s
        )
        self._threads = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="hicachectl-master")

    def close(self) -> None:
        """Close the connections; pending requests of other threads fail."""
        self._http.close()  # first, because it ends the threads' requests
        self._threads.shutdown(cancel_futures=True)

    def check(self) -> None:
        """Raise StoreUnavailable if no master serves here, or if its queries extend leases."""
        reply = self._http.get("/health")
        if reply.status == http.client.OK and reply.body.strip() == b"OK":
            raise self._http.lost("the master is too old", _OLD_MASTER)
        try:
            health = decode(_HEALTH, reply.body)
        except FormatError:
            raise self._http.lost(
                "another service answers at this port, not a Mooncake master", _WRONG_PORT
            ) from None
        if not health.service_ready:
            leader = health.leader_address or "unknown to this master"
            raise self._http.lost(
                f"the master does not serve (role {health.role}, state {health.ha_state})",
                "give the leader in the URL, as in mooncake://HOST:50051?admin=HOST:9003 "
                f"(leader: {leader})",
            )
        self._check_queries_extend_no_lease()

    def key_batches(self, most: int) -> Generator[Any, None, None]:
        """Yield the default tenant's keys as binary arrays with 1 to `most` keys.

        The master leaves out keys without a readable replica, and returns a key with a newline as
        two keys. The memory in use does not grow with the number of keys.
        """
        pending = pa.array([], pa.binary())
        for lines in self._lines("/get_all_keys"):
            keys = lines.filter(pc.not_equal(pc.binary_length(lines), 0))
            pending = pa.concat_arrays([pending, keys])
            whole = len(pending) - len(pending) % most
            for start in range(0, whole, most):
                yield pending.slice(start, most)
            pending = pending.slice(whole)
        if len(pending):
            yield pending

    def query(self, keys: Any) -> Any:
        """Query keys; return a record batch of ANSWER_SCHEMA, in the order of `keys`.

        keys: binary array without nulls.
        code: 0, or the master's negative error code, such as -704 for an object that is gone and
            -703 for an object that is not written yet. An empty key, a key that is not UTF-8 and a
            key with a comma cannot be queried, and have a row of nulls.
        nbytes: size of the first replica; memory replicas come first.
        version: size, hash of the memory replicas' sorted endpoints, and address of the first
            memory replica, each uint64 little-endian. Null without a memory replica.
        replicas: the replicas, of the kinds memory, nof (NVMe over Fabrics), disk and local_disk.
        """
        # The master splits at commas, even encoded ones. For a key that is not UTF-8, its JSON
        # writer would fail the whole request.
        texts = key_texts(keys)
        chosen = [text for text in texts if text and "," not in text]
        if len(chosen) == len(texts):
            return self._answers(keys, chosen)
        askable = np.array([bool(text and "," not in text) for text in texts], dtype=np.bool_)
        answers = self._answers(keys.filter(pa.array(askable)), chosen)
        places = np.cumsum(askable) - 1
        return answers.take(pa.array(places, pa.int64(), mask=~askable))

    def segments(self) -> list[Segment]:
        """Return the cluster's memory segments."""
        reply = self._ok("/get_segments_detail")
        try:
            return decode(_SEGMENTS, reply).segments
        except FormatError as error:
            raise self._http.lost(
                f"its reply to /get_segments_detail is invalid: {error}"
            ) from None

    def free_bytes(self) -> int:
        """Return the unused bytes of the segments with status OK."""
        return sum(
            max(0, segment.capacity_bytes - segment.used_bytes)
            for segment in self.segments()
            if segment.status == "OK"
        )

    def capacity_bytes(self) -> int:
        """Return the bytes of the segments with status OK."""
        return sum(s.capacity_bytes for s in self.segments() if s.status == "OK")

    def can_pin(self, milliseconds: int) -> bool | None:
        """Return whether the master pins objects; None if it refuses pins of this duration.

        The request names a key that no store has.
        """
        probe = _PROBE + secrets.token_hex(16)
        reply = self._http.post(_PIN, _pin_body([probe], milliseconds), repeatable=True)
        if reply.status == http.client.NOT_FOUND:
            return False
        codes = self._pin_codes(_PIN, reply, [probe])
        return None if codes[0] == Code.INVALID_PARAMS else True

    def pin(self, keys: Sequence[str], milliseconds: int | None) -> npt.NDArray[np.int64]:
        """Soft-pin objects, or remove their pins; return the master's codes: [n].

        milliseconds: how long the pins last from now on; None removes pins. The master accepts 0,
            but such a pin protects nothing.
        A new pin replaces an earlier pin.
        """
        path = _UNPIN if milliseconds is None else _PIN
        codes = np.zeros(len(keys), dtype=np.int64)
        for start in range(0, len(keys), PIN_KEYS):
            some = keys[start : start + PIN_KEYS]
            reply = self._http.post(path, _pin_body(some, milliseconds), repeatable=True)
            codes[start : start + len(some)] = self._pin_codes(path, reply, some)
        return codes

    def _pin_codes(self, path: str, reply: Reply, keys: Sequence[str]) -> list[int]:
        try:
            results = decode(_PINNED, self._checked(path, reply)).results
        except FormatError as error:
            raise self._http.lost(f"its reply to {path} is invalid: {error}") from None
        if [result.key for result in results] != list(keys):
            raise self._http.lost(f"its reply to {path} has other keys than the request")
        return [result.error_code for result in results]

    def _check_queries_extend_no_lease(self) -> None:
        # The change that stopped lease extension also added `nof_values` to each answer.
        # A query of a missing key grants no lease in any version.
        probe = _PROBE + secrets.token_hex(16)
        path = f"/batch_query_keys?keys={probe}"
        reply = self._http.get(path)
        if reply.status == http.client.NOT_FOUND:
            raise self._http.lost("has no endpoint /batch_query_keys", _OLD_MASTER)
        body = self._checked(path, reply)
        if probe.encode() in body and b'"nof_values"' not in body:
            raise self._http.lost("the master extends the leases of queried objects", _OLD_MASTER)
        self._decoded(body)

    def _answers(self, keys: Any, texts: list[str]) -> Any:
        """Query keys that the master can answer, several requests at a time."""
        ends = np.cumsum(pc.binary_length(keys).to_numpy(zero_copy_only=False) + 1) // URL_BYTES
        cuts = [0, *(np.flatnonzero(np.diff(ends)) + 1).tolist(), len(texts)]
        chunks = [texts[start:end] for start, end in pairwise(cuts) if end > start]
        batches = self._ask_each(chunks)
        table = pa.Table.from_batches(batches, schema=ANSWER_SCHEMA).combine_chunks()
        return table.to_batches()[0] if len(table) else _no_answers()

    def _ask_each(self, chunks: Sequence[Sequence[str]]) -> list[Any]:
        if len(chunks) <= 1:
            return [self._ask(chunk) for chunk in chunks]
        failed = threading.Event()

        def ask(chunk: Sequence[str]) -> Any:
            if failed.is_set():  # without this, threads take chunks until the caller sees the error
                return None
            try:
                return self._ask(chunk)
            except BaseException:
                failed.set()
                raise

        return list(self._threads.map(ask, chunks))

    def _ask(self, keys: Sequence[str]) -> Any:
        body = self._ok("/batch_query_keys?keys=" + _url_keys(keys))
        found = self._decoded(body)
        try:
            return _answer_batch([found[key] for key in keys])
        except KeyError:
            raise self._http.lost(
                "its reply to /batch_query_keys lacks keys of the request"
            ) from None
        except (OverflowError, ValueError) as error:
            raise self._http.lost(
                f"its reply to /batch_query_keys has a number out of range: {error}"
            ) from None

    def _decoded(self, body: bytes) -> dict[str, _Item]:
        try:
            return decode(_BATCH, body).data
        except FormatError as error:
            raise self._http.lost(f"its reply to /batch_query_keys is invalid: {error}") from None

    def _ok(self, path: str) -> bytes:
        return self._checked(path, self._http.get(path))

    def _checked(self, path: str, reply: Reply) -> bytes:
        if reply.status != http.client.OK:
            raise self._http.refused(path, reply)
        return reply.body

    def _lines(self, path: str) -> Iterator[Any]:
        """Yield the complete lines of a reply, one binary array for each block that is read."""
        rest, total = b"", 0
        for block in self._http.stream(path, "text/plain"):
            total += len(block)
            if total > MAX_LISTING_BYTES:
                raise self._http.lost(
                    f"its reply to {path} is longer than {MAX_LISTING_BYTES} bytes"
                )
            head, newline, tail = block.rpartition(b"\n")
            if newline:
                text, rest = rest + head, tail
                yield pc.split_pattern(pa.array([text], pa.binary()), b"\n").values
            else:
                rest += tail
            if len(rest) > MAX_KEY_BYTES:
                raise self._http.lost(
                    f"its reply to {path} has a line longer than {MAX_KEY_BYTES} bytes"
                )
        if rest:
            raise self._http.lost(f"its reply to {path} ends within a key", "run again")


# keys


def key_texts(keys: Any) -> list[str | None]:
    """Return the keys of a binary array as text; None for a key that is not UTF-8."""
    try:
        texts: list[str | None] = keys.cast(pa.string()).to_pylist()
    except pa.ArrowInvalid:
        return list(map(_text, keys.to_pylist()))
    return texts


def _text(key: bytes) -> str | None:
    try:
        return key.decode()
    except UnicodeDecodeError:
        return None


def _url_keys(keys: Sequence[str]) -> str:
    joined = ",".join(keys).encode()
    if joined.translate(None, _SAFE):
        joined = _UNSAFE.sub(lambda match: _ESCAPES[match[0]], joined)
    return joined.decode("ascii")


def _pin_body(keys: Sequence[str], milliseconds: int | None) -> bytes:
    return msgspec.json.encode(_PinRequest(list(keys), milliseconds))


# answers


def _no_answers() -> Any:
    return pa.RecordBatch.from_pylist([], schema=ANSWER_SCHEMA)


def _answer_batch(items: Sequence[_Item]) -> Any:
    """Return the master's items as a batch of ANSWER_SCHEMA.

    Raises OverflowError or ValueError for impossible numbers.
    """
    rows, kinds, locations, sizes = _replicas(items)
    counts = np.bincount(rows, minlength=len(items))
    starts = np.cumsum(counts) - counts
    codes = _error_codes(items)
    codes[(codes == 0) & (counts == 0)] = Code.REPLICA_IS_NOT_READY
    fine = codes == 0
    first = np.zeros(len(items), dtype=np.int64)
    first[counts > 0] = sizes[starts[counts > 0]]
    offsets = pa.array(np.append(starts, len(rows)), pa.int32())
    replicas = pa.StructArray.from_arrays(
        [kinds, locations, pa.array(sizes)], fields=list(REPLICA_TYPE)
    )
    return pa.RecordBatch.from_arrays(
        [
            pa.array(codes),
            pa.array(first, mask=~fine),
            _versions(items, first, fine),
            pa.ListArray.from_arrays(offsets, replicas, mask=pa.array(~fine)),
        ],
        schema=ANSWER_SCHEMA,
    )


def _error_codes(items: Sequence[_Item]) -> npt.NDArray[np.int32]:
    by_name, other = Code.__members__, Code.INTERNAL_ERROR
    codes = [0 if item.ok else by_name.get(item.error or "", other) for item in items]
    return np.array(codes, dtype=np.int32)


def _replicas(items: Sequence[_Item]) -> tuple[npt.NDArray[np.int64], Any, Any, Any]:
    """Return row, kind, location and size of each replica.

    They are sorted by row. Memory replicas are the first of their row.
    """
    rows: list[npt.NDArray[np.int64]] = [np.zeros(0, dtype=np.int64)]
    kinds: list[str] = []
    locations: list[str] = []
    sizes: list[int] = []
    for member, kind in _KINDS.items():
        lists = [listed or () for listed in map(attrgetter(member), items)]
        if any(lists):
            rows.append(np.repeat(np.arange(len(items)), list(map(len, lists))))
            flat = list(chain.from_iterable(lists))
            kinds += [kind] * len(flat)
            locations += map(_LOCATION, flat)
            sizes += map(_NBYTES, flat)
    nbytes = np.array(sizes, dtype=np.int64)
    if len(nbytes) and nbytes.min() < 1:  # a cluster stores no empty objects
        raise ValueError(f"a size of {nbytes.min()} bytes")
    if len(nbytes) and nbytes.max() > MAX_OBJECT_BYTES:
        raise ValueError(f"a size of {nbytes.max()} bytes; at most {MAX_OBJECT_BYTES} are expected")
    row = np.concatenate(rows)
    columns = pa.array(kinds, pa.string()), pa.array(locations, pa.string())
    if len(rows) > 2:  # several kinds, each in the order of rows
        order = np.argsort(row, kind="stable")
        return row[order], *(column.take(pa.array(order)) for column in columns), nbytes[order]
    return row, *columns, nbytes


def _versions(
    items: Sequence[_Item], sizes: npt.NDArray[np.int64], fine: npt.NDArray[np.bool_]
) -> Any:
    buffers = [item.values or _NO_BUFFERS for item in items]
    fields = np.empty((len(items), 3), dtype="<u8")
    fields[:, 0] = sizes
    fields[:, 1] = [_endpoints_hash(*map(_LOCATION, all_)) for all_ in buffers]
    fields[:, 2] = [all_[0].address for all_ in buffers]
    known = fine & np.fromiter((all_ is not _NO_BUFFERS for all_ in buffers), np.bool_, len(items))
    bitmap = np.packbits(known, bitorder="little").tobytes()
    return pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(VERSION_BYTES), len(items), [pa.py_buffer(bitmap), pa.py_buffer(fields.tobytes())]
    )


@lru_cache(maxsize=4096)
def _endpoints_hash(*endpoints: str) -> int:
    digest = blake2b("\n".join(sorted(endpoints)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
