"""Configs and flags that give no profile: the field or flag, its value, and what to do."""

from __future__ import annotations

from typing import Any

import pytest

from hicachectl.formats.errors import HicacheError, ProfileError
from hicachectl.formats.models.config import profile_from_config
from hicachectl.formats.models.flags import DeploymentFlags, refused_flags
from hicachectl.formats.models.launch import config_arguments, launched_deployment, parse_arguments
from tests.model_records import MODELS

LLAMA, JET, GEMMA = "LlamaForCausalLM", "JetNemotronForCausalLM", "Gemma4ForCausalLM"
CHECK = "; check the config, or write a profile file"
BLOCK = {"jet": {"num_heads": 8, "head_dim": 64, "conv_size": 4, "expand_v": 2.0}}


def refusal(name: str, fields: dict[str, Any], **flags: Any) -> str:
    """Return what is said of a model's config with other fields, after the config's name."""
    stated = {"model": "m", "page_size": 64, **MODELS[name].get("flags", {}), **flags}
    config = {**MODELS[name]["config"], **fields}
    with pytest.raises(ProfileError) as refused:
        profile_from_config(config, DeploymentFlags(**stated), source="config.json")
    return str(refused.value).removeprefix(f"config.json ({name}): ")


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        (LLAMA, {"num_hidden_layers": "32"}, "num_hidden_layers: expected a whole number of at "
         "least 1, found '32'"),
        (LLAMA, {"num_hidden_layers": 10_001}, "num_hidden_layers: must be at most 10000, but is "
         "10001"),
        (LLAMA, {"num_hidden_layers": None}, "num_hidden_layers: missing"),
        (LLAMA, {"dtype": 16}, "dtype: expected a name, found 16"),
        ("LongcatFlashForCausalLM", {"index_topk": 2048}, "index_topk: hicachectl does not know "
         "this model's index keys"),
        ("NanbeigeForCausalLM", {"num_loops": 100}, "num_loops: must be at most 10000, but is "
         "220000"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "M" * 20}, "num_hidden_layers: "
         "expected both attention and Mamba layers"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "M*"}, "hybrid_override_pattern: "
         "expected 20 letters, found 'M*'"),
        (JET, {"layer_types": ["jet"] * 28}, "layer_types: expected both attn and jet layers"),
        (JET, {"efficient_attention_config": 1}, "efficient_attention_config: expected a table, "
         "found 1"),
    ],
)  # fmt: skip
def test_a_field_is_named_with_its_value_and_what_to_do(
    name: str, fields: dict[str, Any], said: str
) -> None:
    assert refusal(name, fields) == said + CHECK


@pytest.mark.parametrize(
    ("block", "tp", "said"),
    [
        ({"expand_v": 65}, 1, "expand_v: expected a number up to 64, found 65"),
        ({"expand_v": "2"}, 1, "expand_v: expected a number up to 64, found '2'"),
        ({}, 16, "num_heads: 8 heads cannot be divided by TP 16"),
    ],
)
def test_a_field_of_a_section_is_named_with_the_section(
    block: dict[str, Any], tp: int, said: str
) -> None:
    jet = {"efficient_attention_config": {"jet": {**BLOCK["jet"], **block}}}
    assert refusal(JET, jet, tp=tp) == (
        f"config.json: efficient_attention_config: jet ({JET}): {said}{CHECK}"
    )


def test_the_last_layer_of_gemma_4_has_full_attention() -> None:
    text = {**MODELS[GEMMA]["config"]["text_config"]}
    kinds = ["sliding_attention"] * text["num_hidden_layers"]
    said = refusal(GEMMA, {"text_config": {**text, "layer_types": kinds}})
    assert said == (
        f"layer_types: the last layer must have full_attention, but has sliding_attention{CHECK}"
    )


