"""Drafts: every profile with one is what SGLang allocates, and what SGLang refuses is refused."""

from __future__ import annotations

from typing import Any

import pytest

from hicachectl.formats.errors import ProfileError
from hicachectl.formats.models.architectures import architectures
from hicachectl.formats.models.config import profile_from_config
from hicachectl.formats.models.families.base import Family
from hicachectl.formats.models.flags import DeploymentFlags
from hicachectl.formats.models.recorded import recorded
from tests.formats.model_rows import allocated, profile_of, refusal_of, stored
from tests.model_records import DRAFTS, MODELS


def _family(name: str) -> Any:
    return architectures()[name]


_KNOWN = {name for name, x in architectures().items() if isinstance(x, Family) and x.draft_only}
_ONE = {"tp": 1, "pp": 1, "stage": 0}


def test_every_draft_with_kv_was_compared_with_sglang() -> None:
    with_kv = {name for name in _KNOWN if not _family(name).frozen_kv}
    assert with_kv <= {name.split()[1] for name in DRAFTS}


def test_every_target_with_a_draft_of_its_own_was_compared_with_sglang() -> None:
    """Each target whose config SGLang rewrites for a draft, except drafts not known to us."""
    own = {
        (target, row.draft)
        for target, row in recorded().architectures.items()
        if target in MODELS and row.draft in _KNOWN
    }
    assert own <= {tuple(name.split()[:2]) for name in DRAFTS}


@pytest.mark.parametrize("name", sorted(DRAFTS))
def test_profiles_are_what_sglang_allocates(name: str) -> None:
    """Layers, bytes, hit policies and packed layers, on all ranks and stages; and refusals."""
    assert DRAFTS[name]["rows"]
    refused = {(row["tp"], row["pp"]): row for row in DRAFTS[name]["rows"] if "refusal" in row}
    for row in DRAFTS[name]["rows"]:
        refusal = refused.get((row["tp"], row["pp"]))  # of any stage
        words = refusal_of(DRAFTS[name]["rows"], row)
        if row["pp"] > 1 and name.startswith("Qwen4Exp"):
            words = "knows n-gram states only without pipeline parallelism"
        if refusal is None and words:
            with pytest.raises(ProfileError, match=words):
                profile_of(DRAFTS[name], row)
            continue
        if refusal is None:
            assert stored(profile_of(DRAFTS[name], row), row) == allocated(row)
            continue
        flag = refusal["where"] in ("arguments", "stages")
        source = "draft config " if "draft" in DRAFTS[name] else r"config\.json \("
        field = r"(.*\): )?(pp|speculative_algorithm): " if flag else source
        staged = r"|config\.json .*: pp: " if row["pp"] > 1 else ""  # the target's own refusal
        with pytest.raises(ProfileError, match=f"^({field}{staged})"):
            profile_of(DRAFTS[name], row)


@pytest.mark.parametrize(
    "draft", ["Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"]
)
def test_drafts_that_read_the_targets_kv_add_no_pool(draft: str) -> None:
    """SGLang turns EAGLE into FROZEN_KV_MTP for them, and refuses EAGLE3."""
    model = {**MODELS["Gemma4ForConditionalGeneration"], "draft": {"architectures": [draft]}}
    profile = profile_of({**model, "flags": {"speculative_algorithm": "NEXTN"}}, _ONE)
    assert profile.speculative_algorithm == "FROZEN_KV_MTP"
    assert {pool.name for pool in profile.pools} == {"kv", "swa"}
    with pytest.raises(ProfileError, match="architectures: SGLang serves this draft with EAGLE"):
        profile_of({**model, "flags": {"speculative_algorithm": "EAGLE3"}}, _ONE)


def test_the_number_of_mtp_layers_is_asked_for_where_sglang_has_its_own() -> None:
    """deepseek_v3's config class counts one MTP layer if the config states none."""
    model = DRAFTS["DeepseekV3ForCausalLM DeepseekV3ForCausalLMNextN"]
    config = {k: v for k, v in model["config"].items() if k != "num_nextn_predict_layers"}
    with pytest.raises(ProfileError, match="num_nextn_predict_layers: missing"):
        profile_of({**model, "config": config}, _ONE)


