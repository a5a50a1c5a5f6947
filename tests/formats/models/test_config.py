from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.formats.errors import ProfileError
from hicachectl.formats.models.config import profile_from_config
from hicachectl.formats.models.flags import DeploymentFlags, normalised_layout
from hicachectl.formats.profile import Profile, dump_profile, parse_profile
from hicachectl.formats.spec import object_specs
from tests.model_records import MODELS

if TYPE_CHECKING:
    from hicachectl.formats.kinds.pool import Pool

CONFIGS = Path(__file__).parents[2] / "data" / "configs"
PAGE = 64
TARGETS = sorted(path.stem for path in CONFIGS.glob("*.json") if "eagle" not in path.stem)


def config(name: str, **changes: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    for field, value in changes.items():
        if value is ...:
            del document[field]
        else:
            document[field] = value
    return document


def derive(name: str, *, changes: dict[str, Any] | None = None, **flags: Any) -> Profile:
    flags = {"model": name, "page_size": PAGE, **flags}
    return profile_from_config(config(name, **(changes or {})), DeploymentFlags(**flags))


def pool(profile: Profile, name: str) -> Pool:
    found = profile.pool(name)
    assert found is not None
    return found


@pytest.mark.parametrize("name", TARGETS)
def test_each_config_gives_a_profile_that_survives_a_profile_file(name: str) -> None:
    profile = derive(name, kv_cache_dtype="bfloat16")
    assert parse_profile(dump_profile(profile)) == profile


# Layers


@pytest.mark.parametrize(
    ("name", "changes", "flags", "layers"),
    [
        ("glm-5.2", {"indexer_types": ...}, {}, (0, 1, *range(2, 78, 4))),
        (
            "glm-5.2",
            {"indexer_types": ..., "index_skip_topk_offset": ...},
            {},
            (0, *range(1, 78, 4)),
        ),
        (
            "deepseek-v3.2",
            {"index_topk_pattern": "FSF", "num_hidden_layers": 5},
            {},
            (0, 2, 3, 4),
        ),
        ("glm-5.2", {}, {"sglang": "0.5.18"}, 78),
    ],
    ids=["schedule", "no offset", "pattern", "old server"],
)
def test_index_keys_are_of_the_layers_that_choose(
    name: str, changes: dict[str, Any], flags: dict[str, str], layers: object
) -> None:
    profile = derive(name, changes=changes, kv_cache_dtype="bf16", **flags)
    assert pool(profile, "indexer").layers == layers


def test_layer_types_stand_in_for_a_missing_interval() -> None:
    document = config("qwen3.5-9b")
    del document["text_config"]["full_attention_interval"]
    profile = profile_from_config(document, DeploymentFlags(model="m", page_size=PAGE))
    assert pool(profile, "kv").layers == tuple(range(3, 32, 4))


def test_gated_delta_net_convolutions_are_sharded_by_q_k_and_v() -> None:
    (conv,) = pool(derive("qwen3-next-80b-a3b"), "mamba").conv
    assert (conv.shape, conv.shard_axis, conv.groups) == ((8192, 3), 0, (2048, 2048, 4096))


def test_kimi_delta_convolutions_have_the_window_first() -> None:
    (conv,) = pool(derive("kimi-linear-48b-a3b"), "mamba").conv
    assert (conv.shape, conv.shard_axis, conv.groups) == ((3, 12288), 1, (4096, 4096, 4096))


# Sliding windows


@pytest.mark.parametrize(("page_size", "pages"), [(1, 127), (16, 8), (64, 2), (127, 1), (128, 1)])
def test_gpt_oss_keeps_a_window_of_127_tokens(page_size: int, pages: int) -> None:
    profile = derive("gpt-oss-20b", page_size=page_size)
    swa = pool(profile, "swa")
    assert (swa.hit_policy, swa.trailing_pages) == ("trailing_pages", pages)


def test_gpt_oss_without_hybrid_memory_is_one_pool() -> None:
    profile = derive("gpt-oss-20b", disable_hybrid_swa_memory=True)
    assert [(p.name, p.layers) for p in profile.pools] == [("kv", 24)]


# Element types


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({"torch_dtype": "float32"}, "float16"),
        ({"torch_dtype": ...}, "float16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": "float32", "model_type": "gemma2"}, "bfloat16"),
        ({"dtype": "bfloat16", "torch_dtype": ...}, "bfloat16"),
    ],
)
def test_auto_is_else_the_type_of_the_model(changes: dict[str, Any], dtype: str) -> None:
    assert pool(derive("llama-3.1-8b", changes=changes), "kv").dtype == dtype


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp8_e4m3", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2")]
)
def test_the_flag_wins_over_the_config(name: str, dtype: str) -> None:
    assert pool(derive("llama-3.1-8b", kv_cache_dtype=name), "kv").dtype == dtype
    assert pool(derive("kimi-k2", kv_cache_dtype=name), "kv").row == "fp8"


