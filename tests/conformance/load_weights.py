"""Tell which settings and files SGLang loads weights by.

Runs inside the SGLang environment: `load_weights.py FILE`, a JSON object with settings (names of
server arguments), directories (of models) and quantizations (contents of hf_quant_config.json).
Prints a JSON object: the defaults of these settings; the load formats; for each directory, the file
names that each loader of safetensors files would read, and whether auto means mistral; the method
of each quantisation.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    pass
else:
    pass

# runai_streamer needs a package that is not installed here.
_LOADERS = ("auto", "safetensors", "fastsafetensors", "instanttensor", "layered", "mistral")


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Answer the question."""
    from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES
    from sglang.srt.configs.model_config import ModelConfig

    return {
        "defaults": _defaults(question["settings"]),
        "load_formats": LOAD_FORMAT_CHOICES,
        "files": [
            {load_format: _files(directory, load_format) for load_format in _LOADERS}
            for directory in question["directories"]
        ],
        "native": [_is_native(directory) for directory in question["directories"]],
        "methods": [
            ModelConfig._parse_modelopt_quant_config(None, config)["quant_method"]
            for config in question["quantizations"]
        ],
    }


def _defaults(names: list[str]) -> dict[str, Any]:
    from msgspec.structs import fields
    from sglang.srt.arg_groups.fields.exec_ import ExecMoe
    from sglang.srt.arg_groups.fields.model import Model
    from sglang.srt.arg_groups.fields.spec import Spec

    forms = (Model, Spec, ExecMoe)
    defaults = {field.name: field.default for form in forms for field in fields(form)}
    return {name: defaults[name] for name in names}


def _files(directory: str, load_format: str) -> list[str]:
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader import loader as loaders

    loader = loaders.get_model_loader(LoadConfig(load_format=load_format))
    # Without arguments of a server, checksums are not compared.
    with mock.patch.object(loaders, "get_server_args", return_value=None):
        try:
            _, paths, *_ = loader._prepare_weights(directory, None, True)
        except RuntimeError:  # no file that this loader takes
            return []
    return sorted(Path(path).name for path in paths)


def _is_native(directory: str) -> bool:
    from sglang.srt.arg_groups import model_path_hook

    given = SimpleNamespace(model_path=directory, revision=None)
    with mock.patch.object(model_path_hook, "resolving_view", lambda arguments: arguments):
        native: bool = model_path_hook.is_mistral_native_format(given)
        return native