_MIMO = "MiMoV2FlashForCausalLM MiMoV2MTP"
_DFLASH = "Qwen3ForCausalLM DFlashDraftModel"
_DSPARK = "DeepseekV4ForCausalLM DeepseekV4ForCausalLMDSpark"
_IQUEST = "IQuestQ1ForCausalLM IQuestQ1MTP"
_LONGCAT = "LongcatFlashForCausalLM LongcatFlashForCausalLMNextN"


@pytest.mark.parametrize(
    ("name", "part", "changes", "words"),
    [
        (_MIMO, "flags", {"speculative_num_steps": 0}, "give --speculative-num-steps"),
        (_DFLASH, "flags", {"kv_cache_dtype": "fp8_e4m3"}, "DFLASH draft, the meaning of fp8_e4m3"),
        (_DSPARK, "config", MODELS["DeepseekV4ForCausalLM"]["config"], "missing; DSPARK needs"),
        (_DSPARK, "config", {"dspark_target_layer_ids": []}, "names no layer"),
        (_IQUEST, "draft", DRAFTS["LlamaForCausalLM LlamaForCausalLMEagle"]["draft"],
         "SGLang serves this target only with IQuestQ1MTP"),
        (_IQUEST, "flags", {"speculative_algorithm": "EAGLE3"}, "does not support EAGLE3 for this"),
        (_IQUEST, "draft", {"num_hidden_layers": 2}, "MTP supports one physical draft layer"),
        (_LONGCAT, "draft", {"num_nextn_predict_layers": 0}, "expected a whole number"),
    ],
)  # fmt: skip
def test_drafts_that_their_targets_do_not_have_are_refused(
    name: str, part: str, changes: dict[str, Any], words: str
) -> None:
    """A draft of the target's own checkpoint has the target's config."""
    model = DRAFTS[name]
    stated = model.get(part, model["config"])
    changed = changes if "architectures" in changes else {**stated, **changes}
    with pytest.raises(ProfileError, match=words):
        profile_of({**model, part: changed}, _ONE)


def test_dspark_reads_its_target_layers_where_sglang_does() -> None:
    """One stage for each layer; a nested list comes before NEXTN (parse_dspark_draft_config)."""
    model = DRAFTS["DeepseekV4ForCausalLM DeepseekV4ForCausalLMDSpark counted"]
    draft = {**model["draft"], "dflash_config": {"target_layer_ids": [1, 2, 3, 4]}}
    profile = profile_of({**model, "draft": draft}, _ONE)
    assert {
        pool.name: pool.packed_draft_layers for pool in profile.pools if pool.name == "swa"
    } == {"swa": 4}


_INKLING = "InklingForConditionalGeneration InklingForConditionalGenerationMTP"


@pytest.mark.parametrize(
    ("fields", "flags", "words"),
    [
        ({}, {"enable_multi_layer_eagle": False}, "; use --enable-multi-layer-eagle"),
        (
            {"mtp_local_layer_ids": [0]},
            {"enable_multi_layer_eagle": False, "speculative_num_steps": 1},
            "a banded MTP head .* requires --enable-multi-layer-eagle",
        ),
        ({}, {"speculative_num_steps": 9}, "9 steps need as many layers, but the draft has 8"),
        ({}, {"speculative_num_steps": 0}, "give --speculative-num-steps"),
        ({"mtp_local_layer_ids": [8]}, {}, "expected different layers from 0 to 7"),
        ({"mtp_local_layer_ids": [1, 1]}, {}, "expected different layers from 0 to 7"),
        (
            {"mtp_local_layer_ids": [0], "mtp_swa_head_dim": 64},
            {},
            "banded MTP head geometry must match the trunk swa geometry",
        ),
        ({"num_nextn_predict_layers": 0}, {}, "draft_model_config: missing; EAGLE needs"),
        ({}, {"speculative_algorithm": "EAGLE3"}, "draft_model_config: missing; EAGLE3 needs"),
    ],
)
def test_a_draft_of_inkling_that_sglang_refuses_is_refused(
    fields: dict[str, Any], flags: dict[str, Any], words: str
) -> None:
    """Source: models/inkling.py, configs/inkling.py and speculative/draft_utils.py."""
    model = _with_fields({"num_nextn_predict_layers": 8, **fields})
    with pytest.raises(ProfileError, match=words):
        profile_of({**model, "flags": {**DRAFTS[_INKLING]["flags"], **flags}}, _ONE)