@pytest.mark.parametrize("value", [None, [], LLAMA, [7]])
def test_architectures_of_another_form_are_shown(value: Any) -> None:
    said = refusal(LLAMA, {"architectures": value})
    assert said == (
        f"config.json: architectures: expected a list of names, found {value!r}; "
        "give a model's config.json"
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"page_size": 0}, "page_size: must be at least 1, but is 0; check --page-size"),
        ({"tp": 0}, "tp: must be at least 1, but is 0; check --tp"),
        ({"dcp": -1}, "dcp: must be at least 1, but is -1; check --dcp"),
        ({"pp": 4097}, "pp: must be at most 4096, but is 4097"),
        ({"pp": 33}, "pp: 32 layers cannot fill 33 stages; give a smaller pp"),
        ({"tp": 8, "dp": 3, "enable_dp_attention": True}, "tp: 8 is not a multiple of attention "
         "dp 3 x cp 1; check --tp, --dp and --cp"),
        ({"pp": 2, "pp_partition": (20, 13)}, "pp_partition: [20, 13] sums to 33, but the model "
         "has 32 layers; check --pp-partition"),
        ({"tp": 4, "tp_lcm_size": 6}, "tp_lcm_size: 6 is not a multiple of tp 4; check "
         "--tp-lcm-size"),
        ({"dcp": 2}, "dcp: SGLang's HiCache supports dcp only for MLA models without an indexer "
         "pool; check --dcp, or write a profile file"),
        ({"speculative_algorithm": "EAGLE3", "pp": 2}, "pp: SGLang supports pipeline parallelism "
         "only with EAGLE (non-multi-layer) speculative decoding; check --pp and "
         "--speculative-algorithm"),
        ({"speculative_algorithm": "NGRAM", "pp": 2}, "pp: SGLang supports pipeline parallelism "
         "only with EAGLE (non-multi-layer) speculative decoding; check --pp and "
         "--speculative-algorithm"),
        ({"speculative_algorithm": "NGRAM", "dcp": 2}, "speculative_algorithm: SGLang's HiCache "
         "supports --dcp-size above 1 only with DSPARK; check --speculative-algorithm"),
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype: 'int3' objects have a form that hicachectl "
         "cannot describe; supported are auto, bf16, bfloat16, fp8_e4m3, fp8_e5m2; write a "
         "profile file"),
    ],
)  # fmt: skip
def test_a_flag_is_named_with_its_value_and_what_to_do(flags: dict[str, Any], said: str) -> None:
    assert refusal(LLAMA, {}, **flags) == said


def test_flags_of_a_live_server_are_not_refused() -> None:
    """It started with them, as servers of other releases may."""
    flags = DeploymentFlags(
        model="m", page_size=64, speculative_algorithm="NGRAM", pp=2, resolved=True
    )
    profile = profile_from_config(MODELS[LLAMA]["config"], flags)
    assert profile.pp == 2


@pytest.mark.parametrize(
    "values",
    [
        {"enable_lmcache": True},
        {"dcp_size": 2, "hicache_host_memory_mode": "buffer_only"},
        {"disaggregation_mode": "decode", "hicache_host_memory_mode": "buffer_only"},
        {"enable_unified_memory": True, "speculative_algorithm": "EAGLE3"},
        {"pp_size": 2, "speculative_algorithm": "DSPARK"},
        {
            "disaggregation_decode_host_receive_threshold": 0.5,
            "hicache_storage_backend": "mooncake",
        },
    ],
)
def test_combinations_are_refused_only_together(values: dict[str, Any]) -> None:
    assert refused_flags(values)
    for name in values if len(values) > 1 else ():
        assert not refused_flags({one: values[one] for one in values if one != name})
    if values.get("pp_size"):
        assert not refused_flags({**values, "disaggregation_mode": "prefill"})


def test_a_draft_with_states_is_refused() -> None:
    draft = {**MODELS["FalconH1ForCausalLM"]["config"]}
    said = refusal(LLAMA, {}, speculative_algorithm="STANDALONE", draft_model_config=draft)
    assert said == (
        "draft config (FalconH1ForCausalLM): architectures: drafts with recurrent states are not "
        f"supported{CHECK}"
    )


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (
            lambda: launched_deployment({"disable_radix_cache": True}, {}, unknown={}),
            "launch command: --disable-radix-cache: SGLang refuses it with "
            "--enable-hierarchical-cache; leave it out, or give another server's command",
        ),
        (
            lambda: config_arguments({"lora-paths": ["x"]}, "f.yaml"),
            "f.yaml: lora-paths: SGLang does not take this flag from a config file; give it in the "
            "command",
        ),
        (
            lambda: parse_arguments(["extra"]),
            "'extra' belongs to no flag; leave it out",
        ),
        (
            lambda: launched_deployment({"tp_size": "2"}, {}, unknown={}),
            "launch command: model_path: missing; give the whole command",
        ),
    ],
)
def test_a_flag_of_a_launch_command_is_named_with_what_to_do(read: Any, said: str) -> None:
    with pytest.raises(HicacheError) as refused:
        read()
    assert str(refused.value) == said
