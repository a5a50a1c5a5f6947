"""`profile`: every source, and an inferred profile that does not pretend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hicachectl.formats.profile import parse_profile
from tests.hicachectl.stores import put_pages

if TYPE_CHECKING:
    from tests.conftest import Invoke

CONFIGS = Path(__file__).parent.parent / "data" / "configs"


def test_from_a_config_with_flags(invoke: Invoke) -> None:
    out = invoke(
        "profile", "--model-config", CONFIGS / "qwen3-32b.json", "--served-model-name",
        "Qwen/Qwen3-32B", "--page-size", 64, "--tp", 8,
    ).stdout  # fmt: skip
    profile = parse_profile(out)
    assert (profile.model, profile.tp, profile.page_size) == ("Qwen/Qwen3-32B", 8, 64)
    assert profile.pools[0].kv_heads == 8


def test_json_and_toml_say_the_same(invoke: Invoke, tmp_path: Path) -> None:
    arguments = ["--model-config", CONFIGS / "qwen3-32b.json", "--page-size", 64]
    arguments += ["--served-model-name", "m"]
    invoke("profile", *arguments, "-o", tmp_path / "p.toml")
    invoke("profile", *arguments, "--format", "json", "-o", tmp_path / "p.json")
    toml, as_json = ((tmp_path / name).read_text() for name in ("p.toml", "p.json"))
    assert parse_profile(toml) == parse_profile(as_json)
    assert parse_profile(
        invoke("profile", "--profile", tmp_path / "p.toml").stdout
    ) == parse_profile(toml)


def test_the_store_names_the_model_where_nothing_else_does(invoke: Invoke, tmp_path: Path) -> None:
    put_pages(tmp_path, range(2), "_x-y_0_2", "_x-y_1_2")
    arguments = ["--model-config", CONFIGS / "qwen3-32b.json", "--page-size", 64, "--tp", 2]
    document = json.loads(invoke("ls", tmp_path, *arguments, "--format", "json").stdout)
    assert {row["model"] for row in document["pages"]} == {"x-y"}
    assert "--served-model-name" in invoke("profile", *arguments, exit_code=2).stderr


@pytest.mark.parametrize(
    ("stems", "pools", "tp", "pp"),
    [
        (["_m_0_2", "_m_1_2"], {"kv": False}, 2, 1),
        (["_m", ".indexer_m"], {"kv": True, "indexer": True}, 1, 1),
        (["_m", ".mamba_m_0_2", ".mamba_m_1_2"], {"kv": True, "mamba": False}, 2, 1),
        (["_m_2_0", "_m_2_1"], {"kv": True}, 1, 2),
    ],
)
def test_inferred_profiles_state_what_was_seen(
    invoke: Invoke, tmp_path: Path, stems: list[str], pools: dict[str, bool], tp: int, pp: int
) -> None:
    put_pages(tmp_path, range(4), *stems)
    path = tmp_path.parent / f"{tmp_path.name}.toml"
    invoke("profile", tmp_path, "-o", path)
    profile = parse_profile(path.read_text())
    assert profile.inferred
    assert {pool.name: pool.replicated for pool in profile.pools} == pools
    assert (profile.tp, profile.pp) == (tp, pp)
    document = json.loads(invoke("verify", tmp_path, "--profile", path, "--format", "json").stdout)
    assert document["findings"] == []
    assert document["profile"] == "inferred"
    assert "absent-pools" in document["skipped_checks"]


def test_several_deployments_need_a_choice(invoke: Invoke, tmp_path: Path) -> None:
    put_pages(tmp_path, range(2), "_a", "_b_0_2", "_b_1_2")
    assert "--model" in invoke("profile", tmp_path, exit_code=2).stderr
    assert parse_profile(invoke("profile", tmp_path, "--model", "b").stdout).tp == 2


def test_an_empty_store_shows_no_profile(invoke: Invoke, tmp_path: Path) -> None:
    assert "no pages" in invoke("profile", tmp_path, exit_code=2).stderr


def test_without_any_source_it_says_what_to_give(invoke: Invoke) -> None:
    assert "--model-config" in invoke("profile", exit_code=2).stderr
