"""How SGLang's settings change the name of a checkpoint's weights."""

from __future__ import annotations

from typing import Any

import pytest

from hicachectl.formats.errors import ProfileError
from hicachectl.formats.models.loading import SETTINGS, loaded_weights
from hicachectl.formats.weights import Checkpoint

NAME = "0123456789abcdef" * 2
# SGLang 0.5.23's defaults, as /server_info reports them.
DEFAULTS: dict[str, Any] = {
    "quantization": None,
    "load_format": "auto",
    "revision": None,
    "speculative_draft_model_quantization": None,
    "speculative_draft_load_format": None,
    "speculative_draft_model_revision": None,
    "json_model_override_args": "{}",
    "model_loader_extra_config": "{}",
    "modelopt_quant": None,
    "checkpoint_engine_wait_weights_before_ready": False,
    "decrypted_config_file": None,
    "decrypted_draft_config_file": None,
    "kt_weight_path": None,
    "modelopt_checkpoint_restore_path": None,
    "quantization_param_path": None,
    "weight_cache_mode": "off",
}


def loaded(config: dict[str, Any] | None = None, /, *, draft: bool = False, **settings: Any) -> str:
    found = Checkpoint(NAME, {"config.json": config or {}})
    return loaded_weights(found, {**DEFAULTS, **settings}, draft=draft)


def test_the_defaults_leave_the_fingerprint() -> None:
    assert DEFAULTS.keys() == set(SETTINGS)
    assert loaded() == loaded(draft=True) == loaded_weights(Checkpoint(NAME, {}), {}) == NAME


@pytest.mark.parametrize(
    "settings",
    [
        {"load_format": "safetensors"},
        {"load_format": "runai_streamer"},
        {"model_loader_extra_config": '{"num_threads": 64, "enable_multithread_load": true}'},
        {"weight_cache_mode": "daemon"},
        {"speculative_draft_model_quantization": "fp8"},
        {"speculative_draft_load_format": "dummy"},
        {"speculative_draft_model_revision": "v2"},
        {"revision": ""},
    ],
)
def test_what_loads_the_same_numbers_keeps_the_name(settings: dict[str, Any]) -> None:
    assert loaded(**settings) == NAME


@pytest.mark.parametrize(
    "settings",
    [
        {"quantization": "fp8"},
        {"load_format": "mistral"},
        {"load_format": "bitsandbytes"},
        {"revision": "v2"},
        {"json_model_override_args": '{"rope_theta": 1}'},
        {"model_loader_extra_config": {"pattern": "x"}},
        {"modelopt_quant": "fp8"},
    ],
)
def test_what_loads_other_numbers_changes_the_name(settings: dict[str, Any]) -> None:
    assert loaded(**settings) != NAME


def test_a_draft_has_settings_of_its_own() -> None:
    """A draft's load format and revision are the target's where it has none of its own."""
    assert loaded(quantization="fp8", draft=True) == NAME
    own = loaded(
        draft=True,
        speculative_draft_model_quantization="fp8",
        speculative_draft_load_format="mistral",
        speculative_draft_model_revision="v2",
    )
    assert own == loaded(quantization="fp8", load_format="mistral", revision="v2")
    inherited = loaded(draft=True, load_format="mistral", revision="v2")
    assert inherited == loaded(load_format="mistral", revision="v2")
    with pytest.raises(ProfileError, match="load_format: 'dummy'"):
        loaded(draft=True, speculative_draft_load_format="dummy")


@pytest.mark.parametrize(
    ("configs", "same"),
    [
        ({"config.json": {"quantization_config": {"quant_method": "fp8"}}}, {"fp8", "FP8"}),
        ({"config.json": {"compression_config": {"quant_method": "CT"}}}, {"ct"}),
        (
            {"hf_quant_config.json": {"quantization": {"quant_algo": "NVFP4"}}},
            {"modelopt", "modelopt_fp4"},
        ),
        (
            {
                "config.json": {
                    "quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}
                }
            },
            {"modelopt", "modelopt_fp8"},
        ),
        ({"quant_model_description.json": {}}, {"modelslim"}),
        ({"config.json": {"quantization_config": {"quant_method": 5}}}, {"5"}),
        ({"config.json": {"quantization_config": "fp8"}}, set()),
    ],
)
def test_the_checkpoints_own_quantisation_is_no_change(
    configs: dict[str, Any], same: set[str]
) -> None:
    """SGLang fills in the checkpoint's method on some platforms only."""
    found = Checkpoint(NAME, configs)
    for quantization in (*same, "int8"):
        name = loaded_weights(found, {"quantization": quantization})
        assert (name == NAME) is (quantization in same)


@pytest.mark.parametrize(
    ("shards", "same"),
    [
        (["consolidated.safetensors"], True),
        (["consolidated-1.safetensors", "other.safetensors"], True),
        (["consolidated.safetensors", "model.safetensors"], False),
        (["model.safetensors"], False),
        ([], False),
    ],
)
def test_mistrals_own_format_is_loaded_without_being_asked_for(
    shards: list[str], same: bool
) -> None:
    name = loaded_weights(Checkpoint(NAME, {}, shards), {"load_format": "mistral"})
    assert (name == NAME) is same


@pytest.mark.parametrize(
    ("setting", "value", "problem"),
    [
        ("load_format", "dummy", "not the safetensors files of the model directory"),
        ("load_format", "gguf", "not the safetensors files"),
        ("load_format", "remote", "not the safetensors files"),
        ("load_format", "presharded", "not the safetensors files"),
        ("load_format", "own_loader", "not the safetensors files"),
        (
            "quantization_param_path",
            "/scales.json",
            "not all weights come from the model directory",
        ),
        ("kt_weight_path", "/experts", "not all weights come from"),
        ("weight_cache_mode", "client", "not all weights come from"),
        ("decrypted_config_file", "/config.json", "not all weights come from"),
        ("checkpoint_engine_wait_weights_before_ready", True, "not all weights come from"),
        ("quantization", 5, "expected text, found 5"),
        ("json_model_override_args", "[]", "not a JSON object"),
        ("model_loader_extra_config", "{", "not JSON"),
        (
            "model_loader_extra_config",
            '{"qlora_adapter_name_or_path": "adapter"}',
            "qlora_adapter_name_or_path: 'adapter': not all weights come from",
        ),
        ("model_loader_extra_config", {"pattern": "/x/{rank}.safetensors"}, "not all weights come"),
    ],
)
def test_settings_that_no_model_directory_decides_are_refused_by_name(
    setting: str, value: Any, problem: str
) -> None:
    with pytest.raises(ProfileError, match=f"^{setting}[:.].*{problem}"):
        loaded(**{setting: value})
