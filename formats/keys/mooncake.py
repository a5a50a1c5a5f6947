"""Keys of SGLang's Mooncake backend.

Source: sglang srt/mem_cache/storage/mooncake_store/mooncake_store.py ::
MooncakeStore._get_hybrid_page_component_keys, _get_mha_buffer_meta, _get_mla_buffer_meta,
_get_mha_split_heads_buffer_meta, _tag_keys. A key is::

    [ tag "_" ] [ model "_" ] [ dcp-part "_" ] page-hash "_" rank "_" component
    dcp-part = "tp" tp "_dcp" dcp-size "_page" tokens "_pp" pp-size "_cp" cp-size
    rank     = tp-rank [ "_" pp-rank ]                        MHA and mamba
             | "" | pp-rank | "dcp" r "_cp" c [ "_" pp-rank ] rank-replicated
             | "['4', '5']"                     sidecars of split heads: a printed list

Up to SGLang 0.5.7, MLA keys have no rank field. Up to SGLang 0.5.16, no key has a model.

Only a DCP part states TP and PP sizes. Without a profile, a tag cannot be separated from the model
name and stays in `model`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from hicachectl.formats.errors import UnsupportedByBackend
from hicachectl.formats.keys.base import FILE_STORE, Grammar, PageObject, part_in_keys
from hicachectl.formats.kinds.pool import pool_name, pool_names
from hicachectl.formats.objects import ANCHOR, HALVES, MAX_RANKS, Coordinate, Names, Shard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.formats.keys.base import RankPool, Ranks, Readings
    from hicachectl.formats.kinds.pool import PoolName
    from hicachectl.formats.releases import Release

_NUMBER = "(0|[1-9][0-9]{0,8})"
_DCP_PREFIX = re.compile(
    f"(?:(.*)_)?tp{_NUMBER}_dcp{_NUMBER}_page{_NUMBER}_pp{_NUMBER}_cp{_NUMBER}", re.DOTALL
)
_SLICES = re.compile(r"\['[0-9_]+'(?:, '[0-9_]+')*\]")
_MHA_RANK = re.compile(f"{_NUMBER}(?:_{_NUMBER})?")
_DCP_RANK = re.compile(f"dcp{_NUMBER}_cp{_NUMBER}(?:_{_NUMBER})?")
# The 4 KiB key that each SGLang client leaves (MooncakeStore.warmup).
WARM_UP_PATTERN = r"^sglang_mooncake_store_warmup_key[0-9a-f]{32}$"

Rank = tuple[bool, Shard]  # whether the text of a rank has the MHA form, and its meaning


class MooncakeGrammar(Grammar):
    """MooncakeStore's keys."""

    name = "mooncake"
    title = "Mooncake"
    axes: ClassVar = {"pp": "mooncake_stage", "dcp": ""}
    unnamed_cp = True
    has_tag = True
    unequal_halves = True
    refuses_oversized = True
    warm_ups = WARM_UP_PATTERN

    def readings(self, prefix: str, suffix: str) -> tuple[Coordinate, ...]:
        """See `Grammar`."""
        if prefix and not prefix.endswith("_"):
            return ()
        model, dcp = _read_prefix(prefix.removesuffix("_"))
        names = Names(model)
        if suffix == "_k":
            return (Coordinate(names, "kv", "k", shard=Shard(ranked=False)),) if not dcp else ()
        return tuple(
            Coordinate(names, pool, part, shard=shard)
            for rank, pool, part in _component_readings(suffix)
            for is_mha, shard in _rank_readings(rank, dcp)
            if _agrees(pool, part, is_mha, shard) and _within_sizes(shard)
        )

    def narrow(self, readings: Readings) -> Readings:
        """Drop readings that other keys of the same store exclude.

        MHA pools have a V, and rank-replicated pools have none. So `_1_k` means TP rank 1 if a `_v`
        exists under the same prefix and pool. Otherwise it means stage 1.
        """
        with_v = {
            (prefix, reading.pool)
            for (prefix, _), found in readings.items()
            for reading in found
            if reading.part == "v"
        }
        return {
            affix: tuple(
                reading
                for reading in found
                if reading.part != "k"
                or len(found) == 1
                or (reading.shard.tp_rank is not None) == ((affix[0], reading.pool) in with_v)
            )
            for affix, found in readings.items()
        }

    def affix(self, coordinate: Coordinate) -> tuple[str, str]:
        """See `Grammar`."""
        shard = coordinate.shard
        parts = [coordinate.names.text]
        if shard.dcp_size is not None:
            parts.append(
                f"tp{shard.tp_size}_dcp{shard.dcp_size}_page{shard.dcp_page_size}"
                f"_pp{shard.pp_size or 1}_cp{shard.cp_size or 1}"
            )
        prefix = "".join(f"{part}_" for part in parts if part)
        rank = f"_{_rank_text(coordinate)}" if shard.ranked else ""
        return prefix, f"{rank}_{_component_text(coordinate)}"

    def check_ranks(self, ranks: Ranks, release: Release, *, reads: bool = False) -> None:
        """See `Grammar`. Under DCP, the keys of the anchor name the CP rank."""
        named = ranks if ranks.dcp == 1 else ranks._replace(cp=1)
        super().check_ranks(named, release, reads=reads)

    def coordinate(self, page: RankPool, part: str | None, shard: Shard) -> Coordinate:
        """See `Grammar`. Early releases do not name the model."""
        if not page.release.mooncake_model:
            page = page._replace(names=page.names._replace(model=""))
        return super().coordinate(page, part, shard)

    def objects(self, page: RankPool) -> tuple[PageObject, ...]:
        """Return an object for each part (_get_hybrid_page_component_keys)."""
        if not page.parts:
            return ()
        ranked = _is_ranked(page)
        if page.scattered:
            raise UnsupportedByBackend(
                f"pools[{page.pool}]: pages in layout {page.layout} are scattered in host memory "
                "and cannot be stored as parts; use page_first or page_first_direct "
                "(--hicache-mem-layout)"
            )
        # Under DCP, keys name the CP rank only if they do not name the TP rank.
        names_cp = page.ranks.dcp > 1 and not ranked
        if page.ranks.cp_rank and not names_cp:
            return ()
        slices = _head_slices(page) if ranked else 1
        # The model's heads are cut into tp_lcm slices. A key of kv names one slice. A key of a
        # sidecar names all slices of its rank.
        cut = slices if page.pool == ANCHOR else 1
        parts: tuple[str | None, ...] = tuple(part_in_keys(page, part) for part in page.parts)
        if page.opaque and ranked:
            parts = HALVES
        return tuple(
            PageObject(self.coordinate(page, part, shard), slice(n, n + 1), cut)
            for shard in _shards(page, ranked, slices, cut)
            for n, part in enumerate(parts)
        )


