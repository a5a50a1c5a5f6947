"""Keys of SGLang's 3FS backend, as we write them: RANK:NAMESPACE:KEY.

RANK and NAMESPACE are those of SGLang's metadata server, KEY is what it maps to a page index.
Source: sglang srt/mem_cache/storage/hf3fs/storage_hf3fs.py :: HiCacheHF3FS,
_get_mha_zero_copy_keys, _pool_component_key. KEY is::

    page-hash                               kv, flat page or MLA
    page-hash "-k" | page-hash "-v"         kv, MHA zero-copy
    page-hash "_" pool                      namespace = pool
    page-hash "_mamba_" tp-rank "_" tp-size mamba beside an MLA target, all in rank 0

Neither model nor pipeline rank is in any of them.
"""

from __future__ import annotations

import re

from hicachectl.formats.keys.file import SIDECAR_POOLS
from hicachectl.formats.objects import Coordinate, Shard

_PREFIX = re.compile(r"(0|[1-9][0-9]{0,8}):([a-z0-9_]+):")
_SHARED_MAMBA = re.compile(r"_mamba_(0|[1-9][0-9]{0,8})_([1-9][0-9]{0,8})")


class Hf3fsCodec:
    """Keys of HiCacheHF3FS, between their text and a `Coordinate`.

    tp_rank is the rank whose data file holds the object. tp_size is set only where the key says
    it: mamba states beside an MLA target, which all lie in the file of rank 0.
    """

    scheme = "hf3fs"

    def readings(self, prefix: str, suffix: str) -> tuple[Coordinate, ...]:
        """Read the text around a page hash; no coordinate when it is foreign."""
        match = _PREFIX.fullmatch(prefix)
        if match is None:
            return ()
        rank, namespace = int(match[1]), match[2]
        shared = _SHARED_MAMBA.fullmatch(suffix)
        if namespace == "mamba" and shared is not None:
            tp_rank, tp_size = int(shared[1]), int(shared[2])
            if rank or tp_rank >= tp_size:
                return ()
            return (Coordinate("", "mamba", shard=Shard(tp_rank=tp_rank, tp_size=tp_size)),)
        part = suffix[1:] if namespace == "kv" and suffix in ("-k", "-v") else None
        known = namespace == "kv" if part or not suffix else suffix == f"_{namespace}"
        if not known or (namespace != "kv" and namespace not in SIDECAR_POOLS):
            return ()
        return (Coordinate("", namespace, part, shard=Shard(tp_rank=rank)),)

    def affix(self, coordinate: Coordinate) -> tuple[str, str]:
        """Spell the text before and after the page hash; inverse of `readings`."""
        shard, pool = coordinate.shard, coordinate.pool
        if pool == "mamba" and shard.tp_size is not None:
            return "0:mamba:", f"_mamba_{shard.tp_rank}_{shard.tp_size}"
        suffix = "" if pool == "kv" else f"_{pool}"
        if coordinate.part is not None:
            suffix += f"-{coordinate.part}"
        return f"{shard.tp_rank or 0}:{pool}:", suffix
