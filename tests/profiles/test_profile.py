"""`profile`: every source, and inferred profiles that state only what was seen."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hicachectl.formats.profile import Profile, dump_profile, parse_profile
from hicachectl.formats.releases import NEWEST_SGLANG, release_of
from tests.stores import page, put, put_pages

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


def test_the_release_decides_what_was_written(invoke: Invoke, tmp_path: Path) -> None:
    arguments = ["--model-config", CONFIGS / "qwen3-32b.json", "--served-model-name", "m"]
    arguments += ["--page-size", 64]
    newest = parse_profile(invoke("profile", *arguments).stdout)
    old = parse_profile(invoke("profile", *arguments, "--sglang", "0.5.7").stdout)
    assert (newest.sglang, newest.layout) == (NEWEST_SGLANG, "page_first")
    assert (old.sglang, old.layout) == ("0.5.7", "layer_first")
    assert release_of(newest.sglang).mooncake_model
    assert not release_of(old.sglang).mooncake_model
    (tmp_path / "m.toml").write_text(dump_profile(newest))
    for wrong in (
        [*arguments, "--sglang", "newest"],
        ["--profile", tmp_path / "m.toml", "--sglang", "0.5.7"],
        [tmp_path, "--sglang", "0.5.7"],
    ):
        assert "sglang" in invoke("profile", *wrong, exit_code=2).stderr


def test_a_store_of_an_old_release_is_refused_what_its_keys_cannot_tell(
    invoke: Invoke, tmp_path: Path
) -> None:
    arguments = ["--model-config", CONFIGS / "qwen3-32b.json", "--served-model-name", "m"]
    arguments += ["--page-size", 64, "--pp", 2]
    invoke("verify", tmp_path, *arguments, "--allow-empty")
    said = invoke("verify", tmp_path, *arguments, "--sglang", "0.5.9", exit_code=2).stderr
    assert "SGLang before 0.5.10" in said


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
    document = invoke("ls", tmp_path, *arguments, "--format", "json").document
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
    said = invoke("profile", tmp_path, "-o", path).stderr
    assert f"file://{tmp_path}: the profile is inferred from the objects" in said
    profile = parse_profile(path.read_text())
    assert profile.inferred
    assert {pool.name: pool.replicated for pool in profile.pools} == pools
    assert (profile.tp, profile.pp) == (tp, pp)
    document = invoke("verify", tmp_path, "--profile", path, "--format", "json").document
    assert document["findings"] == []
    assert document["profile"] == "inferred"
    assert "absent-pools" in document["skipped_checks"]


TP2 = ["_m_0_2", "_m_1_2"]
STAGES = ["_m_2_0", "_m_2_1"]  # of PP 2, without TP ranks
DCP = [f"_m_tp4_dcp{rank}_2_page64" for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "stems",
    [
        ["_m"],
        ["_m_0_1"],
        TP2,
        [*TP2, ".swa_m_0_2", ".swa_m_1_2"],
        [*TP2, ".draft_m_0_2", ".draft_m_1_2"],
        [*TP2, ".mamba_m_0_2", ".mamba_m_1_2"],
        ["_m", ".indexer_m"],
        ["_m", ".mamba_m"],
        ["_m", ".mamba_m_0_1"],
        ["_m", ".mamba_m_0_2", ".mamba_m_1_2"],
        ["_m", ".draft_m", ".draft_indexer_m"],
        ["_m_2_0", "_m_2_1"],
        ["_m_2_0", "_m_2_1", ".draft_m_2_1"],
        [f"_m_{tp}_2_2_{pp}" for tp in range(2) for pp in range(2)],
        ["_m_cp0_2", "_m_cp1_2", ".indexer_m_cp0_2", ".indexer_m_cp1_2"],
        DCP,
        [*DCP, *(f".mamba_m_{tp}_4_tp4_dcp{tp % 2}_2_page64" for tp in range(4))],
    ],
    ids=" ".join,
)
def test_a_store_is_clean_by_its_own_profile(
    invoke: Invoke, tmp_path: Path, stems: list[str]
) -> None:
    store = tmp_path / "store"
    put_pages(store, range(4), *stems)
    assert_clean(invoke, store, tmp_path / "p.toml")


def assert_clean(invoke: Invoke, store: Path, path: Path) -> Profile:
    """Verify a store with its inferred profile; return the profile."""
    invoke("profile", store, "-o", path)
    arguments = ["--profile", path, "--checks", "names,groups,sizes", "--format", "json"]
    document = invoke("verify", store, *arguments).document
    assert document["findings"] == []
    assert document["objects"] == len(list(store.iterdir()))
    states = invoke("ls", store, *arguments[:2], "--format", "json").document["pages"]
    assert {row["state"] for row in states} == {"whole"}
    return parse_profile(path.read_text())


def test_empty_kv_files_are_a_logical_anchor(invoke: Invoke, tmp_path: Path) -> None:
    store = tmp_path / "store"
    put_pages(store, range(4), "_m", nbytes=0)
    put_pages(store, range(4), ".deepseek_v4_c4_m", ".deepseek_v4_c4_state_m")
    profile = assert_clean(invoke, store, tmp_path / "p.toml")
    assert [pool.kind for pool in profile.pools] == ["logical", "opaque", "opaque"]


def test_dcp_keys_give_page_size_and_tp(invoke: Invoke, tmp_path: Path) -> None:
    put_pages(tmp_path, range(4), *DCP)
    profile = parse_profile(invoke("profile", tmp_path).stdout)
    assert (profile.tp, profile.dcp, profile.page_size) == (4, 2, 64)


@pytest.mark.parametrize(("mamba", "sglang"), [(".mamba_m", "0.5.22"), (".mamba_m_0_1", "0.5.23")])
def test_mamba_keys_tell_which_releases_wrote_them(
    invoke: Invoke, tmp_path: Path, mamba: str, sglang: str
) -> None:
    put_pages(tmp_path, range(4), "_m", mamba)
    assert parse_profile(invoke("profile", tmp_path).stdout).sglang == sglang


def refused(invoke: Invoke, store: Path, *arguments: object) -> str:
    """Return the one line that says why no profile can be inferred."""
    outcome = invoke("profile", store, *arguments, exit_code=2)
    (line,) = outcome.stderr.splitlines()
    assert outcome.stdout == ""
    return line


def test_several_deployments_need_a_choice(invoke: Invoke, tmp_path: Path) -> None:
    put_pages(tmp_path, range(2), "_a", "_b_0_2", "_b_1_2")
    line = refused(invoke, tmp_path)
    assert "--model a --tp 1 (keys without TP ranks); --model b --tp 2" in line
    assert parse_profile(invoke("profile", tmp_path, "--model", "b").stdout).tp == 2
    assert "--model b --tp 2" in refused(invoke, tmp_path, "--model", "c")


def test_sizes_choose_between_topologies_of_one_model(invoke: Invoke, tmp_path: Path) -> None:
    put_pages(tmp_path, range(2), *TP2, *(f"_m_{rank}_4" for rank in range(4)))
    put_pages(tmp_path, range(2), *(f"_m_{tp}_2_2_{pp}" for tp in range(2) for pp in range(2)))
    line = refused(invoke, tmp_path)
    assert "choose one: --model m --tp 2; --model m --tp 2 --pp 2; --model m --tp 4" in line
    for arguments, sizes in (
        (["--tp", 4], (4, 1)),
        (["--pp", 2], (2, 2)),
        (["--tp", 2, "--pp", 1], (2, 1)),
    ):
        profile = parse_profile(invoke("profile", tmp_path, *arguments).stdout)
        assert (profile.tp, profile.pp) == sizes
    assert "--tp 4" in refused(invoke, tmp_path, "--tp", 8)


def test_topologies_that_no_option_tells_apart_are_said_to_be(
    invoke: Invoke, tmp_path: Path
) -> None:
    put_pages(tmp_path, range(2), "_m", "_m_0_1")
    assert "no option chooses one, so give --profile" in refused(invoke, tmp_path)


def test_sidecars_without_kv_do_not_ask_for_a_choice(invoke: Invoke, tmp_path: Path) -> None:
    put_pages(tmp_path, range(2), *TP2, ".mamba_m_0_4")
    assert parse_profile(invoke("profile", tmp_path).stdout).tp == 2


@pytest.mark.parametrize(
    ("stems", "message"),
    [
        ([], "The store has no pages to infer a profile from; give --profile"),
        (["-foreign"], "The store has 4 keys, but none that SGLang writes; check the store's URL"),
        (["_m_1_2"], "keys, such as <hash>_m_1_2.bin, can be read in several ways.*; give --pro"),
        ([".swa_m_0_2", ".swa_m_1_2"], "no kv objects of model 'm'; give --profile"),
        (
            ["_m", *(f".mamba_m_{r}_{n}" for n in (2, 4) for r in range(n))],
            r"Model 'm' has mamba objects of several TP sizes \(2, 4\).*; give --profile",
        ),
        ([*STAGES, ".indexer_m_2_0"], "indexer objects exist on some.*; give --profile"),
        (
            [*STAGES, ".draft_m_2_0"],
            "both keys like <hash>.draft_m_2_0.bin and the other keys of model 'm'; give --profile",
        ),
    ],
)
def test_what_shows_no_profile_is_said(
    invoke: Invoke, tmp_path: Path, stems: list[str], message: str
) -> None:
    put_pages(tmp_path, range(4), *stems)
    assert re.search(message, refused(invoke, tmp_path))


def test_stages_of_unequal_size_are_refused_with_what_to_do(invoke: Invoke, tmp_path: Path) -> None:
    put_pages(tmp_path, range(4), "_m_2_0", nbytes=96)
    put_pages(tmp_path, range(4), "_m_2_1", nbytes=64)
    line = refused(invoke, tmp_path)
    assert "96 bytes at pp rank 0, 64 bytes at pp rank 1" in line
    assert "--model-config" in line


def test_objects_of_no_usual_size_are_refused(invoke: Invoke, tmp_path: Path) -> None:
    for number in range(4):
        put(tmp_path, f"{page(number)}_m.bin", 64 + number)
    line = refused(invoke, tmp_path)
    assert "kv objects of one rank have several sizes, and the usual size is unclear; run " in line
    assert "hicachectl ls --objects" in line


def test_empty_sidecars_are_refused(invoke: Invoke, tmp_path: Path) -> None:
    put_pages(tmp_path, range(4), "_m")
    put_pages(tmp_path, range(4), ".indexer_m", nbytes=0)
    assert "indexer objects are empty; run hicachectl verify" in refused(invoke, tmp_path)


def test_a_config_beside_a_store_takes_the_name_from_it(invoke: Invoke, tmp_path: Path) -> None:
    store = tmp_path / "store"
    put_pages(store, range(2), "_x-y_0_2", "_x-y_1_2")
    arguments = ["--model-config", CONFIGS / "qwen3-32b.json", "--page-size", 64, "--tp", 2]
    profile = parse_profile(invoke("profile", store, *arguments).stdout)
    assert (profile.model, profile.inferred) == ("x-y", False)
    invoke("profile", tmp_path / "none", *arguments, exit_code=3)


def test_a_config_may_be_a_folder(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((CONFIGS / "llama-3.1-8b.json").read_text())
    arguments = ["--page-size", 64, "--served-model-name", "m"]
    out = invoke("profile", "--model-config", tmp_path, *arguments).stdout
    assert parse_profile(out).model == "m"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "m", "--model-config", CONFIGS / "qwen3-32b.json"], "--model chooses"),
        (["--page-size", 64], "--page-size needs"),
    ],
)
def test_options_that_do_nothing_are_refused(
    invoke: Invoke, tmp_path: Path, arguments: list[object], message: str
) -> None:
    put_pages(tmp_path, range(2), "_m")
    assert message in invoke("profile", tmp_path, *arguments, exit_code=2).stderr


def test_without_any_source_it_says_what_to_give(invoke: Invoke) -> None:
    assert "--model-config" in invoke("profile", exit_code=2).stderr