@pytest.mark.parametrize(
    ("flags", "row"),
    [
        ({}, "fp8_scaled"),
        ({"dsa_prefill_backend": "flashmla_kv", "dsa_decode_backend": "flashmla_kv"}, "fp8_scaled"),
        ({"dsa_prefill_backend": "trtllm", "dsa_decode_backend": "flashmla_kv"}, "fp8"),
        ({"dsa_prefill_backend": "trtllm", "disaggregation_mode": "decode"}, "fp8_scaled"),
        ({"dsa_prefill_backend": "trtllm", "disaggregation_mode": "prefill"}, "fp8"),
        ({"dsa_prefill_backend": "tilelang", "dsa_decode_backend": "tilelang"}, "fp8"),
        ({"dsa_decode_backend": "aiter"}, "fp8"),
    ],
)
def test_the_dsa_backend_decides_the_row(flags: dict[str, Any], row: str) -> None:
    profile = derive("deepseek-v3.2", kv_cache_dtype="fp8_e4m3", **flags)
    assert pool(profile, "kv").row == row


@pytest.mark.parametrize("name", ["auto", "fp8_e5m2"])
def test_a_dsa_type_that_depends_on_the_gpu_is_asked_for(name: str) -> None:
    with pytest.raises(ProfileError, match="kv_cache_dtype"):
        derive("deepseek-v3.2", kv_cache_dtype=name)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "int3"])
def test_a_type_without_a_known_form_is_refused(name: str) -> None:
    with pytest.raises(ProfileError, match=f"kv_cache_dtype: '{name}'"):
        derive("llama-3.1-8b", kv_cache_dtype=name)


def test_state_types_come_from_flag_then_config_then_default() -> None:
    document = config("qwen3.5-9b")
    document["text_config"]["mamba_ssm_dtype"] = "bfloat16"

    def types(**flags: str) -> tuple[str, str]:
        settings: dict[str, Any] = {"model": "m", "page_size": PAGE, **flags}
        mamba = pool(profile_from_config(document, DeploymentFlags(**settings)), "mamba")
        assert mamba.temporal is not None
        return mamba.temporal.dtype, mamba.conv[0].dtype

    assert types() == ("bfloat16", "bfloat16")
    assert types(mamba_ssm_dtype="float16", mamba_conv_dtype="float32") == ("float16", "float32")
    assert types(mamba_ssm_dtype="int8") == ("bfloat16", "bfloat16")


# Parallelism


@pytest.mark.parametrize(
    ("flags", "tp"),
    [
        ({"tp": 8}, 8),
        ({"tp": 8, "dp": 2}, 8),
        ({"tp": 8, "dp": 2, "enable_dp_attention": True}, 4),
        ({"tp": 8, "cp": 4}, 2),
        ({"tp": 8, "cp": 2, "dp": 2}, 2),
    ],
)
def test_tp_is_that_of_attention(flags: dict[str, Any], tp: int) -> None:
    assert derive("kimi-k2", **flags).tp == tp


