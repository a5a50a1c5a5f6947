"""Proof that read-only commands change neither eviction nor removal."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest

from tests.mooncake_cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.conftest import Invoke

    Look = Callable[[Cluster, list[str]], None]

LEASE_S = 0.1
PAGES = 50
OBJECT_BYTES = 512 << 10
FILLING_BYTES = 10 << 20  # from 78 to 94 % of the segment, in one step
PROFILE = {
    "model": "x/m",
    "page_size": 64,
    "pools": [
        {
            "name": "kv",
            "kind": "mha",
            "dtype": "bfloat16",
            "layers": 16,
            "kv_heads": 4,
            "head_dim": 64,
        }
    ],
}
LOOKS = (
    ("ls",),
    ("ls", "--objects"),
    ("ls", "--summary"),
    ("verify", "--checks", "names,groups,sizes", "--grace", "0s"),
)


@pytest.fixture(scope="module")
def evicting(mooncake_package: None) -> Iterator[Cluster]:
    """A cluster that evicts above 90 % and has very short leases."""
    with Cluster(
        64 << 20, lease_ms=round(LEASE_S * 1000), eviction_high_watermark_ratio=0.9,
        eviction_ratio=0.05,
    ) as cluster:  # fmt: skip
        yield cluster


@pytest.fixture
def look(invoke: Invoke, tmp_path: Path) -> Look:
    """Run every command that promises not to disturb a server."""
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(PROFILE))

    def call(cluster: Cluster, keys: list[str]) -> None:
        for command, *options in LOOKS:
            out = invoke(command, cluster.url, *options, "--profile", profile).stdout
            assert out
        chain = tmp_path / "chain"
        chain.write_text(json.dumps([f"{page:064x}" for page in range(len(keys) // 2)]))
        arguments = ("--pages", chain, "--profile", profile, "--format", "jsonl")
        row = invoke("hits", cluster.url, *arguments).document
        assert row["usable_pages"] == len(keys) // 2
        objects = invoke("ls", cluster.url, "--objects", "--format", "jsonl").stdout
        assert {json.loads(line)["key"] for line in objects.splitlines()} == set(keys)

    return call


def put_pages(cluster: Cluster, pages: int, nbytes: int = OBJECT_BYTES) -> list[str]:
    """Put whole pages, oldest first; return their keys in that order."""
    keys = [f"x-m_{page:064x}_0_{part}" for page in range(pages) for part in "kv"]
    for key in keys:
        assert cluster.client().put(key, bytes(nbytes)) == 0
    return keys


def evicted_after(cluster: Cluster, look: Look) -> list[int]:
    """Fill the segment after a look; return the ages of the evicted objects: 0 is the oldest."""
    cluster.clear()
    keys = put_pages(cluster, PAGES)
    time.sleep(LEASE_S)
    look(cluster, keys)
    time.sleep(2 * LEASE_S)  # now a lease changes the order of eviction, but protects nothing
    assert cluster.client().put("filling", bytes(FILLING_BYTES)) == 0
    left = settled_keys(cluster)
    return [age for age, key in enumerate(keys) if key not in left]


def settled_keys(cluster: Cluster) -> set[str]:
    """Return the keys after an eviction has started and ended."""
    deadline = time.monotonic() + 120
    before, keys = set[str](), set(cluster.list_keys())
    while len(keys) > 2 * PAGES or keys != before:
        assert time.monotonic() < deadline, "nothing is evicted"
        time.sleep(0.05)
        before, keys = keys, set(cluster.list_keys())
    return keys


def ask_with_leases(cluster: Cluster, keys: list[str]) -> None:
    """Query the older half of the objects with the client, which grants leases."""
    assert cluster.client().batch_is_exist(keys[: PAGES // 2]) == [1] * (PAGES // 2)


def test_the_same_objects_are_evicted_with_and_without_a_look(
    evicting: Cluster, look: Look
) -> None:
    undisturbed = evicted_after(evicting, lambda cluster, keys: None)
    assert undisturbed == list(range(len(undisturbed)))  # the oldest
    assert undisturbed
    assert evicted_after(evicting, look) == undisturbed
    # The test can fail: a query that grants leases saves its objects from eviction.
    assert not set(evicted_after(evicting, ask_with_leases)) & set(range(PAGES // 2))


def test_objects_can_be_removed_right_after_a_look(mooncake_cluster: Cluster, look: Look) -> None:
    keys = put_pages(mooncake_cluster, 3)
    look(mooncake_cluster, keys)
    client = mooncake_cluster.client()
    assert [client.remove(key) for key in keys[1:]] == [0] * 5
    assert client.is_exist(keys[0]) == 1
    assert client.remove(keys[0]) == -706  # the query granted a lease
