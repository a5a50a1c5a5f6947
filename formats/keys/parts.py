"""Objects that hold one rank's page of a pool, by key grammar.

SGLang's backends divide the page of a host pool differently. Source: sglang srt/mem_cache/
hicache_storage.py :: HiCacheFile; storage/mooncake_store/mooncake_store.py ::
MooncakeStore._get_hybrid_page_component_keys; storage/hf3fs/storage_hf3fs.py :: HiCacheHF3FS.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from hicachectl.formats.errors import UnsupportedByBackend, UsageError
from hicachectl.formats.kinds.pool import pool_name
from hicachectl.formats.layouts import PAGE_FIRST_LAYOUTS
from hicachectl.formats.objects import Coordinate, Shard
from hicachectl.formats.wording import not_one_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Parts = Sequence[str | None]

_K_AND_V = ("k", "v")
_SCATTERED = "layer_first"


class PageObject(NamedTuple):
    """One object of a page.

    parts: the slice of the page's parts that the object holds.
    """

    coordinate: Coordinate
    parts: slice


class HeldPool(NamedTuple):
    """A pool of one rank.

    coordinate: of the object with the whole page on a file store.
    parts: names of the page's parts, in order: k and v, or states, or one name for a whole page.
        None for a logical anchor.
    layout: SGLang's --hicache-mem-layout.
    shared_anchor: whether the TP ranks share the objects of the anchor.
    tag: Mooncake's extra_backend_tag.
    """

    coordinate: Coordinate
    parts: Parts
    layout: str
    shared_anchor: bool
    tag: str = ""


def page_objects(scheme: str, pool: HeldPool) -> tuple[PageObject, ...]:
    """Return the objects of a pool's page; none for a logical anchor on Mooncake.

    scheme: "file", "mooncake" or "hf3fs". Raises UnsupportedByBackend if the keys of a grammar
    cannot tell the objects from those of other ranks, or SGLang has no such objects there;
    UsageError for another scheme.
    """
    if scheme not in _SCHEMES:
        raise UsageError(not_one_of("Key scheme", scheme, _SCHEMES))
    return _SCHEMES[scheme](pool)


def _on_file(pool: HeldPool) -> tuple[PageObject, ...]:
    return (PageObject(pool.coordinate, slice(None)),)


def _on_mooncake(pool: HeldPool) -> tuple[PageObject, ...]:
    coordinate = pool.coordinate
    name, shard = coordinate.pool, coordinate.shard
    if not pool.parts:
        return ()
    form = pool_name(name).mooncake
    if not form:
        raise UnsupportedByBackend(
            f"Pool {name}: SGLang does not store this pool on Mooncake; use a file store"
        )
    if pool.layout == _SCATTERED:
        raise UnsupportedByBackend(
            f"Layout {pool.layout}: SGLang does not store it on Mooncake; give "
            "--hicache-mem-layout page_first or page_first_direct"
        )
    _refuse_context_parallel(shard, "Mooncake")
    both = tuple(pool.parts) == _K_AND_V
    held = Shard(pp_rank=shard.pp_rank, pp_size=shard.pp_size)
    if form == "states" or (both and form != "shared"):
        held = replace(held, tp_rank=shard.tp_rank or 0, tp_size=shard.tp_size)
    return tuple(
        PageObject(
            replace(coordinate, part=_mooncake_part(form, part, both), tag=pool.tag, shard=held),
            slice(n, n + 1),
        )
        for n, part in enumerate(pool.parts)
    )


def _mooncake_part(form: str, part: str | None, both: bool) -> str | None:
    """Return the part as keys name it: K and V of an MLA page together are "k"."""
    if form == "states" or both:
        return part
    return "k" if form in ("kv", "parts") else None


def _on_hf3fs(pool: HeldPool) -> tuple[PageObject, ...]:
    coordinate = pool.coordinate
    name, shard = coordinate.pool, coordinate.shard
    if not pool.parts:
        raise UnsupportedByBackend(
            f"Pool {name}: SGLang's 3FS backend cannot store models without KV, because it divides "
            "files by the size of a kv page; use a file store or Mooncake"
        )
    if pool.layout not in (*PAGE_FIRST_LAYOUTS, _SCATTERED):
        raise UnsupportedByBackend(
            f"Layout {pool.layout}: SGLang's 3FS backend does not store it; start with "
            f"--hicache-mem-layout {', '.join(PAGE_FIRST_LAYOUTS)} or {_SCATTERED}"
        )
    if shard.pp_rank is not None:
        raise UnsupportedByBackend(
            "Pipeline stages: 3FS keys do not name the stage, so stages overwrite each other's "
            "objects; use a file store or Mooncake"
        )
    _refuse_context_parallel(shard, "3FS")
    both = tuple(pool.parts) == _K_AND_V
    if both and name != "kv":
        raise UnsupportedByBackend(
            f"Pool {name}: SGLang cannot store K and V of a pool beside kv on 3FS; use a file store"
        )
    held = Shard(tp_rank=shard.tp_rank or 0)
    if pool.shared_anchor and pool_name(name).states:
        held = replace(held, tp_size=shard.tp_size)
    whole = replace(coordinate, model="", part=None, shard=held)
    if not both or pool.shared_anchor or pool.layout == _SCATTERED:
        return (PageObject(whole, slice(None)),)
    return tuple(
        PageObject(replace(whole, part=part), slice(n, n + 1)) for n, part in enumerate(_K_AND_V)
    )


def _refuse_context_parallel(shard: Shard, backend: str) -> None:
    if shard.cp_rank is not None:
        raise UnsupportedByBackend(
            f"Context parallelism: {backend} keys do not name the CP rank, so ranks overwrite "
            "each other's objects; use a file store"
        )


_SCHEMES: dict[str, Callable[[HeldPool], tuple[PageObject, ...]]] = {
    "file": _on_file,
    "mooncake": _on_mooncake,
    "hf3fs": _on_hf3fs,
}
