from __future__ import annotations

from typing import Any

import pytest

from hicachectl.formats.errors import ProfileError
from hicachectl.formats.models.flags import DeploymentFlags
from hicachectl.formats.models.server_info import flags_from_server_info
from hicachectl.formats.releases import sglang_version

# The relevant fields of a reply of SGLang 0.5.23: arguments, scheduler fields, the schedulers'
# internal states, and fields that the endpoint adds.
REPLY: dict[str, Any] = {
    "model_path": "/models/DeepSeek-V3.2",
    "served_model_name": "deepseek-ai/DeepSeek-V3.2",
    "dtype": "auto",
    "kv_cache_dtype": "auto",
    "page_size": 1,
    "tp_size": 8,
    "pp_size": 1,
    "dp_size": 1,
    "attn_dp_size": 1,
    "attn_cp_size": 1,
    "dcp_size": 1,
    "enable_dp_attention": False,
    "enable_dsa_cache_layer_split": False,
    "enable_hisparse": False,
    "enable_hierarchical_cache": True,
    "hicache_storage_backend": "mooncake",
    "hicache_storage_backend_extra_config": '{"master_server_address": "m:50051", '
    '"extra_backend_tag": "teamA", "tp_lcm_size": 16}',
    "hicache_mem_layout": "page_first",
    "hicache_io_backend": "kernel",
    "speculative_algorithm": None,
    "speculative_draft_model_path": None,
    "speculative_num_steps": None,
    "enable_multi_layer_eagle": False,
    "mamba_ssm_dtype": None,
    "disable_hybrid_swa_memory": False,
    "enable_scattered_sconv": False,
    "disaggregation_mode": "null",
    "dsa_prefill_backend": None,
    "dsa_decode_backend": None,
    "launch_command": "python -m sglang.launch_server --api-key <redacted>",
    "status": "ready",
    "max_total_num_tokens": 524288,
    "kv_events": None,
    "startup_time": 61.5,
    "internal_states": [
        {
            "world_size": 8,
            "page_size": 64,
            "kv_cache_dtype": "fp8_e4m3",
            "dsa_prefill_backend": "flashmla_kv",
            "dsa_decode_backend": "flashmla_kv",
        }
    ],
    "version": "0.5.23",
    "frontend": "python",
}


def reply(**changes: Any) -> dict[str, Any]:
    return {**REPLY, **changes}


def flags(**changes: Any) -> DeploymentFlags:
    return flags_from_server_info(reply(**changes)).flags


def test_the_arguments_serve_where_no_scheduler_answers() -> None:
    assert flags(internal_states=[]).page_size == 1
    assert flags(internal_states=None).page_size == 1


def test_a_reply_becomes_flags() -> None:
    """The scheduler's view wins over the arguments."""
    assert flags() == DeploymentFlags(
        model="deepseek-ai/DeepSeek-V3.2",
        page_size=64,
        kv_cache_dtype="fp8_e4m3",
        layout="page_first",
        storage_backend="mooncake",
        tp=8,
        tp_lcm_size=16,
        tag="teamA",
        dsa_prefill_backend="flashmla_kv",
        dsa_decode_backend="flashmla_kv",
        sglang="0.5.23",
        resolved=True,
    )


def test_the_served_name_is_the_path_where_none_is_given() -> None:
    assert flags(served_model_name=None).model == "/models/DeepSeek-V3.2"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # 0.5.23 moves the size to attn_dp_size and repeats it as enable_dp_attention
        ({"attn_dp_size": 4, "enable_dp_attention": True}, (4, True)),
        ({"attn_dp_size": 1, "dp_size": 2}, (1, False)),
        ({"attn_dp_size": None, "dp_size": 4, "enable_dp_attention": True}, (4, True)),
        ({"attn_dp_size": None, "dp_size": 4}, (4, False)),
    ],
)
def test_attention_dp_is_read_from_new_and_old_servers(
    changes: dict[str, Any], expected: tuple[int, bool]
) -> None:
    read = flags(**changes)
    assert (read.dp, read.enable_dp_attention) == expected


