import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hicachectl.formats.errors import ProfileError
from hicachectl.formats.kinds.mla import MLA_ROWS
from hicachectl.formats.kinds.pool import Pool, StateTensor
from hicachectl.formats.layouts import DTYPE_BYTES, LAYOUTS
from hicachectl.formats.profile import (
    HASH_UNITS,
    Profile,
    dump_profile,
    parse_profile,
    profile_from_mapping,
    profile_to_mapping,
    validate_profile,
)

KV = Pool(name="kv", kind="mha", dtype="bfloat16", layers=12, kv_heads=2, head_dim=256)
MLA = Pool(name="kv", kind="mla", layers=61, kv_lora_rank=512, qk_rope_head_dim=64, row="bf16")
MAMBA = Pool(
    name="mamba",
    kind="mamba",
    layers=(0, 1, 2),
    temporal=StateTensor(shape=(32, 128, 128), dtype="float32"),
    conv=(StateTensor(shape=(8192, 3), dtype="bfloat16", groups=(2048, 2048, 4096)),),
)
PROFILE = Profile(model="Qwen/Qwen3-Next-80B-A3B", page_size=64, tp=2, pools=(KV, MAMBA))

TOML = """
model = "Qwen/Qwen3-Next-80B-A3B"
page_size = 64
tp = 2

[[pools]]
name = "kv"
kind = "mha"
dtype = "bfloat16"
layers = 12
kv_heads = 2
head_dim = 256

[[pools]]
name = "mamba"
kind = "mamba"
layers = [0, 1, 2]
temporal = { shape = [32, 128, 128], dtype = "float32", shard_axis = 0 }
conv = [{ shape = [8192, 3], dtype = "bfloat16", groups = [2048, 2048, 4096] }]
"""


def mapping(**changes: Any) -> dict[str, Any]:
    return {**profile_to_mapping(PROFILE), **changes}


def kv_with(**changes: Any) -> dict[str, Any]:
    values = {**profile_to_mapping(PROFILE)["pools"][0], **changes}
    return mapping(pools=[values])


def refusal(document: dict[str, Any]) -> str | None:
    try:
        profile_from_mapping(document)
    except ProfileError as error:
        return str(error)
    return None


# --- reading and writing ---


def test_a_profile_reads_from_toml() -> None:
    assert parse_profile(TOML) == PROFILE


def test_a_profile_reads_from_json() -> None:
    assert parse_profile(json.dumps(profile_to_mapping(PROFILE))) == PROFILE


def test_fields_at_their_default_are_left_out() -> None:
    assert set(mapping()) == {"model", "sglang", "page_size", "layout", "tp", "pools"}
    assert set(mapping()["pools"][1]) == {"name", "kind", "layers", "temporal", "conv"}


def test_a_hit_policy_of_ones_own_is_kept() -> None:
    kv = replace(KV, hit_policy="trailing_pages")
    profile = replace(PROFILE, pools=(kv,))
    assert profile_from_mapping(profile_to_mapping(profile)) == profile


texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
counts = st.integers(1, 10_000)
ranks = st.integers(1, 256)
layers = st.one_of(counts, st.sets(st.integers(0, 99), min_size=1).map(sorted).map(tuple))
shapes = st.lists(counts, min_size=1, max_size=3).map(tuple)
states = st.builds(StateTensor, shape=shapes, dtype=st.sampled_from(sorted(DTYPE_BYTES)))
policies = st.sampled_from(["", "all_pages", "trailing_pages"])
kv_pools = st.one_of(
    st.builds(
        Pool,
        name=st.just("kv"),
        kind=st.just("mha"),
        dtype=st.sampled_from(sorted(DTYPE_BYTES)),
        layers=layers,
        packed_draft_layers=st.integers(0, 3),
        kv_heads=counts,
        head_dim=counts,
        v_head_dim=st.integers(0, 300),
        replicated=st.booleans(),
    ),
    st.builds(
        Pool,
        name=st.just("kv"),
        kind=st.just("mla"),
        layers=layers,
        kv_lora_rank=counts,
        qk_rope_head_dim=counts,
        row=st.sampled_from(MLA_ROWS),
    ),
    st.just(Pool(name="kv", kind="logical")),
)
side_pools = st.one_of(
    st.builds(
        Pool,
        name=texts.filter(lambda name: name != "kv"),
        kind=st.just("mamba"),
        layers=layers,
        temporal=states,
        conv=st.lists(states, max_size=2).map(tuple),
        hit_policy=policies,
        trailing_pages=counts,
    ),
    st.builds(
        Pool,
        name=texts.filter(lambda name: name != "kv"),
        kind=st.just("opaque"),
        nbytes=counts,
        hit_policy=policies,
    ),
)
profiles = st.builds(
    Profile,
    model=texts,
    sglang=texts,
    page_size=counts,
    layout=st.sampled_from(LAYOUTS),
    tp=ranks,
    linear_tp=st.integers(0, 9),
    cp=ranks,
    cp_layer_split=st.booleans(),
    tag=texts,
    hash_unit=st.sampled_from(HASH_UNITS),
    speculative_algorithm=st.sampled_from(["", "EAGLE"]),
    pools=st.tuples(kv_pools, side_pools),
)


