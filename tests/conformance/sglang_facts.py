"""Tell what an SGLang release says of its models and flags.

Runs inside the SGLang environment: `sglang_facts.py REQUEST`. The request is a JSON object of
models by architecture: config (a config.json) and code (a file of this folder with the config's
class). Prints a JSON object of `release`, `flags` and `architectures`.

flags: the spellings of each flag, its number of values as in argparse, and whether a file of
--config takes it, in the order of the help.

read_again: model types whose config lacks the quantisation that its section on the language model
states.

architectures, by name: family (of FAMILIES), stages (`divided` if a model tells its runner the
layers of its pipeline stage; `undivided` if its forward takes stages all the same), keeps_quant
(whether the model keeps its quantisation), dsa (whether its attention can be sparse), filled
(fields to which the config's class gives a number of its own if a config lacks them), draft (the
name that the architecture gets for a draft) and nextn (the MTP layers that the draft then counts).
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import json
import logging
import re
import shutil
import sys
import tempfile
import warnings
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from hicachectl.profiles import probe
    from tests.conformance import sglang_env
else:
    import sglang_env

    sys.path.append(str(Path(__file__).parents[2] / "hicachectl" / "profiles"))
    import probe

_MODELS = "sglang.srt.models."

# The families of formats/models/architectures.py, each with the classes of SGLang by which a model
# is known. The name of a model decides before the classes that it is made of, which are read in
# this order; of a draft they can be its target's, so that only its name decides.
FAMILIES = {
    "draft of a refused target": "Dots3NoteForCausalLMNextN",
    "nemotron_h draft": "NemotronHForCausalLMMTP",
    "bailing draft": "BailingMoeForCausalLMNextN",
    "longcat draft": "LongcatFlashForCausalLMNextN",
    "deepseek_v4 dspark": "DeepseekV4ForCausalLMDSpark",
    "deepseek_v4 mtp": "DeepseekV4ForCausalLMNextN",
    "gigachat mtp": "GigaChat35ForCausalLMNextN",
    "glm5_next mtp": "Glm5NextForConditionalGenerationNextN",
    "iquest mtp": "IQuestQ1MTP",
    "inkling mtp": "InklingForConditionalGenerationMTP",
    "mimo_v2 mtp": "MiMoV2MTP",
    "qwen4 mtp": "Qwen4ExpForCausalLMMTP",
    "minimax dspark": "DSparkMiniMaxDraftModel",
    "frozen draft": "Gemma4AssistantForCausalLM Gemma4UnifiedAssistantForCausalLM",
    # Refusals.
    "no cache": "WhisperForConditionalGeneration",
    "mamba": "MambaModel FalconMambaModel MambaForCausalLM",
    "states only": "Mamba2Model",
    "sala": "MiniCPMSALAForCausalLM",
    "dots3": "Dots3NoteForCausalLM",
    "chosen": "TransformersBase MindSporeForCausalLM",
    "diffusion": "DiffusionGemmaModel",
    # SGLang has no pool for the window layers of Step 3.5 while HiCache is on (_step3p_overrides).
    # MiniCPM modules have the classes of several language models.
    "mha": "Step3p5Model MiniCPMForCausalLM MiniCPMV",
    "mha draft of one layer": "Step3p5MTP",
    "nemotron_nas": "DeciModel",
    "hrm_text": "HrmTextModel",
    "looped": "NanbeigeModel IQuestLoopCoderModel",
    "mha_or_mla": "PixtralForConditionalGeneration",
    "glm4_lite": "Glm4MoeLiteModel Glm4MoeLiteForCausalLM",
    "longcat_flash": "LongcatFlashModel LongcatFlashForCausalLM",
    "swa_or_mha": "MuseSpark1xModel",
    "llama4": "Llama4ForConditionalGeneration",
    "only_windows": "UnlimitedOCRForCausalLM",
    "gdn of one token": "InternS2MobiusForConditionalGeneration",
    "qwen4": "Qwen4ExpVLModel",
    "gdn": "Qwen3NextModel Qwen3_5ForCausalLM MiniCPMV4_6ForConditionalGeneration "
    "MiniCPMV4_7ForConditionalGeneration",
    "bailing_delta": "BailingKDA",
    "kimi_linear": "KimiDeltaAttention KimiK3DeltaAttention",
    "bailing_lightning": "BailingMoELinearForCausalLM",
    "falcon_h1": "FalconH1Model",
    "granite_hybrid": "GraniteMoeHybridModel",
    "lfm2": "Lfm2ShortConv Lfm2MoeShortConv",
    "zaya": "ZayaModel",
    "inkling": "InklingCausalLLM",
    "jet": "JetBlock",
    "nemotron_h": "NemotronHModel",
    "gigachat": "GigaChat35Model",
    "deepseek_v4": "DeepseekV4Model",
    "glm5_next": "Glm5NextModel",
    "minimax_sparse": "MiniMaxM3Model",
    "iquest": "IQuestQ1Model",
    "gemma4": "Gemma4Attention",
    "mimo_v2": "MiMoV2Model",
}  # fmt: skip
_DRAFT = re.compile("NextN|MTP|Eagle|DSpark|DFlash|Draft|Assistant")
_OF_TARGET = re.compile("NextN|MTP")
_SCORES = re.compile("Embedding|Classification|Reward|Bidirectional|VisionModel$")
_FIELDS = (
    "head_dim", "num_key_value_heads", "num_attention_groups", "multi_query_group_num",
    "sliding_window", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim",
    "num_nextn_predict_layers", "num_loops",
)  # fmt: skip

# Checkpoints whose config classes are code beside the config, in no wheel: these can give numbers
# of their own to the fields, whatever a config with a class of the wheel has.
_FILLED_BY_CODE = {
    "num_key_value_heads": """
    BailingMoEForCausalLM BailingMoeForCausalLM BailingMoeForCausalLMNextN
    BailingMoeV2ForCausalLM DeepseekForCausalLM DeepseekOCRForCausalLM ExaoneForCausalLM
    ExaoneMoEForCausalLM ExaoneMoEForCausalLMMTP Grok1ForCausalLM InternLM2ForCausalLM
    InternVLChatModel K2HorizonForCausalLM LLaDA2MoeModelLM LlavaLlamaForCausalLM
    LlavaMistralForCausalLM LlavaQwenForCausalLM LlavaVidForCausalLM MiMoForCausalLM MiMoMTP
    MiniCPMForCausalLM OrionForCausalLM POINTSV15ChatModel Phi4MMForCausalLM SDARForCausalLM
    SDARMoeForCausalLM SarvamMoEForCausalLM SolarForCausalLM Spark2_5ForCausalLM
    UnlimitedOCRForCausalLM XllmForCausalLM XverseMoeForCausalLM
    """,
    "head_dim num_key_value_heads": """
    InternS1ProForConditionalGeneration MiniMaxM3SparseForConditionalGeneration
    PixtralForConditionalGeneration
    """,
}
_HEADS, _KV_HEADS = "num_attention_heads", "num_key_value_heads"
_SECTIONS = ("text_config", "llm_config", "language_config", "thinker_config")


def main() -> None:
    """Answer the request that the command line names."""
    parser = argparse.ArgumentParser(description="Describe an SGLang release.")
    parser.add_argument("request", type=Path)
    request = json.loads(parser.parse_args().request.read_text())
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(sys.stderr):
        modules = Modules()
        latent = set(_latent())
        found = {
            "release": metadata.version("sglang"),
            "flags": list(_flags()),
            "read_again": sorted({*_read_again(request.values())}),
            "architectures": {
                name: _facts(name, modules, latent, request.get(name))
                for name in sorted(modules.entries)
            },
        }
    print(json.dumps(found))


def _flags() -> Iterator[tuple[list[str], Any, bool]]:
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    refused = ConfigArgumentMerger(parser).unsupported_actions.values()
    for action in parser._actions:
        yield list(action.option_strings), action.nargs, action not in refused


class Modules:
    """The modules of SGLang's models, also those that this environment cannot import.

    entries: the module of each architecture that SGLang registers.
    """

    def __init__(self) -> None:
        import sglang.srt.models as package

        folder = Path(package.__path__[0])
        self.entries: dict[str, str] = {}
        self._defined: dict[tuple[str, str], ast.AST] = {}
        self._imported: dict[tuple[str, str], tuple[str, str]] = {}
        for path in folder.rglob("*.py"):
            name = _MODELS + ".".join(path.relative_to(folder).with_suffix("").parts)
            self._read(name, ast.parse(path.read_text()))

    def _read(self, module: str, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    self._imported[module, alias.asname or alias.name] = (node.module, alias.name)
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                self._defined[module, node.name] = node
            if isinstance(node, ast.Assign):
                named = {name for target in node.targets for name in _names(target)}
                self._defined |= {(module, name): node.value for name in named}
                if "EntryClass" in named:
                    self.entries |= dict.fromkeys(_names(node.value), module)

    def parts(self, architecture: str) -> set[str]:
        """Return the classes of SGLang's models that a model is made of, and its own."""
        seen: set[tuple[str, str]] = set()
        waiting = [(self.entries[architecture], architecture)]
        while waiting:
            key = waiting.pop()
            key = self._imported.get(key, key)
            if key in self._defined and key not in seen:
                seen.add(key)
                waiting += [(key[0], name) for name in _names(self._defined[key])]
        return {name for _, name in seen}


