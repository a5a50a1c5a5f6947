"""Missing pages and other deployments on Mooncake and 3FS, whose keys state less."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from hicachectl.backends.base import open_store
from hicachectl.cli.demo_store import PROFILE, fill
from hicachectl.formats.profile import dump_profile
from tests.hf3fs_places import PAGES, Place
from tests.prewarming.test_prewarm import tokens
from tests.stores import page

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke
    from tests.hf3fs_server import MetadataServer
    from tests.mooncake_cluster import Cluster

TP2 = """
model = "m"
tp = 2
[[pools]]
name = "kv"
kind = "opaque"
nbytes = 32
"""


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    path = tmp_path / "asked.jsonl"
    path.write_text(json.dumps([*tokens()[: PAGES * PROFILE.page_size], 1]) + "\n")
    return path


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """The demo's profile, as of servers that hash token pairs."""
    path = tmp_path / "pairs.toml"
    path.write_text(dump_profile(replace(PROFILE, hash_unit="bigram")))
    return path


def test_a_wrong_hash_unit_is_suspected_on_3fs(
    invoke: Invoke, tmp_path: Path, metadata_server: MetadataServer, asked: Path, pairs: Path
) -> None:
    place = Place(tmp_path, metadata_server)
    requests = ("--token-ids", asked, "--format", "json")
    said = invoke("hits", place.url(), *requests, "--profile", pairs).stderr
    assert "with --page-size 16, the store has pages of the first request" in said
    right = invoke("hits", place.url(), *requests, "--profile", place.profile)
    assert right.document["usable_share"] == 1
    assert "has pages, but none" not in right.stderr


def test_a_wrong_hash_unit_and_another_model_are_said_on_mooncake(
    invoke: Invoke, mooncake_cluster: Cluster, tmp_path: Path, asked: Path, pairs: Path
) -> None:
    with open_store(mooncake_cluster.url) as store:
        fill(store, PAGES)
    requests = ("--token-ids", asked, "--format", "json")
    said = invoke("hits", mooncake_cluster.url, *requests, "--profile", pairs).stderr
    assert "with --page-size 16, the store has pages of the first request" in said
    (renamed := tmp_path / "renamed.toml").write_text(
        dump_profile(replace(PROFILE, model="demo/new"))
    )
    gate = ("--profile", renamed, "--min-usable", "0.5")
    output = invoke("hits", mooncake_cluster.url, *requests, *gate, exit_code=4)
    (found,) = output.document["elsewhere"]
    assert (found["place"], found["pages"]) == ("model demo-hybrid-1b", PAGES)
    assert output.stderr.splitlines()[-1].startswith(
        "hicachectl: --min-usable 0.5: servers of demo/new tp 2 can restore 0.0% of the requested "
        f"tokens (0 of {PAGES * 16});"
    )


def test_ranks_beyond_the_profiles_are_another_deployment_on_mooncake(
    invoke: Invoke, mooncake_cluster: Cluster, tmp_path: Path
) -> None:
    """Mooncake keys state ranks, but no TP size: objects of rank 2 and 3 tell of it."""
    for number in range(3):
        for rank in range(4 if number else 2):
            for part in "kv":
                mooncake_cluster.put(f"m_{page(number)}_{rank}_{part}", bytes(32))
    (profile := tmp_path / "m.toml").write_text(TP2)
    arguments = ("--profile", profile, "--checks", "groups", "--format", "json")
    (found,) = invoke("verify", mooncake_cluster.url, *arguments).document["findings"]
    assert (found["code"], found["severity"]) == ("other-deployment", "info")
    assert found["detail"].startswith("2 pages at tp ranks 2, 3 (256 B); servers of the profile")
    (asked := tmp_path / "pages").write_text(f"{page(2)}\n")
    for rank in range(2):
        for part in "kv":
            mooncake_cluster.remove(f"m_{page(2)}_{rank}_{part}")
    hits = ("hits", mooncake_cluster.url, "--pages", asked, "--profile", profile)
    assert "wrote: tp ranks 2, 3 (1 page)" in invoke(*hits).stderr