@pytest.mark.slow
@given(profiles)
def test_toml_gives_the_profile_back(profile: Profile) -> None:
    assert parse_profile(dump_profile(profile)) == profile


@pytest.mark.slow
@given(profiles)
def test_json_gives_the_profile_back(profile: Profile) -> None:
    assert parse_profile(json.dumps(profile_to_mapping(profile))) == profile


@given(st.text())
def test_any_other_text_is_a_profile_error(text: str) -> None:
    with pytest.raises(ProfileError):
        parse_profile(text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@pytest.mark.slow
@given(st.sampled_from(["model", "page_size", "pp_partition", "pools", "cp_layer_split"]),
       json_values)  # fmt: skip
def test_any_value_is_taken_or_named_in_the_error(name: str, value: Any) -> None:
    assert name in (refusal(mapping(**{name: value})) or name)


@pytest.mark.slow
@given(st.sampled_from(["layers", "kind", "temporal", "conv", "replicated", "hit_policy"]),
       json_values)  # fmt: skip
def test_any_value_of_a_pool_is_taken_or_named_in_the_error(name: str, value: Any) -> None:
    assert name in (refusal(kv_with(**{name: value})) or name)


# --- errors name the field ---


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (mapping(modle="x"), "p.toml: unknown field 'modle'"),
        ({"pools": []}, "p.toml: field 'model' is missing"),
        (mapping(model=3), "p.toml: model: expected str, found 3"),
        (mapping(tp="2"), "p.toml: tp: expected int, found '2'"),
        (mapping(tp=True), "p.toml: tp: expected int, found True"),
        (mapping(page_size=1.5), "p.toml: page_size: expected int"),
        (mapping(cp_layer_split=1), "p.toml: cp_layer_split: expected bool"),
        (mapping(pp_partition=2), "p.toml: pp_partition: expected"),
        (mapping(pp_partition=[1, "2"]), r"p.toml: pp_partition\[1\]: expected int, found '2'"),
        (mapping(pools={}), "p.toml: pools: expected list, found {}"),
        (mapping(pools=["kv"]), r"p.toml: pools\[0\]: expected table, found 'kv'"),
        (mapping(pools=[{"kind": "mha"}]), r"p.toml: pools\[0\]: field 'name' is missing"),
        (kv_with(heads=8), r"p.toml: pools\[0\]: unknown field 'heads'"),
        (kv_with(layers="12"), r"p.toml: pools\[0\].layers: expected int or list"),
        (kv_with(layers=[0, True]), r"p.toml: pools\[0\].layers\[1\]: expected int, found True"),
        (kv_with(temporal=[]), r"p.toml: pools\[0\].temporal: expected table"),
        (kv_with(temporal={"dtype": "x"}), r"p.toml: pools\[0\].temporal: field 'shape'"),
        (kv_with(conv={}), r"p.toml: pools\[0\].conv: expected list"),
        (kv_with(conv=[3]), r"p.toml: pools\[0\].conv\[0\]: expected table"),
    ],
)
def test_a_wrong_field_is_named(document: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        profile_from_mapping(document, source="p.toml")


@pytest.mark.parametrize("text", ["{", "model = ", "{]"])
def test_broken_syntax_is_a_profile_error(text: str) -> None:
    with pytest.raises(ProfileError, match=r"p.toml: not (TOML|JSON): .*; see hicachectl-profile"):
        parse_profile(text, source="p.toml")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"model": ' + "[" * 100_000,
        "tp = " + "9" * 5000,
        '{"tp": ' + "9" * 5000 + "}",
    ],
)
def test_what_no_parser_takes_is_a_profile_error(text: str) -> None:
    with pytest.raises(
        ProfileError, match=r"p.toml: (not TOML|not JSON|has 100000 ).*; see hicachectl-prof"
    ):
        parse_profile(text, source="p.toml")


