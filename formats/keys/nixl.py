"""Keys of SGLang's NIXL backend on files, and where their files lie.

Source: sglang srt/mem_cache/storage/nixl/hicache_nixl.py :: HiCacheNixl._get_suffixed_key,
_get_component_key, _get_hybrid_component_keys, _get_key_list_from_meta; nixl_routing.py ::
route_key. A key is::

    page-hash "_" model [ "_" tp-rank "_" tp-size ] [ "_" component ]
    component = "k" | "v" | pool [ "_" part ]
    part      = "k" | "v" | "temporal" | "conv_" number | number

Keys of an MLA target have no TP rank, except keys of states. No key has a PP or CP rank. An object
without component is a whole page of the kv pool. An object "k" without an object "v" is a page of
MLA, with K and V together.
"""

from __future__ import annotations

import re
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hicachectl.formats.errors import UnsupportedByBackend
from hicachectl.formats.keys.base import FILE_STORE, WHOLE, Grammar, PageObject, part_in_keys
from hicachectl.formats.kinds.pool import pool_name, pool_names
from hicachectl.formats.layouts import PAGE_FIRST_LAYOUTS
from hicachectl.formats.objects import ANCHOR, HALVES, MAX_RANKS, Coordinate, Names, Shard

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hicachectl.formats.keys.base import RankPool, Readings
    from hicachectl.formats.kinds.pool import PoolName

DIRECT, BUFFERED = "nixl", "nixl-buffered"  # grammars of servers with and without O_DIRECT

_UintArray = npt.NDArray[np.uint64]

_NUMBER = "(0|[1-9][0-9]{0,8})"
_PAIR = re.compile(f"_{_NUMBER}_{_NUMBER}$")
# Alignment of memory that O_DIRECT can transfer (HiCacheNixl.register_mem_pool_host). Host pools
# begin at a page of memory (pool_host/common.py :: HostTensorAllocator).
_ALIGNMENT = 4096
_BLOCK = 512  # O_DIRECT transfers only multiples of this size, on any disk


class NixlGrammar(Grammar):
    """HiCacheNixl's keys and objects, of servers with direct I/O."""

    name = DIRECT
    title = "NIXL"
    unequal_halves = True
    served = False
    marker = _ALIGNMENT

    def readings(self, prefix: str, suffix: str) -> tuple[Coordinate, ...]:
        """See `Grammar`. A model's name can end like a component or a rank."""
        if prefix:
            return ()
        return tuple(
            Coordinate(Names(model), pool, part, shard=shard)
            for stem, pool, part in _component_readings(suffix)
            if stem.startswith("_")
            for model, shard in _rank_readings(stem[1:])
        )

    def narrow(self, readings: Readings) -> Readings:
        """Take K and V of the kv pool for parts, not for the end of a model's name."""
        return {
            affix: tuple(
                reading
                for reading in found
                if reading.part is not None
                or reading.pool != "kv"
                or not any(other.part in HALVES for other in found)
            )
            for affix, found in readings.items()
        }

    def affix(self, coordinate: Coordinate) -> tuple[str, str]:
        """See `Grammar`."""
        shard = coordinate.shard
        suffix = f"_{coordinate.names.model}"
        if shard.tp_rank is not None:
            suffix += f"_{shard.tp_rank}_{shard.tp_size}"
        if coordinate.pool != "kv":
            suffix += f"_{coordinate.pool}"
        if coordinate.part is not None:
            suffix += f"_{coordinate.part}"
        return "", suffix

    def objects(self, page: RankPool) -> tuple[PageObject, ...]:
        """Return the parts if O_DIRECT can transfer them from memory, else the whole page."""
        if _lies_in_place(page) and not any(nbytes % _ALIGNMENT for nbytes in page.sizes):
            return self._parts(page)
        nbytes = sum(page.sizes)
        if nbytes % _BLOCK and not page.opaque:
            raise UnsupportedByBackend(
                f"pools[{page.pool}]: a page of {nbytes} bytes is no multiple of {_BLOCK}: "
                "SGLang's NIXL backend fails to store such pages with direct I/O; for servers "
                "without direct I/O, add direct_io=off to the URL"
            )
        return self._whole(page)

    def _whole(self, page: RankPool) -> tuple[PageObject, ...]:
        return (PageObject(self.coordinate(page, None, _shard(page)), WHOLE),)

    def _parts(self, page: RankPool) -> tuple[PageObject, ...]:
        states = pool_name(page.pool).states
        # Models that have only convolutions lack a temporal state. batch_exists_v2 counts one all
        # the same, so it asks for a name that _get_hybrid_zero_copy_buffers does not write.
        if states and page.parts[0] != pool_name(page.pool).parts[0]:
            raise UnsupportedByBackend(
                f"pools[{page.pool}]: SGLang's NIXL backend never finds states without a temporal "
                f"one again, because it looks for one more object than it writes; {FILE_STORE}"
            )
        # The key of a single state names only the pool (_get_hybrid_component_keys).
        alone = states and len(page.parts) == 1
        parts = [None if alone else part_in_keys(page, part) for part in page.parts]
        return tuple(
            PageObject(self.coordinate(page, part, _shard(page)), slice(n, n + 1))
            for n, part in enumerate(parts)
        )