def _names(node: ast.AST) -> set[str]:
    return {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}


def _facts(
    name: str, modules: Modules, latent: set[str], model: Mapping[str, Any] | None
) -> dict[str, Any]:
    from sglang.srt.configs.model_config import is_deepseek_dsa
    from sglang.srt.models.registry import ModelRegistry
    from transformers import PretrainedConfig

    model_class, sources = probe._model_class(name)
    states = (
        probe._states_its_layers(model_class)
        if model_class
        else bool(probe._STATED_LAYERS.search(sources))
    )
    undivided = "undivided" if probe.takes_stages(name) else ""
    config = PretrainedConfig(architectures=[name], index_topk=1)
    registered = ModelRegistry.models.get(name)
    return {
        "family": _family(name, modules.parts(name), latent, sources, states=states),
        "stages": "divided" if states and undivided else undivided,
        "keeps_quant": registered is None or probe.keeps_quant_config(registered),
        "dsa": is_deepseek_dsa(config),
        "filled": _filled(name, model) if model else [],
        **_draft(name),
    }


def _draft(name: str) -> dict[str, Any]:
    """Return what SGLang makes of an architecture for a draft of the target's checkpoint."""
    from sglang.srt.configs.model_config import ModelConfig
    from transformers import PretrainedConfig

    read = dict.fromkeys(
        (
            "mtp_local_layer_ids",
            "mtp_num_experts",
            "mtp_num_experts_per_tok",
            "num_nextn_predict_layers",
        )
    )
    config = PretrainedConfig(architectures=[name], **read)
    model = SimpleNamespace(
        is_draft_model=True,
        speculative_algorithm="EAGLE",
        hf_config=config,
        hf_text_config=config,
    )
    ModelConfig._config_draft_model(model)
    (draft,) = model.hf_config.architectures
    return {
        "draft": draft if draft != name else "",
        "nextn": model.hf_text_config.num_nextn_predict_layers,
    }


