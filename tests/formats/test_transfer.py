"""Transfer plans against pages rendered by hand, for random models and deployments."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hicachectl.formats.errors import ProfileError, UsageError
from hicachectl.formats.kinds.pool import Pool, StateTensor
from hicachectl.formats.objects import Names
from hicachectl.formats.profile import Profile, validate_profile
from hicachectl.formats.spec import ObjectSpec, object_specs
from hicachectl.formats.transfer import TransferPlan, retargeted, transfer_plan
from hicachectl.kernels import relayout as kernel
from hicachectl.kernels.relayout import relayout
from tests.formats.rendered_pages import page_content, rendered
from tests.formats.small_models import (
    LOGICAL,
    MHA_TWO,
    convolutions,
    gdn,
    indexer,
    kda,
    mamba2,
    mha,
    mla,
    opaque,
    profile,
)
from tests.speed import examples

PAGES = 2


# --- random deployments ---


@st.composite
def models(draw: st.DrawFn) -> Profile:
    """A random model: pools and page size, served by one rank."""
    total = draw(st.integers(1, 6))
    numbers = st.sets(st.integers(0, total - 1), min_size=1).map(lambda found: tuple(sorted(found)))
    packed = draw(st.sampled_from([0, 0, 1, 2]))
    if draw(st.booleans()):
        geometry: dict[str, Any] = {
            "kv_heads": draw(st.sampled_from([1, 2, 4, 8])),
            "packed_draft_layers": packed,
        }
        pools = [mha(**geometry, v_head_dim=draw(st.sampled_from([0, 0, 0, 4])))]
        states = draw(st.sampled_from([gdn(), mamba2(), convolutions()]))
        others = [mha("swa", kv_heads=4), states, mha("draft", kv_heads=2), mla("draft")]
    else:
        pools = [mla(packed_draft_layers=packed, row=draw(st.sampled_from(["bf16", "fp8"])))]
        others = [indexer(packed_draft_layers=packed), kda(), mla("draft")]
    chosen = draw(st.lists(st.sampled_from(others), unique_by=lambda pool: pool.name, max_size=3))
    placed = [
        replace(pool, layers=draw(st.integers(1, 3)) if pool.name == "draft" else draw(numbers))
        for pool in [*pools, *chosen]
    ]
    # One pool has the model's last layer, so all stages count the same layers.
    whole = replace(placed[0], layers=tuple(sorted({*placed[0].layer_numbers, total - 1})))
    if len(placed) == 1 and draw(st.booleans()):
        whole = replace(whole, layers=total)
    return profile(whole, *placed[1:], page_size=draw(st.integers(1, 4)))


@st.composite
def deployments(draw: st.DrawFn, model: Profile) -> tuple[Profile, str]:
    """A random deployment that SGLang supports, by rules repeated here."""
    kinds = {pool.kind for pool in model.pools}
    last = max(max(pool.layer_numbers) for pool in model.pools if pool.name != "draft") + 1
    cuts = draw(st.sets(st.integers(1, last - 1), max_size=2)) if last > 1 else set()
    bounds = [0, *sorted(cuts), last]
    partition = tuple(end - start for start, end in pairwise(bounds))
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
    if not wide and not side_mha and layout != "page_head":
        grammars.append("hf3fs")
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
    model: Profile, grammar: str, objects: tuple[ObjectSpec, ...], contents: list[Any]
) -> list[npt.NDArray[np.uint8]]:
    """Return [pages, bytes] of each object."""
    return [
        np.stack(
            [
                np.frombuffer(rendered(model, grammar, content, each.coordinate), np.uint8)
                for content in contents
            ]
        )
        for each in objects
    ]


@pytest.mark.slow
@examples(150)
@given(st.data())
def test_a_page_of_any_deployment_becomes_that_of_any_other(data: st.DataObject) -> None:
    model = data.draw(models())
    source, source_grammar = data.draw(deployments(model))
    destination, grammar = data.draw(deployments(model))
    plan = transfer_plan(source, source_grammar, destination, grammar)
    contents = [page_content(model, seed) for seed in range(PAGES)]
    sources = pages_of(source, source_grammar, plan.sources, contents)
    expected = pages_of(destination, grammar, plan.destinations, contents)
    for after in (1 << 62, -1):  # by numpy, and compiled
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernel, "COMPILED_AFTER", after)
            made = transferred(plan, sources)
        for each, found, wanted in zip(plan.destinations, made, expected, strict=True):
            assert np.array_equal(found, wanted), each.coordinate
    check_form(plan)


def read_sources(plan: TransferPlan) -> set[int]:
    return {number for unit in plan.units for number in unit.sources}


def check_form(plan: TransferPlan) -> None:
    """Check that every destination is in one unit, with each byte written once."""
    made = sorted(number for unit in plan.units for number in unit.destinations)
    assert made == list(range(len(plan.destinations)))
    assert read_sources(plan) <= set(range(len(plan.sources)))
    for unit in plan.units:
        written = [np.zeros(plan.destinations[number].nbytes, int) for number in unit.destinations]
        for copy in unit.copies:
            places = np.array(copy.destination_offset)
            for axis in copy.axes:
                places = places[..., None] + np.arange(axis.length) * axis.destination
            places = (places[..., None] + np.arange(copy.run)).reshape(-1)
            written[copy.destination][places] += 1
        for position, counts in enumerate(written):
            assert counts.max(initial=0) <= 1
            assert (position in unit.padded) == bool((counts == 0).any())
        trailing = {plan.destinations[number].trailing for number in unit.destinations}
        assert trailing == {unit.trailing}
        assert unit.trailing == any(plan.sources[number].trailing for number in unit.sources)


def test_groups_that_every_rank_holds_come_from_a_source_that_is_read_anyway() -> None:
    """Each unit has one rank of the smaller deployment: B and C do not tie all ranks together."""
    for tps in ((2, 8), (8, 2)):
        source, destination = (profile(mha(), mamba2(), tp=tp) for tp in tps)
        plan = transfer_plan(source, "file", destination, "file")
        trailing = [unit for unit in plan.units if unit.trailing]
        assert [(len(unit.sources), len(unit.destinations)) for unit in trailing] == (
            [(1, 4), (1, 4)] if tps[0] == 2 else [(4, 1), (4, 1)]
        )


# --- objects with equal bytes ---


def identities(plan: TransferPlan) -> bool:
    return all(unit.identity for unit in plan.units)


@pytest.mark.parametrize(
    ("model", "grammars"),
    [
        (profile(mla(), indexer(), kda(), tp=2), ("file", "hf3fs")),
        (profile(mla(), indexer(), tp=2, pp=2), ("file", "mooncake")),
        (profile(mha(), gdn(), tp=4), ("file", "file")),
        (profile(mha(), tp=8), ("hf3fs", "mooncake")),
        (profile(mla(), kda(), tp=4, dcp=2, page_size=4), ("file", "file")),
        (profile(mla(), tp=4, pp=2, dcp=2, page_size=4), ("mooncake", "file")),
        (profile(LOGICAL, opaque("swa"), opaque("deepseek_v4_c4"), tp=2), ("file", "mooncake")),
    ],
)
def test_another_name_alone_copies_nothing(model: Profile, grammars: tuple[str, str]) -> None:
    renamed = retargeted(model, model="other/name")
    there = transfer_plan(model, grammars[0], renamed, grammars[1])
    back = transfer_plan(renamed, grammars[1], model, grammars[0])
    for plan in (there, back):
        filled = [
            unit
            for unit in plan.units
            if any(plan.destinations[n].nbytes for n in unit.destinations)
        ]
        assert filled
        assert all(unit.identity for unit in filled)


def test_ranks_that_hold_the_same_head_keep_their_own_copy_where_they_can() -> None:
    model = profile(mha(kv_heads=2), tp=8)
    plan = transfer_plan(model, "mooncake", replace(model, layout="page_first_direct"), "mooncake")
    assert [(unit.sources, unit.destinations) for unit in plan.units] == [
        ((number,), (number,)) for number in range(16)
    ]
    fewer = transfer_plan(model, "file", replace(model, tp=2), "file")
    assert [unit.sources for unit in fewer.units] == [(0,), (4,)]


def test_layer_first_and_page_first_direct_are_the_same_bytes() -> None:
    model = profile(mha(), tp=2, layout="layer_first")
    assert identities(
        transfer_plan(model, "file", retargeted(model, layout="page_first_direct"), "file")
    )


def test_k_and_v_of_a_flat_page_are_two_runs() -> None:
    model = profile(mha(), layout="page_first_direct")
    (unit,) = transfer_plan(model, "file", model, "mooncake").units
    assert [(copy.axes, copy.run) for copy in unit.copies] == [((), 768), ((), 768)]


def test_objects_of_an_older_release_get_their_new_names() -> None:
    old = profile(mla(), tp=2, tag="t", sglang="0.5.7")
    plan = transfer_plan(old, "mooncake", retargeted(old, sglang="0.5.23"), "mooncake")
    assert identities(plan)
    assert plan.sources[0].coordinate.names == Names(tag="t")
    assert plan.destinations[0].coordinate.names == Names("a-b", "t")
    assert not plan.sources[0].coordinate.shard.ranked


def test_a_logical_anchor_is_made_of_nothing() -> None:
    model = profile(LOGICAL, opaque("deepseek_v4_c4"), pp=2)
    plan = transfer_plan(model, "mooncake", model, "file")
    anchors = [unit for unit in plan.units if not unit.sources]
    assert [plan.destinations[unit.destinations[0]].nbytes for unit in anchors] == [0, 0]
    assert not any(unit.copies or unit.identity for unit in anchors)
    assert read_sources(transfer_plan(model, "file", model, "mooncake")).isdisjoint({0, 1})


# --- real models ---

GLM_DSA = profile(
    mla(layers=61, kv_lora_rank=512, qk_rope_head_dim=64, row="fp8_scaled"),
    indexer(layers=61),
    page_size=64,
    tp=8,
)


@pytest.mark.parametrize(
    ("model", "source", "change", "destination", "sizes"),
    [
        # Qwen3-32B from files at TP 4 to Mooncake at TP 8: half of the heads, K and V apart.
        (
            profile(mha(layers=64, kv_heads=8, head_dim=128), page_size=64, tp=4),
            "file",
            {"tp": 8},
            "mooncake",
            ({4_194_304}, {1_048_576}),
        ),
        # DeepSeek-V3.2 over two stages of 30 and 31 layers.
        (
            GLM_DSA,
            "mooncake",
            {"pp": 2, "layout": "page_first_direct"},
            "file",
            ({2_561_024, 515_328}, {1_259_520, 1_301_504, 253_440, 261_888}),
        ),
        # Qwen3-Next-80B-A3B's states from TP 1 to TP 4.
        (
            profile(
                mha(layers=(3,), kv_heads=2, head_dim=256),
                Pool(
                    name="mamba",
                    kind="mamba",
                    layers=36,
                    temporal=StateTensor(shape=(32, 128, 128), dtype="float32"),
                    conv=(
                        StateTensor(shape=(8192, 3), dtype="bfloat16", groups=(2048, 2048, 4096)),
                    ),
                ),
                page_size=64,
            ),
            "mooncake",
            {"tp": 4},
            "mooncake",
            ({65_536, 75_497_472, 1_769_472}, {32_768, 18_874_368, 442_368}),
        ),
    ],
)
def test_objects_of_real_models(
    model: Profile,
    source: str,
    change: dict[str, Any],
    destination: str,
    sizes: tuple[set[int], set[int]],
) -> None:
    plan = transfer_plan(model, source, retargeted(model, **change), destination)
    assert {each.nbytes for each in plan.sources} == sizes[0]
    assert {each.nbytes for each in plan.destinations} == sizes[1]


@pytest.mark.slow
def test_a_plan_of_many_ranks_is_made_at_once() -> None:
    model = profile(mha(layers=128, kv_heads=128), tp=128, pp=8)
    plan = transfer_plan(model, "mooncake", retargeted(model, tp=64, pp=16), "mooncake")
    assert len(plan.units) == 8 * 64 * 2


# --- context parallelism ---


def test_padding_layers_are_zero_and_layers_find_their_rank() -> None:
    model = profile(mla(layers=5), indexer(layers=5), cp=2, cp_layer_split=True)
    plan = transfer_plan(model, "file", retargeted(model, layout="page_first_direct"), "file")
    contents = [page_content(model, seed)["kv"] for seed in range(PAGES)]  # [layer, token, bytes]
    kv = [n for n, each in enumerate(plan.sources) if each.coordinate.pool == "kv"]
    sources = [np.full((PAGES, each.nbytes), 7, np.uint8) for each in plan.sources]
    for page, rows in enumerate(contents):
        padded = np.concatenate([rows[3:], np.full_like(rows[:1], 9)])
        for number, held in zip(kv, (rows[:3], padded), strict=True):
            sources[number][page] = held.swapaxes(0, 1).reshape(-1)
    made = transferred(plan, sources)
    for page, rows in enumerate(contents):
        assert np.array_equal(made[kv[0]][page], rows[:3].reshape(-1))
        zeros = np.zeros_like(rows[:1])
        assert np.array_equal(made[kv[1]][page], np.concatenate([rows[3:], zeros]).reshape(-1))
    assert [unit.padded for unit in plan.units if not unit.identity] == [(), (0,)]


def test_pages_under_dcp_are_ordered_anew_within_their_rank() -> None:
    model = profile(mla(), tp=4, dcp=2, page_size=4)
    plan = transfer_plan(model, "file", retargeted(model, layout="page_first_direct"), "mooncake")
    assert [(unit.sources, unit.destinations) for unit in plan.units] == [
        ((0,), (0,)),
        ((1,), (1,)),
    ]
    assert [axis.length for axis in plan.units[0].copies[0].axes] == [
        4,
        2,
    ]  # two of the four tokens


def test_states_and_drafts_under_dcp_find_their_rank() -> None:
    model = profile(mla(), kda(), mla("draft"), tp=4, dcp=2, page_size=4)
    for one, two in (("file", "mooncake"), ("mooncake", "file")):
        plan = transfer_plan(model, one, model, two)
        check_form(plan)
        for unit in plan.units:
            held = [plan.sources[number].coordinate for number in unit.sources]
            made = [plan.destinations[number].coordinate for number in unit.destinations]
            assert {each.shard.tp_rank for each in held} == {each.shard.tp_rank for each in made}
            if held[0].pool == "kv":
                assert [each.shard.dcp_rank for each in held] == [
                    each.shard.dcp_rank for each in made
                ]


def test_bytes_that_ranks_share_do_not_care_for_their_number() -> None:
    v4 = profile(LOGICAL, opaque("swa"), opaque("deepseek_v4_c4"), tp=2)
    assert identities(transfer_plan(v4, "file", retargeted(v4, tp=8), "file"))
    moved = retargeted(v4, layout="page_first_direct")
    assert identities(transfer_plan(v4, "file", moved, "mooncake"))


def test_layers_that_a_later_release_leaves_out_are_left_behind() -> None:
    old = profile(mla(), indexer(), sglang="0.5.18")
    new = replace(old, sglang="0.5.23", pools=(old.pools[0], indexer(layers=(0, 3))))
    kv, unit = transfer_plan(old, "file", new, "file").units
    assert kv.identity
    assert [copy.source_offset for copy in unit.copies] == [0, 3 * 3 * 132]
    with pytest.raises(ProfileError, match=r"pools\[indexer\]: the source does not store layer 1"):
        transfer_plan(new, "file", old, "file")


# --- the destination's profile ---


def test_a_profile_is_retargeted_where_it_is_told() -> None:
    model = profile(mha(), gdn(), tp=2, linear_tp=2, pp=2, pp_partition=(3, 1), tag="t")
    assert retargeted(model) == model
    assert retargeted(model, tp=4).linear_tp == 4
    assert retargeted(replace(model, linear_tp=0), tp=4).linear_tp == 0
    assert retargeted(model, pp=2).pp_partition == (3, 1)
    assert retargeted(model, pp=4).pp_partition == ()
    assert retargeted(model, pp=2, pp_partition=(2, 2)).pp_partition == (2, 2)
    assert retargeted(model, tag="").tag == ""
    assert not validate_profile(retargeted(model, tp=4, pp=1, layout="page_first_direct"))


def test_grammars_are_those_of_expected_objects() -> None:
    with pytest.raises(UsageError, match="Key scheme: 'redis' is not one of "):
        transfer_plan(MHA_TWO, "redis", MHA_TWO, "file")
    plan = transfer_plan(MHA_TWO, "file", MHA_TWO, "mooncake")
    assert plan.sources == object_specs(MHA_TWO, "file")
    assert plan.destinations == object_specs(MHA_TWO, "mooncake")
