"""What SGLang does with a model in several pipeline stages.

Source: SGLang srt/model_executor/model_runner.py :: ModelRunner.support_pp (the argument
pp_proxy_tensors of the model's forward) and model_runner_components/layer_setup.py ::
_resolve_pp_layer_range (the attribute start_layer of the model).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicachectl.formats.models.hf_config import HfConfig


def check_stages(config: HfConfig, stages: int) -> None:
    """Raise ProfileError unless each of several stages has the pools of its own layers."""
    if stages == 1:
        return
    if config.architecture == _LOOPED and config.optional_integer("num_loops") > 1:
        raise config.error(
            "pp", "a stage of this model numbers the layers of its later passes beyond the layers "
            "of its pool"
        )  # fmt: skip
    if states_its_layers(config):
        return
    if config.architecture in _UNDIVIDED_POOLS:
        raise config.error(
            "pp", "SGLang gives every stage of this model pools of all layers, most of them "
            "unused; a profile cannot describe that"
        )  # fmt: skip
    words = _REFUSALS.get(config.architecture, _REFUSAL)
    raise config.error("pp", f"SGLang refuses: {words!r}")


def states_its_layers(config: HfConfig) -> bool:
    """Return whether a model of this kind tells its runner the layers that it has."""
    return config.architecture in _DIVIDED


_REFUSAL = "Pipeline Parallel is not compatible with this model."  # ModelRunner

# srt/arg_groups/model_hook.py
_REFUSALS = {
    "InternS2MobiusForConditionalGeneration": "Intern-S2-Mobius does not support: pipeline "
    "parallelism (--pp-size must be 1).",
}

_LOOPED = "NanbeigeForCausalLM"  # nanbeige.py :: NanbeigeModel.forward, logical_id

_DIVIDED = frozenset(
    {
        "ApertusForCausalLM",
        "ArceeForCausalLM",
        "BailingMoEForCausalLM",
        "BailingMoeForCausalLM",
        "BailingMoeV2ForCausalLM",
        "BailingMoeV2_5ForCausalLM",
        "BailingMoeV3ForCausalLM",
        "BeamForCausalLM",
        "Cosmos3EdgeForConditionalGeneration",
        "Cosmos3ForConditionalGeneration",
        "DeepseekV2ForCausalLM",
        "DeepseekV32ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV4ForCausalLM",
        "Exaone4ForCausalLM",
        "ExaoneMoEForCausalLM",
        "ExaoneMoeForCausalLM",
        "Glm4ForCausalLM",
        "Glm4MoeForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "Glm5NextForConditionalGeneration",
        "GlmMoeDsaForCausalLM",
        "GptOssForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "IQuestCoderForCausalLM",
        "InternLM3ForCausalLM",
        "InternS1ProForConditionalGeneration",
        "InternS2PreviewForConditionalGeneration",
        "K2HorizonForCausalLM",
        "KimiK25ForConditionalGeneration",
        "KimiK3ForConditionalGeneration",
        "KimiK3LinearForCausalLM",
        "KimiLinearForCausalLM",
        "LLaDA2MoeModelLM",
        "LagunaForCausalLM",
        "Llama4ForCausalLM",
        "LlamaForCausalLM",
        "MellumForCausalLM",
        "MiMoV2FlashForCausalLM",
        "MiMoV2ForCausalLM",
        "MiniMaxM3SparseForCausalLM",
        "MiniMaxM3SparseForConditionalGeneration",
        "Ministral3ForCausalLM",
        "MistralForCausalLM",
        "MistralLarge3ForCausalLM",
        "MixtralForCausalLM",
        "NanbeigeForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3_5ForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen4ExpForConditionalGeneration",
        "SDARForCausalLM",
        "SDARMoeForCausalLM",
        "SarvamMLAForCausalLM",
        "SarvamMoEForCausalLM",
        "Spark2_5ForCausalLM",
        "Step3p5ForCausalLM",
        "TeleFLMForCausalLM",
        "XllmForCausalLM",
    }
)

# Their forward takes stages, but the model does not tell its runner where its stage starts.
_UNDIVIDED_POOLS = frozenset(
    {
        "BailingMM2NativeForConditionalGeneration",
        "BailingMMNativeForConditionalGeneration",
        "BailingMoeV3VLForConditionalGeneration",
        "DeciLMForCausalLM",
        "DotsVLMForCausalLM",
        "Gemma4ForCausalLM",
        "Gemma4ForConditionalGeneration",
        "GigaChat35ForCausalLM",
        "Glm4vForConditionalGeneration",
        "Glm4vMoeForConditionalGeneration",
        "GlmOcrForConditionalGeneration",
        "LlavaForConditionalGeneration",
        "MiMoV2ASRForCausalLM",
        "MiniMaxM2ForCausalLM",
        "Mistral3ForConditionalGeneration",
        "MossVLForConditionalGeneration",
        "NemotronHForCausalLM",
        "NemotronHPuzzleForCausalLM",
        "OPTForCausalLM",
        "Qwen2_5_VLForConditionalGeneration",
        "SolarForCausalLM",
        "ZayaForCausalLM",
    }
)
