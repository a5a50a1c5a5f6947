"""Objects that SGLang wrote match the manifests, in the byte order that our formats assume."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.formats.profile import profile_from_mapping
from tests.conformance.conftest import HERE, TIMEOUT_S, environment, extract_recorded
from tests.hf3fs_fixtures import REMEDY
from tests.skips import missing

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conformance.conftest import SglangSession, WriteStore
    from tests.conformance.object_bytes import expected_bytes
    from tests.conformance.store_cases import LEGACY, NEWEST, VARIANTS, store_name
else:
    from object_bytes import expected_bytes
    from store_cases import LEGACY, NEWEST, VARIANTS, store_name

pytestmark = pytest.mark.conformance

every_store = pytest.mark.parametrize(
    ("case", "layout"), VARIANTS, ids=[store_name(*variant) for variant in VARIANTS]
)


@every_store
def test_manifest_lists_every_file_with_its_size(
    sglang_store: WriteStore, case: str, layout: str
) -> None:
    directory, manifest = sglang_store(case, layout=layout)
    on_disk = {path.name: path.stat().st_size for path in directory.iterdir()}
    assert on_disk == {entry["file"]: entry["nbytes"] for entry in manifest["objects"]}
    assert {entry["page"] for entry in manifest["objects"]} == set(manifest["pages"])
    assert len(manifest["tokens"]) == len(manifest["pages"]) * manifest["page_size"]


@every_store
def test_profiles_are_valid(sglang_store: WriteStore, case: str, layout: str) -> None:
    _, manifest = sglang_store(case, layout=layout)
    profiles = [profile_from_mapping(each["profile"]) for each in manifest["deployments"]]
    assert profiles[0] == profile_from_mapping(manifest["profile"])
    assert profiles[0].layout == layout
    models = {entry["model"] for entry in manifest["objects"]}
    assert models == {profile.key_model for profile in profiles}


@every_store
def test_objects_hold_their_values_in_the_documented_order(
    sglang_store: WriteStore, case: str, layout: str
) -> None:
    directory, manifest = sglang_store(case, layout=layout)
    wrong = [
        entry["file"]
        for entry in manifest["objects"]
        if (directory / entry["file"]).read_bytes() != expected_bytes(manifest, entry)
    ]
    assert wrong == []


def test_kv_is_written_once_for_mla_and_mamba_by_every_rank(sglang_store: WriteStore) -> None:
    _, manifest = sglang_store("mla_mamba")
    ranks = {(entry["pool"], entry["tp_rank"], entry["tp_size"]) for entry in manifest["objects"]}
    assert ranks == {("kv", None, None), ("mamba", 0, 2), ("mamba", 1, 2)}


def test_mamba_lies_at_the_ends_of_nodes(sglang_store: WriteStore) -> None:
    _, manifest = sglang_store("hybrid_mamba")
    assert _positions(manifest, "mamba") == {2, 5, 7}
    assert _positions(manifest, "kv") == set(range(8))


def test_window_lies_on_the_last_pages_of_nodes(sglang_store: WriteStore) -> None:
    _, manifest = sglang_store("swa")
    assert _positions(manifest, "swa") == {1, 2, 4, 5, 6, 7}


def test_layer_split_pads_kv_but_not_the_indexer(sglang_store: WriteStore) -> None:
    _, manifest = sglang_store("cp2")
    sizes = {(entry["pool"], entry["cp_rank"]): entry["nbytes"] for entry in manifest["objects"]}
    assert sizes["kv", 0] == sizes["kv", 1] == 3 * 64 * 1152
    assert (sizes["indexer", 0], sizes["indexer", 1]) == (3 * 64 * 132, 2 * 64 * 132)


def test_context_parallel_ranks_after_the_first_store_nothing_without_attention_dp(
    sglang_store: WriteStore,
) -> None:
    _, manifest = sglang_store("cp2_without_dp")
    assert {entry["cp_rank"] for entry in manifest["objects"]} == {0}


def test_older_release_keeps_the_first_mamba_shard_for_all_ranks(sglang_store: WriteStore) -> None:
    _, manifest = sglang_store("legacy_mla_mamba")
    mamba = [entry for entry in manifest["objects"] if entry["pool"] == "mamba"]
    assert manifest["sglang"] == LEGACY
    assert {entry["tp_rank"] for entry in mamba} == {None}
    assert {entry["file"] for entry in mamba} == {entry["file"] for entry in manifest["ignored"]}
    assert {entry["tp_rank"] for entry in manifest["ignored"]} == {1}


def test_the_recorded_store_is_what_the_older_release_writes(
    sglang_python: Path, tmp_path: Path
) -> None:
    packages = sglang_python.parents[1] / "legacy"
    if not packages.is_dir():
        missing(f"SGLang {LEGACY}", REMEDY)
    written, recorded = tmp_path / "written", tmp_path / "recorded"
    options = ("--layout=page_first", f"--manifest={written}/manifest.json")
    written.mkdir()
    subprocess.run(
        [sglang_python, HERE / "write_store.py", "legacy_mla_mamba", written / "store", *options],
        env={**environment(), "PYTHONPATH": str(packages)},
        timeout=TIMEOUT_S,
        check=True,
    )
    extract_recorded(recorded)
    assert contents_of(written) == contents_of(recorded)


def contents_of(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_options_are_honoured(sglang_store: WriteStore) -> None:
    _, manifest = sglang_store("gqa_tp2", pages=3, seed=1, layout="page_head")
    assert len(manifest["pages"]) == 3
    assert manifest["profile"]["layout"] == "page_head"
    assert manifest["pages"][0] not in sglang_store("gqa_tp2")[1]["pages"]


def test_sglang_reads_its_store_back(
    sglang_store: WriteStore, sglang_session: SglangSession
) -> None:
    directory, manifest = sglang_store("hybrid_mamba")
    results = sglang_session.read_back(directory, "file", manifest)
    assert [result["hit_pages"] for result in results] == [8, 8]
    assert all(result["wrong"] == {"kv": [], "mamba": []} for result in results)
    assert all(result["read"]["mamba"] == [2, 5, 7] for result in results)


def test_reading_back_notices_another_layout_and_a_short_file(
    sglang_store: WriteStore, sglang_session: SglangSession, tmp_path: Path
) -> None:
    directory, manifest = sglang_store("mha_layouts")
    copy = tmp_path / "store"
    shutil.copytree(directory, copy)
    short = copy / manifest["objects"][0]["file"]
    short.write_bytes(short.read_bytes()[:-1])
    (result,) = sglang_session.read_back(copy, "file", manifest)
    assert result["wrong"] == {"kv": [0]}
    (result,) = sglang_session.read_back(
        directory, "file", manifest, {**manifest["profile"], "layout": "page_head"}
    )
    assert result["wrong"] == {"kv": list(range(8))}


def test_newest_release_writes_all_other_cases(sglang_store: WriteStore) -> None:
    cases = [case for case, _ in VARIANTS if case != "legacy_mla_mamba"]
    assert {sglang_store(case)[1]["sglang"] for case in cases} == {NEWEST}
    assert Counter(cases)["mha_layouts"] == 4


def _positions(manifest: dict[str, Any], pool: str) -> set[int]:
    return {
        manifest["pages"].index(entry["page"])
        for entry in manifest["objects"]
        if entry["pool"] == pool
    }
