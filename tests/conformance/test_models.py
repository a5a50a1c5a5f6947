"""SGLang still allocates and stores for models what tests/data/models.json says."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.model_records import DRAFTS, MODELS, QUANTISED
from tests.speed import some

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conformance.conftest import SglangSession

pytestmark = [pytest.mark.conformance, pytest.mark.xdist_group("probe")]

# Each kind of pool, form of draft and form of quantisation; record_models.py asks about all.
_KINDS = (
    "DeepseekV4ForCausalLM",
    "MiniMaxM3SparseForCausalLM fp8",
    "GptOssForCausalLM v_head_dim",
    "Qwen4ExpForConditionalGeneration",
    "Glm5NextForConditionalGeneration",
    "MiMoV2FlashForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "DeepseekV32ForCausalLM DeepseekV3ForCausalLMNextN",
    "Qwen3ForCausalLM DFlashDraftModel",
    "MistralLarge3ForCausalLM MistralLarge3ForCausalLMEagle refused",
    "InklingForConditionalGeneration InklingForConditionalGenerationMTP windows",
    "ct-kv",
    "section-dropped",
)
# Weekly, forms of these kinds: tests/formats/models compare all records with profiles on each run.
_FORMS = (
    "DeepseekV41ForCausalLM rows v41_new",
    "LlamaForCausalLM v_head_dim",
    "Llama4ForConditionalGeneration",
    "GlmMoeDsaForCausalLM",
    "DeepseekV32ForCausalLM DeepseekV3ForCausalLMNextN sidecar",
    "GptOssForCausalLM GptOssForCausalLM",
    "MiMoV2FlashForCausalLM MiMoV2MTP",
    "Qwen3ForCausalLM DSparkDraftModel inherited",
    "DeepseekV4ForCausalLM DeepseekV4ForCausalLMDSpark",
    "IQuestQ1ForCausalLM IQuestQ1MTP",
    "section-llm",
    "beside-fp8",
)


# TP and PP sizes. The others divide heads and layers in the same way.
_RANKS = some(((1, 1), (2, 1), (4, 1), (1, 2)), (2, 1), (1, 2))


def test_records_are_sglangs(modelling_session: SglangSession, tmp_path: Path) -> None:
    """Rows of all stages, and of ranks of several sizes, are those recorded."""
    request, known = tmp_path / "request.json", {**MODELS, **DRAFTS, **QUANTISED}
    names = some((*_KINDS, *_FORMS), *_KINDS)
    request.write_text(json.dumps({name: {**known[name], "ranks": _RANKS} for name in names}))
    found: dict[str, Any] = modelling_session.run("model_pools", request)
    recorded = {
        name: [row for row in known[name]["rows"] if (row["tp"], row["pp"]) in _RANKS]
        for name in names
    }
    assert all(recorded.values())
    assert {n: rows for n, rows in found.items() if rows != recorded[n]} == {}
