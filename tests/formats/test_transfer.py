"""Plans against pages rendered by hand, for random models and pairs of deployments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicachectl.formats.errors import HicacheError, ProfileError, UnsupportedByBackend, UsageError
from hicachectl.formats.expectation import ExpectedObject, expected_objects
from hicachectl.formats.profile import Pool, Profile, StateTensor, validate_profile
from hicachectl.formats.transfer import TransferPlan, retargeted, transfer_plan
from hicachectl.kernels.relayout import relayout
from tests.formats.rendered_pages import page_content, rendered

PAGES = 2
GRAMMARS = ("file", "mooncake", "hf3fs", "unified")


def mha(name: str = "kv", **fields: Any) -> Pool:
    values = {"dtype": "bfloat16", "layers": 4, "kv_heads": 4, "head_dim": 8, **fields}
    return Pool(name=name, kind="mha", **values)


def mla(name: str = "kv", **fields: Any) -> Pool:
    sizes = {"kv_lora_rank": 12, "qk_rope_head_dim": 4, "row": "bf16", "layers": 4}
    return Pool(name=name, kind="mla", **{**sizes, **fields})


def indexer(**fields: Any) -> Pool:
    values = {"layers": 4, "index_head_dim": 128, **fields}
    return Pool(name="indexer", kind="dsa_indexer", **values)


def gdn(layers: Any = 4) -> Pool:
    conv = StateTensor(shape=(32, 3), dtype="bfloat16", groups=(8, 8, 16))
    temporal = StateTensor(shape=(8, 2, 3), dtype="float32")
    return Pool(name="mamba", kind="mamba", layers=layers, temporal=temporal, conv=(conv,))


def kda(layers: Any = 4) -> Pool:
    conv = StateTensor(shape=(3, 40), dtype="bfloat16", shard_axis=1, groups=(24, 8, 8))
    temporal = StateTensor(shape=(8, 2, 2), dtype="float32")
    return Pool(name="mamba", kind="mamba", layers=layers, temporal=temporal, conv=(conv, conv))


def opaque(name: str, **fields: Any) -> Pool:
    return Pool(name=name, kind="opaque", **{"nbytes": 100, **fields})


def profile(*pools: Pool, **fields: Any) -> Profile:
    return Profile(**{"model": "a/b", "page_size": 3, "pools": pools, **fields})


LOGICAL = Pool(name="kv", kind="logical")


# --- random deployments ---


@st.composite
def models(draw: st.DrawFn) -> Profile:
    """A model: its pools and page size, served by one rank."""
    total = draw(st.integers(1, 6))
    numbers = st.sets(st.integers(0, total - 1), min_size=1).map(lambda found: tuple(sorted(found)))
    packed = draw(st.sampled_from([0, 0, 1, 2]))
    if draw(st.booleans()):
        geometry = {"kv_heads": draw(st.sampled_from([1, 2, 4, 8])), "packed_draft_layers": packed}
        pools = [mha(**geometry, v_head_dim=draw(st.sampled_from([0, 0, 0, 4])))]
        others = [mha("swa", kv_heads=4), gdn(), mha("draft", kv_heads=2), mla("draft")]
    else:
        pools = [mla(packed_draft_layers=packed, row=draw(st.sampled_from(["bf16", "fp8"])))]
        others = [indexer(packed_draft_layers=packed), kda(), mla("draft")]
    chosen = draw(st.lists(st.sampled_from(others), unique_by=lambda pool: pool.name, max_size=3))
    placed = [
        replace(pool, layers=draw(st.integers(1, 3)) if pool.name == "draft" else draw(numbers))
        for pool in [*pools, *chosen]
    ]
    # Some pool has the model's last layer, so that all stages count the same layers.
    whole = replace(placed[0], layers=tuple(sorted({*placed[0].layer_numbers, total - 1})))
    if len(placed) == 1 and draw(st.booleans()):
        whole = replace(whole, layers=total)
    return profile(whole, *placed[1:], page_size=draw(st.integers(1, 4)))


@st.composite
def deployments(draw: st.DrawFn, model: Profile) -> tuple[Profile, str]:
    """A way to serve and store a model that SGLang has, by rules spelled out here again."""
    pools = {pool.name: pool for pool in model.pools}
    kinds = {pool.kind for pool in model.pools}
    last = max(max(pool.layer_numbers) for pool in model.pools if pool.name != "draft") + 1
    cuts = draw(st.sets(st.integers(1, last - 1), max_size=2)) if last > 1 else set()
    bounds = [0, *sorted(cuts), last]
    partition = tuple(end - start for start, end in zip(bounds, bounds[1:], strict=False))
    heads = [pool.kv_heads for pool in model.pools if pool.kind == "mha"]
    tps = [t for t in (1, 2, 4, 8, 16) if "mamba" not in kinds or t <= 8]
    wide = any(pool.v_head_dim for pool in model.pools)
    layouts = ["page_first", "page_first_direct"]
    if not kinds & {"mamba", "dsa_indexer", "mla"} and not wide:
        layouts.append("page_head")
    if "mamba" not in kinds and not wide:
        layouts.append("layer_first")
    layout = draw(st.sampled_from(layouts))
    tp = draw(st.sampled_from(tps))
    grammars = [] if wide else ["file"]
    if layout != "layer_first" or kinds == {"mla"}:
        grammars.append("mooncake")
    side_mha = any(pool.kind == "mha" for pool in model.pools[1:])
    if not wide and not side_mha:
        grammars.append("hf3fs")
    kv = pools["kv"]
    alone = len(pools) == 1 and not kv.packed_draft_layers and kv.layer_numbers == tuple(range(last))
    grid = draw(st.sampled_from([0, 1, 2]))
    divides = kv.kind == "mla" or (kv.kv_heads % (tp * max(grid, 1)) == 0 and not wide)
    if alone and divides and (kv.kind == "mla" or grid or kv.kv_heads > tp or tp == 1):
        grammars.append("unified")
    grammar = draw(st.sampled_from(grammars))
    pp = 1 if grammar == "hf3fs" else len(partition)
    lcm = draw(st.sampled_from([tp, 2 * tp]))
    split = layout == "page_head" and min(heads, default=0) % lcm == 0
    return (
        replace(
            model,
            model=draw(st.sampled_from(["a/b", "c"])),
            tp=tp,
            pp=pp,
            pp_partition=partition if pp > 1 else (),
            layout=layout,
            tp_lcm_size=lcm if split else 0,
            unified_head_group=grid,
        ),
        grammar,
    )


def transferred(
    plan: TransferPlan, sources: list[npt.NDArray[np.uint8]]
) -> list[npt.NDArray[np.uint8]]:
    made = [np.full((PAGES, e.nbytes), 0xA5, np.uint8) for e in plan.destinations]
    for unit in plan.units:
        relayout(unit, [sources[i] for i in unit.sources], [made[i] for i in unit.destinations])
    return made


def pages_of(
    model: Profile, grammar: str, objects: tuple[ExpectedObject, ...], contents: list[Any]
) -> list[npt.NDArray[np.uint8]]:
    """[pages, bytes] of each object."""
    return [
        np.stack(
            [
                np.frombuffer(rendered(model, grammar, content, each.coordinate), np.uint8)
                for content in contents
            ]
        )
        for each in objects
    ]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_page_of_any_deployment_becomes_that_of_any_other(data: st.DataObject) -> None:
    model = data.draw(models())
    source, source_grammar = data.draw(deployments(model))
    destination, grammar = data.draw(deployments(model))
    plan = transfer_plan(source, source_grammar, destination, grammar)
    contents = [page_content(model, seed) for seed in range(PAGES)]
    made = transferred(plan, pages_of(source, source_grammar, plan.sources, contents))
    for each, found, wanted in zip(
        plan.destinations,
        made,
        pages_of(destination, grammar, plan.destinations, contents),
        strict=True,
    ):
        assert np.array_equal(found, wanted), each.coordinate
    check_form(plan)


def check_form(plan: TransferPlan) -> None:
    """Every destination is in one unit, and each of its bytes is written once."""
    made = sorted(number for unit in plan.units for number in unit.destinations)
    assert made == list(range(len(plan.destinations)))
    read = {number for unit in plan.units for number in unit.sources}
    assert sorted(read | set(plan.unused)) == list(range(len(plan.sources)))
    assert not read & set(plan.unused)
    for unit in plan.units:
        written = [np.zeros(plan.destinations[number].nbytes, int) for number in unit.destinations]
        for copy in unit.copies:
            places = np.array(copy.destination_offset)
            for length, step in zip(copy.shape, copy.destination_strides, strict=True):
                places = places[..., None] + np.arange(length) * step
            places = (places[..., None] + np.arange(copy.itemsize)).reshape(-1)
            written[copy.destination][places] += 1
        for position, counts in enumerate(written):
            assert counts.max(initial=0) <= 1
            assert (position in unit.padded) == bool((counts == 0).any())
        trailing = {plan.destinations[number].trailing for number in unit.destinations}
        assert trailing == {unit.trailing}
        assert unit.trailing == any(plan.sources[number].trailing for number in unit.sources)
