"""--kv-cache-dtype auto of a quantised checkpoint is the dtype that SGLang chooses."""

from __future__ import annotations

import pytest

from hicachectl.formats.errors import ProfileError
from hicachectl.formats.models.quantisation import KEEP_NO_QUANTISATION
from tests.formats.model_rows import profile_of
from tests.model_records import QUANTISED, UNQUANTISED


@pytest.mark.parametrize("name", sorted(QUANTISED))
def test_auto_follows_the_kv_quantisation_that_sglang_reads(name: str) -> None:
    """fp8, compressed-tensors and ModelOpt forms, in and beside config.json; else refused."""
    row = QUANTISED[name]["rows"][0]
    if "refusal" in row:
        with pytest.raises(ProfileError, match="quantization_config"):
            profile_of(QUANTISED[name], row)
    else:
        assert profile_of(QUANTISED[name], row).pools[0].dtype == row["dtype"]


def test_models_that_keep_no_quantisation_are_sglangs() -> None:
    """Such a model has the dtype of its weights, even if the checkpoint states fp8 KV."""
    assert set(UNQUANTISED) == KEEP_NO_QUANTISATION
