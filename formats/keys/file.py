"""Keys of SGLang's file backend, which are file names.

Source: sglang srt/mem_cache/hicache_storage.py :: HiCacheFile.__init__, _get_suffixed_key,
_get_component_key, _log_key. A name is::

    page-hash [ "." pool ] "_" model [tp] [pp] [cp] [dcp] ".bin"
    tp  = "_" rank "_" size         pp  = "_" size "_" rank   (size first)
    cp  = "_cp" rank "_" size       dcp = "_tp" size "_dcp" rank "_" size "_page" tokens

Unified keys (`keys.unified`) with ".bin" are also file names.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from hicachectl.formats.keys.base import WHOLE, Grammar, PageObject, RankPool
from hicachectl.formats.keys.unified import UnifiedGrammar
from hicachectl.formats.kinds.pool import pool_name, pool_names
from hicachectl.formats.objects import MAX_RANKS, Coordinate, Names, Shard

if TYPE_CHECKING:
    from collections.abc import Iterator

_UNIFIED = UnifiedGrammar()
_NUMBER = "(0|[1-9][0-9]{0,8})"  # the text of an int in Python
_PAIR = re.compile(f"_{_NUMBER}_{_NUMBER}$")
_CP = re.compile(f"_cp{_NUMBER}_{_NUMBER}$")
_DCP = re.compile(f"_tp{_NUMBER}_dcp{_NUMBER}_{_NUMBER}_page{_NUMBER}$")


class FileGrammar(Grammar):
    """HiCacheFile's file names."""

    name = title = "file"
    axes: ClassVar = {"pp": "file_stage", "cp": "file_cp", "dcp": ""}
    refuses_truncated = True
    marker = 0

    def readings(self, prefix: str, suffix: str) -> tuple[Coordinate, ...]:
        """See `Grammar`.

        There are several readings if a model name ends like a rank suffix or starts like a pool.
        """
        if prefix or not suffix.endswith(".bin"):
            return ()
        stem = suffix.removesuffix(".bin")
        unified = _UNIFIED.readings("", stem)
        return unified or tuple(
            Coordinate(Names(model), pool=pool, shard=shard)
            for pool, text in _pool_readings(stem)
            for model, shard in _shard_readings(text, pool)
        )

    def affix(self, coordinate: Coordinate) -> tuple[str, str]:
        """See `Grammar`."""
        shard = coordinate.shard
        if shard.layers is not None:
            return "", _UNIFIED.affix(coordinate)[1] + ".bin"
        suffix = "" if coordinate.pool == "kv" else f".{coordinate.pool}"
        suffix += f"_{coordinate.names.model}"
        if shard.tp_rank is not None:
            suffix += f"_{shard.tp_rank}_{shard.tp_size}"
        if shard.pp_rank is not None:
            suffix += f"_{shard.pp_size}_{shard.pp_rank}"
        if shard.cp_rank is not None:
            suffix += f"_cp{shard.cp_rank}_{shard.cp_size}"
        if shard.dcp_rank is not None:
            suffix += f"_tp{shard.tp_size}_dcp{shard.dcp_rank}_{shard.dcp_size}"
            suffix += f"_page{shard.dcp_page_size}"
        return "", suffix + ".bin"

    def objects(self, page: RankPool) -> tuple[PageObject, ...]:
        """Return the file of the whole page. The form of its name depends on the target.

        Each rank of an MHA target has its own file. Ranks of an MLA target share the first rank's
        file, even for an MHA draft. The other ranks then read the wrong shard of the draft. If the
        release has `file_state_rank`, each rank has its own file of states.
        """
        ranks = page.ranks
        states = pool_name(page.pool).states and page.release.file_state_rank
        ranked, dcp = not page.shared_anchor or states, ranks.dcp > 1
        shard = Shard(
            tp_rank=ranks.tp_rank if ranked else None,
            tp_size=ranks.tp if ranked or dcp else None,
            pp_rank=ranks.pp_rank if ranks.pp > 1 else None,
            pp_size=ranks.pp if ranks.pp > 1 else None,
            cp_rank=ranks.cp_rank if ranks.cp > 1 else None,
            cp_size=ranks.cp if ranks.cp > 1 else None,
            dcp_rank=ranks.dcp_rank if dcp else None,
            dcp_size=ranks.dcp if dcp else None,
            dcp_page_size=ranks.page_size if dcp else None,
        )
        return (PageObject(self.coordinate(page, None, shard), WHOLE),)


def _pool_readings(stem: str) -> Iterator[tuple[str, str]]:
    """Yield each pool that can begin `stem`, and the text from the model on."""
    if stem.startswith("_"):
        yield "kv", stem[1:]
    for pool in pool_names():
        if pool.name != "kv" and stem.startswith(f".{pool.name}_"):
            yield pool.name, stem[len(pool.name) + 2 :]


def _shard_readings(text: str, pool: str) -> Iterator[tuple[str, Shard]]:
    """Yield (model, shard) for every reading of the text's end, longest model first."""
    yield text, Shard()
    yield from _rank_readings(text, Shard())
    without_cp = _strip_cp(text, Shard())
    if without_cp is not None:
        yield without_cp
        yield from _rank_readings(*without_cp)
    yield from _dcp_readings(text, pool)


def _dcp_readings(text: str, pool: str) -> Iterator[tuple[str, Shard]]:
    """Yield the readings of a DCP part.

    DCP targets are MLA, so only keys of states have a tp pair.
    """
    match = _DCP.search(text)
    if match is None:
        return
    tp_size, rank, size, page_size = map(int, match.groups())
    if not _is_rank(rank, size) or size < 2 or tp_size % size or page_size % size:
        return
    if not page_size or tp_size > MAX_RANKS:
        return
    shard = Shard(tp_size=tp_size, dcp_rank=rank, dcp_size=size, dcp_page_size=page_size)
    text = text[: match.start()]
    states = pool_name(pool).states
    bases = [(text, shard)]
    without_cp = _strip_cp(text, shard)
    if without_cp is not None:
        bases.append(without_cp)
    for base, base_shard in bases:
        if not states:
            yield base, base_shard
        for model, ranked in _rank_readings(base, base_shard):
            if (ranked.tp_rank is not None) == states and ranked.tp_size == tp_size:
                yield model, ranked


def _rank_readings(text: str, shard: Shard) -> Iterator[tuple[str, Shard]]:
    """Yield the readings of one or two number pairs at the end, as tp, as pp, or as tp and pp."""
    match = _PAIR.search(text)
    if match is None:
        return
    first, second = int(match[1]), int(match[2])
    model = text[: match.start()]
    if _is_rank(first, second):
        yield model, replace(shard, tp_rank=first, tp_size=second)
    if first > 1 and _is_rank(second, first):
        staged = replace(shard, pp_size=first, pp_rank=second)
        yield model, staged
        tp = _PAIR.search(model)
        if tp is not None and _is_rank(int(tp[1]), int(tp[2])):
            yield model[: tp.start()], replace(staged, tp_rank=int(tp[1]), tp_size=int(tp[2]))


def _strip_cp(text: str, shard: Shard) -> tuple[str, Shard] | None:
    match = _CP.search(text)
    if match is None or not _is_rank(int(match[1]), int(match[2])) or int(match[2]) < 2:
        return None
    return text[: match.start()], replace(shard, cp_rank=int(match[1]), cp_size=int(match[2]))


def _is_rank(rank: int, size: int) -> bool:
    return rank < size <= MAX_RANKS  # larger numbers belong to the model's name
