"""Every architecture of SGLang has an answer, and every profile is what SGLang allocates."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hicachectl.formats.errors import ProfileError
from hicachectl.formats.models.architectures import (
    FAMILIES,
    REFUSALS,
    Refusal,
    architectures,
    family_of,
    unverified,
)
from hicachectl.formats.models.families.base import Family
from hicachectl.formats.models.hf_config import open_config
from hicachectl.formats.models.recorded import recorded
from tests.formats.model_rows import allocated, has_ngrams, profile_of, refusal_of, stored
from tests.model_records import DRAFTS, MODELS

_ANSWERS = architectures()
SERVED = sorted(name for name, x in _ANSWERS.items() if isinstance(x, Family) and not x.draft_only)


def test_every_registered_architecture_has_an_answer() -> None:
    """No family is without architectures."""
    assert len(_ANSWERS) == 290
    named = {row.family for row in recorded().architectures.values()}
    assert named == {*FAMILIES, *REFUSALS}


def test_every_served_architecture_was_compared_with_sglang() -> None:
    assert set(SERVED) <= {_architecture(model) for model in MODELS.values()}


def test_configs_written_by_hand_are_marked_as_unverified() -> None:
    published = {_architecture(x) for x in MODELS.values() if "by hand" not in x["origin"]}
    assert set(SERVED) - published == unverified(drafts=False)


def test_drafts_with_configs_written_by_hand_are_marked_as_unverified() -> None:
    """A draft of the target's checkpoint is as good as the target's config."""
    compared, published = set(), set()
    for name, draft in DRAFTS.items():
        target, architecture = name.split()[:2]
        of_target = draft["origin"].startswith("the target's")
        origin = MODELS[target]["origin"] if of_target else draft["origin"]
        compared.add(architecture)
        published |= {architecture} if "by hand" not in origin else set()
    own = {n for n, x in _ANSWERS.items() if isinstance(x, Family) and x.draft_only}
    assert (compared - published) & own == unverified(drafts=True)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_profiles_are_what_sglang_allocates(name: str) -> None:
    """Pools, kinds, layers, bytes, hit policies and states, on all ranks that SGLang was asked.

    What SGLang refuses is refused in its words.
    """
    model = MODELS[name]
    for rank in model["rows"]:
        row = {**model["rows"][0], **rank}
        if words := refusal_of(model["rows"], row):
            with pytest.raises(ProfileError, match=re.escape(words.partition(": ")[2])):
                profile_of(model, row)
            continue
        if row["pp"] > 1 and has_ngrams(model):
            with pytest.raises(
                ProfileError, match="knows n-gram states only without pipeline parallelism"
            ):
                profile_of(model, row)
            continue
        profile = profile_of(model, row)
        assert stored(profile, row) == allocated(row)
        assert profile.pools[0].dtype in (row["dtype"], "")  # a logical pool has none


def _architecture(model: dict[str, Any]) -> str:
    return open_config(model["config"], source="config.json").architecture


@pytest.mark.parametrize(
    "name", sorted(name for name, x in _ANSWERS.items() if isinstance(x, Refusal))
)
def test_other_architectures_are_refused_with_the_reason(name: str) -> None:
    config = open_config({"architectures": [name]}, source="prod.json")
    said = (
        rf"^prod\.json: architectures: '{name}' (is|answers) .*; (its servers|write|give the model)"
    )
    with pytest.raises(ProfileError, match=said):
        family_of(config)


@pytest.mark.parametrize("name", SERVED)
def test_fields_without_which_sglang_uses_numbers_of_its_own_are_asked_for(name: str) -> None:
    """A config that leaves such a field out is refused by the field's name."""
    family, model = _ANSWERS[name], MODELS[name]
    assert isinstance(family, Family)
    for field in family.stated:
        config = _without(model["config"], field)
        with pytest.raises(ProfileError, match=f"{field}: missing"):
            profile_of({**model, "config": config}, model["rows"][0])


@pytest.mark.parametrize(
    ("name", "field", "value", "said"),
    [
        ("Glm5NextForConditionalGeneration", "index_topk", None, "missing"),
        ("Qwen4ExpForConditionalGeneration", "indexer_n_heads", None, "missing"),
        ("FalconH1ForCausalLM", "mamba_intermediate", 2048, "is 2048, but .* are 1024"),
        ("GraniteMoeHybridForCausalLM", "mamba_intermediate_size", 64, "is 64, but .* are 4096"),
        ("DotsVLMForCausalLM", "num_hidden_layers", None, "missing"),
        ("Glm4MoeLiteForCausalLM", "head_dim", 128, "must be qk_rope_head_dim, 64"),
        ("IQuestQ1ForCausalLM", "use_hybrid_layers", False, "is false, so SGLang"),
        ("LlamaForCausalLM", "loop_num", 2, "SGLang multiplies the layers of the pool"),
        ("NanbeigeForCausalLM", "loop_num", 2, "SGLang multiplies the layers of the pool"),
        ("DeepseekV3ForCausalLM", "is_hybrid_swa", True, "SGLang then has a pool of window layers"),
    ],
)
def test_fields_that_change_what_sglang_allocates_are_not_overlooked(
    name: str, field: str, value: object, said: str
) -> None:
    """SGLang allocates other pools for these configs than for the recorded ones."""
    model = MODELS[name]
    config = dict(model["config"])
    nested = next((x for x in ("text_config", "llm_config") if x in config), None)
    changed = {**config.get(nested, config), field: value}
    config = {**config, nested: changed} if nested else changed
    with pytest.raises(ProfileError, match=f"{field}: {said}"):
        profile_of({**model, "config": config}, model["rows"][0])


def test_passes_of_hrm_text_are_asked_for_where_its_layers_are_of_one() -> None:
    """HrmTextConfig fills in passes of its own, and multiplies the layers by them."""
    model = MODELS["HrmTextForCausalLM layers of one pass"]
    for field in ("H_cycles", "L_cycles"):
        config = _without(model["config"], field)
        with pytest.raises(ProfileError, match=f"{field}: missing"):
            profile_of({**model, "config": config}, model["rows"][0])


def test_dots_vlm_has_its_language_model_beside_other_fields() -> None:
    """SGLang's DotsVLMConfig replaces a section `language_config`."""
    model = MODELS["DotsVLMForCausalLM"]
    config = {**model["config"], "language_config": {"num_hidden_layers": 2}}
    row = model["rows"][0]
    assert stored(profile_of({**model, "config": config}, row), row) == allocated(row)


def test_only_dbrx_has_its_heads_in_a_table() -> None:
    """Source: ModelConfig.get_total_num_kv_heads, which asks for the model type."""
    model = MODELS["LlamaForCausalLM"]
    config = {**model["config"], "attn_config": {"kv_n_heads": 1}}
    row = model["rows"][0]
    assert stored(profile_of({**model, "config": config}, row), row) == allocated(row)


def _without(config: dict[str, Any], field: str) -> dict[str, Any]:
    return {
        key: _without(value, field) if isinstance(value, dict) else value
        for key, value in config.items()
        if key != field
    }
