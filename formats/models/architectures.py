"""The families of models, and the reasons why some architectures of SGLang have no family.

`recorded` says which family an architecture belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from hicachectl.formats.documents import shown
from hicachectl.formats.errors import ProfileError
from hicachectl.formats.models.families import (
    attention,
    compressed,
    convolutions,
    states,
    windows,
)
from hicachectl.formats.models.families.base import (
    NEXTN,
    Family,
    PoolBuilder,
    all_layers,
    mtp_of,
    nextn_layers,
    one_layer,
    one_token_pages,
)
from hicachectl.formats.models.recorded import Architecture, recorded
from hicachectl.formats.releases import NEWEST_SGLANG
from hicachectl.formats.wording import RUN_PROBE, WRITE_PROFILE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hicachectl.formats.models.hf_config import HfConfig


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why an architecture has no profile, and the next step.

    reason: clause that follows the architecture's name.
    """

    reason: str
    next_step: str = "its servers have no store"


def family_of(config: HfConfig) -> Family:
    """Return the family of a config's architecture. Raises ProfileError if it has none."""
    family = architectures().get(config.architecture, _UNKNOWN)
    if isinstance(family, Refusal):
        raise ProfileError(
            f"{config.source}: architectures: {shown(config.architecture)} {family.reason}; "
            f"{family.next_step}"
        )
    return family


@cache
def architectures() -> Mapping[str, Family | Refusal]:
    """Return the family, or the refusal, of each architecture that SGLang registers."""
    return {name: _answer(row) for name, row in recorded().architectures.items()}


def unverified(*, drafts: bool) -> set[str]:
    """Return the models that were compared with SGLang only by a config written by hand.

    drafts: return drafts; otherwise return targets.
    """
    return {
        name
        for name, answer in architectures().items()
        if isinstance(answer, Family)
        if answer.draft_only is drafts
        if recorded().architectures[name].unverified
    }


def _answer(row: Architecture) -> Family | Refusal:
    if row.family in REFUSALS:
        return REFUSALS[row.family]
    family = FAMILIES[row.family]
    asked = tuple(name for name in family.asks if name in row.filled)
    return replace(family, stated=(*asked, *family.stated))


def _refused(words: str) -> Refusal:
    """Return the refusal of an architecture that SGLang itself refuses.

    words: SGLang's own message.
    """
    return Refusal(f"is not supported: SGLang's HiCache refuses it: {words}")


_UNKNOWN = Refusal(f"is not an architecture of SGLang {NEWEST_SGLANG}", RUN_PROBE)
REFUSALS = {
    "draft of a refused target": Refusal(
        "is a draft of Dots3NoteForCausalLM, which SGLang's HiCache refuses"
    ),
    "scores": Refusal(
        "answers with embeddings or scores, and only models that generate have profiles"
    ),
    "no cache": Refusal("is not supported: SGLang disables its radix cache, which HiCache needs"),
    "mamba": _refused("ZeroDivisionError: integer division or modulo by zero"),
    "states only": Refusal(
        "is not supported: it keeps states only, and HiCache finds pages by their KV"
    ),
    "sala": _refused("MiniCPM SALA does not support hierarchical cache"),
    "dots3": _refused("AttributeError: 'MLABufferInfo' object has no attribute 'head_dim'"),
    # model_loader/utils.py :: get_model_architecture
    "chosen": Refusal(
        "is a class by which SGLang runs other architectures, and no config.json names it",
        f"give the model's own config, or {WRITE_PROFILE}",
    ),
    # arg_groups/dllm_hook.py :: handle_dllm_inference
    "diffusion": Refusal("is not supported: SGLang disables HiCache for diffusion language models"),
}

_HEADS = ("num_key_value_heads",)
_ROWS = ("head_dim", "num_key_value_heads")
_MHA = (*_ROWS, "num_attention_groups", "multi_query_group_num")
_LATENT = ("kv_lora_rank", "qk_rope_head_dim")
_WINDOWS = (*_ROWS, "sliding_window")


def _draft(
    build: PoolBuilder,
    *asks: str,
    layers: Callable[[HfConfig], int] | None = None,
    nextn: bool = False,
) -> Family:
    """Return the family of a draft.

    nextn: whether the config must state the number of the draft's layers (NEXTN).
    """
    stated = (NEXTN,) if nextn else ()
    return Family(build, asks=asks, stated=stated, draft_only=True, draft_layers=layers)