@pytest.mark.parametrize("field", ["model", "tp", "pp_partition", "layout"])
def test_a_number_that_python_does_not_print_is_named(field: str) -> None:
    lines = [line for line in TOML.splitlines() if not line.startswith(f"{field} =")]
    with pytest.raises(ProfileError, match=field):
        parse_profile("\n".join([f"{field} = 0x{'f' * 5000}", *lines]))


def test_a_byte_order_mark_is_skipped() -> None:
    assert parse_profile("\ufeff" + TOML) == PROFILE
    assert parse_profile("\ufeff" + json.dumps(profile_to_mapping(PROFILE))) == PROFILE


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(ProfileError, match=r"page_size: .*; tp: .*; layout: "):
        profile_from_mapping(mapping(page_size=0, tp=0, layout="x"))


def test_every_field_of_another_type_is_told_at_once() -> None:
    document = kv_with(layers="12", head_dim=2.0, heads=8) | {"tp": "2", "model": None}
    with pytest.raises(ProfileError) as caught:
        profile_from_mapping(document, source="p.toml")
    told = str(caught.value).split("; ")
    assert told[0] == "p.toml: model: expected str, found None"
    assert told[1] == "tp: expected int, found '2'"
    assert told[2].startswith("pools[0]: unknown field 'heads'")
    assert told[4:] == [
        "pools[0].layers: expected int or list, found '12'",
        "pools[0].head_dim: expected int, found 2.0",
    ]


def test_the_problems_of_a_document_are_told_in_one_bounded_message() -> None:
    with pytest.raises(ProfileError) as caught:
        profile_from_mapping(mapping(pp_partition=["x" * 1000] * 100_000))
    assert len(str(caught.value)) < 3000


# --- validation ---


def test_a_sound_profile_has_no_problems() -> None:
    assert validate_profile(PROFILE) == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"page_size": 0}, "page_size: must be at least 1, but is 0"),
        ({"tp": 0}, "tp: must be at least 1, but is 0"),
        ({"pp": 0}, "pp: must be at least 1, but is 0"),
        ({"cp": -1}, "cp: must be at least 1, but is -1"),
        ({"dcp": 0}, "dcp: must be at least 1, but is 0"),
        ({"linear_tp": -1}, "linear_tp: must not be negative, but is -1"),
        ({"tp_lcm_size": -2}, "tp_lcm_size: must not be negative, but is -2"),
        ({"tp_lcm_size": 3}, "tp_lcm_size: 3 is not a multiple of tp 2"),
        ({"model": ""}, "model: missing"),
        ({"layout": "x"}, f"layout: 'x' is not one of {', '.join(LAYOUTS)}"),
        ({"hash_unit": "x"}, "hash_unit: 'x' is not one of token, bigram"),
        ({"pp": 2, "pp_partition": (3,)}, "pp_partition: states 1 stages, but pp is 2"),
        ({"pp": 2, "pp_partition": (3, 0)}, "pp_partition: [3, 0] has a stage without layers"),
        ({"dcp": 2, "page_size": 3}, "page_size: 3 is not a multiple of dcp 2"),
        ({"dcp": 2, "tp": 3}, "tp: 3 is not a multiple of dcp 2"),
        ({"tp": 4097}, "tp: must be at most 4096, but is 4097"),
        ({"pp": 10**9}, "pp: must be at most 4096, but is 1000000000"),
        ({"cp": 4097}, "cp: must be at most 4096, but is 4097"),
        ({"dcp": 4097}, "dcp: must be at most 4096, but is 4097"),
        ({"linear_tp": 4097}, "linear_tp: must be at most 4096, but is 4097"),
        ({"tp_lcm_size": 4098}, "tp_lcm_size: must be at most 4096, but is 4098"),
        (
            {"tp": 512, "pp": 256},
            "tp x pp x cp: 131072 ranks; at most 65536 are allowed",
        ),
        ({"page_size": 2**20 + 1}, "page_size: must be at most 1048576, but is 1048577"),
        (
            {"pp": 2, "pp_partition": (1, 10**9)},
            "pp_partition: must be at most 10000, but is 1000000000",
        ),
        ({"model": "\ud800"}, "model: not valid Unicode (a lone surrogate)"),
        ({"weights": "\ud800"}, "weights: not valid Unicode (a lone surrogate)"),
        ({"draft_weights": "a"}, "draft_weights: needs weights"),
        ({"pools": (KV,) * 33}, "pools: has 33 pools; at most 32 are allowed"),
        ({"pools": ()}, "pools: missing; a profile needs at least the kv pool"),
        ({"pools": (MAMBA,)}, "pools: the first pool must be kv, but is 'mamba'"),
        ({"pools": (KV, MAMBA, MAMBA)}, "pools: 'mamba' occurs twice"),
        (
            {"pools": (replace(MAMBA, name="kv"),)},
            "pools[kv].kind: 'mamba' is not one of mha, mla, logical, opaque",
        ),
        (
            {"pools": (KV, Pool(name="swa", kind="logical"))},
            "pools[swa].kind: only the kv pool can be logical",
        ),
    ],
)
def test_a_problem_of_the_deployment_is_told(changes: dict[str, Any], problem: str) -> None:
    assert validate_profile(replace(PROFILE, **changes)) == [problem]


