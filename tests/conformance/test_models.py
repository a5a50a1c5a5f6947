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

pytestmark = pytest.mark.conformance

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


def test_records_are_sglangs(sglang_session: SglangSession, tmp_path: Path) -> None:
    """Rows of all ranks and stages are those recorded."""
    request, known = tmp_path / "request.json", {**MODELS, **DRAFTS, **QUANTISED}
    request.write_text(
        json.dumps({name: known[name] for name in some((*_KINDS, *_FORMS), *_KINDS)})
    )
    found: dict[str, Any] = sglang_session.run("model_pools", request)
    assert {n: rows for n, rows in found.items() if rows != known[n]["rows"]} == {}
