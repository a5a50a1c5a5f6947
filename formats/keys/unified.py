"""Keys of SGLang's unified scheme, which names layers and heads, but no rank.

Source: sglang srt/mem_cache/hicache_key_scheme.py :: plan_unified_kv, namespace_digest. A key is::

    page-hash "_" digest "_L" start "-" end [ "_H" head-group ]
    digest = "ukv1-" first 16 hex digits of SHA-256 over a msgpack map

One object holds K and V of a range of model layers and one head group. KV that all ranks replicate
has no head group. The scheme is a library of SGLang, and no backend uses it yet.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar, NoReturn

from hicachectl.formats.errors import UnsupportedByBackend
from hicachectl.formats.keys.base import Grammar
from hicachectl.formats.objects import Coordinate, Names, Shard

if TYPE_CHECKING:
    from hicachectl.formats.keys.base import RankPool

SCHEMA_VERSION = 1

_NUMBER = "(0|[1-9][0-9]{0,8})"
_SUFFIX = re.compile(f"_(ukv{SCHEMA_VERSION}-[0-9a-f]{{16}})_L{_NUMBER}-{_NUMBER}(?:_H{_NUMBER})?")


class UnifiedGrammar(Grammar):
    """Keys of the unified scheme.

    The digest stands in the place of the model. It is a hash of model, dtype, page size and grid,
    which is the division into ranges of layers and groups of heads.
    `shard.heads` is the object's one head group, counted over the whole model.
    """

    name = title = "unified"
    axes: ClassVar = {"pp": "", "cp": "", "dcp": ""}

    def readings(self, prefix: str, suffix: str) -> tuple[Coordinate, ...]:
        """See `Grammar`. There is at most one reading."""
        match = _SUFFIX.fullmatch(suffix)
        if prefix or match is None:
            return ()
        start, end = int(match[2]), int(match[3])
        if start >= end:
            return ()
        group = None if match[4] is None else int(match[4])
        heads = None if group is None else (group, group + 1)
        return (Coordinate(Names(match[1]), shard=Shard(layers=(start, end), heads=heads)),)

    def affix(self, coordinate: Coordinate) -> tuple[str, str]:
        """See `Grammar`.

        Raises UnsupportedByBackend for a coordinate with a rank, a part, a pool other than kv, or
        several head groups.
        """
        layers, heads = coordinate.shard.layers, coordinate.shard.heads
        suffix = f"_{coordinate.names.model}"
        if layers is not None:
            suffix += f"_L{layers[0]}-{layers[1]}"
        if heads is not None:
            suffix += f"_H{heads[0]}"
        if self.readings("", suffix) != (coordinate,):
            raise UnsupportedByBackend(f"The unified key scheme has no key for {coordinate}")
        return "", suffix

    def objects(self, page: RankPool) -> NoReturn:
        """Raise UnsupportedByBackend. No server writes such keys, so no profile has their grid."""
        raise UnsupportedByBackend(
            "A profile cannot describe objects of the unified key scheme; use another store"
        )
