"""The objects of a page that each rank names are those that specs name."""

from __future__ import annotations

from contextlib import suppress
from itertools import product
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from hicachectl.formats.errors import ProfileError, UnsupportedByBackend, UsageError
from hicachectl.formats.keys import grammar_of
from hicachectl.formats.keys.base import RankPool, Ranks
from hicachectl.formats.layouts import LAYOUTS
from hicachectl.formats.releases import RELEASES
from hicachectl.formats.spec import ObjectSpec, object_specs, ranks_of
from tests.formats.small_models import LOGICAL, gdn, indexer, kda, mha, mla, opaque, profile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.formats.objects import Coordinate
    from hicachectl.formats.profile import Profile

MHA = profile(mha(), gdn(), tp=2)
MLA = profile(mla(), indexer(), kda(), tp=2)
STAGES = {"pp": 2, "tp": 2}
MODELS = {
    "mha": profile(mha(), tp=2),
    "mha alone": profile(mha()),
    "mamba beside mha": MHA,
    "mla": profile(mla(), tp=2),
    "mla, indexer, mamba": MLA,
    "mla draft": profile(mla(), indexer(), mla("draft"), tp=2),
    "mha draft": profile(mha(), mha("draft"), tp=2),
    "swa": profile(mha(), mha("swa"), tp=2),
    "stages, mha": profile(mha(), mha("draft"), **STAGES),
    "stages, mla": profile(mla(), indexer(), mla("draft"), **STAGES),
    "logical": profile(LOGICAL, opaque("deepseek_v4_c4")),
}


def held(model: Profile, spec: ObjectSpec, ranks: Ranks) -> RankPool:
    """Return a pool of one rank as the plug-in sees it, by the tensors of its file."""
    parts = [tensor.name for tensor in spec.tensors] or ["page"] * bool(spec.nbytes)
    sizes = [tensor.nbytes for tensor in spec.tensors] or [spec.nbytes] * bool(spec.nbytes)
    return RankPool(
        names=model.names,
        pool=spec.pool,
        ranks=ranks,
        parts=tuple(parts),
        sizes=tuple(sizes),
        layout=model.layout,
        release=RELEASES[-1],
        shared_anchor=model.rank_replicated,
        sharded=parts == ["k", "v"] or spec.pool == "mamba",
        scattered=model.layout == "layer_first",
    )


def on(scheme: str, model: Profile) -> set[Coordinate]:
    """Return the coordinates that each rank gives its pages, on a store with keys of a grammar."""
    grammar, found = grammar_of(scheme), set()
    for pp_rank, tp_rank in product(range(model.pp), range(model.tp)):
        ranks = ranks_of(model)._replace(pp_rank=pp_rank, tp_rank=tp_rank)
        grammar.check_ranks(ranks, RELEASES[-1])
        for spec in object_specs(model, "file"):
            shard = spec.coordinate.shard
            if shard.tp_rank in (None, tp_rank) and shard.pp_rank in (None, pp_rank):
                objects = grammar.objects(held(model, spec, ranks))
                found |= {one.coordinate for one in objects}
    return found


def in_each_layout() -> Iterator[tuple[str, str]]:
    """Yield the name of a model, and a layout in which SGLang builds its host pools."""
    for name, model in MODELS.items():
        for layout in LAYOUTS:
            with suppress(ProfileError):
                object_specs(structs.replace(model, layout=layout), "file")
                yield name, layout


@pytest.mark.parametrize("scheme", ["file", "mooncake", "hf3fs"])
@pytest.mark.parametrize(("name", "layout"), list(in_each_layout()))
def test_objects_are_those_of_the_specs(name: str, layout: str, scheme: str) -> None:
    """What a profile cannot have on a backend is refused, as is all layer_first on Mooncake."""
    model = structs.replace(MODELS[name], layout=layout, tag="tag")
    try:
        wanted = {spec.coordinate for spec in object_specs(model, scheme)}
    except UnsupportedByBackend:
        wanted = set()
    if not wanted or (scheme == "mooncake" and layout == "layer_first"):
        with pytest.raises(UnsupportedByBackend):
            on(scheme, model)
    else:
        assert on(scheme, model) == wanted


@pytest.mark.parametrize("scheme", ["mooncake", "hf3fs"])
def test_a_rank_is_refused_where_keys_do_not_name_its_cp_rank(scheme: str) -> None:
    with pytest.raises(UnsupportedByBackend, match="do not name the cp rank"):
        grammar_of(scheme).check_ranks(Ranks(cp=2, cp_rank=1), RELEASES[-1])


def test_an_unknown_grammar_is_refused() -> None:
    with pytest.raises(UsageError, match="Key scheme"):
        grammar_of("redis")