def _is_ranked(page: RankPool) -> bool:
    """Return whether keys name the TP rank. Refuse pools that SGLang cannot store under its keys.

    Keys of pools without parts never name the rank. Keys of states always do. Keys of a draft or an
    opaque pool name the rank if the ranks hold different shares of it. Keys of other pools name the
    rank if the ranks do not share the anchor.
    """
    pool = pool_name(page.pool)
    if not pool.mooncake:
        raise UnsupportedByBackend(
            f"pools[{page.pool}]: SGLang does not store this pool on Mooncake; {FILE_STORE}"
        )
    if page.opaque and pool.states:
        raise UnsupportedByBackend(
            f"pools[{page.pool}]: Mooncake stores one object per state, which kind opaque cannot "
            "name, and SGLang does not store slot side states there at all; use kind mamba"
        )
    if not pool.parts:
        ranked = False
    elif pool.states or pool.draft or page.opaque:
        ranked = pool.states or page.sharded
    else:
        ranked = not page.shared_anchor
    if not page.opaque and ranked != page.sharded:
        # MooncakeStore makes too few or too many keys for these pages.
        raise UnsupportedByBackend(
            f"pools[{page.pool}]: the pages do not fit SGLang's Mooncake keys of this pool beside "
            f"this kv pool; {FILE_STORE}"
        )
    return ranked


def _head_slices(page: RankPool) -> int:
    """Return the number of slices into which keys divide a rank's heads.

    Source: should_split_heads (cache_controller.py :: _generate_storage_config).
    """
    tp = page.ranks.tp
    split = page.tp_lcm > tp and page.layout == "page_head" and not page.shared_anchor
    return page.tp_lcm // tp if split else 1


def _shards(page: RankPool, ranked: bool, slices: int, cut: int) -> Iterator[Shard]:
    """Yield the shards of a rank's objects. There is one shard, or one for each slice of heads."""
    ranks = page.ranks
    shard = Shard()
    if ranks.pp > 1:
        shard = Shard(pp_rank=ranks.pp_rank, pp_size=ranks.pp)
    if ranks.dcp > 1:
        shard = replace(
            shard,
            tp_size=ranks.tp,
            pp_size=ranks.pp,
            cp_rank=None if ranked else ranks.cp_rank,
            cp_size=ranks.cp,
            dcp_size=ranks.dcp,
            dcp_page_size=ranks.page_size,
        )
    if slices > 1:
        held = slices // cut
        first = ranks.tp_rank * slices
        for start in range(first, first + slices, held):
            yield replace(shard, tp_size=ranks.tp, heads=(start, start + held))
    elif ranked:
        yield replace(shard, tp_rank=ranks.tp_rank, tp_size=ranks.tp)
    elif ranks.dcp > 1:
        yield replace(shard, dcp_rank=ranks.dcp_rank)
    else:
        yield replace(shard, ranked=page.release.mooncake_stage)


