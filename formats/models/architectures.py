"""The families of models, and why some architectures that SGLang registers have none.

`recorded` says which family an architecture belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
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
    minimax_dspark_layers,
    mla,
    nemotron_nas,
    no_kv,
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
from hicachectl.formats.models.recorded import Architecture, recorded
from hicachectl.formats.releases import NEWEST_SGLANG
from hicachectl.formats.wording import RUN_PROBE, WRITE_PROFILE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hicachectl.formats.models.hf_config import HfConfig


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an architecture has no profile: a clause that follows its name, and what to do."""

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
    """Return the answer to each architecture that SGLang registers."""
    return {name: _answer(row) for name, row in recorded().architectures.items()}


def unverified(*, drafts: bool) -> set[str]:
    """Return the drafts or targets that were compared with SGLang only by a config by hand."""
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
    """Return the refusal of what SGLang itself refuses. words: SGLang's."""
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
        "is what SGLang itself runs other architectures as, and no config.json names it",
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
    """Return the family of a draft. nextn: its target's config must count its layers."""
    stated = (NEXTN,) if nextn else ()
    return Family(build, asks=asks, stated=stated, draft_only=True, draft_layers=layers)


FAMILIES = {
    # K and V rows of all layers. Models such as Gemma 3 have window layers, but SGLang has a pool
    # for those only where is_hybrid_swa_model says so and no override disables it.
    "mha": Family(mha, asks=_MHA),
    "nemotron_nas": Family(nemotron_nas),
    "hrm_text": Family(hrm_text, asks=("head_dim",)),
    "looped": Family(looped, asks=("num_loops",)),
    # Latent rows of all layers, with index keys where the config has index_topk.
    "mla": Family(mla),
    "mha_or_mla": Family(mha_or_mla, asks=_ROWS),
    "glm4_lite": Family(glm4_lite),
    "longcat_flash": Family(longcat_flash),
    # Window layers in a pool of their own.
    "swa": Family(swa, asks=_ROWS),
    "swa_or_mha": Family(swa_or_mha, asks=_ROWS),
    "llama4": Family(llama4, asks=_ROWS),
    "only_windows": Family(only_windows, asks=_HEADS),
    # Recurrent states beside K and V, or beside latent rows.
    "gdn": Family(gdn, asks=_ROWS),
    "gdn of one token": Family(one_token_pages(gdn), asks=_ROWS),
    "kimi_linear": Family(kimi_linear),
    "bailing_delta": Family(bailing_delta, asks=("head_dim",)),
    "bailing_lightning": Family(bailing_lightning, asks=("head_dim",)),
    "falcon_h1": Family(falcon_h1, asks=_HEADS),
    "granite_hybrid": Family(granite_hybrid, asks=_HEADS),
    "lfm2": Family(one_token_pages(lfm2), asks=_HEADS),
    "zaya": Family(one_token_pages(zaya), asks=_ROWS),
    "inkling": Family(inkling, asks=_HEADS),
    "jet": Family(one_token_pages(jet)),
    "nemotron_h": Family(nemotron_h, asks=_HEADS),
    "gigachat": Family(gigachat, asks=_LATENT),
    # Compressed rows, and index keys in pools of their own.
    "deepseek_v4": Family(deepseek_v4, page_size=deepseek_v4_page_size),
    "glm5_next": Family(glm5_next, asks=_LATENT),
    "minimax_sparse": Family(minimax_sparse, asks=_ROWS),
    "qwen4": Family(qwen4, asks=_ROWS, page_size=qwen4_page_size),
    "iquest": Family(iquest, asks=_WINDOWS),
    # Window layers of other heads.
    "gemma4": Family(gemma4, asks=_ROWS),
    "mimo_v2": Family(mimo_v2, asks=(*_ROWS, "v_head_dim")),
    # Drafts: K and V rows, or latent rows, of a NextN or MTP layer of the target's checkpoint.
    "mha mtp": _draft(mha, *_ROWS, nextn=True),
    "mha mtp of one layer": _draft(mha, *_ROWS, nextn=True, layers=one_layer),
    "nemotron_h draft": _draft(nemotron_h_draft, *_HEADS, nextn=True),
    "bailing draft": _draft(mha_or_mla, *_HEADS, nextn=True, layers=bailing_draft_layers),
    "mla draft": _draft(mla, nextn=True),
    "mla draft of all layers": _draft(mla, nextn=True, layers=all_layers),
    # _config_draft_model sets num_hidden_layers to their number.
    "longcat draft": _draft(mla, nextn=True, layers=nextn_layers),
    "deepseek_v4 dspark": _draft(deepseek_v4_dspark, layers=dspark_stages),
    "deepseek_v4 mtp": _draft(mtp_of(deepseek_v4, "swa"), layers=one_layer),
    "gigachat mtp": _draft(mtp_of(gigachat, "kv"), *_LATENT, nextn=True, layers=one_layer),
    "glm5_next mtp": _draft(mtp_of(glm5_next, "kv", "indexer"), layers=one_layer),
    "iquest mtp": _draft(iquest_mtp, *_WINDOWS, layers=one_layer),
    "inkling mtp": _draft(inkling_mtp, *_HEADS, nextn=True, layers=one_layer),
    "mimo_v2 mtp": _draft(mtp_of(mimo_v2, "swa"), layers=one_layer),
    "qwen4 mtp": _draft(mtp_of(qwen4, "kv", "indexer"), *_ROWS, layers=one_layer),
    # Drafts with checkpoints of their own.
    "mha draft": _draft(mha, *_ROWS),
    "mha draft of one layer": _draft(mha, *_MHA, layers=one_layer),
    "mha draft of all layers": _draft(mha, *_ROWS, layers=all_layers),
    "minimax dspark": _draft(minimax_dspark, *_ROWS, layers=minimax_dspark_layers),
    # Drafts that read the target's KV and have none.
    "frozen draft": replace(_draft(no_kv), frozen_kv=True),
}
