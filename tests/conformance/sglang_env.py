"""Make SGLang importable on a machine without a GPU, with SGLang's default behaviour.

Runs inside the SGLang environment, before anything of SGLang is imported.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from unittest import mock

# Imported but never called. torchvision has no CPU build for the pinned torch.
_STAND_INS = (
    "torchvision",
    "torchvision.io",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)


def prepare() -> None:
    """Clean the environment, and replace missing packages by mocks."""
    clean_environment()
    replace_missing_packages()


def clean_environment() -> None:
    """Clear SGLang's variables, hide GPUs, and set where extensions are built."""
    for name in list(os.environ):
        if name.startswith(("SGLANG_", "MOONCAKE_")):
            del os.environ[name]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["TORCH_EXTENSIONS_DIR"] = _extensions_directory()


def replace_missing_packages() -> None:
    """Replace torchvision by mocks, and let transformers know that it is missing."""
    _reconcile_transformers()
    for name in _STAND_INS:
        module = mock.MagicMock()
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = module


def _extensions_directory() -> str:
    """Return the build directory of the page-hash extension, whose source differs by release."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        raise SystemExit(f"sglang is not installed for {sys.executable}")
    return str(Path(sys.prefix) / "torch_extensions" / Path(spec.origin).parents[1].name)


def _reconcile_transformers() -> None:
    from transformers.models.auto import configuration_auto
    from transformers.utils import is_torchvision_available

    # transformers caches this answer: after the mock exists, it would use the mock.
    is_torchvision_available()
    # An older SGLang registers model names that transformers now has itself.
    mapping = configuration_auto.CONFIG_MAPPING
    register = mapping.register
    mapping.register = lambda key, value, exist_ok=False: register(key, value, exist_ok=True)
