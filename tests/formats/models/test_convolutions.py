"""Models whose states are convolutions only, and what SGLang refuses of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.formats.errors import ProfileError
from hicachectl.formats.models.config import profile_from_config
from hicachectl.formats.models.flags import DeploymentFlags
from tests.model_records import MODELS

if TYPE_CHECKING:
    from hicachectl.formats.profile import Profile

ZAYA = "ZayaForCausalLM"
INKLING = "InklingForConditionalGeneration"


def derive(name: str, changes: dict[str, Any] | None = None, **flags: Any) -> Profile:
    """Derive the profile of a recorded model with other fields of its language model."""
    document = dict(MODELS[name]["config"])
    if "text_config" in document:
        document["text_config"] = {**document["text_config"], **(changes or {})}
    else:
        document |= changes or {}
    page_size = MODELS[name].get("flags", {}).get("page_size", 64)
    flags = {"model": "m", "page_size": page_size, **flags}
    return profile_from_config(document, DeploymentFlags(**flags))


@pytest.mark.parametrize("name", [ZAYA, INKLING])
def test_the_states_are_those_of_the_whole_model_at_every_tp(name: str) -> None:
    """So that pages can move between TP sizes."""
    assert derive(name, tp=2).pools == derive(name).pools


def test_a_window_of_inkling_is_without_the_token_itself() -> None:
    """Source: models/inkling.py :: get_attention_sliding_window_size."""
    pools = {pool.name: pool for pool in derive(INKLING, page_size=1).pools}
    assert pools["swa"].trailing_pages == 511


@pytest.mark.parametrize(
    ("name", "changes", "flags", "words"),
    [
        (ZAYA, {"num_key_value_heads": 4}, {}, "num_query_groups must equal num_key_value_heads"),
        (ZAYA, {}, {"tp": 2, "dp": 2, "enable_dp_attention": True}, "attention DP is not"),
        (ZAYA, {"num_attention_heads": 9}, {}, "num_q_heads must be a multiple of num_k_heads"),
        (ZAYA, {}, {"tp": 16}, "num_attention_heads (8) must be divisible by tp_size (16)"),
        (ZAYA, {"cca_time0": 0}, {}, "cca_time0: expected a whole number of at least 1"),
        (ZAYA, {"zaya_layers": [16, 16]}, {}, "zaya_layers: expected a list with an 'a'"),
        (ZAYA, {"num_query_groups": None}, {}, "num_query_groups: missing"),
        (ZAYA, {}, {"page_size": 2}, "only with --page-size 1"),
        (INKLING, {"local_layer_ids": [0, 0]}, {}, "expected different layers from 0 to 65"),
        (INKLING, {"local_layer_ids": [66]}, {}, "expected different layers from 0 to 65"),
        (INKLING, {"local_layer_ids": []}, {}, "no window or linear layers"),
        (INKLING, {}, {"disable_hybrid_swa_memory": True}, "cannot disable hybrid SWA memory"),
    ],
)
def test_what_sglang_refuses_is_refused(
    name: str, changes: dict[str, Any], flags: dict[str, Any], words: str
) -> None:
    with pytest.raises(ProfileError) as refused:
        derive(name, changes, **flags)
    assert words in str(refused.value)


def test_only_the_rows_of_inkling_follow_another_name_of_the_heads() -> None:
    """Source: InklingModelConfig.mamba2_cache_params, ModelConfig.get_total_num_kv_heads."""
    pools = {pool.name: pool for pool in derive(INKLING, {"num_kv_heads": 4}).pools}
    assert pools["kv"].kv_heads == 4
    assert pools["mamba"].conv[0].shape == (3, 8 * 128)


def test_heads_of_nemotron_nas_are_those_of_its_blocks() -> None:
    (kv,) = derive("DeciLMForCausalLM", {"num_kv_heads": 2}).pools
    assert kv.kv_heads == 8


def test_inkling_needs_the_section_of_its_language_model() -> None:
    """InklingMMConfig has sizes of its own for a config without it."""
    document = {**MODELS[INKLING]["config"]["text_config"], "architectures": [INKLING]}
    with pytest.raises(ProfileError, match="text_config: missing"):
        profile_from_config(document, DeploymentFlags(model="m", page_size=64))


def test_the_newer_form_of_a_zaya_config_is_refused() -> None:
    """Of it, SGLang 0.5.23 reads some fields and takes numbers of its own for the others."""
    document = {
        "architectures": [ZAYA],
        "layer_types": ["hybrid"] * 40,
        "num_hidden_layers": 40,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "hidden_size": 2048,
    }
    with pytest.raises(ProfileError, match="num_query_groups: missing"):
        profile_from_config(document, DeploymentFlags(model="m", page_size=1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_configs": None}, "block_configs: expected 6 tables, found"),
        ({"block_configs": [1] * 6}, "block_configs[0]: expected a table, found 1"),
        ({"block_configs": [{}] * 6}, "attention: missing"),
        ({"block_configs": [{"attention": {}}] * 6}, "n_heads_in_group: missing"),
        ({"model_type": "deci"}, "model_type: SGLang serves this architecture only as"),
    ],
)
def test_blocks_of_nemotron_nas_that_tell_no_heads_are_refused(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ProfileError) as refused:
        derive("DeciLMForCausalLM", changes)
    assert words in str(refused.value)