@pytest.mark.parametrize(
    ("pool", "problem"),
    [
        (replace(KV, kind="x"), "kind: 'x' is not one of"),
        (replace(KV, dtype=""), "dtype: missing"),
        (replace(KV, layers=0), "layers: missing"),
        (replace(KV, layers=()), "layers: missing"),
        (replace(KV, kv_heads=0), "kv_heads: missing"),
        (replace(KV, head_dim=0), "head_dim: missing"),
        (replace(MLA, row=""), "row: missing"),
        (replace(MLA, kv_lora_rank=0), "kv_lora_rank: missing"),
        (Pool(name="kv", kind="opaque"), "nbytes: missing"),
        (
            replace(KV, packed_draft_layers=-1),
            "packed_draft_layers: must not be negative, but is -1",
        ),
        (replace(KV, v_head_dim=-1), "v_head_dim: must not be negative, but is -1"),
        (replace(KV, layers=-1), "layers: must not be negative, but is -1"),
        (replace(KV, layers=(3, 3)), "layers: layer numbers must be at least 0 and strictly"),
        (replace(KV, layers=(-1, 3)), "layers: layer numbers must be at least 0 and strictly"),
        (replace(MLA, row="fp4"), "row: 'fp4' is not one of bf16, fp8, fp8_scaled"),
        (replace(KV, dtype="int8"), "dtype: 'int8' is not one of"),
        (replace(KV, hit_policy="x"), "hit_policy: 'x' is not one of"),
        (replace(KV, trailing_pages=0), "trailing_pages: must be at least 1, but is 0"),
        (replace(KV, layers=10_001), "layers: must be at most 10000, but is 10001"),
        (replace(KV, layers=(3, 10**12)), "layers: must be at most 10000, but is 1000000000000"),
        (
            replace(KV, packed_draft_layers=10**9),
            "packed_draft_layers: must be at most 10000, but is 1000000000",
        ),
        (
            replace(KV, head_dim=10**40),
            "head_dim: must be at most 1099511627776, but is 10000000000000000000000",
        ),
        (
            replace(KV, head_dim=2**40, kv_heads=2**12),
            "head_dim: too large; an object must be smaller than 2^62 bytes",
        ),
        (
            replace(MLA, kv_lora_rank=2**40, qk_rope_head_dim=2**40, layers=10_000),
            "kv_lora_rank: too large; an object must be smaller than 2^62 bytes",
        ),
        (
            Pool(name="kv", kind="opaque", nbytes=2**62),
            "nbytes: must be at most 4611686018427387903, but is 4611686018427387904",
        ),
    ],
)
def test_a_problem_of_the_kv_pool_is_told(pool: Pool, problem: str) -> None:
    (found,) = validate_profile(replace(PROFILE, pools=(pool,)))
    assert found.startswith(f"pools[kv].{problem}")


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        (
            StateTensor(shape=(), dtype="float32"),
            "shape: every length must be at least 1, but is []",
        ),
        (
            StateTensor(shape=(3, 0), dtype="float32"),
            "shape: every length must be at least 1, but is [3, 0]",
        ),
        (StateTensor(shape=(3,), dtype="float64"), "dtype: 'float64' is not one of"),
        (
            StateTensor(shape=(3,), dtype="float32", shard_axis=1),
            "shard_axis: 1 is not an axis of [3]",
        ),
        (
            StateTensor(shape=(3,), dtype="float32", groups=(1, 1)),
            "groups: sum to 2, but the sharded axis has length 3",
        ),
        (
            StateTensor(shape=(3,), dtype="float32", groups=(4, -1)),
            "groups: every length must be at least 1, but is [4, -1]",
        ),
        (
            StateTensor(shape=(3,), dtype="float32", groups=(2, 1), whole=(2,)),
            "whole: [2] must name groups from 0 to 1",
        ),
        (
            StateTensor(shape=(3,), dtype="float32", whole=(-1,)),
            "whole: [-1] must name groups from 0 to 0",
        ),
        (
            StateTensor(shape=(3,), dtype="float32", groups=(2, 1), whole=(1, 1)),
            "whole: [1, 1] must be strictly ascending",
        ),
        (
            StateTensor(shape=(8,), dtype="float32", least=3),
            "least: 3 must be a divisor of the length of the sharded axis, 8",
        ),
        (
            StateTensor(shape=(8,), dtype="float32", least=-4),
            "least: -4 must be a divisor of the length of the sharded axis, 8",
        ),
        (
            StateTensor(shape=(8,), dtype="float32", groups=(4, 4), least=4),
            "least: only for a state without groups and whole",
        ),
        (
            StateTensor(shape=(2**41,), dtype="float32"),
            "shape: must be at most 1099511627776, but is 2199023255552",
        ),
        (
            StateTensor(shape=(2**40, 2**30), dtype="float32"),
            "shape: too large; an object must be smaller",
        ),
        (StateTensor(shape=(1,) * 9, dtype="float32"), "shape: has 9 axes; at most 8 are allowed"),
    ],
)
def test_a_problem_of_a_state_is_told(state: StateTensor, problem: str) -> None:
    for pool, where in (
        (replace(MAMBA, temporal=state), "temporal"),
        (replace(MAMBA, conv=(state,)), "conv[0]"),
    ):
        (found,) = validate_profile(replace(PROFILE, pools=(KV, pool)))
        assert found.startswith(f"pools[mamba].{where}.{problem}")


