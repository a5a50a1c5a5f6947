"""Which family each architecture that SGLang registers belongs to, or why it has none.

Source: SGLang srt/models, in 0.5.23. The next model of a known kind is one line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicachectl.formats.documents import shown
from hicachectl.formats.errors import ProfileError
from hicachectl.formats.models.families.attention import (
    glm4_lite,
    hrm_text,
    longcat_flash,
    looped,
    mha,
    mha_or_mla,
    minimax_dspark,
    mla,
    nemotron_nas,
    no_kv,
)
from hicachectl.formats.models.families.base import (
    NEXTN,
    Family,
    all_layers,
    mtp_of,
    nextn_layers,
    one_layer,
    one_token_pages,
)
from hicachectl.formats.models.families.compressed import (
    deepseek_v4,
    deepseek_v4_dspark,
    deepseek_v4_page_size,
    dspark_stages,
    glm5_next,
    minimax_sparse,
    qwen4,
    qwen4_page_size,
)
from hicachectl.formats.models.families.convolutions import inkling, inkling_mtp, lfm2, zaya
from hicachectl.formats.models.families.states import (
    bailing_delta,
    bailing_draft_layers,
    bailing_lightning,
    falcon_h1,
    gdn,
    gigachat,
    granite_hybrid,
    jet,
    kimi_linear,
    nemotron_h,
    nemotron_h_draft,
)
from hicachectl.formats.models.families.windows import (
    gemma4,
    iquest,
    iquest_mtp,
    llama4,
    mimo_v2,
    only_windows,
    swa,
    swa_or_mha,
)
from hicachectl.formats.releases import NEWEST_SGLANG
from hicachectl.formats.wording import RUN_PROBE, WRITE_PROFILE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicachectl.formats.models.hf_config import HfConfig


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an architecture has no profile: a clause that follows its name, and what to do."""

    reason: str
    next_step: str = "its servers have no store"


def family_of(config: HfConfig) -> Family:
    """Return the family of a config's architecture. Raises ProfileError if it has none."""
    family = ARCHITECTURES.get(config.architecture, _UNKNOWN)
    if isinstance(family, Refusal):
        raise ProfileError(
            f"{config.source}: architectures: {shown(config.architecture)} {family.reason}; "
            f"{family.next_step}"
        )
    return family


def _each(answer: Family | Refusal, *names: str) -> dict[str, Family | Refusal]:
    return dict.fromkeys(names, answer)


_UNKNOWN = Refusal(f"is not an architecture of SGLang {NEWEST_SGLANG}", RUN_PROBE)
# model_loader/utils.py :: get_model_architecture
_CHOSEN = Refusal(
    "is what SGLang itself runs other architectures as, and no config.json names it",
    f"give the model's own config, or {WRITE_PROFILE}",
)
# arg_groups/dllm_hook.py :: handle_dllm_inference
_DIFFUSION = Refusal("is not supported: SGLang disables HiCache for diffusion language models")
_NO_CACHE = Refusal("is not supported: SGLang disables its radix cache, which HiCache needs")
_NO_KV = Refusal("is not supported: it keeps states only, and HiCache finds pages by their KV")
_SCORES = Refusal("answers with embeddings or scores, and only models that generate have profiles")


def _refused(words: str) -> Refusal:
    """Return the refusal of what SGLang itself refuses. words: SGLang's."""
    return Refusal(f"is not supported: SGLang's HiCache refuses it: {words}")


# Fields that SGLang's config classes fill with numbers of their own.
_HEADS = ("num_key_value_heads",)
_ROWS = ("head_dim", "num_key_value_heads")