def _family(name: str, parts: set[str], latent: set[str], sources: str, *, states: bool) -> str:
    """Return a model's family. states: whether it tells its runner the layers that it has."""
    from sglang.srt.configs.model_config import is_generation_model, is_hybrid_swa_model

    if not is_generation_model([name]) or _SCORES.search(name):
        return "scores"
    draft = _DRAFT.search(name)
    for known in ({name}, set() if draft else parts):
        for family, classes in FAMILIES.items():
            if known & {*classes.split()}:
                return family
    plain = "mla" if name in latent else "mha"
    if not draft:
        return "swa" if is_hybrid_swa_model([name]) else plain
    form = "mtp" if plain == "mha" and _OF_TARGET.search(name) else "draft"
    if _ONE_LAYER in sources:
        return f"{plain} {form} of one layer"
    stated = states or "DSparkDraftMixin" in parts
    return f"{plain} {form} of all layers" if stated else f"{plain} {form}"


_SAYS_MLA = "self.attention_arch = AttentionArch.MLA"
_ONE_LAYER = "config.num_hidden_layers = 1"


def _latent() -> Iterator[str]:
    """Yield the architectures for which ModelConfig._derive_model_shapes says MLA."""
    from sglang.srt.configs import model_config

    for node in ast.walk(ast.parse(inspect.getsource(model_config))):
        if isinstance(node, ast.If) and _SAYS_MLA in map(ast.unparse, node.body):
            yield from (str(x.value) for x in ast.walk(node.test) if isinstance(x, ast.Constant))


