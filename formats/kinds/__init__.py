"""The kinds of pools, one file each, and their registry.

To add a kind, subclass `PoolKind` and `register` an instance, with any new pool names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicachectl.formats.kinds.blocks import Blocks
from hicachectl.formats.kinds.dsa_indexer import INDEXER_POOLS, DsaIndexer
from hicachectl.formats.kinds.dsv4 import Dsv4
from hicachectl.formats.kinds.index_keys import IndexKeys
from hicachectl.formats.kinds.logical import Logical
from hicachectl.formats.kinds.mamba import MAMBA_POOLS, Mamba
from hicachectl.formats.kinds.mha import KV_POOLS, Mha
from hicachectl.formats.kinds.mla import Mla
from hicachectl.formats.kinds.opaque import COMPRESSED_POOLS, Opaque
from hicachectl.formats.kinds.pool import add_pool_names, remove_pool_names

if TYPE_CHECKING:
    from hicachectl.formats.kinds.base import PoolKind
    from hicachectl.formats.kinds.pool import Pool, PoolName

_KINDS: dict[str, PoolKind] = {}


def register(kind: PoolKind, names: tuple[PoolName, ...] = ()) -> None:
    """Add a kind, and pool names that keys can have. Raises ValueError if one of them exists."""
    if kind.name in _KINDS:
        raise ValueError(f"kind {kind.name!r} is already registered")
    add_pool_names(names)
    _KINDS[kind.name] = kind


def unregister(kind: PoolKind, names: tuple[PoolName, ...] = ()) -> None:
    """Undo `register`."""
    remove_pool_names(names)
    del _KINDS[kind.name]


def kind_of(pool: Pool) -> PoolKind:
    """Return the kind of a pool, which must be a pool of a valid profile."""
    return _KINDS[pool.kind]


def kinds() -> tuple[PoolKind, ...]:
    """Return all kinds, in order of registration."""
    return tuple(_KINDS.values())


def kind_names() -> tuple[str, ...]:
    """Return the names of all kinds."""
    return tuple(_KINDS)


register(Mha(), KV_POOLS)
register(Mla())
register(DsaIndexer(), INDEXER_POOLS)
register(Mamba(), MAMBA_POOLS)
register(Logical())
register(Opaque(), COMPRESSED_POOLS)
register(IndexKeys())
register(Dsv4())
register(Blocks())
