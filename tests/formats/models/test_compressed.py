"""Compressed and sparse KV: what flags decide is asked for or used, never guessed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.formats.errors import ProfileError
from hicachectl.formats.models.config import profile_from_config
from hicachectl.formats.models.flags import DeploymentFlags
from tests.model_records import MODELS

if TYPE_CHECKING:
    from hicachectl.formats.kinds.pool import Pool
    from hicachectl.formats.profile import Profile

V4, V41 = "DeepseekV4ForCausalLM", "DeepseekV41ForCausalLM"
M3, QWEN4 = "MiniMaxM3SparseForCausalLM", "Qwen4ExpForConditionalGeneration"


def derive(name: str, changes: dict[str, Any] | None = None, **flags: Any) -> Profile:
    document = {**MODELS[name]["config"], **(changes or {})}
    return profile_from_config(document, DeploymentFlags(model="m", **flags))


def pool(profile: Profile, name: str) -> Pool:
    found = profile.pool(name)
    assert found is not None
    return found


def rows(profile: Profile) -> dict[str, str]:
    return {x.name: x.row for x in profile.pools if x.kind == "dsv4"}


def test_the_page_size_of_deepseek_v4_is_sglangs() -> None:
    assert derive(V4).page_size == 256
    with pytest.raises(ProfileError, match="page_size: is 64, but on CUDA SGLang always sets 256"):
        derive(V4, page_size=64)


@pytest.mark.parametrize(
    ("flags", "window", "c2"),
    [
        ({"dsv4_attn_backend": "flashmla"}, "v4", "v4"),
        ({"dsv4_attn_backend": "flashmla_mega"}, "v41", "v41_fp4"),
        ({"dsv4_attn_backend": "flashmla_mega", "dsv4_kv_layout": "v4"}, "v41", "v41_fp4"),
        ({"dsv4_kv_layout": "v41_new"}, "v41_new", "v41_fp4_new"),
        ({"dsv4_kv_layout": "v41", "dsv4_compressed_kv_layout": "fp8"}, "v41", "v41"),
        ({"dsv4_attn_backend": "trtllm"}, "uniform_fp8", "uniform_fp8"),
    ],
)
def test_backend_and_layout_decide_the_rows(flags: dict[str, Any], window: str, c2: str) -> None:
    found = rows(derive(V41, **flags))
    assert (found["swa"], found["deepseek_v4_c2"]) == (window, c2)


@pytest.mark.parametrize(
    ("name", "flags", "words"),
    [
        (V41, {}, "dsv4_kv_layout: the GPU decides"),
        (V4, {"dsv4_kv_layout": "auto"}, "dsv4_kv_layout: the GPU decides"),
        (V4, {"dsv4_kv_layout": "v5"}, "dsv4_kv_layout: 'v5' is not one of v4, v41, v41_new"),
        (V4, {"dsv4_compressed_kv_layout": "fp4"}, "SGLang has no fp4 beside v4 rows"),
        (V4, {"dsv4_compressed_kv_layout": "x"}, "'x' is not one of auto, fp8, fp4"),
        (V4, {"dsv4_compress_state_dtype": "int8"}, "'int8' is not one of float32"),
        (
            M3,
            {"page_size": 128, "kv_cache_dtype": "fp8_e4m3"},
            "indexer_dtype: the dtype depends on the GPU",
        ),
        (M3, {"page_size": 128, "indexer_dtype": "fp4"}, "'fp4' is not one of auto, bfloat16"),
        (M3, {"page_size": 128, "pp": 2}, "does not support pipeline parallelism"),
        (QWEN4, {"pp": 2}, "pp: hicachectl knows n-gram states only without pipeline parallelism"),
        ("GigaChat35ForCausalLM", {"page_size": 64}, "only with --page-size 1"),
    ],
)
def test_what_only_the_server_knows_is_asked_for(
    name: str, flags: dict[str, Any], words: str
) -> None:
    with pytest.raises(ProfileError, match=re.escape(words)):
        derive(name, **flags)


def test_window_rows_that_requests_rebuild_are_not_stored() -> None:
    profile = derive(V41, dsv4_attn_backend="flashmla", enable_encoder_swa_bounded_replay=True)
    assert "swa" not in rows(profile)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (V4, {"compress_ratios": [4] * 42}, "compress_ratios: expected 43 of"),
        (V4, {"compress_ratios": [8] * 43}, "compress_ratios: expected 43 of"),
        (V4, {"head_dim": 256}, "head_dim: must be 512, the width in SGLang's DeepSeek-V4 rows"),
        ("IQuestQ1ForCausalLM", {"num_hybrid_layers_block": 20}, "is 88, but the blocks have 84"),
        ("IQuestQ1ForCausalLM", {"use_hybrid_layers": 1}, "expected true or false, found 1"),
    ],
)
def test_configs_that_sglang_has_no_pool_for_are_refused(
    name: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ProfileError, match=re.escape(words)):
        derive(name, changes, page_size=256 if name == V4 else 128)


def test_sparse_layers_with_index_values_are_refused_in_sglangs_words() -> None:
    sparse = dict(MODELS[M3]["config"]["sparse_attention_config"])
    del sparse["sparse_disable_index_value"]
    with pytest.raises(ProfileError, match="currently supports index-k-only sparse layers"):
        derive(M3, {"sparse_attention_config": sparse}, page_size=128)


def test_the_gpu_decides_how_minimax_m3_packs_k_and_v() -> None:
    sparse = {**MODELS[M3]["config"]["sparse_attention_config"], "sparse_attention_freq": [1] * 60}
    packed = {"quantization_config": {"quant_method": "minimax_m3_nvfp4"}}
    with pytest.raises(ProfileError, match="on Blackwell, SGLang packs K and V with scales"):
        derive(M3, {**packed, "sparse_attention_config": sparse}, page_size=128)


def test_iquest_without_windows_has_one_pool() -> None:
    profile = derive("IQuestQ1ForCausalLM", {"use_sliding_window": False}, page_size=64)
    assert [(x.name, x.layers) for x in profile.pools] == [("kv", 88)]


def test_dsa_keys_may_be_pooled() -> None:
    """A block holds a key for each `index_kpool` tokens, in pages of as many times 64 tokens."""
    profile = derive("GlmMoeDsaForCausalLM", {"index_kpool": 4}, kv_cache_dtype="bf16")
    assert (profile.page_size, pool(profile, "indexer").compress_ratio) == (256, 4)
