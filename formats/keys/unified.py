"""Keys of SGLang's unified scheme, which names what an object holds and no rank.

Source: sglang srt/mem_cache/hicache_key_scheme.py :: plan_unified_kv, namespace_digest. A key is::

    page-hash "_" digest "_L" start "-" end [ "_H" head-group ]
    digest = "ukv1-" first 16 hex digits of SHA-256 over a msgpack map

One object holds K and V of a range of model layers and one group of heads; KV that every rank
replicates has no heads. In SGLang 0.5.23 the scheme is a library: no backend stores it yet.
"""

from __future__ import annotations

import hashlib
import re
import struct
from typing import TYPE_CHECKING

from hicachectl.formats.errors import FormatError, UnsupportedByBackend
from hicachectl.formats.objects import Coordinate, Shard

if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEMA_VERSION = 1
OBJECT_LAYOUT = "page-unified-v1"  # pool_host/page_unified.py :: PAGE_UNIFIED_OBJECT_LAYOUT

_NUMBER = "(0|[1-9][0-9]{0,8})"  # as Python prints an int; nine digits bound what we believe
_SUFFIX = re.compile(f"_(ukv{SCHEMA_VERSION}-[0-9a-f]{{16}})_L{_NUMBER}-{_NUMBER}(?:_H{_NUMBER})?")


class UnifiedCodec:
    """Keys of the unified scheme, between their text and a `Coordinate`.

    The digest stands for the model: it covers model, dtype, page size and grid, and cannot be
    undone. `shard.heads` is the one head group of the object, counted over the whole model.
    """

    scheme = "unified"

    def readings(self, prefix: str, suffix: str) -> tuple[Coordinate, ...]:
        """Return the coordinate of the text around a page hash; none when foreign."""
        match = _SUFFIX.fullmatch(suffix)
        if prefix or match is None:
            return ()
        start, end = int(match[2]), int(match[3])
        if start >= end:
            return ()
        group = None if match[4] is None else int(match[4])
        heads = None if group is None else (group, group + 1)
        return (Coordinate(match[1], shard=Shard(layers=(start, end), heads=heads)),)

    def affix(self, coordinate: Coordinate) -> tuple[str, str]:
        """Return the text before and after the page hash; inverse of `readings`.

        Raises UnsupportedByBackend for what the scheme has no name for: a rank, a part, any
        pool but kv, more than one head group.
        """
        layers, heads = coordinate.shard.layers, coordinate.shard.heads
        suffix = f"_{coordinate.model}"
        if layers is not None:
            suffix += f"_L{layers[0]}-{layers[1]}"
        if heads is not None:
            suffix += f"_H{heads[0]}"
        if self.readings("", suffix) != (coordinate,):
            raise UnsupportedByBackend(f"the unified key scheme has no name for {coordinate}")
        return "", suffix


def unified_namespace(
    *,
    model_id: str,
    dtype: str,
    page_size: int,
    rank_replicated: bool,
    total_kv_heads: int = 0,
    head_group: int = 0,
    layer_partition: int = 0,
) -> str:
    """Compute the digest that all servers share whose KV bytes are interchangeable.

    dtype:           the logical one ("bfloat16", "float8_e4m3fn").
    head_group:      KV heads of one object; it divides `total_kv_heads`. Both are ignored, as
                     SGLang ignores them, for KV that every rank replicates.
    layer_partition: layers of one object, 0 where each stage stores its whole range.

    Raises FormatError on a grid that SGLang refuses.
    """
    if rank_replicated:
        total_kv_heads = head_group = 0
    fields: dict[str, str | int | bool] = {  # the order is part of the digest
        "schema_version": SCHEMA_VERSION,
        "model_id": model_id,
        "dtype": dtype,
        "page_size": page_size,
        "rank_replicated": rank_replicated,
        "total_kv_heads": total_kv_heads,
        "layer_partition": layer_partition,
        "head_group": head_group,
        "object_layout": OBJECT_LAYOUT,
    }
    problem = _grid_problem(model_id, page_size, layer_partition)
    if not problem and not rank_replicated:
        problem = _heads_problem(total_kv_heads, head_group)
    if problem:
        raise FormatError(f"unified key namespace: {problem}")
    digest = hashlib.sha256(pack_msgpack_map(fields)).hexdigest()
    return f"ukv{SCHEMA_VERSION}-{digest[:16]}"


def _grid_problem(model_id: str, page_size: int, layer_partition: int) -> str | None:
    if not model_id:
        return "model_id: empty"
    if page_size < 1:
        return f"page_size: must be at least 1, is {page_size}"
    if layer_partition < 0:
        return f"layer_partition: must not be negative, is {layer_partition}"
    return None


def _heads_problem(total_kv_heads: int, head_group: int) -> str | None:
    if total_kv_heads < 1 or head_group < 1:
        return f"head_group {head_group} and total_kv_heads {total_kv_heads} must be at least 1"
    if total_kv_heads % head_group:
        return f"head_group: {head_group} does not divide total_kv_heads {total_kv_heads}"
    return None


def pack_msgpack_map(fields: Mapping[str, str | int | bool]) -> bytes:
    """Encode a map of up to 15 fields as msgpack, in its own order and every value at its shortest.

    Raises FormatError on a number outside 0..2^64-1 and on text that is not Unicode.
    """
    assert len(fields) < 16
    parts = [bytes([0x80 | len(fields)])]
    for name, value in fields.items():
        parts += [_pack_text(name), _pack_text(value) if isinstance(value, str) else _pack(value)]
    return b"".join(parts)


def _pack(value: int) -> bytes:
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    return bytes([value]) if 0 <= value < 0x80 else _tagged(0xCC, value, "BHIQ")


def _pack_text(text: str) -> bytes:
    try:
        encoded = text.encode()
    except UnicodeEncodeError as error:
        raise FormatError(f"not valid Unicode: {text!a}") from error
    size = len(encoded)
    return (bytes([0xA0 | size]) if size < 32 else _tagged(0xD9, size, "BHI")) + encoded


def _tagged(tag: int, number: int, widths: str) -> bytes:
    """Pack a number in the narrowest width that holds it, behind that width's tag."""
    for step, width in enumerate(widths):
        if 0 <= number < 1 << 8 * struct.calcsize(f">{width}"):
            return struct.pack(f">B{width}", tag + step, number)
    raise FormatError(f"msgpack: {number} is out of range")
