"""`ls` and `verify` on stores that SGLang itself wrote: existing and missing objects, exactly."""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
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


def damage_remove(path: Path, _: int) -> None:
    path.unlink()


def damage_truncate(path: Path, number: int) -> None:
    os.truncate(path, path.stat().st_size // 2 - number)


def damage_lengthen(path: Path, number: int) -> None:
    os.truncate(path, path.stat().st_size + 1 + number)


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


def on_pages_of_their_own(entries: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return one object of each pool, part and rank, in lists with at most one object of a page.

    What is found of a page depends on no other page, so one run judges the objects of a list.
    """
    kinds: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for entry in entries:
        before, _, after = (entry.get("key") or entry["file"]).partition(entry["page"])
        kinds[before, after].append(entry)
    lists: list[dict[str, dict[str, Any]]] = []
    for same in kinds.values():
        free = ((one, entry) for one in lists for entry in same if entry["page"] not in one)
        one, entry = next(free, ({}, same[-1]))
        if not one:
            lists.append(one)
        one[entry["page"]] = entry
    return [list(one.values()) for one in lists]


@pytest.mark.parametrize("case", [c for c in CASES if c != "cp2_without_dp"])
def test_each_damage_is_found_and_nothing_else(
    sglang_store: SglangStore, invoke: Invoke, tmp_path: Path, case: str
) -> None:
    store, manifest = sglang_store(case)
    profiles = profile_files(manifest, tmp_path)
    models = {json.loads(p.read_text())["model"].replace("/", "-"): p for p in profiles}
    for model, profile in models.items():
        entries = [entry for entry in manifest["objects"] if entry["model"] == model]
        for damage, code in (
            (damage_remove, None), (damage_truncate, "truncated"), (damage_lengthen, "oversized"),
        ):  # fmt: skip
            for chosen in on_pages_of_their_own(entries):
                # An anchor without bytes cannot be cut short.
                hit = [e for e in chosen if e["nbytes"] or damage is not damage_truncate]
                copy = tmp_path / "copy"
                shutil.copytree(store, copy)
                for number, entry in enumerate(hit):  # equal sizes would be another deployment's
                    damage(copy / entry["file"], number)
                wanted = sorted(
                    found
                    for entry in hit
                    for found in (
                        removal_findings(manifest, entry) if code is None
                        else [(code, "error", entry["file"])]
                    )
                )  # fmt: skip
                status = 4 if wanted else 0
                document = verified(invoke, copy, "--profile", profile, exit_code=status)
                found = sorted((f["code"], f["severity"], f["key"]) for f in document["findings"])
                assert found == wanted, damage.__name__
                pages = {entry["page"] for entry in hit}
                assert all(f["page"] in pages for f in document["findings"])
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
