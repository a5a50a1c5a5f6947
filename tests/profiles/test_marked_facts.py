"""What `profile STORE` takes from the markers of a store that the plug-in wrote."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING

from msgspec.structs import replace

from tests.served_stores import HYBRID, INDEXED, OTHER_WEIGHTS, WEIGHTS, served_store

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke


def test_markers_state_weights_layout_page_size_and_dtypes(invoke: Invoke, tmp_path: Path) -> None:
    """The profile stays an inferred one: it describes no bytes."""
    profile = replace(HYBRID, layout="page_first_direct")
    served_store(tmp_path, profile, range(2))
    found = invoke("profile", tmp_path)
    stated = tomllib.loads(found.stdout)
    assert stated["inferred"]
    assert (stated["weights"], stated["layout"]) == (WEIGHTS, "page_first_direct")
    assert (stated["page_size"], stated["tp"]) == (16, 2)
    kv, mamba = stated["pools"]
    assert kv["dtype"] == "bfloat16"
    assert "dtype" not in mamba  # of two dtypes
    assert "what the markers state: weights, layout, page_size, dtype of kv" in found.stderr
    path = tmp_path / "inferred.toml"
    path.write_text(found.stdout)
    refused = ("migrate", tmp_path, tmp_path / "x", "--profile", path, "--to-tp", 1)
    assert "--to-tp needs a profile" in invoke(*refused, exit_code=2).stderr


def test_markers_that_differ_state_nothing(invoke: Invoke, tmp_path: Path) -> None:
    """Only what all agree on is stated, and only of the objects that the profile is about."""
    served_store(tmp_path, HYBRID, range(2))
    served_store(tmp_path, replace(HYBRID, weights=OTHER_WEIGHTS), range(2, 3))
    served_store(tmp_path, replace(INDEXED, weights="c" * 32), range(2))
    stated = tomllib.loads(invoke("profile", tmp_path, "--tp", 2).stdout)
    assert "weights" not in stated
    assert stated["page_size"] == 16


def test_a_store_without_markers_states_none_of_it(invoke: Invoke, tmp_path: Path) -> None:
    served_store(tmp_path / "marked", INDEXED, range(2))
    invoke("migrate", tmp_path / "marked", tmp_path / "plain", "--trailers", "drop")
    found = invoke("profile", tmp_path / "plain")
    assert "weights" not in found.stdout
    assert "what the markers state" not in found.stderr