@pytest.mark.parametrize("name", ["llama-3.1-8b", "kimi-linear-48b-a3b"])
def test_context_parallelism_whose_keys_a_profile_cannot_state_is_refused(name: str) -> None:
    with pytest.raises(ProfileError, match="cp"):
        derive(name, tp=4, cp=2)


def test_layer_split_is_for_dsa_under_context_parallelism_only() -> None:
    flags: dict[str, Any] = {"enable_dsa_cache_layer_split": True, "kv_cache_dtype": "bf16"}
    assert derive("glm-5.2", tp=8, cp=8, **flags).cp_layer_split
    assert not derive("glm-5.2", tp=8, **flags).cp_layer_split
    assert not derive("kimi-k2", tp=8, cp=8, **flags).cp_layer_split


def test_a_partition_is_kept_where_it_has_an_effect() -> None:
    assert derive("llama-3.1-8b", pp=2, pp_partition=(20, 12)).pp_partition == (20, 12)
    assert derive("llama-3.1-8b", pp=1, pp_partition=(20, 12)).pp_partition == ()
    for partition in [(20, 13), (8, 8, 16)]:
        with pytest.raises(ProfileError, match="pp_partition"):
            derive("llama-3.1-8b", pp=2, pp_partition=partition)


def test_a_page_of_decode_context_parallelism_is_the_logical_one() -> None:
    profile = derive("kimi-k2", tp=8, dcp=4)
    assert (profile.page_size, profile.dcp) == (256, 4)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3.2"])
def test_decode_context_parallelism_is_for_plain_mla(name: str) -> None:
    with pytest.raises(ProfileError, match="dcp"):
        derive(name, tp=8, dcp=2, kv_cache_dtype="bf16")


@pytest.mark.parametrize(
    ("name", "layout", "tp", "split"),
    [
        ("qwen3-32b", "page_head", 2, 8),
        ("qwen3-32b", "page_head", 8, 0),
        ("qwen3-32b", "page_first", 2, 0),
    ],
)
def test_heads_are_split_where_sglang_splits_them(
    name: str, layout: str, tp: int, split: int
) -> None:
    assert derive(name, layout=layout, tp=tp, tp_lcm_size=8).tp_lcm_size == split


# Layout and page size


@pytest.mark.parametrize(
    ("flags", "layout"),
    [
        ({}, "page_first"),
        ({"sglang": "0.5.12"}, "layer_first"),
        ({"layout": "page_first", "io_backend": "direct"}, "page_first_direct"),
        ({"layout": "page_first_direct"}, "page_first_direct"),
        ({"layout": "layer_first", "storage_backend": "file"}, "layer_first"),
        ({"layout": "layer_first", "storage_backend": "mooncake"}, "page_first"),
        (
            {"layout": "layer_first", "storage_backend": "mooncake", "io_backend": "direct"},
            "page_first_direct",
        ),
        ({"layout": "layer_first", "storage_backend": "mooncake", "dcp": 2}, "layer_first"),
        ({"layout": "page_head"}, "page_head"),
    ],
)
def test_layouts_are_normalised_as_sglang_does(flags: dict[str, Any], layout: str) -> None:
    assert normalised_layout(DeploymentFlags(**flags)) == layout


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama-3.1-8b", "page_first_kv_split"),
        ("qwen3-next-80b-a3b", "layer_first"),
        ("mimo-v2-flash", "page_head"),
        ("kimi-k2", "page_head"),
    ],
)
def test_layouts_that_the_model_cannot_have_are_refused(name: str, layout: str) -> None:
    with pytest.raises(ProfileError, match="layout"):
        derive(name, layout=layout)


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_deepseek_v4_has_all_layouts_without_heads(layout: str) -> None:
    """memory_pool_host.py :: DeepSeekV4PagedHostPool, DeepSeekV4StateHostPool, LogicalHostPool."""
    document = MODELS["DeepseekV4ForCausalLM"]["config"]
    flags = DeploymentFlags(model="a", page_size=256, layout=layout)
    found = profile_from_config(document, flags)
    assert found.layout == layout
    usual = profile_from_config(document, replace(flags, layout="page_first"))
    sizes, expected = ([x.nbytes for x in object_specs(y, "file")] for y in (found, usual))
    assert sizes == expected


