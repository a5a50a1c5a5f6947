"""Stores that SGLang itself wrote have no findings with profiles inferred from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.formats.profile import parse_profile
from hicachectl.formats.releases import release_of
from tests.conformance.store_cases import VARIANTS

if TYPE_CHECKING:
    from tests.conftest import Invoke

pytestmark = pytest.mark.conformance

SglangStore = Callable[..., tuple[Path, dict[str, Any]]]

# Cases that an inferred profile cannot describe, with a part of the message.
REFUSED = {
    "pp2": "bytes at pp rank 0",  # the stages have three and two layers
    "cp2": "bytes at cp rank 0",  # of the indexer; kv is padded
    "cp2_without_dp": "several ways",  # the ranks could also be part of a model name
}


@pytest.mark.parametrize(("case", "layout"), [v for v in VARIANTS if v[0] not in REFUSED])
def test_a_store_is_clean_by_its_inferred_profile(
    sglang_store: SglangStore, invoke: Invoke, tmp_path: Path, case: str, layout: str
) -> None:
    store, manifest = sglang_store(case, layout=layout)
    for deployment in manifest["deployments"]:
        written = deployment["profile"]
        path = tmp_path / "inferred.toml"
        invoke("profile", store, "--model", written["model"], "-o", path)
        checks = ["--profile", path, "--checks", "names,groups,sizes", "--grace", "0s"]
        document = invoke("verify", store, *checks, "--format", "json").document
        assert document["findings"] == []
        assert document["objects"] == len(manifest["objects"])
        profile = parse_profile(path.read_text())
        assert profile.pools[0].name == "kv"
        assert {pool.name for pool in profile.pools} == {pool["name"] for pool in written["pools"]}
        names_rank = release_of(profile.sglang).file_state_rank
        assert names_rank == release_of(written["sglang"]).file_state_rank


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_cannot_be_stated_is_refused(
    sglang_store: SglangStore, invoke: Invoke, case: str
) -> None:
    store, _ = sglang_store(case)
    (line,) = invoke("profile", store, exit_code=2).stderr.splitlines()
    assert REFUSED[case] in line
    assert "--model-config" in line