def _read_prefix(text: str) -> tuple[str, Shard | None]:
    """Return the model (with any tag), and the sizes of a DCP part; None without a DCP part."""
    match = _DCP_PREFIX.fullmatch(text)
    if match is None:
        return text, None
    tp, dcp, page_size, pp, cp = map(int, match.groups()[1:])
    impossible = dcp < 2 or tp % dcp or page_size % dcp or max(tp, pp, cp) > MAX_RANKS
    if impossible:  # the match is part of the model's name
        return text, None
    return match[1] or "", Shard(
        tp_size=tp, dcp_size=dcp, dcp_page_size=page_size, pp_size=pp, cp_size=cp
    )


def _component_readings(suffix: str) -> Iterator[tuple[str, str, str | None]]:
    """Yield (rank text, pool, part) for every component that can end `suffix`."""
    for pattern, pool in _components(pool_names()):
        if match := pattern.fullmatch(suffix):
            yield match[1] or "", pool.name, match[2] or None


@lru_cache(maxsize=1)
def _components(names: tuple[PoolName, ...]) -> tuple[tuple[re.Pattern[str], PoolName], ...]:
    return tuple(
        (re.compile(f"_(?:(.*)_)?{_component_pattern(one)}", re.DOTALL), one)
        for one in names
        if one.mooncake
    )


def _component_pattern(pool: PoolName) -> str:
    """Return the regular expression of a pool's components. Its group is the part."""
    name = re.escape(pool.name)
    if not pool.parts:
        return f"{name}()"
    if _has_bare_parts(pool):
        return pool.part_pattern
    return f"{name}(?:_{pool.part_pattern}){'?' * pool.whole}"


def _has_bare_parts(pool: PoolName) -> bool:
    """Return whether components are parts without the pool's name."""
    return pool.name == ANCHOR or pool.states


def _rank_readings(text: str, dcp: Shard | None) -> Iterator[Rank]:
    """Yield the readings of a rank, in MHA and rank-replicated form."""
    sizes = dcp or Shard()
    if _SLICES.fullmatch(text):
        yield from _slice_readings(text, sizes)
        return
    ranked = _DCP_RANK.fullmatch(text)
    if ranked is not None and dcp is not None:
        stage = None if ranked[3] is None else int(ranked[3])
        yield False, replace(sizes, dcp_rank=int(ranked[1]), cp_rank=int(ranked[2]), pp_rank=stage)
        return
    if not text:
        yield False, sizes
        return
    match = _MHA_RANK.fullmatch(text)
    if match is None:
        return
    yield (
        True,
        replace(sizes, tp_rank=int(match[1]), pp_rank=None if match[2] is None else int(match[2])),
    )
    if match[2] is None:
        yield False, replace(sizes, pp_rank=int(match[1]))


def _slice_readings(text: str, sizes: Shard) -> Iterator[Rank]:
    """Yield the reading of a printed list of slices, with the stage if the list names it."""
    ranks = [_MHA_RANK.fullmatch(rank) for rank in re.findall("'([0-9_]+)'", text)]
    found = [rank for rank in ranks if rank is not None]
    slices = [int(rank[1]) for rank in found]
    stages = {rank[2] for rank in found}
    rising = slices == list(range(slices[0], slices[0] + len(ranks))) if slices else False
    if rising and len(stages) == 1:
        stage = stages.pop()
        heads = (slices[0], slices[-1] + 1)
        yield True, replace(sizes, heads=heads, pp_rank=None if stage is None else int(stage))


def _agrees(pool: str, part: str | None, is_mha: bool, shard: Shard) -> bool:
    """Return whether SGLang writes this pool with this form of rank."""
    if part is None:
        return not is_mha or shard.heads is not None
    return is_mha or (part == HALVES[0] and not pool_name(pool).whole)


def _within_sizes(shard: Shard) -> bool:
    return all(rank is None or size is None or rank < size for _, rank, size in shard.axes)


def _rank_text(coordinate: Coordinate) -> str:
    shard = coordinate.shard
    stage = "" if shard.pp_rank is None else str(shard.pp_rank)
    if shard.heads is not None and shard.tp_rank is None:
        end = f"_{stage}" if stage else ""
        slices = [f"{number}{end}" for number in range(*shard.heads)]
        return slices[0] if coordinate.pool == "kv" else str(slices)
    if shard.tp_rank is not None:
        return f"{shard.tp_rank}_{stage}" if stage else str(shard.tp_rank)
    if shard.dcp_rank is not None:
        ranks = f"dcp{shard.dcp_rank}_cp{shard.cp_rank or 0}"
        return f"{ranks}_{stage}" if stage else ranks
    return stage


def _component_text(coordinate: Coordinate) -> str:
    if _has_bare_parts(pool_name(coordinate.pool)):
        return str(coordinate.part)
    return coordinate.pool if coordinate.part is None else f"{coordinate.pool}_{coordinate.part}"