class NixlBufferedGrammar(NixlGrammar):
    """HiCacheNixl's keys and objects, of servers without direct I/O.

    The keys have the same form, but these servers divide pages into other objects.
    """

    name = BUFFERED
    marker = 1

    def objects(self, page: RankPool) -> tuple[PageObject, ...]:
        """Return the parts if they can be transferred from memory, else the whole page."""
        if _lies_in_place(page):
            return self._parts(page)
        if page.pool == ANCHOR or page.opaque or not page.nixl_layouts:
            return self._whole(page)
        raise UnsupportedByBackend(
            f"pools[{page.pool}]: layout {page.layout}: SGLang's NIXL backend without direct I/O "
            "does not store this pool whole; use page_first or page_first_direct"
        )


def _lies_in_place(page: RankPool) -> bool:
    """Return whether the page's parts can be transferred from their place in memory.

    Apart from kv, only pools with `get_hybrid_pool_buffer` allow this.
    """
    layouts = PAGE_FIRST_LAYOUTS if page.pool == ANCHOR else page.nixl_layouts
    return bool(page.parts) and not page.opaque and page.layout in layouts


def _shard(page: RankPool) -> Shard:
    """Return the shard of a rank's keys. Keys of an MLA target name a rank only for states."""
    if page.shared_anchor and not pool_name(page.pool).states:
        return Shard()
    return Shard(tp_rank=page.ranks.tp_rank, tp_size=page.ranks.tp)


def route(key: bytes, directories: int) -> tuple[int, bytes]:
    """Return the number of the directory with a key's file, and the name of the folder in it.

    directories: number of directories of the store, which all its servers number in one order.
    """
    disks, folders = routes(hashes_of([key]), directories)
    return int(disks[0]), b"%02x" % folders[0]


def hashes_of(keys: Iterable[bytes]) -> _UintArray:
    """Return the hashes that place files (stable_key_hash): [n] uint64."""
    digests = b"".join([blake2b(key, digest_size=8).digest() for key in keys])
    return np.frombuffer(digests, dtype=">u8").astype(np.uint64)


def routes(hashes: _UintArray, directories: int) -> tuple[_UintArray, _UintArray]:
    """Return `route` for several keys: directories and folders, both [n] uint64."""
    return (hashes >> np.uint64(16)) % np.uint64(directories), hashes & np.uint64(0xFF)


def _component_readings(suffix: str) -> Iterator[tuple[str, str, str | None]]:
    """Yield (text before the component, pool, part), longest component first."""
    for pattern, pool in _components(pool_names()):
        if match := pattern.search(suffix):
            yield suffix[: match.start()], pool.name, match[1]
    for part in HALVES:
        if suffix.endswith(f"_{part}"):
            yield suffix.removesuffix(f"_{part}"), "kv", part
    yield suffix, "kv", None


@lru_cache(maxsize=1)
def _components(names: tuple[PoolName, ...]) -> tuple[tuple[re.Pattern[str], PoolName], ...]:
    numbered = f"({'|'.join(HALVES)}|(?:0|[1-9][0-9]{{0,8}}))"
    found = (
        (
            re.compile(
                f"_{re.escape(one.name)}(?:_{one.part_pattern if one.states else numbered})?$"
            ),
            one,
        )
        for one in names
        if one.name != ANCHOR
    )
    return tuple(sorted(found, key=lambda pair: -len(pair[1].name)))


def _rank_readings(text: str) -> Iterator[tuple[str, Shard]]:
    yield text, Shard()
    match = _PAIR.search(text)
    if match is None:
        return
    rank, size = int(match[1]), int(match[2])
    if rank < size <= MAX_RANKS:
        yield text[: match.start()], Shard(tp_rank=rank, tp_size=size)
