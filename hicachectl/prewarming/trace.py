"""Traces: requests with times and block chains, one per JSON line.

`hash_ids` are block ids, as in Mooncake's public traces (FAST25-release). `token_ids` (in SGLang
also `input_ids`) may come with `extra_key` and `cache_salt`. `timestamp` is a number in any unit,
or ISO 8601; `input_length` and `output_length` count tokens. Requests for LoRA adapters are
refused; other members are ignored.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from hicachectl.backends.disk.bounded import MAX_LINE_BYTES
from hicachectl.formats.errors import FormatError, UsageError
from hicachectl.formats.forms import decode
from hicachectl.formats.hashing import HASH_BYTES
from hicachectl.formats.wording import failed, needs_profile
from hicachectl.prewarming.forest import Forest, grow_forest
from hicachectl.requests.chains import Hashing, RequestSample
from hicachectl.requests.files import OfAdapter, Request, request_lines

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy.typing as npt

    from hicachectl.formats.profile import Profile

_MAX_INDEX = 2**31 - 1


@dataclass(frozen=True, eq=False, slots=True)
class Trace:
    """Requests in the order of their times.

    times:   [requests] float64 in the trace's unit; None if unknown.
    offsets: [requests + 1] int64; request i has blocks[offsets[i]:offsets[i + 1]].
    blocks:  [references] int32, indices into the forest, chain after chain.
    input_tokens, output_tokens: [requests] int64, -1 if unknown.
    block_tokens: tokens of a full block; 0 if unknown.
    starts:  [requests] int64, byte offset of each line; None without a file.
    sample:  of the requests, as in `Chains`.
    """

    times: npt.NDArray[np.float64] | None
    offsets: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int32]
    input_tokens: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]
    block_tokens: int
    forest: Forest
    starts: npt.NDArray[np.int64] | None = None
    sample: tuple[Request, ...] = ()

    def __len__(self) -> int:
        return len(self.offsets) - 1


class _TraceLine(OfAdapter):
    timestamp: float | str | None = None
    hash_ids: list[int] | None = None
    token_ids: list[int] | None = None
    input_ids: list[int] | None = None
    input_length: int | None = None
    output_length: int | None = None
    extra_key: str | None = None
    cache_salt: str | None = None

    @property
    def tokens(self) -> list[int] | None:
        return self.token_ids if self.input_ids is None else self.input_ids

    @property
    def namespace(self) -> tuple[str | None, str | None]:
        """Extra key and cache salt; servers treat empty ones as none (managers/io_struct.py)."""
        return self.extra_key or None, self.cache_salt or None


class _Lines:
    def __init__(self, profile: Profile | None) -> None:
        self._hashing = None if profile is None else Hashing.of(profile)
        self.times = array("d")
        self.lengths = array("q")
        self.inputs = array("q")
        self.outputs = array("q")
        self.ids = array("q")
        self.starts = array("q")
        self.hashes: list[npt.NDArray[np.uint8]] = []
        self.sample = RequestSample()
        self.hashed: bool | None = None
        self.timed: bool | None = None

    def add(self, request: _TraceLine, start: int) -> None:
        """Add the request whose line begins at byte `start`. Raises FormatError."""
        request.refuse()
        tokens = request.tokens
        if (tokens is None) == (request.hash_ids is None):
            raise FormatError('needs exactly one of "token_ids" and "hash_ids"')
        self.hashed = _same(self.hashed, tokens is not None, '"token_ids"', '"hash_ids"')
        self.timed = _same(self.timed, request.timestamp is not None, "a timestamp", "no timestamp")
        if request.timestamp is not None:
            self.times.append(_time(request.timestamp))
        count = self._add_ids(request.hash_ids or []) if tokens is None else self._hash(request)
        self.lengths.append(count)
        self.starts.append(start)
        length = request.input_length
        self.inputs.append(_count(len(tokens) if tokens is not None else length, "input_length"))
        self.outputs.append(_count(request.output_length, "output_length"))

    def _add_ids(self, ids: list[int]) -> int:
        try:
            self.ids.extend(ids)
        except OverflowError as error:
            beyond = next(one for one in ids if not -(2**63) <= one < 2**63)
            raise FormatError(f"hash_ids: {beyond} does not fit into 64 bits") from error
        return len(ids)

    def _hash(self, request: _TraceLine) -> int:
        if self._hashing is None:
            raise UsageError(needs_profile("A trace of token ids"))
        tokens = request.tokens or []
        hashes = self._hashing.hashes_of(tokens, *request.namespace)
        self.hashes.append(hashes)
        if not self.sample.full:
            self.sample.add(Request("", tokens, *request.namespace))
        return len(hashes)


_REQUEST = msgspec.json.Decoder(_TraceLine)


def read_trace(path: Path, profile: Profile | None) -> Trace:
    """Read a trace.

    profile: gives the page size and hash unit of token ids. Raises FormatError naming the line;
    UsageError if the file cannot be read or has no requests, or if token ids have no profile.
    """
    lines = _Lines(profile)
    for number, start, line in request_lines(path):
        try:
            lines.add(decode(_REQUEST, line), start)
        except FormatError as error:
            raise FormatError(f"{path}: line {number}: {error}") from error
    try:
        return _trace(lines, profile)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error


def read_requests(path: Path, starts: npt.NDArray[np.int64]) -> Iterator[Request]:
    """Read again the token-id requests whose lines begin at bytes `starts`, in that order.

    A trace does not keep tokens, since there may be billions. Raises UsageError if the file cannot
    be read, FormatError if it has changed.
    """
    try:
        with path.open("rb") as file:
            for start in starts.tolist():
                file.seek(start)
                found = decode(_REQUEST, file.readline(MAX_LINE_BYTES))
                where = f"{path}: byte {start}"
                yield Request(where, found.tokens or [], *found.namespace)
    except FormatError as error:
        raise FormatError(f"{path}: changed since it was read; run again") from error
    except OSError as error:
        raise UsageError(failed(path, "read the trace again", error, "check the file")) from error


def _trace(lines: _Lines, profile: Profile | None) -> Trace:
    offsets = np.zeros(len(lines.lengths) + 1, np.int64)
    np.cumsum(lines.lengths, out=offsets[1:])
    if offsets[-1] > _MAX_INDEX:
        raise FormatError(
            f"has {offsets[-1]} block references, but at most 2^31-1 are allowed; split the file"
        )
    names, blocks = _hash_index(lines) if lines.hashed else _id_index(lines.ids)
    inputs, outputs = np.array(lines.inputs, np.int64), np.array(lines.outputs, np.int64)
    times = np.array(lines.times, np.float64) if lines.timed else None
    order: Any = slice(None)
    if times is not None and (np.diff(times) < 0).any():
        order = np.argsort(times, kind="stable")
        blocks, offsets = _reordered(blocks, offsets, order)
        times, inputs, outputs = times[order], inputs[order], outputs[order]
    starts = np.array(lines.starts, np.int64)[order]
    block_tokens = _block_tokens(inputs, np.diff(offsets))
    if lines.hashed and profile is not None:
        block_tokens = profile.page_size
    forest = grow_forest(names, blocks, offsets)
    sample = lines.sample.requests
    return Trace(times, offsets, blocks, inputs, outputs, block_tokens, forest, starts, sample)


def _id_index(
    ids: array[int],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Return the distinct ids, ascending, and each id's index among them."""
    flat = np.frombuffer(ids, np.int64) if ids else np.empty(0, np.int64)
    least, most = (int(flat.min()), int(flat.max())) if len(flat) else (0, -1)
    if least >= 0 and most < 4 * len(flat):  # mostly consecutive: a table instead of a sort
        present = np.zeros(most + 1, np.bool_)
        present[flat] = True
        index = np.cumsum(present, dtype=np.int32) - np.int32(1)
        return np.flatnonzero(present), index[flat]
    names, inverse = np.unique(flat, return_inverse=True)
    return names, inverse.astype(np.int32)


