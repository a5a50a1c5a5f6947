"""Make SGLang importable, and its behaviour its own default, on a machine without a GPU.

Runs inside the SGLang environment, before anything of SGLang is imported.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from unittest import mock

# Imported by the cache modules, called by none of them. torchvision has no CPU build that fits
# the pinned torch; the parsers of SGLang want packages that are not pinned at all.
_STAND_INS = (
    "torchvision",
    "torchvision.io",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
    "sglang.srt.function_call.function_call_parser",
    "sglang.srt.parser.reasoning_parser",
)


def prepare() -> None:
    """Clear what steers SGLang, hide GPUs, stand in for packages that are absent."""
    for name in list(os.environ):
        if name.startswith(("SGLANG_", "MOONCAKE_")):
            del os.environ[name]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["TORCH_EXTENSIONS_DIR"] = _extensions_directory()
    _reconcile_transformers()
    for name in _STAND_INS:
        module = mock.MagicMock()
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = module


def _extensions_directory() -> str:
    """Where the page-hash extension is built: releases share its name but not its source."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        raise SystemExit(f"sglang is not installed for {sys.executable}")
    return str(Path(sys.prefix) / "torch_extensions" / Path(spec.origin).parents[1].name)


def _reconcile_transformers() -> None:
    from transformers.models.auto import configuration_auto
    from transformers.utils import is_torchvision_available

    # Cached by transformers: asked once the stand-in exists, it would go and use it.
    is_torchvision_available()
    # An older SGLang registers model names that transformers has taken since.
    mapping = configuration_auto.CONFIG_MAPPING
    register = mapping.register
    mapping.register = lambda key, value, exist_ok=False: register(key, value, exist_ok=True)
