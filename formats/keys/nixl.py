"""Keys of SGLang's NIXL backend on files, and where their files lie.

Source: sglang srt/mem_cache/storage/nixl/hicache_nixl.py :: HiCacheNixl._get_suffixed_key,
_get_component_key, _get_hybrid_component_keys, _get_key_list_from_meta; nixl_routing.py ::
route_key. A key is::

    page-hash "_" model [ "_" tp-rank "_" tp-size ] [ "_" component ]
    component = "k" | "v" | pool [ "_" part ]
    part      = "k" | "v" | "temporal" | "conv_" number | number

Keys of an MLA target have no TP rank, except those of states. No key has a PP or CP rank. An object
without component is a whole page of the kv pool; "k" alone is a page of MLA, K and V together.
"""

from __future__ import annotations

import re
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hicachectl.formats.kinds.pool import pool_name, pool_names
from hicachectl.formats.objects import MAX_RANKS, Coordinate, Shard

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from hicachectl.formats.kinds.pool import PoolName

DIRECT, BUFFERED = "nixl", "nixl-buffered"  # key schemes: servers with and without O_DIRECT

_UintArray = npt.NDArray[np.uint64]

_NUMBER = "(0|[1-9][0-9]{0,8})"
_PAIR = re.compile(f"_{_NUMBER}_{_NUMBER}$")
_KV_PARTS = ("k", "v")


class NixlCodec:
    """Codec of HiCacheNixl's keys, of servers with direct I/O."""

    scheme = DIRECT

    def readings(self, prefix: str, suffix: str) -> tuple[Coordinate, ...]:
        """See `KeyCodec`; a model's name can end like a component or a rank."""
        if prefix:
            return ()
        return tuple(
            Coordinate(model, pool, part, shard=shard)
            for stem, pool, part in _component_readings(suffix)
            if stem.startswith("_")
            for model, shard in _rank_readings(stem[1:])
        )

    def narrow(
        self, readings: Mapping[tuple[str, str], tuple[Coordinate, ...]]
    ) -> dict[tuple[str, str], tuple[Coordinate, ...]]:
        """Take K and V of the kv pool for parts, not for the end of a model's name."""
        return {
            affix: tuple(
                reading
                for reading in found
                if reading.part is not None
                or reading.pool != "kv"
                or not any(other.part in _KV_PARTS for other in found)
            )
            for affix, found in readings.items()
        }

    def affix(self, coordinate: Coordinate) -> tuple[str, str]:
        """See `KeyCodec`."""
        shard = coordinate.shard
        suffix = f"_{coordinate.model}"
        if shard.tp_rank is not None:
            suffix += f"_{shard.tp_rank}_{shard.tp_size}"
        if coordinate.pool != "kv":
            suffix += f"_{coordinate.pool}"
        if coordinate.part is not None:
            suffix += f"_{coordinate.part}"
        return "", suffix


class NixlBufferedCodec(NixlCodec):
    """The same grammar, of servers without direct I/O, which divide pages into other objects."""

    scheme = BUFFERED


def route(key: bytes, directories: int) -> tuple[int, bytes]:
    """Return the number of the directory with a key's file, and the name of the folder in it.

    directories: how many the store has, in an order that all its servers share.
    """
    disks, folders = routes(hashes_of([key]), directories)
    return int(disks[0]), b"%02x" % folders[0]


def hashes_of(keys: Iterable[bytes]) -> _UintArray:
    """Return the hashes that place files (stable_key_hash): [n] uint64."""
    digests = b"".join([blake2b(key, digest_size=8).digest() for key in keys])
    return np.frombuffer(digests, dtype=">u8").astype(np.uint64)


def routes(hashes: _UintArray, directories: int) -> tuple[_UintArray, _UintArray]:
    """Return `route` of several keys; folders as numbers: both [n] uint64."""
    return (hashes >> np.uint64(16)) % np.uint64(directories), hashes & np.uint64(0xFF)


def _component_readings(suffix: str) -> Iterator[tuple[str, str, str | None]]:
    """Yield (text before the component, pool, part), longest component first."""
    for name, pool in _pools(pool_names()):
        match = re.search(f"_{name}(?:_(k|v|temporal|conv_{_NUMBER}|{_NUMBER}))?$", suffix)
        if match is None:
            continue
        part = match[1]
        if part is None or _can_be(pool, part):
            yield suffix[: match.start()], pool.name, part
    for part in _KV_PARTS:
        if suffix.endswith(f"_{part}"):
            yield suffix.removesuffix(f"_{part}"), "kv", part
    yield suffix, "kv", None


@lru_cache(maxsize=1)
def _pools(names: tuple[PoolName, ...]) -> tuple[tuple[str, PoolName], ...]:
    found = ((re.escape(one.name), one) for one in names if one.name != "kv")
    return tuple(sorted(found, key=lambda pair: -len(pair[1].name)))


def _can_be(pool: PoolName, part: str) -> bool:
    """Return whether keys of a pool can name a part."""
    is_state = part == "temporal" or part.startswith("conv_")
    return is_state == pool_name(pool.name).states


def _rank_readings(text: str) -> Iterator[tuple[str, Shard]]:
    yield text, Shard()
    match = _PAIR.search(text)
    if match is None:
        return
    rank, size = int(match[1]), int(match[2])
    if rank < size <= MAX_RANKS:
        yield text[: match.start()], Shard(tp_rank=rank, tp_size=size)