def test_the_page_size_of_dsa_is_fixed_but_a_server_knows_better() -> None:
    with pytest.raises(ProfileError, match=r"page_size: .*SGLang always sets 64"):
        derive("deepseek-v3.2", page_size=1, kv_cache_dtype="bf16")
    assert derive("deepseek-v3.2", page_size=None, kv_cache_dtype="bf16").page_size == 64
    assert derive("deepseek-v3.2", page_size=1, kv_cache_dtype="bf16", resolved=True).page_size == 1


# Speculation


@pytest.mark.parametrize(
    ("algorithm", "unit"),
    [("", "token"), ("ngram", "token"), ("FROZEN_KV_MTP", "bigram"), ("UNO", "token")],
)
def test_algorithms_without_a_draft_model_change_the_hash_at_most(
    algorithm: str, unit: str
) -> None:
    profile = derive("llama-3.1-8b", speculative_algorithm=algorithm)
    assert (profile.hash_unit, len(profile.pools)) == (unit, 1)
    assert profile.speculative_algorithm == algorithm.upper()


def test_the_nextn_layer_of_glm_47_is_packed() -> None:
    profile = derive("glm-4.7", speculative_algorithm="NEXTN", tp=8)
    assert (profile.speculative_algorithm, profile.hash_unit) == ("EAGLE", "bigram")
    assert pool(profile, "kv").packed_draft_layers == 1


def test_an_eagle3_draft_is_a_pool_of_its_own() -> None:
    profile = derive(
        "kimi-k2",
        speculative_algorithm="EAGLE3",
        draft_model_config=config("kimi-k2-eagle3"),
    )
    assert pool(profile, "draft").kind == "mha"
    assert (pool(profile, "kv").packed_draft_layers, profile.hash_unit) == (0, "bigram")


def test_an_eagle_draft_without_nextn_layers_is_a_pool_of_its_own() -> None:
    profile = derive(
        "glm-4.7",
        speculative_algorithm="EAGLE",
        draft_model_config=config("llama-3.1-8b-eagle"),
    )
    assert (pool(profile, "draft").dtype, pool(profile, "kv").packed_draft_layers) == ("float16", 0)


def test_a_standalone_draft_hashes_plain_tokens_and_has_its_own_type() -> None:
    profile = derive(
        "qwen3-32b",
        speculative_algorithm="STANDALONE",
        draft_model_config=config("llama-3.1-8b"),
        speculative_draft_kv_cache_dtype="fp8_e4m3",
    )
    assert (profile.hash_unit, pool(profile, "draft").dtype) == ("token", "float8_e4m3fn")
    assert pool(profile, "kv").dtype == "bfloat16"


@pytest.mark.parametrize(
    ("name", "flags", "field"),
    [
        ("llama-3.1-8b", {"speculative_algorithm": "EAGLE"}, "draft_model_config"),
        ("glm-4.7", {"speculative_algorithm": "EAGLE3"}, "draft_model_config"),
        ("llama-3.1-8b", {"speculative_algorithm": "MAGIC"}, "speculative_algorithm: 'MAGIC'"),
        (
            "llama-3.1-8b",
            {
                "speculative_algorithm": "EAGLE",
                "draft_model_config": config("glm-4.7", head_dim=64),
            },
            "draft config.*head_dim: 64 differs from the target's 128",
        ),
        (
            "qwen3-32b",
            {"speculative_algorithm": "STANDALONE", "draft_model_config": config("gpt-oss-20b")},
            "swa",
        ),
        (
            "gpt-oss-20b",
            {"speculative_algorithm": "EAGLE", "draft_model_config": config("glm-4.7")},
            "speculative_algorithm",
        ),
    ],
)
def test_drafts_that_cannot_be_derived_are_refused(
    name: str, flags: dict[str, Any], field: str
) -> None:
    with pytest.raises(ProfileError, match=field):
        derive(name, **flags)


