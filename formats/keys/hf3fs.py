"""Keys of SGLang's 3FS backend, written as RANK:NAMESPACE:KEY.

SGLang's metadata server has a table per RANK and NAMESPACE, which maps KEY to a page index.
Source: sglang srt/mem_cache/storage/hf3fs/storage_hf3fs.py :: HiCacheHF3FS,
_get_mha_zero_copy_keys, _pool_component_key. KEY is::

    page-hash                               kv, flat page or MLA
    page-hash "-k" | page-hash "-v"         kv, MHA zero-copy
    page-hash "_" pool                      namespace = pool
    page-hash "_mamba_" tp-rank "_" tp-size mamba beside an MLA target, RANK is 0; likewise any
                                            pool with its own ranks

No key names the model or the pipeline rank.
"""

from __future__ import annotations

import re

from hicachectl.formats.kinds.pool import pool_name, pool_names
from hicachectl.formats.objects import MAX_RANKS, Coordinate, Shard

_PREFIX = re.compile(r"(0|[1-9][0-9]{0,8}):([a-z0-9_]+):")
_OWN_RANK = re.compile(r"_([a-z0-9_]+)_(0|[1-9][0-9]{0,8})_([1-9][0-9]{0,8})")


class Hf3fsCodec:
    """Codec of HiCacheHF3FS's keys.

    tp_rank is RANK, the rank of the data file, except if KEY states a tp-rank.
    """

    scheme = "hf3fs"

    def readings(self, prefix: str, suffix: str) -> tuple[Coordinate, ...]:
        """See `KeyCodec`; at most one reading."""
        match = _PREFIX.fullmatch(prefix)
        if match is None:
            return ()
        rank, namespace = int(match[1]), match[2]
        own = _OWN_RANK.fullmatch(suffix) if pool_name(namespace).states else None
        if own is not None and own[1] == namespace:
            tp_rank, tp_size = int(own[2]), int(own[3])
            if rank or not tp_rank < tp_size <= MAX_RANKS:
                return ()
            return (Coordinate("", namespace, shard=Shard(tp_rank=tp_rank, tp_size=tp_size)),)
        part = suffix[1:] if namespace == "kv" and suffix in ("-k", "-v") else None
        known = namespace == "kv" if part or not suffix else suffix == f"_{namespace}"
        if not known or all(pool.name != namespace for pool in pool_names()):
            return ()
        return (Coordinate("", namespace, part, shard=Shard(tp_rank=rank)),)

    def affix(self, coordinate: Coordinate) -> tuple[str, str]:
        """See `KeyCodec`."""
        shard, pool = coordinate.shard, coordinate.pool
        if pool_name(pool).states and shard.tp_size is not None:
            return f"0:{pool}:", f"_{pool}_{shard.tp_rank}_{shard.tp_size}"
        suffix = "" if pool == "kv" else f"_{pool}"
        if coordinate.part is not None:
            suffix += f"-{coordinate.part}"
        return f"{shard.tp_rank or 0}:{pool}:", suffix
