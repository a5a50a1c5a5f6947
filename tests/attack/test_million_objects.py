"""A million objects under 1.5 GB: generated listings; tests/soak has real files.

Each run lists, verifies and migrates a million ranked objects, and verifies and removes pages
beside one stray rank of 4096, of which all commands make the same group table. Weekly, the other
commands read that table as well: ls, hits, migrate and prewarm.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from tests.attack.memory import FIRST_PAGE, LIMIT_BYTES, OBJECT_BYTES, OBJECTS, peak_of, synthetic
from tests.speed import ALL, some

if TYPE_CHECKING:
    from pathlib import Path

RANKED = synthetic("_org-model_0_1.bin")
# An MLA deployment's names have no rank. One other file claims that a page has 4096 Mamba states.
STRAY = f"{FIRST_PAGE}.mamba_org-model_0_4096.bin"
RANKLESS = synthetic("_org-model.bin", STRAY)
MLA = """
model = "org/model"
page_size = 1
layout = "page_first"
[[pools]]
name = "kv"
kind = "mla"
dtype = "bfloat16"
layers = 1
kv_lora_rank = 512
qk_rope_head_dim = 64
row = "bf16"
"""
STRUCTURE = ("--checks", "names,groups,sizes", "--fail-on", "never")


COMMANDS = ("summary", "parquet", "verify", "migrate")


@pytest.mark.parametrize("command", some(COMMANDS, *COMMANDS[1:]))
def test_commands_stay_below_the_limit(tmp_path: Path, command: str) -> None:
    store, out = tmp_path / "million", tmp_path / "out"
    store.mkdir()
    arguments: dict[str, list[object]] = {
        "summary": ["ls", store, "--summary", "--format", "json"],
        "parquet": ["ls", store, "--objects", "--format", "parquet"],
        "verify": ["verify", store, *STRUCTURE, "--format", "json"],
        "migrate": ["migrate", store, tmp_path / "new", "--dry-run", "--format", "json"],
    }
    used = peak_of(RANKED, *arguments[command], "-o", out)
    assert used.status == 0, used.stderr
    assert used.nbytes < LIMIT_BYTES
    if command == "parquet":
        assert pq.read_metadata(out).num_rows == OBJECTS
    elif command != "summary":
        document = json.loads(out.read_text())
        assert document["pages"] == OBJECTS


class Million:
    """A million pages without ranks, and one file of rank 0 of 4096; runs commands on them."""

    def __init__(self, folder: Path, profile: bool) -> None:
        self.store = folder / "million"
        self.new, self.copy = folder / "new", folder / "copy" / "million"
        self.has_profile = profile
        self._out = folder / "out"
        self._options: list[object] = []
        self.copy.mkdir(parents=True)
        self.store.mkdir()
        for name in (f"{FIRST_PAGE}_org-model.bin", STRAY):  # verify reads faulty objects again
            (self.store / name).write_bytes(bytes(OBJECT_BYTES))
            os.utime(self.store / name, (10**9, 10**9))
        if profile:
            (folder / "profile.toml").write_text(MLA)
            self._options = ["--profile", folder / "profile.toml"]

    def __call__(self, *arguments: object) -> Any:
        """Run a command within the memory limit; return its document."""
        arguments = (*arguments, *self._options, "--format", "json", "-o", self._out)
        used = peak_of(RANKLESS, *arguments)
        assert used.status == 0, used.stderr
        assert used.nbytes < LIMIT_BYTES
        return json.loads(self._out.read_text())


@pytest.fixture
def million(request: pytest.FixtureRequest, tmp_path: Path) -> Million:
    return Million(tmp_path, profile=getattr(request, "param", False))


either_way = pytest.mark.parametrize("million", [False, True], ids=["seen", "mla"], indirect=True)
with_profile = pytest.mark.parametrize("million", [True], ids=["mla"], indirect=True)


@pytest.mark.weekly
def test_ls_of_one_stray_rank(million: Million) -> None:
    (row,) = million("ls", million.store, "--state", "partial")["pages"]
    assert row["page"] == FIRST_PAGE
    assert row["pools"]["mamba"] == {"present": 1, "expected": 4096}
    assert len(row["missing"]) == 4095


@pytest.mark.parametrize(
    "million", some([False, True], False), ids=["seen", "mla"] if ALL else ["seen"], indirect=True
)
def test_verify_of_one_stray_rank(million: Million) -> None:
    document = million("verify", million.store, *STRUCTURE)
    assert (document["pages"], document["objects"]) == (OBJECTS, OBJECTS + 1)
    assert document["counts"] == ({} if million.has_profile else {"missing-rank": 4095})


@pytest.mark.weekly
@either_way
def test_hits_of_one_stray_rank(million: Million) -> None:
    pages = million.store.with_name("pages")
    pages.write_text(FIRST_PAGE)
    (chain,) = million("hits", million.store, "--pages", pages)["chains"]
    assert chain["kv_pages"] == 1
    assert chain["usable_pages"] == (1 if million.has_profile else 0)


def test_rm_of_one_stray_rank(million: Million) -> None:
    document = million("rm", million.store, "--model", "org/model", "--dry-run")
    assert (document["pages"], document["objects"]) == (OBJECTS, OBJECTS + 1)


@pytest.mark.weekly
@either_way
def test_migrate_of_one_stray_rank(million: Million) -> None:
    whole = OBJECTS if million.has_profile else OBJECTS - 1
    document = million("migrate", million.store, million.new, "--dry-run")
    assert (document["pages"], document["skipped"]) == (whole, 0)
    document = million("migrate", million.store, million.copy, "--dry-run")
    assert (document["pages"], document["skipped"]) == (0, whole)
    document = million("migrate", million.store, million.new, "--dry-run", "--include-partial")
    assert (document["pages"], document["objects"]) == (OBJECTS, OBJECTS + 1)


@pytest.mark.weekly
@with_profile
def test_prewarm_of_one_stray_rank(million: Million) -> None:
    warm = ("--from", million.store, "--all", "--dry-run")
    document = million("prewarm", million.new, *warm)
    assert (document["copied_pages"], document["already_there"]) == (OBJECTS, 0)
    document = million("prewarm", million.copy, *warm)
    assert (document["copied_pages"], document["already_there"]) == (0, OBJECTS)
