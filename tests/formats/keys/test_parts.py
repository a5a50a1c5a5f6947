"""The objects of a page on other backends, derived from its file, are those that specs name."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs

from hicachectl.formats.errors import ProfileError, UnsupportedByBackend, UsageError
from hicachectl.formats.keys.parts import HeldPool, page_objects
from hicachectl.formats.layouts import PAGE_LAYOUTS
from hicachectl.formats.objects import Coordinate, Shard
from hicachectl.formats.spec import ObjectSpec, object_specs
from tests.formats.small_models import LOGICAL, gdn, indexer, kda, mha, mla, opaque, profile

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def held(model: Profile, spec: ObjectSpec, **fields: Any) -> HeldPool:
    """Return the pool of a file, by its tensors."""
    parts = [tensor.name for tensor in spec.tensors] or ["page"] * bool(spec.nbytes)
    pool = HeldPool(spec.coordinate, parts, model.layout, model.rank_replicated, model.tag)
    return pool._replace(**fields)


def on(scheme: str, model: Profile) -> set[Coordinate]:
    """Return the coordinates that all files of a model's page have on another backend."""
    return {
        found.coordinate
        for spec in object_specs(model, "file")
        for found in page_objects(scheme, held(model, spec))
    }


def in_each_layout() -> Iterator[tuple[str, str]]:
    """Yield the name of a model, and a layout in which SGLang builds its host pools."""
    for name, model in MODELS.items():
        for layout in PAGE_LAYOUTS:
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
def test_keys_without_cp_rank_are_refused(scheme: str) -> None:
    shard = Shard(tp_rank=0, tp_size=1, cp_rank=1, cp_size=2)
    pool = HeldPool(Coordinate("a-b", "kv", shard=shard), ["k", "v"], "page_first", False)
    with pytest.raises(UnsupportedByBackend, match="do not name the CP rank"):
        page_objects(scheme, pool)


def test_pools_without_keys_are_refused() -> None:
    coordinate = Coordinate("a-b", "auxiliary_swa", shard=Shard(tp_rank=0, tp_size=1))
    with pytest.raises(UnsupportedByBackend, match="auxiliary_swa: SGLang does not store"):
        page_objects("mooncake", HeldPool(coordinate, ["k", "v"], "page_first", False))
    with pytest.raises(UsageError, match="Key scheme"):
        page_objects("unified", HeldPool(coordinate, ["k", "v"], "page_first", False))
