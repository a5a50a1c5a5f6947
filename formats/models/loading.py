"""Name the weights that a server gets from a checkpoint, by SGLang's settings that change them.

These settings count (arg_groups/fields/model.py, spec.py):
- for a target: quantization, load_format and revision
- for a draft: speculative_draft_model_quantization, speculative_draft_load_format and
  speculative_draft_model_revision
- for both: json_model_override_args, model_loader_extra_config and modelopt_quant

Settings that take weights, scales or the config from outside the model directory are refused. Other
settings do not count. The setting dtype does not count, because an identity has the dtype of the
stored bytes. Settings of model_impl, kernels and parallelism do not count, because they change
numbers only by rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hicachectl.formats.documents import parse_json_object, shown, storable
from hicachectl.formats.errors import ProfileError
from hicachectl.formats.weights import SAME_LOAD_FORMATS, served_weights
from hicachectl.formats.wording import NAME_WEIGHTS

if TYPE_CHECKING:
    from hicachectl.formats.weights import Checkpoint

# Load formats that take other tensors from the same directory. The other LOAD_FORMAT_CHOICES
# (arg_groups/choices.py) load random or remote weights, other files, or their own cache.
_OTHER_LOAD_FORMATS = ("bitsandbytes", "mistral", "sharded_state")
# Settings that can bring weights, scales or a config from outside the model directory, and the
# values with which they do not.
_ELSEWHERE: Mapping[str, tuple[Any, ...]] = {
    "checkpoint_engine_wait_weights_before_ready": (None, False),
    "decrypted_config_file": (None,),
    "decrypted_draft_config_file": (None,),
    "kt_weight_path": (None,),  # experts that the CPU computes
    "modelopt_checkpoint_restore_path": (None,),
    "quantization_param_path": (None,),  # scales of fp8 KV
    "weight_cache_mode": (None, "off", "daemon"),  # "client" takes weights from a daemon
}
_TARGET = ("quantization", "load_format", "revision")
_DRAFT = (
    "speculative_draft_model_quantization",
    "speculative_draft_load_format",
    "speculative_draft_model_revision",
)
_SHARED = ("json_model_override_args", "model_loader_extra_config", "modelopt_quant")
SETTINGS = (*_TARGET, *_DRAFT, *_SHARED, *_ELSEWHERE)
# Options of loaders that change only the speed of loading.
_SPEED_OPTIONS = (
    "concurrency", "distributed", "enable_gds", "enable_multithread_load", "memory_limit",
    "num_threads",
)  # fmt: skip
_ADAPTER = "qlora_adapter_name_or_path"  # BitsAndBytesModelLoader
_MERGED = ("rope_parameters", "rope_scaling")
_QUANTISATIONS = ("compression_config", "quantization_config")  # sections, not nested configs
# ModelConfig._parse_modelopt_quant_config
_MODELOPT = {
    "FP8": ("modelopt_fp8",),
    "NVFP4": ("modelopt_fp4",),
    "MXFP8": ("mxfp8",),
    "MIXED_PRECISION": ("modelopt_mixed", "w4afp8"),
}


def loaded_weights(found: Checkpoint, settings: Mapping[str, Any], *, draft: bool = False) -> str:
    """Return the name of a checkpoint's weights as a server loads them. See `served_weights`.

    settings: values of `SETTINGS` after SGLang's resolution, as in `runtime_context.get_model()`,
        `get_spec()` and `/server_info`. A missing setting has its default.
    draft: whether the checkpoint is that of a draft.
    Raises ProfileError for a setting that takes weights from outside the model directory, or that
    has a value of a wrong type. Only the settings decide this, so all ranks and hosts of a
    deployment refuse the same settings.
    """
    for name, harmless in _ELSEWHERE.items():
        if settings.get(name) not in harmless:
            raise _from_elsewhere(name, settings[name])
    quantization, load_format, revision = (
        _text(settings, name) for name in (_DRAFT if draft else _TARGET)
    )
    if draft:  # ModelRunner._resolve_draft_load_format, ModelConfig.from_server_args
        load_format = load_format or _text(settings, "load_format")
        revision = revision or _text(settings, "revision")
    load_format = load_format or "auto"
    if load_format == "mistral" and _is_mistral_native(found):
        load_format = "auto"
    if load_format not in (*SAME_LOAD_FORMATS, *_OTHER_LOAD_FORMATS):
        raise ProfileError(
            f"load_format: {load_format!r}: the weights are not the safetensors files of the model "
            f"directory; {NAME_WEIGHTS}"
        )
    if quantization.lower() in own_quantizations(found.configs):
        quantization = ""
    return served_weights(
        found.fingerprint,
        quantization=quantization,
        load_format=load_format,
        revision=revision,
        overrides=_object(settings, "json_model_override_args"),
        loader=_loader_options(settings),
        modelopt=settings.get("modelopt_quant"),
    )


def overridden_config(config: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's config with --json-model-override-args applied. Raises ProfileError.

    A dict is merged into a nested config or into rope parameters. In all other cases, the
    override's value replaces the field. Source: SGLang srt/utils/hf_transformers/config.py ::
    get_config.
    """
    found = dict(config)
    for name, value in _object(settings, "json_model_override_args").items():
        current = found.get(name)
        merges = name in _MERGED or (name.endswith("_config") and name not in _QUANTISATIONS)
        if merges and isinstance(value, dict) and isinstance(current, dict):
            found[name] = {**current, **value}
        else:
            found[name] = value
    return found


