"""Derive the dtypes of KV rows and recurrent states from a model's config and a server's flags.

With --kv-cache-dtype auto, a checkpoint's quantisation can make its KV fp8.

Source: SGLang srt/mem_cache/kv_cache_dtype.py :: configure_kv_cache_dtype, which reads
`model.quant_config.kv_cache_quant_algo`; srt/configs/model_config.py :: _parse_quant_hf_config;
srt/model_loader/weight_utils.py :: get_quant_config; srt/layers/quantization;
srt/arg_groups/overrides.py :: _dsa_kv_cache_dtype_default, srt/configs/mamba_utils.py ::
mamba2_state_dtype, srt/mem_cache/kv_cache_configurator.py :: calculate_mla_kv_cache_dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hicachectl.formats.documents import shown
from hicachectl.formats.errors import ProfileError
from hicachectl.formats.layouts import UNSTORED_DTYPES
from hicachectl.formats.models.hf_config import is_llava
from hicachectl.formats.models.loading import modelopt_names, unwrapped
from hicachectl.formats.models.recorded import architecture, recorded
from hicachectl.formats.wording import not_one_of

if TYPE_CHECKING:
    from hicachectl.formats.models.flags import DeploymentFlags
    from hicachectl.formats.models.hf_config import HfConfig

_KV_DTYPES = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
_DSA_KV_DTYPES = ("bfloat16", "float8_e4m3fn")
# _STR_DTYPE_TO_TORCH_DTYPE (srt/configs/model_config.py)
_MODEL_DTYPES = {
    "half": "float16",
    "float16": "float16",
    "float": "float32",
    "float32": "float32",
    "bfloat16": "bfloat16",
}
_COMPRESS_STATE_BYTES = {"float32": 4, "fp32": 4, "bfloat16": 2, "bf16": 2}
# Model types for which SGLang's config class (srt/configs) takes bfloat16 if no dtype is stated.
_BFLOAT16_MODEL_TYPES = ("beam", "gigachat3_5", "longcat_flash")
# IQuestQ1Config takes bfloat16 if "dtype" is missing, whatever torch_dtype says. It does not take
# bfloat16 if "dtype" is null.
_IQUEST_MODEL_TYPES = ("iquest_q1", "iquest_q1_mtp")
# arg_groups/model_override_base.py :: MODEL_OVERRIDES
_BFLOAT16_ARCHITECTURES = ("MistralLarge3ForCausalLM", "PixtralForConditionalGeneration")
_STATE_DTYPES = ("float32", "bfloat16", "float16")
_ROCM_DSA_BACKENDS = {"triton", "aiter"}
_KV_FIELDS = {"kv_cache_quant_algo", "kv_cache_scheme"}
# The key under which a reader puts the hf_quant_config.json beside a config.json.
BESIDE = "hf_quant_config"


def stated_kv_dtype(name: str) -> str | None:
    """Return the dtype that --kv-cache-dtype names; None for auto and unknown names."""
    return _KV_DTYPES.get(name)


def kv_dtype(config: HfConfig, flags: DeploymentFlags, *, dsa: bool, draft: bool = False) -> str:
    """Return the dtype that --kv-cache-dtype means for a model.

    dsa: whether the model is a DSA model.
    draft: whether the model is a draft.
    Raises ProfileError if config and flags do not determine the dtype.
    """
    name = flags.kv_cache_dtype
    if draft and flags.speculative_draft_kv_cache_dtype:
        name = flags.speculative_draft_kv_cache_dtype
    if name == "auto" and dsa:
        raise ProfileError(
            "kv_cache_dtype: for a DSA model, auto means bfloat16 or fp8_e4m3, depending on the "
            "GPU (fp8_e4m3 on Blackwell); give the dtype that the server logs at start"
        )
    if name == "auto" and config.architecture == "MuseSparkForConditionalGeneration":
        return "float8_e4m3fn"  # srt/arg_groups/overrides.py :: _muse_spark_overrides
    if name == "auto":
        return "float8_e4m3fn" if has_fp8_kv(config) else model_dtype(config, flags)
    if name in UNSTORED_DTYPES:
        raise ProfileError(f"kv_cache_dtype: {name!r}: {UNSTORED_DTYPES[name]}")
    if name not in _KV_DTYPES:
        raise ProfileError(
            f"kv_cache_dtype: {name!r} objects have a form that hicachectl cannot describe; "
            f"supported are auto, {', '.join(_KV_DTYPES)}; write a profile file"
        )
    resolved = _KV_DTYPES[name]
    if dsa and resolved not in _DSA_KV_DTYPES:
        raise ProfileError(
            f"kv_cache_dtype: SGLang does not support {name!r} for DSA models; "
            "give bfloat16 or fp8_e4m3"
        )
    return resolved


def forced_dtype(config: HfConfig, flags: DeploymentFlags) -> DeploymentFlags:
    """Return the flags with the --dtype that SGLang sets for a target, and so for its draft.

    Source: arg_groups/model_override_base.py :: MODEL_OVERRIDES, model_overrides/gpt_oss.py.
    """
    name = config.architecture
    mxfp4 = name == "GptOssForCausalLM" and quant_method(config) == "mxfp4"
    return replace(flags, dtype="bfloat16") if mxfp4 or name in _BFLOAT16_ARCHITECTURES else flags


def model_dtype(config: HfConfig, flags: DeploymentFlags) -> str:
    """Return a model's dtype by --dtype. auto means the config's dtype, but 16 bits for float32.

    Source: srt/configs/model_config.py :: _get_and_verify_dtype.
    """
    if flags.dtype != "auto":
        return _known_dtype(flags.dtype, "dtype")
    stated = "float16" if is_llava(config.architecture) else _stated_dtype(config)
    if stated != "float32":
        return stated
    gemma = str(config.text.get("model_type", "")).startswith("gemma")
    return "bfloat16" if gemma else "float16"


def mla_row(dtype: str, flags: DeploymentFlags, *, dsa: bool) -> str:
    """Return the row form of an MLA pool.

    DSA models with fp8 have scaled rows, unless a stated backend reads rows without scales.
    """
    if not dtype.startswith("float8"):
        return "bf16"
    return "fp8" if not dsa or _reads_raw_rows(flags) else "fp8_scaled"


def state_dtypes(config: HfConfig | None, flags: DeploymentFlags) -> tuple[str, str]:
    """Return the dtypes of a Mamba-like layer's temporal and convolution states.

    config: None for models whose SGLang config does not read `mamba_ssm_dtype`.
    """
    stated = config.text.get("mamba_ssm_dtype") if config else None
    temporal = "float32"
    for name in (stated, flags.mamba_ssm_dtype):  # SGLang ignores unknown names
        temporal = name if name in _STATE_DTYPES else temporal
    conv = flags.mamba_conv_dtype
    return temporal, conv if conv in _STATE_DTYPES else "bfloat16"


def index_keys_dtype(config: HfConfig, flags: DeploymentFlags, *, usual: str) -> str:
    """Return the dtype of index keys.

    usual: dtype without the option; "" if it depends on the GPU.

    Source: srt/mem_cache/qsa_kv_pool.py :: resolve_qsa_indexer_dtype,
    srt/mem_cache/memory_pool.py :: get_minimax_sparse_index_dtype.
    """
    name = flags.indexer_dtype
    if name in ("", "auto"):
        if not usual:
            raise config.error(
                "indexer_dtype",
                "the dtype depends on the GPU and the attention backend",
                "give bfloat16 or fp8_e4m3 (--indexer-dtype)",
            )
        return usual
    if name not in ("bfloat16", "fp8_e4m3"):
        words = not_one_of("indexer_dtype", name, ("auto", "bfloat16", "fp8_e4m3"))
        raise config.error(*words.split(": ", 1))
    return _KV_DTYPES[name]


def compress_state_bytes(flags: DeploymentFlags) -> int:
    """Return the bytes of an item of compressor states, by SGLANG_DSV4_COMPRESS_STATE_DTYPE.

    Source: _get_dsv4_compress_state_dtypes.
    """
    name = flags.dsv4_compress_state_dtype.strip().lower() or "float32"
    if name not in _COMPRESS_STATE_BYTES:
        raise ProfileError(not_one_of("dsv4_compress_state_dtype", name, _COMPRESS_STATE_BYTES))
    return _COMPRESS_STATE_BYTES[name]


def _reads_raw_rows(flags: DeploymentFlags) -> bool:
    prefill, decode = flags.dsa_prefill_backend, flags.dsa_decode_backend
    by_role = {"prefill": (prefill,), "decode": (decode,)}
    if "trtllm" in by_role.get(flags.disaggregation_mode, (prefill, decode)):
        return True
    return prefill == decode == "tilelang" or bool({prefill, decode} & _ROCM_DSA_BACKENDS)


def _stated_dtype(config: HfConfig) -> str:
    kind = config.outer.get("model_type")
    if kind in _IQUEST_MODEL_TYPES and "dtype" not in config.text:
        return "bfloat16"
    for source in _dtype_sections(config):
        if kind == "interns2_mobius" and not {"dtype", "torch_dtype"} & set(source):
            # InternS2MobiusConfig and its text config take bfloat16 if both fields are missing, but
            # not if one of them is null.
            return "bfloat16"
        name = source.get("dtype") or source.get("torch_dtype")
        if name and not isinstance(name, str):
            raise config.error("dtype", f"expected a name, found {shown(name)}")
        if name:
            return _known_dtype(name.removeprefix("torch."), f"{config.source}: dtype")
    return "bfloat16" if kind in _BFLOAT16_MODEL_TYPES else "float32"


def _dtype_sections(config: HfConfig) -> tuple[Mapping[str, Any], ...]:
    """Return the sections that may state the dtype. The first section that states a dtype decides.

    A thinker's own dtype replaces its language model's dtype (get_hf_text_config).
    """
    thinker = config.outer.get("thinker_config")
    return (thinker if isinstance(thinker, Mapping) else config.text, config.outer)


def _known_dtype(name: str, field: str) -> str:
    if name.lower() not in _MODEL_DTYPES:
        raise ProfileError(not_one_of(field, name[:60], ("auto", *_MODEL_DTYPES)))
    return _MODEL_DTYPES[name.lower()]


# quantisation


def has_fp8_kv(config: HfConfig) -> bool:
    """Return whether --kv-cache-dtype auto means fp8 KV.

    SGLang reads the KV scheme of some quantisation methods only. Raises ProfileError for a ModelOpt
    checkpoint that states no algorithm known to SGLang, because SGLang refuses such a checkpoint.
    """
    if not architecture(config.architecture).keeps_quant:
        return False
    algo = _kv_quant_algo(config)
    return isinstance(algo, str) and algo.upper() == "FP8"


def quant_method(config: HfConfig) -> str:
    """Return SGLang's name of a checkpoint's quantisation; "" without one."""
    own = _own_section(config)
    section = _beside(config) if own is None else own
    stated = section.get("quant_method", "modelopt")
    if own is not None and stated != "modelopt":
        return stated.lower() if isinstance(stated, str) else ""
    names = modelopt_names(section)
    mixed = len(names) > 1 and not _has_nvfp4_layers(unwrapped(section))
    return names[mixed] if names else ""


def is_nvfp4_packed(config: HfConfig) -> bool:
    """Return whether Blackwell servers pack K, V and scales (minimax_m3._resolve_quant_method)."""
    section, method = _own_section(config) or {}, quant_method(config)
    mixed = str(section.get("moe_quant_algo", "")).upper() == "NVFP4"
    return method == "minimax_m3_nvfp4" or (
        method == "mxfp8" and mixed and section.get("moe_quant_format") == "nvfp4-pack-quantized"
    )


def _kv_quant_algo(config: HfConfig) -> Any:
    """Return the kv_cache_quant_algo of SGLang's quantisation class for the checkpoint."""
    own, method = _own_section(config), quant_method(config)
    if method.startswith("modelopt_"):
        return _modelopt_kv(method, own, _beside(config))
    if own is None:  # SGLang then uses the defaults of its quantisation class
        return None
    if not method and own.get("quant_method") == "modelopt":
        raise config.error("quantization_config", "SGLang needs a quant_algo that it knows")
    scheme, algo = own.get("kv_cache_scheme"), unwrapped(own).get("kv_cache_quant_algo")
    if method == "compressed-tensors":
        return "FP8" if _is_static_fp8(scheme) else None
    if method == "mxfp8" and "quant_algo" in own and _is_fp8(scheme):
        return algo or "FP8"
    return algo if method in ("fp8", "mxfp8") else None


