"""Whether a checkpoint's quantisation makes its KV fp8, for --kv-cache-dtype auto.

Source: SGLang srt/mem_cache/kv_cache_dtype.py :: configure_kv_cache_dtype, which reads
`model.quant_config.kv_cache_quant_algo`; srt/configs/model_config.py :: _parse_quant_hf_config;
srt/model_loader/weight_utils.py :: get_quant_config; srt/layers/quantization.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hicachectl.formats.models.recorded import architecture, recorded

if TYPE_CHECKING:
    from hicachectl.formats.models.hf_config import HfConfig

# The key under which a reader puts the hf_quant_config.json beside a config.json.
BESIDE = "hf_quant_config"


def has_fp8_kv(config: HfConfig) -> bool:
    """Return whether auto means fp8 KV. SGLang ignores the KV schemes of other methods.

    Raises ProfileError for a ModelOpt checkpoint without its algorithm, which SGLang refuses.
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
    section = _unwrapped(section)
    algo = section.get("quant_algo")
    if algo == "MIXED_PRECISION":
        return "modelopt_mixed" if _has_nvfp4_layers(section) else "w4afp8"
    if isinstance(algo, str) and "FP4" in algo:
        return "modelopt_fp4"
    return {"FP8": "modelopt_fp8", "MXFP8": "mxfp8"}.get(algo, "") if isinstance(algo, str) else ""


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
    if own is None:  # SGLang then has the defaults of its class
        return None
    if not method and own.get("quant_method") == "modelopt":
        raise config.error("quantization_config", "SGLang needs a quant_algo that it knows")
    scheme, algo = own.get("kv_cache_scheme"), _unwrapped(own).get("kv_cache_quant_algo")
    if method == "compressed-tensors":
        return "FP8" if _is_static_fp8(scheme) else None
    if method == "mxfp8" and "quant_algo" in own and _is_fp8(scheme):
        return algo or "FP8"
    return algo if method in ("fp8", "mxfp8") else None


def _modelopt_kv(method: str, own: Mapping[str, Any] | None, beside: Mapping[str, Any]) -> Any:
    if own is None or (method == "modelopt_mixed" and not _KV_FIELDS & set(own)):
        if "quant_algo" not in beside:
            return _unwrapped(beside).get("kv_cache_quant_algo")
        own = beside
    # SGLang puts quant_algo into quantization_config, which is then no longer the nested form.
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
    """Return the section on the language model whose fields SGLang copies into a config.

    Without the copy, SGLang sees no quantisation there (hf_transformers/config.py ::
    HfModelConfigParser.parse, ModelConfig._parse_quant_hf_config).
    """
    if str(outer.get("model_type")) in recorded().read_again:
        return {}
    sections = (outer.get(name) for name in ("text_config", "llm_config"))
    return next((x for x in sections if isinstance(x, Mapping)), {})


def _beside(config: HfConfig) -> Mapping[str, Any]:
    section = config.outer.get(BESIDE)
    return section if isinstance(section, Mapping) else {}


def _unwrapped(section: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = section.get("quantization")
    return nested if isinstance(nested, Mapping) else section


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


_KV_FIELDS = {"kv_cache_quant_algo", "kv_cache_scheme"}