def test_the_draft_is_named_where_it_is_another_model() -> None:
    own = flags_from_server_info(reply(speculative_draft_model_path="/models/DeepSeek-V3.2"))
    other = flags_from_server_info(reply(speculative_draft_model_path="/models/draft"))
    assert (own.draft_model_path, other.draft_model_path) == ("", "/models/draft")


def test_an_exposed_environment_is_used() -> None:
    state = {
        "env_vars": {"SGLANG_PP_LAYER_PARTITION": "31,30", "SGLANG_MAMBA_CONV_DTYPE": "float32"}
    }
    read = flags(pp_size=2, internal_states=[state])
    assert (read.pp_partition, read.mamba_conv_dtype) == ((31, 30), "float32")


@pytest.mark.parametrize(
    ("stated", "threshold"),
    [
        (None, 256),
        ("", 256),
        ('{"tp_lcm_size": 16}', 256),
        ('{"prefetch_threshold": 64}', 64),
        ('{"prefetch_threshold": -1}', 0),  # SGLang: at least a page
    ],
)
def test_the_prefetch_threshold_is_among_the_options_of_the_store(
    stated: str | None, threshold: int
) -> None:
    assert flags(hicache_storage_backend_extra_config=stated).prefetch_threshold == threshold


def test_what_the_server_does_not_say_is_noted() -> None:
    assert flags_from_server_info(reply()).notes == ()
    (note,) = flags_from_server_info(reply(enable_hierarchical_cache=False)).notes
    assert "enable-hierarchical-cache" in note
    (note,) = flags_from_server_info(reply(hicache_storage_backend=None)).notes
    assert "L3" in note
    (note,) = flags_from_server_info(
        reply(hicache_storage_backend_extra_config="@/etc/store.toml")
    ).notes
    assert "give --tag, --tp-lcm-size and --prefetch-threshold" in note
    (note,) = flags_from_server_info(reply(pp_size=2)).notes
    assert "SGLANG_PP_LAYER_PARTITION" in note


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tp_size": None}, "tp_size: missing"),
        ({"tp_size": "8"}, "tp_size"),
        ({"model_path": None}, "model_path"),
        ({"kv_cache_dtype": 8, "internal_states": []}, "kv_cache_dtype"),
        ({"enable_hisparse": True}, "enable_hisparse"),
        ({"hicache_storage_backend_extra_config": "{"}, "extra_config"),
        ({"internal_states": [{"env_vars": {"SGLANG_PP_LAYER_PARTITION": "a"}}],
          "page_size": 64}, "SGLANG_PP_LAYER_PARTITION"),
    ],
)  # fmt: skip
def test_a_field_at_fault_is_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ProfileError, match=field):
        flags(**changes)


def test_a_reply_that_is_no_object_is_refused() -> None:
    with pytest.raises(ProfileError, match="JSON object"):
        flags_from_server_info([])  # type: ignore[arg-type]


def test_store_options_are_not_quoted_in_errors() -> None:
    with pytest.raises(ProfileError) as caught:
        flags(hicache_storage_backend_extra_config='{"access_key": "s3cret"')
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000])
def test_an_extra_config_that_no_parser_takes_is_named(text: str) -> None:
    with pytest.raises(ProfileError, match="extra_config: not JSON"):
        flags_from_server_info({**REPLY, "hicache_storage_backend_extra_config": text})


@pytest.mark.parametrize(
    "text", ["9999999999.1", "0.5.9999999999", "9" * 5000, "0.5." + "9" * 5000, "main", ""]
)
def test_a_version_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ProfileError, match="is not a version"):
        sglang_version(text)


def test_a_version_may_have_more_behind_its_numbers() -> None:
    assert sglang_version("v0.5.23.post1+cu129") == (0, 5, 23)
    assert sglang_version("0.5.23rc1") == (0, 5, 23)