def _filled(name: str, model: Mapping[str, Any]) -> list[str]:
    """Return the fields to which a config's class gives a number that no other field decides."""
    by_code = {
        field
        for fields, names in _FILLED_BY_CODE.items()
        for field in fields.split() * (name in names.split())
    }
    return [x for x in _FIELDS if x in by_code or _is_filled(x, model["config"], model.get("code"))]


def _is_filled(field: str, config: Mapping[str, Any], code: str | None) -> bool:
    if field == _KV_HEADS and config.get("multi_query"):
        return False  # such a model has one, whatever the class says
    for times in (1, 2, 3):
        text = _language_model(_without(field, config, times), code)
        if text is None:
            continue
        value, heads = getattr(text, field, None), getattr(text, _HEADS, None)
        usual = {_KV_HEADS: heads, "head_dim": heads and getattr(text, "hidden_size", 0) // heads}
        if value is None or value != usual.get(field):
            return value is not None
    return False


def _without(field: str, config: Mapping[str, Any], times: int) -> dict[str, Any]:
    """Return a config without a field, and with more attention heads."""
    found = {name: value for name, value in config.items() if name != field}
    for name, value in found.items():
        if name in _SECTIONS and isinstance(value, dict):
            found[name] = _without(field, value, times)
        if name == _HEADS and isinstance(value, int):
            found[name] = times * value
    return found


def _read_again(models: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the model types whose config lacks what its section on the language model states."""
    for model in models:
        sections = {
            name: {**value, "quantization_config": {"quant_method": "fp8"}}
            for name in ("text_config", "llm_config")
            if isinstance(value := model["config"].get(name), dict)
        }
        if sections:
            found = _config({**model["config"], **sections}, model.get("code"))
            if found is not None and getattr(found, "quantization_config", None) is None:
                yield model["config"].get("model_type", "")


def _language_model(config: Mapping[str, Any], code: str | None) -> Any:
    """Return SGLang's config of a language model; None if the class does not take the document."""
    from sglang.srt.utils.hf_transformers_utils import get_hf_text_config

    found = _config(config, code)
    with contextlib.suppress(Exception):
        return None if found is None else get_hf_text_config(found)
    return None


def _config(config: Mapping[str, Any], code: str | None) -> Any:
    """Return SGLang's config of a document; None if the class does not take it."""
    from sglang.srt.utils.hf_transformers_utils import get_config

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        if code:
            shutil.copy(Path(__file__).parent / code, folder)
        with contextlib.suppress(Exception):
            return get_config(folder, trust_remote_code=bool(code))
    return None


if __name__ == "__main__":
    sglang_env.prepare()
    main()
