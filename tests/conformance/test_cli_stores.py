"""`ls` and `verify` on stores that SGLang itself wrote: existing and missing objects, exactly."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.conformance.store_cases import (
    CASES,
    VARIANTS,
    follows_windows,
    has_values,
    is_trailing,
)

if TYPE_CHECKING:
    from tests.conftest import Invoke

pytestmark = pytest.mark.conformance

Manifest = dict[str, Any]
SglangStore = Callable[..., tuple[Path, Manifest]]

STORES = [(case, layout) for case, layout in VARIANTS]
_COORDINATES = (
    "page", "pool", "part", "model", "tp_rank", "tp_size", "pp_rank", "pp_size", "cp_rank",
    "cp_size", "dcp_rank", "nbytes",
)  # fmt: skip


def profile_files(manifest: Manifest, directory: Path) -> list[Path]:
    """Write the profiles of a store's deployments; return the files."""
    paths = []
    for number, deployment in enumerate(manifest["deployments"]):
        paths.append(directory / f"profile-{number}.json")
        paths[-1].write_text(json.dumps(deployment["profile"]))
    return paths


def verified(invoke: Invoke, *arguments: object, exit_code: int = 0) -> dict[str, Any]:
    return invoke.document("verify", *arguments, "--grace", "0s", exit_code=exit_code)


def listed(invoke: Invoke, *arguments: object) -> dict[str, dict[str, Any]]:
    out = invoke("ls", *arguments, "--objects", "--format", "jsonl").stdout
    return {row["key"]: row for row in map(json.loads, out.splitlines())}


@pytest.mark.parametrize(("case", "layout"), STORES)
def test_ls_lists_exactly_what_sglang_wrote(
    sglang_store: SglangStore, invoke: Invoke, tmp_path: Path, case: str, layout: str
) -> None:
    store, manifest = sglang_store(case, layout=layout)
    wanted = {
        entry["file"]: {name: entry[name] for name in _COORDINATES} for entry in manifest["objects"]
    }
    with_profile = ["--profile", profile_files(manifest, tmp_path)[0]]
    # With one stored CP rank, only the profile shows that it is a CP rank.
    for arguments in [with_profile] if case == "cp2_without_dp" else [[], with_profile]:
        found = {
            key: {name: row[name] for name in _COORDINATES}
            for key, row in listed(invoke, store, *arguments).items()
        }
        assert found == wanted


@pytest.mark.parametrize(
    ("case", "layout"), [store for store in STORES if store[0] != "cp2_without_dp"]
)
def test_verify_is_clean(
    sglang_store: SglangStore, invoke: Invoke, tmp_path: Path, case: str, layout: str
) -> None:
    store, manifest = sglang_store(case, layout=layout)
    assert verified(invoke, store)["findings"] == []
    for profile in profile_files(manifest, tmp_path):
        document = verified(invoke, store, "--profile", profile)
        assert document["findings"] == []
        assert document["objects"] == len(manifest["objects"])
        assert document["pages"] == len(manifest["pages"])
        skipped = {"digests"}
        if len(manifest["deployments"]) > 1:
            skipped.add("other-deployments")
        checks = ["names", "groups", "sizes", "values"]
        if not has_values(manifest["profile"]):
            skipped.add(checks.pop())
        assert set(document["skipped_checks"]) - {"dtypes"} == skipped
        assert document["checks"] == checks
        assert (document["bytes_read"] > 0) == ("values" in checks)


def test_ranks_that_sglang_never_stores_are_found(
    sglang_store: SglangStore, invoke: Invoke, tmp_path: Path
) -> None:
    """Without attention DP, the second CP rank of an MLA model writes nothing."""
    store, manifest = sglang_store("cp2_without_dp")
    profile = profile_files(manifest, tmp_path)[0]
    assert verified(invoke, store, exit_code=4)["counts"] == {"ambiguous-key": 2}
    document = verified(invoke, store, "--profile", profile, exit_code=4)
    assert document["counts"] == {"missing-rank": 2 * len(manifest["pages"])}


def damage_remove(path: Path) -> None:
    path.unlink()


def damage_truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def damage_lengthen(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 1)


def window_of(pool: str) -> str:
    """Return the pool on whose pages SGLang writes a pool, if they are not those of kv."""
    return "swa" if follows_windows(pool) else pool


def removal_findings(manifest: Manifest, entry: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the findings expected after the loss of one object, from the manifest alone."""
    mates = [
        o for o in manifest["objects"]
        if o["page"] == entry["page"] and o["model"] == entry["model"] and o is not entry
    ]  # fmt: skip
    same_pool = [o for o in mates if window_of(o["pool"]) == window_of(entry["pool"])]
    anchors = [o for o in mates if o["pool"] == "kv"]
    trailing = is_trailing(entry["pool"])
    if entry["pool"] == "kv" and not anchors:
        return sorted(("orphan-sidecar", "warning", o["file"]) for o in mates)
    if trailing:
        return [("missing-rank", "warning", entry["file"])] if same_pool else []
    if entry["pool"] == "kv":
        return [("missing-rank", "warning", entry["file"])]
    severity = "warning" if entry["pool"].startswith("draft") else "error"
    return [("missing-pool", severity, entry["file"])]


def one_of_each_kind(manifest: Manifest) -> list[dict[str, Any]]:
    """Return one object of each model, pool and rank, from the last page that has it."""
    chosen: dict[tuple[object, ...], dict[str, Any]] = {}
    for entry in manifest["objects"]:
        ranks = (entry["tp_rank"], entry["pp_rank"], entry["cp_rank"], entry["dcp_rank"])
        chosen[entry["model"], entry["pool"], *ranks] = entry
    return list(chosen.values())


@pytest.mark.parametrize("case", [c for c in CASES if c != "cp2_without_dp"])
def test_each_damage_is_found_and_nothing_else(
    sglang_store: SglangStore, invoke: Invoke, tmp_path: Path, case: str
) -> None:
    store, manifest = sglang_store(case)
    profiles = profile_files(manifest, tmp_path)
    models = {json.loads(p.read_text())["model"].replace("/", "-"): p for p in profiles}
    for entry in one_of_each_kind(manifest):
        profile = models[entry["model"]]
        for damage, code in (
            (damage_remove, None), (damage_truncate, "truncated"), (damage_lengthen, "oversized"),
        ):  # fmt: skip
            if damage is damage_truncate and not entry["nbytes"]:
                continue  # an anchor without bytes
            copy = tmp_path / "copy"
            shutil.copytree(store, copy)
            damage(copy / entry["file"])
            wanted = (
                removal_findings(manifest, entry) if code is None
                else [(code, "error", entry["file"])]
            )  # fmt: skip
            document = verified(invoke, copy, "--profile", profile, exit_code=4 if wanted else 0)
            found = sorted((f["code"], f["severity"], f["key"]) for f in document["findings"])
            assert found == wanted, (entry["file"], damage.__name__)
            assert all(f["page"] == entry["page"] for f in document["findings"])
            shutil.rmtree(copy)


def test_one_directory_of_two_models_needs_no_profile(
    sglang_store: SglangStore, invoke: Invoke
) -> None:
    store, manifest = sglang_store("two_models")
    models = {entry["model"] for entry in manifest["objects"]}
    assert len(models) == 2
    assert {row["model"] for row in listed(invoke, store).values()} == models
    states = invoke.document("ls", store)["pages"]
    assert len(states) == 2 * len(manifest["pages"])
    assert {row["state"] for row in states} == {"whole"}