ARCHITECTURES: Mapping[str, Family | Refusal] = {
    # K and V rows of all layers. Models such as Gemma 3 have window layers, but SGLang has a pool
    # for those only where is_hybrid_swa_model says so and no override disables it.
    **_each(
        Family(mha),
        "AfmoeForCausalLM",
        "ApertusForCausalLM",
        "ArceeForCausalLM",
        "BaichuanForCausalLM",
        "Cohere2ForCausalLM",
        "Cohere2VisionForConditionalGeneration",
        "CohereForCausalLM",
        "DbrxForCausalLM",
        "GPT2LMHeadModel",
        "GPTBigCodeForCausalLM",
        "GPTJForCausalLM",
        "GraniteForCausalLM",
        "GraniteMoeForCausalLM",
        "GraniteMoeSharedForCausalLM",
        "HunYuanDenseV1ForCausalLM",
        "HunYuanMoEV1ForCausalLM",
        "IQuestCoderForCausalLM",
        "InternLM3ForCausalLM",
        "LlamaForCausalLM",
        "LlavaForConditionalGeneration",
        "MultiModalityCausalLM",
        "OPTForCausalLM",
        "Olmo2ForCausalLM",
        "OlmoForCausalLM",
        "OlmoeForCausalLM",
        "PersimmonForCausalLM",
        "Phi3ForCausalLM",
        "Phi3SmallForCausalLM",
        "PhiForCausalLM",
        "QWenLMHeadModel",
        "TeleFLMForCausalLM",
        "TorchNativeLlamaForCausalLM",
        "TorchNativePhi3ForCausalLM",
        "XverseForCausalLM",
        "YiVLForCausalLM",
    ),
    **_each(
        Family(mha, stated=("head_dim",)),
        "Cohere2MoeForCausalLM",
    ),
    **_each(
        Family(mha, stated=("head_dim", "num_attention_groups")),
        "Step3VLForConditionalGeneration",
        "StepVLForConditionalGeneration",
    ),
    **_each(
        Family(mha, stated=_ROWS),
        "InternS1ProForConditionalGeneration",
        "LightOnOCRForConditionalGeneration",
        "Cosmos3EdgeForConditionalGeneration",
        "Cosmos3ForConditionalGeneration",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration",
        "Gemma3nForCausalLM",
        "Gemma3nForConditionalGeneration",
        "GemmaForCausalLM",
        "Glm4ForCausalLM",
        "HYV3ForCausalLM",
        "Llama4ForCausalLM",
        "MiniMaxM2ForCausalLM",
        "Ministral3ForCausalLM",
        "PaddleOCRVLForConditionalGeneration",
        "Qwen3ASRForConditionalGeneration",
        "Qwen3ForCausalLM",
        "Qwen3VLForConditionalGeneration",
        "VoxtralForConditionalGeneration",
    ),
    "ChatGLMModel": Family(mha, stated=("multi_query_group_num",)),
    **_each(
        Family(mha, stated=_HEADS),
        "BailingMM2NativeForConditionalGeneration",
        "BailingMMNativeForConditionalGeneration",
        "DeepseekOCRForCausalLM",
        "GlmImageForConditionalGeneration",
        "LlavaLlamaForCausalLM",
        "LlavaMistralForCausalLM",
        "LlavaQwenForCausalLM",
        "LlavaVidForCausalLM",
        "LocateAnythingForConditionalGeneration",
        "MiDashengLMModel",
        "MiMoV2ASRForCausalLM",
        "MiniCPMO",
        "MiniCPMV",
        "MossVLForConditionalGeneration",
        "NVILAForConditionalGeneration",
        "NVILALiteForConditionalGeneration",
        "POINTSV15ChatModel",
        "Sarashina2VisionForCausalLM",
        "BailingMoEForCausalLM",
        "BailingMoeForCausalLM",
        "BailingMoeV2ForCausalLM",
        "DeepseekForCausalLM",
        "DotsOCRForCausalLM",
        "Ernie4_5_ForCausalLM",
        "Ernie4_5_MoeForCausalLM",
        "Ernie4_5_VLMoeForConditionalGeneration",
        "Exaone4ForCausalLM",
        "ExaoneForCausalLM",
        "ExaoneMoEForCausalLM",
        "ExaoneMoeForCausalLM",
        "Glm4MoeForCausalLM",
        "Glm4vForConditionalGeneration",
        "Glm4vMoeForConditionalGeneration",
        "GlmAsrForConditionalGeneration",
        "GlmOcrForConditionalGeneration",
        "Grok1ForCausalLM",
        "Grok1ModelForCausalLM",
        "InternLM2ForCausalLM",
        "InternVLChatModel",
        "K2HorizonForCausalLM",
        "LLaDA2MoeModelLM",
        "MiMoForCausalLM",
        "MiniCPMForCausalLM",
        "Mistral3ForConditionalGeneration",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "MllamaForConditionalGeneration",
        "OrionForCausalLM",
        "Phi4MMForCausalLM",
        "PhiMoEForCausalLM",
        "QuantMixtralForCausalLM",
        "Qwen2AudioForConditionalGeneration",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3MoeForCausalLM",
        "Qwen3OmniMoeForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "SDARForCausalLM",
        "SDARMoeForCausalLM",
        "SarvamMoEForCausalLM",
        "SolarForCausalLM",
        "Spark2_5ForCausalLM",
        "StableLmForCausalLM",
        "Starcoder2ForCausalLM",
        "XllmForCausalLM",
        "XverseMoeForCausalLM",
    ),
    "DeciLMForCausalLM": Family(nemotron_nas),
    "HrmTextForCausalLM": Family(hrm_text, stated=("head_dim",)),
    "NanbeigeForCausalLM": Family(looped, stated=("num_loops",)),
    "IQuestLoopCoderForCausalLM": Family(looped),
    "InternS1ForConditionalGeneration": Family(mha, stated=_ROWS),
    # SGLang has no pool for its window layers while HiCache is on (_step3p_overrides).
    **_each(
        Family(mha, stated=("head_dim", "num_attention_groups")),
        "Step3p5ForCausalLM",
        "Step3p7ForConditionalGeneration",
    ),
    # Latent rows of all layers, with index keys where the config has index_topk.
    **_each(
        Family(mla),
        "DeepseekV2ForCausalLM",
        "DeepseekV32ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekVL2ForCausalLM",
        "DotsVLMForCausalLM",
        "GlmMoeDsaForCausalLM",
        "HYV4ForCausalLM",
        "KimiK25ForConditionalGeneration",
        "KimiVLForConditionalGeneration",
        "MiniCPM3ForCausalLM",
        "MistralLarge3ForCausalLM",
        "SarvamMLAForCausalLM",
    ),
    "PixtralForConditionalGeneration": Family(mha_or_mla, stated=_ROWS),
    "Glm4MoeLiteForCausalLM": Family(glm4_lite),
    "LongcatFlashForCausalLM": Family(longcat_flash),
    # Window layers in a pool of their own.
    "GraniteMoeSWAForCausalLM": Family(swa),
    **_each(
        Family(swa, stated=_ROWS),
        "BeamForCausalLM",
        "GptOssForCausalLM",
        "LagunaForCausalLM",
        "MellumForCausalLM",
    ),
    "GraniteSWAForCausalLM": Family(swa, stated=_HEADS),
    "MuseGlimmerForCausalLM": Family(swa, stated=_ROWS),
    "MuseGlimmerForConditionalGeneration": Family(swa, stated=_ROWS),
    "MuseSparkForConditionalGeneration": Family(swa_or_mha, stated=_ROWS),
    "Llama4ForConditionalGeneration": Family(llama4, stated=_ROWS),
    "UnlimitedOCRForCausalLM": Family(only_windows, stated=_HEADS),
    # Recurrent states beside K and V, or beside latent rows.
    **_each(
        Family(gdn, stated=_ROWS),
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
    ),
    "InternS2PreviewForConditionalGeneration": Family(gdn, stated=_ROWS),
    "InternS2MobiusForConditionalGeneration": Family(one_token_pages(gdn), stated=_ROWS),
    "MiniCPMV4_6ForConditionalGeneration": Family(gdn, stated=_ROWS),
    "MiniCPMV4_7ForConditionalGeneration": Family(gdn, stated=_ROWS),
    "KimiK3ForConditionalGeneration": Family(kimi_linear),
    "KimiK3LinearForCausalLM": Family(kimi_linear),
    "KimiLinearForCausalLM": Family(kimi_linear),
    "BailingMoeV3ForCausalLM": Family(bailing_delta, stated=("head_dim",)),
    "BailingMoeV3VLForConditionalGeneration": Family(bailing_delta, stated=("head_dim",)),
    "FalconH1ForCausalLM": Family(falcon_h1, stated=_HEADS),
    "GraniteMoeHybridForCausalLM": Family(granite_hybrid, stated=_HEADS),
    **_each(
        Family(one_token_pages(lfm2), stated=_HEADS),
        "Lfm2ForCausalLM",
        "Lfm2MoeForCausalLM",
        "Lfm2VlForConditionalGeneration",
    ),
    "ZayaForCausalLM": Family(one_token_pages(zaya), stated=_ROWS),
    "InklingForConditionalGeneration": Family(inkling, stated=_HEADS),
    "JetNemotronForCausalLM": Family(one_token_pages(jet)),
    "JetVLMForConditionalGeneration": Family(one_token_pages(jet)),
    **_each(
        Family(nemotron_h, stated=_HEADS),
        "NemotronHForCausalLM",
        "NemotronHPuzzleForCausalLM",
        "NemotronH_Nano_Omni_Reasoning_V3",
        "NemotronH_Nano_VL_V2",
        "NemotronH_Omni_Reasoning_V3",
    ),
    "BailingMoeV2_5ForCausalLM": Family(bailing_lightning, stated=("head_dim",)),
    "GigaChat35ForCausalLM": Family(gigachat, stated=("kv_lora_rank", "qk_rope_head_dim")),
    # Compressed rows, and index keys in pools of their own.
    "DeepseekV4ForCausalLM": Family(deepseek_v4, page_size=deepseek_v4_page_size),
    "Glm5NextForConditionalGeneration": Family(
        glm5_next, stated=("kv_lora_rank", "qk_rope_head_dim")
    ),
    "MiniMaxM3SparseForCausalLM": Family(minimax_sparse, stated=_ROWS),
    "MiniMaxM3SparseForConditionalGeneration": Family(minimax_sparse, stated=_ROWS),
    "Qwen4ExpForConditionalGeneration": Family(qwen4, stated=_ROWS, page_size=qwen4_page_size),
    "IQuestQ1ForCausalLM": Family(iquest, stated=(*_ROWS, "sliding_window")),
    # Window layers of other heads.
    "Gemma4ForCausalLM": Family(gemma4, stated=_ROWS),
    "Gemma4ForConditionalGeneration": Family(gemma4, stated=_ROWS),
    "Gemma4UnifiedForConditionalGeneration": Family(gemma4, stated=_ROWS),
    **_each(
        Family(mimo_v2, stated=(*_ROWS, "v_head_dim")),
        "MiMoV2FlashForCausalLM",
        "MiMoV2ForCausalLM",
    ),
    # Drafts: K and V rows, or latent rows, of a NextN or MTP layer of the target's checkpoint.
    **_each(
        Family(mha, stated=(*_HEADS, NEXTN), draft_only=True),
        "Ernie4_5_MoeForCausalLMMTP",
        "ExaoneMoEForCausalLMMTP",
        "Glm4MoeForCausalLMNextN",
        "GlmOcrForConditionalGenerationNextN",
        "MiMoMTP",
        "Qwen3MoeForCausalLMMTP",
    ),
    **_each(
        Family(mha, stated=(*_ROWS, NEXTN), draft_only=True, draft_layers=one_layer),
        "Qwen3NextForCausalLMMTP",
        "Qwen3_5ForCausalLMMTP",
    ),
    **_each(
        Family(mha, stated=(*_ROWS, NEXTN), draft_only=True),
        "HYV3ForCausalLMNextN",
    ),
    "NemotronHForCausalLMMTP": Family(nemotron_h_draft, stated=(*_HEADS, NEXTN), draft_only=True),
    "BailingMoeForCausalLMNextN": Family(
        mha_or_mla,
        stated=(*_HEADS, NEXTN),
        draft_only=True,
        draft_layers=bailing_draft_layers,
    ),
    **_each(
        Family(mla, stated=(NEXTN,), draft_only=True),
        "DeepseekV3ForCausalLMNextN",
        "Eagle3DeepseekV2ForCausalLM",
        "Glm4MoeLiteForCausalLMNextN",
        "GlmMoeDsaForCausalLMNextN",
        "HYV4ForCausalLMNextN",
    ),
    # _config_draft_model sets num_hidden_layers to their number.
    "LongcatFlashForCausalLMNextN": Family(
        mla, stated=(NEXTN,), draft_only=True, draft_layers=nextn_layers
    ),
    "MistralLarge3ForCausalLMEagle": Family(
        mla, stated=(NEXTN,), draft_only=True, draft_layers=all_layers
    ),
    "DeepseekV4ForCausalLMDSpark": Family(
        deepseek_v4_dspark, draft_only=True, draft_layers=dspark_stages
    ),
    "DeepseekV4ForCausalLMNextN": Family(
        mtp_of(deepseek_v4, "swa"), draft_only=True, draft_layers=one_layer
    ),
    "GigaChat35ForCausalLMNextN": Family(
        mtp_of(gigachat, "kv"),
        stated=("kv_lora_rank", "qk_rope_head_dim", NEXTN),
        draft_only=True,
        draft_layers=one_layer,
    ),
    "Glm5NextForConditionalGenerationNextN": Family(
        mtp_of(glm5_next, "kv", "indexer"), draft_only=True, draft_layers=one_layer
    ),
    "IQuestQ1MTP": Family(
        iquest_mtp, stated=(*_ROWS, "sliding_window"), draft_only=True, draft_layers=one_layer
    ),
    "InklingForConditionalGenerationMTP": Family(
        inkling_mtp, stated=(*_HEADS, NEXTN), draft_only=True, draft_layers=one_layer
    ),
    "MiMoV2MTP": Family(mtp_of(mimo_v2, "swa"), draft_only=True, draft_layers=one_layer),
    "Qwen4ExpForCausalLMMTP": Family(
        mtp_of(qwen4, "kv", "indexer"), stated=_ROWS, draft_only=True, draft_layers=one_layer
    ),
    "Step3p5MTP": Family(
        mha, stated=("head_dim", "num_attention_groups"), draft_only=True, draft_layers=one_layer
    ),
    # Drafts with checkpoints of their own.
    **_each(
        Family(mha, draft_only=True),
        "LlamaForCausalLMEagle",
        "LlamaForCausalLMEagle3",
    ),
    "Qwen2ForCausalLMEagle": Family(mha, stated=_HEADS, draft_only=True),
    "MistralForCausalLMEagle": Family(mha, stated=_HEADS, draft_only=True, draft_layers=all_layers),
    **_each(
        Family(mha, stated=_ROWS, draft_only=True),
        "DFlash2BeamDraftModel",
        "DFlash2DraftModel",
        "DFlashDraftModel",
        "DFlashLagunaForCausalLM",
        "LiLiCorrDraftModel",
        "MiniMaxDFlash2DraftModel",
        "MuseGlimmerAssistantModel",
    ),
    **_each(
        Family(mha, stated=_ROWS, draft_only=True, draft_layers=all_layers),
        "DSparkDraftModel",
        "Lfm2DSparkDraftModel",
        "LingDSparkModel",
        "Qwen3DSparkModel",
    ),
    "DSparkMiniMaxDraftModel": Family(minimax_dspark, stated=_ROWS, draft_only=True),
    # Drafts that read the target's KV and have none.
    **_each(
        Family(no_kv, draft_only=True, frozen_kv=True),
        "Gemma4AssistantForCausalLM",
        "Gemma4UnifiedAssistantForCausalLM",
    ),
    "Dots3NoteForCausalLMNextN": Refusal(
        "is a draft of Dots3NoteForCausalLM, which SGLang's HiCache refuses"
    ),
    **_each(
        _SCORES,
        "BertForSequenceClassification",
        "BertModel",
        "CLIPModel",
        "Contriever",
        "EmbeddingGemma2Model",
        "EmbeddingGemmaModel",
        "Gemma2ForSequenceClassification",
        "InternLM2ForRewardModel",
        "Lfm2BidirectionalModel",
        "LlamaEmbeddingModel",
        "LlamaForClassification",
        "LlamaForSequenceClassification",
        "LlamaForSequenceClassificationWithNormal_Weights",
        "MistralModel",
        "NanbeigeForSequenceClassification",
        "PixtralVisionModel",
        "Qwen2ForRewardModel",
        "Qwen2ForSequenceClassification",
        "Qwen3ForRewardModel",
        "Qwen3ForSequenceClassification",
        "Qwen3Model",
        "TransformersEmbeddingModel",
        "TransformersForSequenceClassification",
        "TransformersMoEEmbeddingModel",
        "TransformersMoEForSequenceClassification",
        "TransformersMultiModalEmbeddingModel",
        "TransformersMultiModalForSequenceClassification",
        "TransformersMultiModalMoEEmbeddingModel",
        "TransformersMultiModalMoEForSequenceClassification",
        "XLMRobertaForSequenceClassification",
        "XLMRobertaModel",
    ),
    "WhisperForConditionalGeneration": _NO_CACHE,
    **_each(
        _refused("ZeroDivisionError: integer division or modulo by zero"),
        "FalconMambaForCausalLM",
        "MambaForCausalLM",
    ),
    "Mamba2ForCausalLM": _NO_KV,
    "MiniCPMSALAForCausalLM": _refused("MiniCPM SALA does not support hierarchical cache"),
    "Dots3NoteForCausalLM": _refused(
        "AttributeError: 'MLABufferInfo' object has no attribute 'head_dim'"
    ),
    **_each(
        _CHOSEN,
        "MindSporeForCausalLM",
        *(f"Transformers{x}ForCausalLM" for x in ("", "MoE", "MultiModal", "MultiModalMoE")),
    ),
    "DiffusionGemmaForBlockDiffusion": _DIFFUSION,
}