def _hash_index(lines: _Lines) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
    """Like `_id_index`, for hashes. Raises FormatError if two share their first 8 bytes."""
    empty = np.empty((0, HASH_BYTES), np.uint8)
    hashes = np.concatenate([empty, *lines.hashes])
    lines.hashes.clear()
    keys = np.ascontiguousarray(hashes[:, :8]).view(np.int64).ravel()
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    names = hashes[first]
    if not np.array_equal(names[inverse], hashes):
        at = int((names[inverse] != hashes).any(axis=1).argmax())
        one, other = (page.tobytes().hex() for page in (names[inverse[at]], hashes[at]))
        raise FormatError(
            f"pages {one} and {other} share the first 64 bits of their hashes; remove the requests "
            "of one of them"
        )
    return names, inverse.astype(np.int32)


def _reordered(
    blocks: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64], order: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    chains = np.split(blocks, offsets[1:-1])
    ordered = np.zeros_like(offsets)
    np.cumsum(np.diff(offsets)[order], out=ordered[1:])
    return np.concatenate([chains[index] for index in order.tolist()]), ordered


def _block_tokens(inputs: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> int:
    """Return the tokens of a block: every prompt of n tokens has ceil(n / tokens) blocks.

    If several numbers fit, the least power of two among them, else the least; 0 if none fits.
    """
    known = (inputs > 0) & (lengths > 0)
    if not known.any() or not (inputs >= 0).all():
        return 0
    tokens, blocks = inputs[known], lengths[known]
    least = int((-(-tokens // blocks)).max())
    several = blocks > 1
    most = int(((tokens[several] - 1) // (blocks[several] - 1)).min(initial=_MAX_INDEX))
    if least > most:
        return 0
    power = 1 << (least - 1).bit_length()
    return power if power <= most else least


def _same(before: bool | None, now: bool, yes: str, no: str) -> bool:
    if before is not None and before != now:
        mine, theirs = (yes, no) if now else (no, yes)
        raise FormatError(f"has {mine}, but earlier lines have {theirs}; write all lines alike")
    return now


def _time(stamp: float | str) -> float:
    if isinstance(stamp, str):
        try:
            return datetime.fromisoformat(stamp).timestamp()
        except (ValueError, OverflowError) as error:
            raise FormatError(f"timestamp: {stamp!a:.60} is not ISO 8601") from error
    if not abs(stamp) < 1e18:
        raise FormatError(f"timestamp: {stamp} is not in -1e18..1e18")
    return stamp


def _count(value: int | None, name: str) -> int:
    if value is None:
        return -1
    if not 0 <= value <= _MAX_INDEX:
        raise FormatError(f"{name}: {value} is not in 0..2^31-1")
    return value