def _modelopt_kv(method: str, own: Mapping[str, Any] | None, beside: Mapping[str, Any]) -> Any:
    if own is None or (method == "modelopt_mixed" and not _KV_FIELDS & set(own)):
        if "quant_algo" not in beside:
            return unwrapped(beside).get("kv_cache_quant_algo")
        own = beside
    # SGLang adds quant_algo to this section, and then reads the section itself, not one nested in
    # it.
    scheme = own.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        return "FP8" if _is_fp8(scheme) else None
    if method == "modelopt_fp4" and isinstance(scheme, str):
        return "FP8" if scheme.strip().upper() in ("FP8", "FLOAT8") else None
    return own.get("kv_cache_quant_algo")


def _own_section(config: HfConfig) -> Mapping[str, Any] | None:
    """Return the quantisation that config.json states (_select_hf_quant_metadata)."""
    outer = config.outer
    for source, name in (
        (outer, "quantization_config"),
        (_copied_section(outer), "quantization_config"),
        (outer, "compression_config"),
    ):
        section = source.get(name)
        if isinstance(section, Mapping):
            return section
    return None


def _copied_section(outer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's section if SGLang copies its fields into the config, else {}.

    Without the copy, SGLang sees no quantisation in that section (hf_transformers/config.py ::
    HfModelConfigParser.parse, ModelConfig._parse_quant_hf_config).
    """
    if str(outer.get("model_type")) in recorded().read_again:
        return {}
    sections = (outer.get(name) for name in ("text_config", "llm_config"))
    return next((x for x in sections if isinstance(x, Mapping)), {})


def _beside(config: HfConfig) -> Mapping[str, Any]:
    section = config.outer.get(BESIDE)
    return section if isinstance(section, Mapping) else {}


def _has_nvfp4_layers(section: Mapping[str, Any]) -> bool:
    layers = section.get("quantized_layers")
    if not isinstance(layers, Mapping):
        return False
    algos = {str(x.get("quant_algo")).upper() for x in layers.values() if isinstance(x, Mapping)}
    return bool({"NVFP4", "W4A16_NVFP4"} & algos)


def _is_fp8(scheme: Any) -> bool:
    if not isinstance(scheme, Mapping):
        return False
    return (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)


def _is_static_fp8(scheme: Any) -> bool:
    """Return whether a scheme is static, symmetric and per tensor (CompressedTensorsConfig)."""
    return (
        _is_fp8(scheme)
        and scheme.get("strategy") == "tensor"
        and bool(scheme.get("symmetric", True))
        and not scheme.get("dynamic", False)
    )