FAMILIES = {
    # K and V rows of all layers. Models such as Gemma 3 have window layers. SGLang has a pool for
    # these layers only if is_hybrid_swa_model says so and no override disables it.
    "mha": Family(attention.mha, asks=_MHA),
    "nemotron_nas": Family(attention.nemotron_nas),
    "hrm_text": Family(attention.hrm_text, asks=("head_dim",)),
    "looped": Family(attention.looped, asks=("num_loops",)),
    # Latent rows of all layers, with index keys where the config has index_topk.
    "mla": Family(attention.mla),
    "mha_or_mla": Family(attention.mha_or_mla, asks=_ROWS),
    "glm4_lite": Family(attention.glm4_lite),
    "longcat_flash": Family(attention.longcat_flash),
    # Window layers in a pool of their own.
    "swa": Family(windows.swa, asks=_ROWS),
    "swa_or_mha": Family(windows.swa_or_mha, asks=_ROWS),
    "llama4": Family(windows.llama4, asks=_ROWS),
    "only_windows": Family(windows.only_windows, asks=_HEADS),
    # Recurrent states beside K and V, or beside latent rows.
    "gdn": Family(states.gdn, asks=_ROWS),
    "gdn of one token": Family(one_token_pages(states.gdn), asks=_ROWS),
    "kimi_linear": Family(states.kimi_linear),
    "bailing_delta": Family(states.bailing_delta, asks=("head_dim",)),
    "bailing_lightning": Family(states.bailing_lightning, asks=("head_dim",)),
    "falcon_h1": Family(states.falcon_h1, asks=_HEADS),
    "granite_hybrid": Family(states.granite_hybrid, asks=_HEADS),
    "lfm2": Family(one_token_pages(convolutions.lfm2), asks=_HEADS),
    "zaya": Family(one_token_pages(convolutions.zaya), asks=_ROWS),
    "inkling": Family(convolutions.inkling, asks=_HEADS),
    "jet": Family(one_token_pages(states.jet)),
    "nemotron_h": Family(states.nemotron_h, asks=_HEADS),
    "gigachat": Family(one_token_pages(states.gigachat), asks=_LATENT),
    # Compressed rows, and index keys in pools of their own.
    "deepseek_v4": Family(compressed.deepseek_v4, page_size=compressed.deepseek_v4_page_size),
    "glm5_next": Family(compressed.glm5_next, asks=_LATENT),
    "minimax_sparse": Family(compressed.minimax_sparse, asks=_ROWS),
    "qwen4": Family(compressed.qwen4, asks=_ROWS, page_size=compressed.qwen4_page_size),
    "iquest": Family(windows.iquest, asks=_WINDOWS),
    # Window layers whose heads differ from those of the full layers.
    "gemma4": Family(windows.gemma4, asks=_ROWS),
    "mimo_v2": Family(windows.mimo_v2, asks=(*_ROWS, "v_head_dim")),
    # Drafts: K and V rows, or latent rows, of a NextN or MTP layer of the target's checkpoint.
    "mha mtp": _draft(attention.mha, *_ROWS, nextn=True),
    "mha mtp of one layer": _draft(attention.mha, *_ROWS, nextn=True, layers=one_layer),
    "nemotron_h draft": _draft(states.nemotron_h_draft, *_HEADS, nextn=True),
    "bailing draft": _draft(
        attention.mha_or_mla, *_HEADS, nextn=True, layers=states.bailing_draft_layers
    ),
    "mla draft": _draft(attention.mla, nextn=True),
    "mla draft of all layers": _draft(attention.mla, nextn=True, layers=all_layers),
    # ModelConfig._config_draft_model sets num_hidden_layers to the number of MTP layers.
    "longcat draft": _draft(attention.mla, nextn=True, layers=nextn_layers),
    "deepseek_v4 dspark": _draft(compressed.deepseek_v4_dspark, layers=compressed.dspark_stages),
    "deepseek_v4 mtp": _draft(mtp_of(compressed.deepseek_v4, "swa"), layers=one_layer),
    "gigachat mtp": _draft(mtp_of(states.gigachat, "kv"), *_LATENT, nextn=True, layers=one_layer),
    "glm5_next mtp": _draft(mtp_of(compressed.glm5_next, "kv", "indexer"), layers=one_layer),
    "iquest mtp": _draft(windows.iquest_mtp, *_WINDOWS, layers=one_layer),
    "inkling mtp": _draft(convolutions.inkling_mtp, *_HEADS, nextn=True, layers=one_layer),
    "mimo_v2 mtp": _draft(mtp_of(windows.mimo_v2, "swa"), layers=one_layer),
    "qwen4 mtp": _draft(mtp_of(compressed.qwen4, "kv", "indexer"), *_ROWS, layers=one_layer),
    # Drafts with checkpoints of their own.
    "mha draft": _draft(attention.mha, *_ROWS),
    "mha draft of one layer": _draft(attention.mha, *_MHA, layers=one_layer),
    "mha draft of all layers": _draft(attention.mha, *_ROWS, layers=all_layers),
    "minimax dspark": _draft(
        attention.minimax_dspark, *_ROWS, layers=attention.minimax_dspark_layers
    ),
    # Drafts without KV, which read the target's KV.
    "frozen draft": replace(_draft(attention.no_kv), frozen_kv=True),
}
