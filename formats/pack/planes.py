"""Byte planes of objects in packs. Each plane is raw or one zstd frame.

Plane i of p holds bytes i, i + p, i + 2p, ... of the object. The high bytes of bfloat16 numbers
(sign and most of the exponent) are similar, so they compress. The low bytes are noise and stay raw.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import zstandard

from hicachectl.formats.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Plane = bytes | memoryview

PLANE_COUNTS = (1, 2, 4)

# A plan is chosen by compressing a sample, which consists of pieces of an object.
_PIECES = 4
_PIECE_BYTES = 16 << 10
# Objects with one key pattern and size use one plan, until at least this many objects and this many
# bytes have used the plan. Choosing a plan takes as long as encoding six objects of 53 KB.
_PLAN_OBJECTS = 32
_PLAN_BYTES = 8 << 20
_MOST_KINDS = 4096
# Compression must leave less than this share of the bytes, to pay for decompression.
_WORTH = 0.97

_PAGE_HASH = re.compile(rb"[0-9a-f]{64}")


class Coding(IntEnum):
    """Compression of a plane. Records state only whether a plane is compressed."""

    RAW = 0
    ENTROPY = 1  # Huffman codes and hardly any matches, which is fast and enough for exponents
    MATCHES = 2  # zstd -1


Plan = tuple[Coding, ...]  # a coding for each plane

_LEVEL = 1
_PARAMETERS = {
    # Without these parameters, level 1 finds short chance matches between exponents. On bf16 KV, it
    # then has less than half the speed, and makes 5 % larger frames.
    Coding.ENTROPY: {"min_match": 7, "hash_log": 6, "target_length": 0},
    Coding.MATCHES: {},
}


class Encoder:
    """Compressor of objects. Threads cannot share an instance, because it has zstd contexts."""

    def __init__(self) -> None:
        self._compressors = {
            coding: zstandard.ZstdCompressor(
                compression_params=zstandard.ZstdCompressionParameters.from_level(
                    _LEVEL, write_content_size=1, write_checksum=0, write_dict_id=0, **changed
                )
            )
            for coding, changed in _PARAMETERS.items()
        }

    def encode(self, data: Bytes, plan: Plan) -> list[Plane]:
        """Return the planes of an object, one buffer each. No buffer is larger than its raw plane.

        A single raw plane is `data` itself. Compression releases the GIL.
        data: [n] uint8.
        """
        planes = [data] if len(plan) == 1 else _split(data, len(plan))
        return [self._code(plane, coding) for plane, coding in zip(planes, plan, strict=True)]

    def measure(self, data: Bytes) -> Plan:
        """Return the plan that makes a sample of the object smallest; raw if little is gained."""
        sample = _sample(data)
        best: Plan = (Coding.RAW,)
        least = len(sample) * _WORTH
        for count in PLANE_COUNTS:
            if len(data) % count or not len(sample):
                continue
            planes = [sample] if count == 1 else _split(sample, count)
            codings, sizes = zip(*map(self._choose, planes), strict=True)
            if sum(sizes) < least:
                best, least = codings, sum(sizes) * _WORTH
        return best

    def _choose(self, plane: Bytes) -> tuple[Coding, int]:
        best, least = Coding.RAW, len(plane)
        for coding, compressor in self._compressors.items():
            size = len(compressor.compress(plane.data))
            if size < least * _WORTH:
                best, least = coding, size
        return best, least

    def _code(self, plane: Bytes, coding: Coding) -> Plane:
        if coding is Coding.RAW:
            return plane.data
        frame: bytes = self._compressors[coding].compress(plane.data)
        return frame if len(frame) < len(plane) else plane.data


class Decoder:
    """Decompressor of objects. Threads cannot share an instance."""

    def __init__(self) -> None:
        self._decompressor = zstandard.ZstdDecompressor()

    def decode(self, planes: Sequence[memoryview], out: memoryview) -> None:
        """Fill `out`, which is as large as the object, from the object's stored planes.

        One plane at a time is allocated. Raises FormatError if a compressed plane is not a zstd
        frame of exactly the expected size. A frame that states another size is refused before any
        allocation.
        """
        size = len(out) // len(planes)
        restored = (
            np.frombuffer(self._restore(plane, size), dtype=np.uint8) for plane in reversed(planes)
        )
        target = np.frombuffer(out, dtype=np.uint8)
        words: NDArray[Any] = target.view(f"<u{len(planes)}")
        np.copyto(words, next(restored))
        for plane in restored:
            np.left_shift(words, 8, out=words)
            np.bitwise_or(words, plane, out=words)

    def _restore(self, plane: memoryview, size: int) -> bytes | memoryview:
        if len(plane) == size:
            return plane
        try:
            claimed = zstandard.get_frame_parameters(plane).content_size
            if claimed != size:
                raise FormatError(f"a zstd frame has {claimed} bytes, expected {size}")
            data: bytes = self._decompressor.decompress(
                plane, max_output_size=size, allow_extra_data=False
            )
        except zstandard.ZstdError as error:
            raise FormatError(f"a zstd frame is damaged: {error}") from error
        return data  # zstd has refused a frame that does not have the claimed size


@dataclass(slots=True)
class PlanMemory:
    """Plans by key pattern (the key without page hash) and object size.

    Threads can share an instance. At worst, two threads choose a plan for the same objects.
    """

    _plans: dict[tuple[bytes, int], tuple[Plan, int]] = field(default_factory=dict)

    def plan(self, key: bytes, data: Bytes, encoder: Encoder) -> Plan:
        """Return an object's plan, chosen by some objects of the same key pattern and size."""
        kind = _PAGE_HASH.sub(b"", key), len(data)
        plan, uses_left = self._plans.get(kind, ((Coding.RAW,), 0))
        if not uses_left:
            plan = encoder.measure(data)
            uses_left = max(_PLAN_OBJECTS, _PLAN_BYTES // max(1, len(data)))
            if len(self._plans) >= _MOST_KINDS:
                self._plans.clear()
        self._plans[kind] = plan, uses_left - 1
        return plan


def _sample(data: Bytes) -> Bytes:
    if len(data) <= _PIECES * _PIECE_BYTES:
        return data
    step = len(data) // _PIECES
    # Pieces begin at multiples of 8, so a plane of the sample has bytes of one plane of the object.
    starts = [(index * step + step // 2 - _PIECE_BYTES // 2) // 8 * 8 for index in range(_PIECES)]
    return np.concatenate([data[start : start + _PIECE_BYTES] for start in starts])


def _split(data: Bytes, count: int) -> list[Bytes]:
    """Split bytes into planes. Word shifts are several times faster than strided copies."""
    words = data.view(f"<u{count}")
    planes = [np.empty(len(words), dtype=np.uint8) for _ in range(count)]
    for index, plane in enumerate(planes):
        np.right_shift(words, 8 * index, out=plane, casting="unsafe")
    return planes