# Configs at fault


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("llama-3.1-8b", "num_hidden_layers", True),
        ("llama-3.1-8b", "hidden_size", ...),
        ("llama-3.1-8b", "num_key_value_heads", -8),
        ("llama-3.1-8b", "torch_dtype", "int8"),
        ("qwen3-32b", "head_dim", ...),
        ("qwen3-32b", "num_key_value_heads", ...),
        ("kimi-k2", "kv_lora_rank", ...),
        ("glm-5.2", "indexer_types", ["full"]),
        ("glm-5.2", "index_head_dim", ...),
        ("qwen3-next-80b-a3b", "full_attention_interval", ...),
        ("qwen3-next-80b-a3b", "linear_num_key_heads", ...),
        ("kimi-linear-48b-a3b", "linear_attn_config", ...),
        ("gpt-oss-20b", "layer_types", ...),
        ("gpt-oss-20b", "sliding_window", ...),
        ("mimo-v2-flash", "hybrid_layer_pattern", [0, 1]),
        ("mimo-v2-flash", "swa_num_key_value_heads", ...),
    ],
)
def test_a_field_at_fault_is_named_with_its_config(name: str, field: str, value: Any) -> None:
    document = config(name, **{field: value})
    flags = DeploymentFlags(model="m", page_size=PAGE, kv_cache_dtype="bf16")
    if field == "torch_dtype":
        flags = DeploymentFlags(model="m", page_size=PAGE)
    short = field.removeprefix("torch_")
    with pytest.raises(ProfileError, match=rf"^prod\.json.*{short}"):
        profile_from_config(document, flags, source="prod.json")


def test_kv_heads_that_are_null_are_as_many_as_attention_heads() -> None:
    profile = derive("llama-3.1-8b", changes={"num_key_value_heads": None})
    assert pool(profile, "kv").kv_heads == 32


def test_a_draft_architecture_is_no_target() -> None:
    with pytest.raises(ProfileError, match="architectures"):
        derive("kimi-k2-eagle3")


def test_the_served_name_falls_back_to_the_config() -> None:
    changes = {"_name_or_path": "meta-llama/Llama-3.1-8B"}
    assert derive("llama-3.1-8b", changes=changes, model=None).model == "meta-llama/Llama-3.1-8B"
    with pytest.raises(ProfileError, match="model"):
        derive("llama-3.1-8b", model=None)


# Mamba2, and layers without KV


def mamba2(name: str, **changes: Any) -> dict[str, Any]:
    return {**MODELS[name]["config"], **changes}


def test_one_group_of_mamba2_is_whole_at_every_tp() -> None:
    """The profile's pool is the same at TP 1 and 4, so that pages can move between them."""
    document = mamba2("FalconH1ForCausalLM", mamba_n_groups=1)
    flags = DeploymentFlags(model="m", page_size=PAGE)
    one, four = (
        pool(profile_from_config(document, replace(flags, tp=tp)), "mamba") for tp in (1, 4)
    )
    (conv,) = one.conv
    assert (conv.shape, conv.groups, conv.whole) == ((1536, 3), (1024, 256, 256), (1, 2))
    assert four == one


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mamba_n_groups": 2}, "mamba_n_groups: .*'If tensor parallel world size does not divide"),
        (
            {"mamba_n_groups": 1, "quantization_config": {"quant_method": "fp8"}},
            "mamba_n_groups: .*'Tensor parallel currently supported for quantized models only",
        ),
    ],
)
def test_mamba2_groups_that_sglang_does_not_divide_are_refused_in_its_words(
    changes: dict[str, Any], words: str
) -> None:
    """MambaMixer2 asserts it. One rank alone is no problem."""
    document = mamba2("FalconH1ForCausalLM", **changes)
    flags = DeploymentFlags(model="m", page_size=PAGE, tp=4)
    with pytest.raises(ProfileError, match=words):
        profile_from_config(document, flags)
    assert profile_from_config(document, replace(flags, tp=1)).pool("mamba")


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("FalconH1ForCausalLM", "mamba_d_ssm", 1000),
        ("NemotronHForCausalLM", "num_hidden_layers", 19),
        ("BailingMoeV3ForCausalLM", "use_mla_nope", True),
    ],
)
def test_contradictions_of_a_hybrid_are_named(name: str, field: str, value: Any) -> None:
    document = mamba2(name, **{field: value})
    named = "hybrid_override_pattern" if field == "num_hidden_layers" else field
    with pytest.raises(ProfileError, match=rf"\({name}\): {named}: "):
        profile_from_config(document, DeploymentFlags(model="m", page_size=PAGE))


