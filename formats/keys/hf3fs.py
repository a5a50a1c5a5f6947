"""Keys of SGLang's 3FS backend, written as RANK:NAMESPACE:KEY.

SGLang's metadata server has a table for each RANK and NAMESPACE. A table maps KEY to a page index.
Source: sglang srt/mem_cache/storage/hf3fs/storage_hf3fs.py :: HiCacheHF3FS,
_get_mha_zero_copy_keys, _pool_component_key. KEY is::

    page-hash                               kv, flat page or MLA
    page-hash "-k" | page-hash "-v"         kv, MHA zero-copy
    page-hash "_" pool                      namespace = pool
    page-hash "_mamba_" tp-rank "_" tp-size pool that differs by rank, such as mamba, if TP ranks
                                            share the kv objects (MLA); RANK is then 0

No key names the model or the pipeline rank.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hicachectl.formats.errors import UnsupportedByBackend
from hicachectl.formats.keys.base import FILE_STORE, WHOLE, Grammar, PageObject
from hicachectl.formats.kinds.pool import pool_name, pool_names
from hicachectl.formats.layouts import PAGE_FIRST_LAYOUTS
from hicachectl.formats.objects import ANCHOR, HALVES, MAX_RANKS, Coordinate, Names, Shard

if TYPE_CHECKING:
    from hicachectl.formats.keys.base import RankPool, Ranks
    from hicachectl.formats.releases import Release

_ZERO_COPY_LAYOUTS = PAGE_FIRST_LAYOUTS  # HiCacheHF3FS.register_mem_pool_host
_LAYOUTS = (*_ZERO_COPY_LAYOUTS, "layer_first")  # bytes_per_page of backend_factory.py
_PREFIX = re.compile(r"(0|[1-9][0-9]{0,8}):([a-z0-9_]+):")
_OWN_RANK = re.compile(r"_([a-z0-9_]+)_(0|[1-9][0-9]{0,8})_([1-9][0-9]{0,8})")


class Hf3fsGrammar(Grammar):
    """HiCacheHF3FS's keys.

    If KEY states a tp-rank, it is the `tp_rank` of the coordinate. Otherwise `tp_rank` is RANK, the
    rank of the data file.
    """

    name = "hf3fs"
    title = "3FS"
    unnamed_cp = True
    names_model = False

    def readings(self, prefix: str, suffix: str) -> tuple[Coordinate, ...]:
        """See `Grammar`. There is at most one reading."""
        match = _PREFIX.fullmatch(prefix)
        if match is None:
            return ()
        rank, namespace = int(match[1]), match[2]
        own = _OWN_RANK.fullmatch(suffix) if pool_name(namespace).states else None
        if own is not None and own[1] == namespace:
            tp_rank, tp_size = int(own[2]), int(own[3])
            if rank or not tp_rank < tp_size <= MAX_RANKS:
                return ()
            return (Coordinate(Names(), namespace, shard=Shard(tp_rank=tp_rank, tp_size=tp_size)),)
        part = suffix[1:] if namespace == "kv" and suffix in ("-k", "-v") else None
        known = namespace == "kv" if part or not suffix else suffix == f"_{namespace}"
        if not known or all(pool.name != namespace for pool in pool_names()):
            return ()
        return (Coordinate(Names(), namespace, part, shard=Shard(tp_rank=rank)),)

    def affix(self, coordinate: Coordinate) -> tuple[str, str]:
        """See `Grammar`."""
        shard, pool = coordinate.shard, coordinate.pool
        if pool_name(pool).states and shard.tp_size is not None:
            return f"0:{pool}:", f"_{pool}_{shard.tp_rank}_{shard.tp_size}"
        suffix = "" if pool == "kv" else f"_{pool}"
        if coordinate.part is not None:
            suffix += f"-{coordinate.part}"
        return f"{shard.tp_rank or 0}:{pool}:", suffix

    def check_ranks(self, ranks: Ranks, release: Release, *, reads: bool = False) -> None:
        """See `Grammar`. SGLang refuses DCP."""
        super().check_ranks(ranks._replace(dcp=1), release, reads=reads)
        if ranks.dcp > 1:
            raise UnsupportedByBackend(
                f"dcp {ranks.dcp}: SGLang stores DCP pages in file and Mooncake stores only; "
                f"{FILE_STORE}"
            )

    def objects(self, page: RankPool) -> tuple[PageObject, ...]:
        """Return the object of the whole page, or an object each for K and V (zero copy)."""
        if not page.parts:
            raise UnsupportedByBackend(
                f"pools[{page.pool}]: SGLang's 3FS backend cannot store models without KV "
                "(DeepSeek-V4), because it divides files by the size of a kv page; use a file "
                "store or Mooncake"
            )
        if page.layout not in _LAYOUTS:
            raise UnsupportedByBackend(
                f"layout {page.layout}: SGLang's 3FS backend does not store it; use one of "
                f"{', '.join(_LAYOUTS)}"
            )
        anchor = page.pool == ANCHOR
        # register_mem_host_pool_v2 uses K's size for a page, so writing K and V fails.
        if page.halved and not anchor:
            raise UnsupportedByBackend(
                f"pools[{page.pool}]: SGLang cannot store MHA pools beside kv on 3FS; {FILE_STORE}"
            )
        if page.ranks.cp_rank:
            return ()
        states = pool_name(page.pool).states and page.release.file_state_rank
        shard = Shard(tp_rank=0)
        if not page.shared_anchor:
            shard = Shard(tp_rank=page.ranks.tp_rank)
        elif states:
            shard = Shard(tp_rank=page.ranks.tp_rank, tp_size=page.ranks.tp)
        zero_copy = page.layout in _ZERO_COPY_LAYOUTS and not page.shared_anchor
        if not (anchor and zero_copy and (page.halved or page.opaque)):
            return (PageObject(self.coordinate(page, None, shard), WHOLE),)
        return tuple(
            PageObject(self.coordinate(page, part, shard), slice(n, n + 1))
            for n, part in enumerate(HALVES)
        )