def own_quantizations(configs: Mapping[str, Any]) -> set[str]:
    """Return the values of --quantization that leave a checkpoint's own quantisation as it is.

    Without the flag, SGLang takes one of these values (ModelConfig._verify_quantization,
    overrides.py :: _deepseek_moe_quant_resolution).

    configs: the configs of a `Checkpoint`.
    """
    config = configs.get("config.json", {})
    names = {"modelslim"} if "quant_model_description.json" in configs else set()
    for stated in (
        config.get("quantization_config"),
        config.get("compression_config"),
        configs.get("hf_quant_config.json"),
    ):
        if not isinstance(stated, dict):
            continue
        method = stated.get("quant_method", "modelopt")
        names.add(str(method).lower())
        if method == "modelopt":
            names.update(modelopt_names(stated))
    return names


def _loader_options(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options of the loader that choose weights. Raises ProfileError for a path."""
    name = "model_loader_extra_config"
    options = _object(settings, name)
    for option, value in options.items():
        if option == _ADAPTER or (option == "pattern" and "/" in str(value)):
            raise _from_elsewhere(f"{name}.{option}", value)
    return {option: value for option, value in options.items() if option not in _SPEED_OPTIONS}


def _from_elsewhere(name: str, value: object) -> ProfileError:
    return ProfileError(
        f"{name}: {shown(value)}: not all weights come from the model directory; {NAME_WEIGHTS}"
    )


def _is_mistral_native(found: Checkpoint) -> bool:
    """Return whether auto means load format mistral (is_mistral_native_format)."""
    starts = ("consolidated", "model")
    native, plain = (any(name.startswith(start) for name in found.shards) for start in starts)
    return native and not plain


def modelopt_names(section: Mapping[str, Any]) -> tuple[str, ...]:
    """Return SGLang's names of a ModelOpt quantisation; none for an unknown algorithm.

    Mixed precision has two names. The other algorithms have one.
    """
    algorithm = unwrapped(section).get("quant_algo")
    return _MODELOPT.get("NVFP4" if "FP4" in str(algorithm) else str(algorithm), ())


def unwrapped(section: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the section nested in a section on quantisation; else the section itself."""
    nested = section.get("quantization")
    return nested if isinstance(nested, Mapping) else section


def _text(settings: Mapping[str, Any], name: str) -> str:
    value = settings.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ProfileError(f"{name}: expected text, found {shown(value)}; {NAME_WEIGHTS}")
    return storable(value)


def _object(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = settings.get(name)
    if isinstance(value, dict):
        return value
    return parse_json_object(_text(settings, name) or "{}", name, refusal=ProfileError)