def test_a_gemma_4_text_config_alone_is_refused_as_sglang_fails_to_read_it() -> None:
    document = MODELS["Gemma4ForCausalLM"]["config"]["text_config"]
    alone = {**document, "architectures": ["Gemma4ForCausalLM"]}
    with pytest.raises(ProfileError, match="SGLang fails to read gemma4_text outside"):
        profile_from_config(alone, DeploymentFlags(model="m", page_size=PAGE))


def test_the_layers_of_nemotron_h_are_read_from_each_form() -> None:
    """layers_block_type comes before hybrid_override_pattern, as in NemotronHConfig."""
    document = dict(MODELS["NemotronHForCausalLM"]["config"])
    flags = DeploymentFlags(model="m", page_size=PAGE)
    kinds = {"M": "mamba", "*": "attention", "-": "mlp"}
    named = [kinds[letter] for letter in document["hybrid_override_pattern"]]
    profile = profile_from_config(document, flags)
    document |= {"hybrid_override_pattern": "*M" * 10, "layers_block_type": named}
    assert profile_from_config(document, flags) == profile


def test_the_head_dim_of_nemotron_h_is_128_unless_stated() -> None:
    """attention_head_dim of the first checkpoints is not read (NemotronHConfig.__init__)."""
    document = dict(MODELS["NemotronHForCausalLM"]["config"])
    flags = DeploymentFlags(model="m", page_size=PAGE)

    def head_dim(**changes: int) -> int:
        return pool(profile_from_config(document | changes, flags), "kv").head_dim

    assert head_dim(head_dim=256, attention_head_dim=64) == 256
    del document["head_dim"]
    assert (head_dim(), head_dim(attention_head_dim=128)) == (128, 128)
    with pytest.raises(ProfileError, match=r"attention_head_dim: is 64, but .* SGLang takes 128"):
        head_dim(attention_head_dim=64)


def test_gemma_4_shares_k_and_v_heads_only_where_it_says_so() -> None:
    document = json.loads(json.dumps(MODELS["Gemma4ForConditionalGeneration"]["config"]))
    flags = DeploymentFlags(model="m", page_size=PAGE)
    heads = []
    for shared in (True, False):
        document["text_config"]["attention_k_eq_v"] = shared
        kv = pool(profile_from_config(document, flags), "kv")
        heads.append((kv.kv_heads, kv.head_dim))
    assert heads == [(2, 512), (4, 512)]


def test_a_page_size_that_sglang_refuses_is_refused() -> None:
    with pytest.raises(ProfileError, match=r"page_size: .*only with --page-size 1"):
        profile_from_config(
            MODELS["Lfm2ForCausalLM"]["config"], DeploymentFlags(model="m", page_size=PAGE)
        )


def test_the_dtype_of_the_language_model_counts() -> None:
    """Source: _get_and_verify_dtype reads the text config first."""
    model = MODELS["Gemma3ForConditionalGeneration"]
    config = {**model["config"], "dtype": "bfloat16"}
    config["text_config"] = {**config["text_config"], "dtype": "float16"}
    profile = profile_from_config(config, DeploymentFlags(model="m", page_size=64))
    assert profile.pools[0].dtype == "float16"