def test_the_layers_of_inklings_draft_are_asked_for() -> None:
    """InklingModelConfig counts 8 if the config states none."""
    with pytest.raises(ProfileError, match="num_nextn_predict_layers: missing"):
        profile_of({**_with_fields({}), "flags": DRAFTS[_INKLING]["flags"]}, _ONE)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"sconv_kernel_size": 5},
            r"conv: \[\[4, 1024\], .* differs from the target's \[\[3, 1024\],",
        ),
        ({"num_key_value_heads": 4}, "kv_heads: 4 differs from the target's 8"),
    ],
)
def test_states_and_rows_of_inklings_draft_are_as_wide_as_the_targets(
    changes: dict[str, int], words: str
) -> None:
    model = DRAFTS[_INKLING]
    draft = {**model["config"], "text_config": {**model["config"]["text_config"], **changes}}
    with pytest.raises(ProfileError, match=words):
        profile_of({**model, "draft": draft}, _ONE)


def test_inklings_draft_serves_inkling_only() -> None:
    model = {**MODELS["LlamaForCausalLM"], "draft": DRAFTS[_INKLING]["config"]}
    with pytest.raises(ProfileError, match="hicachectl knows this draft only for Inkling"):
        profile_of({**model, "flags": DRAFTS[_INKLING]["flags"]}, _ONE)
    flags = {"speculative_algorithm": "EAGLE3"}
    with pytest.raises(ProfileError, match=r"speculative_algorithm: .* with EAGLE only"):
        profile_of({**model, "flags": flags}, _ONE)


def _with_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return Inkling with fields of its language model."""
    model = MODELS["InklingForConditionalGeneration"]
    text = {**model["config"]["text_config"], **fields}
    return {**model, "config": {**model["config"], "text_config": text}}


@pytest.mark.parametrize("name", ["GptOssForCausalLM LlamaForCausalLMEagle3"])
def test_a_dtype_that_sglang_sets_for_a_target_is_its_drafts_too(name: str) -> None:
    """Source: arg_groups/model_overrides/gpt_oss.py sets --dtype, which both models have."""
    model = {**DRAFTS[name], "draft": {**DRAFTS[name]["draft"], "torch_dtype": "float16"}}
    profile = profile_of(model, _ONE)
    drafts = [pool for pool in profile.pools if pool.name.startswith("draft")]
    assert [pool.dtype for pool in drafts] == ["bfloat16"]


@pytest.mark.parametrize(
    ("release", "pools", "packed"),
    [
        ("0.5.12", {"kv", "indexer"}, 0),
        ("0.5.13", {"kv", "indexer", "draft"}, 0),
        ("0.5.17", {"kv", "indexer", "draft"}, 0),
        ("0.5.18", {"kv", "indexer"}, 1),
    ],
)
def test_mtp_drafts_are_packed_from_0_5_18_on(release: str, pools: set[str], packed: int) -> None:
    """HiCacheDraftMode is new in 0.5.18; before, set_draft_kv_pool registered the draft's KV."""
    document = MODELS["DeepseekV32ForCausalLM"]["config"]
    flags = DeploymentFlags(
        model="m", kv_cache_dtype="bf16", speculative_algorithm="EAGLE", sglang=release
    )
    profile = profile_from_config(document, flags)
    found = {pool.name: pool for pool in profile.pools}
    assert (set(found), found["kv"].packed_draft_layers) == (pools, packed)
    if draft := found.get("draft"):
        assert (draft.kind, draft.layers, draft.row) == ("mla", 1, found["kv"].row)
