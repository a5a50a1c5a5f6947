"""--kv-cache-dtype auto of a quantised checkpoint is the dtype that SGLang chooses."""

from __future__ import annotations

import pytest

from hicachectl.formats.errors import ProfileError
from hicachectl.formats.models.dtypes import has_fp8_kv
from hicachectl.formats.models.hf_config import open_config
from tests.formats.model_rows import profile_of
from tests.model_records import QUANTISED


@pytest.mark.parametrize("name", sorted(QUANTISED))
def test_auto_follows_the_kv_quantisation_that_sglang_reads(name: str) -> None:
    """fp8, compressed-tensors and ModelOpt forms, in and beside config.json; else refused."""
    row = QUANTISED[name]["rows"][0]
    if "refusal" in row:
        with pytest.raises(ProfileError, match="quantization_config"):
            profile_of(QUANTISED[name], row)
    else:
        assert profile_of(QUANTISED[name], row).pools[0].dtype == row["dtype"]


@pytest.mark.parametrize(
    ("architecture", "keeps"), [("LlamaForCausalLM", True), ("Starcoder2ForCausalLM", False)]
)
def test_models_that_keep_no_quantisation_have_the_dtype_of_their_weights(
    architecture: str, *, keeps: bool
) -> None:
    section = {"quant_method": "fp8", "kv_cache_quant_algo": "FP8"}
    document = {"architectures": [architecture], "quantization_config": section}
    assert has_fp8_kv(open_config(document, source="config.json")) is keeps
