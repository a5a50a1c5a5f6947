"""SGLang still allocates and stores for models what tests/data/models.json says."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.model_records import CLASSES, MODELS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conformance.conftest import SglangSession

pytestmark = pytest.mark.conformance

# One model for each kind of pool; record_models.py asks SGLang about all.
_KINDS = (
    "Llama4ForConditionalGeneration",
    "GlmMoeDsaForCausalLM",
    "KimiLinearForCausalLM",
    "MiMoV2FlashForCausalLM",
    "Qwen3_5ForConditionalGeneration",
)


def test_records_are_sglangs(sglang_session: SglangSession, tmp_path: Path) -> None:
    """Rows of all ranks and stages, and the registered architectures, are those recorded."""
    request = tmp_path / "request.json"
    request.write_text(json.dumps({name: MODELS[name] for name in _KINDS}))
    found: dict[str, Any] = sglang_session.run("model_pools", request)
    assert found["classes"] == CLASSES
    assert {n: rows for n, rows in found["answers"].items() if rows != MODELS[n]["rows"]} == {}