# Compared with SGLang only by a config written by hand: no published one was at hand.
UNVERIFIED = frozenset(
    {
        "BailingMM2NativeForConditionalGeneration",
        "BailingMMNativeForConditionalGeneration",
        "BailingMoEForCausalLM",
        "BailingMoeV3VLForConditionalGeneration",
        "ExaoneMoEForCausalLM",
        "Glm5NextForConditionalGeneration",
        "Grok1ForCausalLM",
        "InklingForConditionalGeneration",
        "InternS1ForConditionalGeneration",
        "JetVLMForConditionalGeneration",
        "K2HorizonForCausalLM",
        "KimiK3LinearForCausalLM",
        "LlavaMistralForCausalLM",
        "LlavaQwenForCausalLM",
        "LlavaVidForCausalLM",
        "MiDashengLMModel",
        "MiMoV2ASRForCausalLM",
        "MiniCPMO",
        "MistralLarge3ForCausalLM",
        "MossVLForConditionalGeneration",
        "NVILAForConditionalGeneration",
        "NVILALiteForConditionalGeneration",
        "NemotronHPuzzleForCausalLM",
        "NemotronH_Nano_Omni_Reasoning_V3",
        "NemotronH_Nano_VL_V2",
        "NemotronH_Omni_Reasoning_V3",
        "POINTSV15ChatModel",
        "PixtralForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
        "Qwen4ExpForConditionalGeneration",
        "SDARMoeForCausalLM",
        "Sarashina2VisionForCausalLM",
        "Spark2_5ForCausalLM",
        "UnlimitedOCRForCausalLM",
        "XllmForCausalLM",
        "XverseMoeForCausalLM",
    }
)

# Drafts that were compared only with such a config, of their own or of their target.
UNVERIFIED_DRAFTS = frozenset(
    {
        "DFlash2BeamDraftModel",
        "DFlashLagunaForCausalLM",
        "DSparkMiniMaxDraftModel",
        "Eagle3DeepseekV2ForCausalLM",
        "Glm5NextForConditionalGenerationNextN",
        "InklingForConditionalGenerationMTP",
        "Lfm2DSparkDraftModel",
        "LiLiCorrDraftModel",
        "LingDSparkModel",
        "MiniMaxDFlash2DraftModel",
        "MistralForCausalLMEagle",
        "MistralLarge3ForCausalLMEagle",
        "MuseGlimmerAssistantModel",
        "NemotronHForCausalLMMTP",
        "Qwen2ForCausalLMEagle",
        "Qwen3DSparkModel",
        "Qwen4ExpForCausalLMMTP",
    }
)