def test_a_mamba_pool_needs_a_state() -> None:
    pool = replace(MAMBA, temporal=None, conv=())
    (found,) = validate_profile(replace(PROFILE, pools=(KV, pool)))
    assert found == "pools[mamba].temporal, conv: a mamba pool needs at least one state"


# --- derived values ---


@pytest.mark.parametrize(
    ("name", "trailing"),
    [("kv", False), ("indexer", False), ("mamba", True), ("swa", True), ("draft_swa", True)],
)
def test_mamba_and_window_pools_are_trailing(name: str, trailing: bool) -> None:
    assert replace(KV, name=name, hit_policy="").trailing is trailing


def test_keys_spell_the_model_without_slashes() -> None:
    assert Profile(model="/models/x").key_model == "-models-x"


@pytest.mark.parametrize(
    ("pool", "shared"),
    [
        (KV, False),
        (MLA, True),
        (Pool(name="kv", kind="logical"), True),
        (replace(KV, replicated=True), True),
    ],
)
def test_mla_targets_are_rank_replicated(pool: Pool, shared: bool) -> None:
    assert replace(PROFILE, pools=(pool,)).rank_replicated is shared


def test_a_pool_is_found_by_name() -> None:
    assert PROFILE.pool("mamba") == MAMBA
    assert PROFILE.pool("swa") is None


def test_a_count_of_layers_counts_from_zero() -> None:
    assert replace(KV, layers=3).layer_numbers == (0, 1, 2)
    assert replace(KV, layers=(4, 7)).layer_numbers == (4, 7)
