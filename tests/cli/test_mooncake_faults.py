"""Mooncake clusters that fail, and objects that vanish, during a command."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import pytest

from tests.mooncake_cluster import Cluster
from tests.paused import paused
from tests.speed import some

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import Invoke
    from tests.paused import Ended

QUICK_S = 30
READ = "hicachectl.backends.mooncake.store:MooncakeStore.read_into"
QUERY = "hicachectl.backends.mooncake.master:MasterAdmin.query"
NOBODY = "127.0.0.1:1"  # a port that nothing listens on
PAGES = 12
OBJECT_BYTES = 64 << 10
PROFILE = {
    "model": "x/m",
    "page_size": 64,
    "pools": [
        {
            "name": "kv",
            "kind": "mha",
            "dtype": "bfloat16",
            "layers": 2,
            "kv_heads": 4,
            "head_dim": 64,
        }
    ],
}


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(PROFILE))
    return path


def put_pages(cluster: Cluster, pages: int = PAGES) -> list[str]:
    """Write whole pages of ordinary numbers; return their keys, page by page."""
    keys = [f"x-m_{page:064x}_0_{part}" for page in range(pages) for part in "kv"]
    value = np.full(OBJECT_BYTES // 2, 0x3F80, dtype="<u2").tobytes()
    for key in keys:
        cluster.put(key, value)
    return keys


def broken_at(
    cluster: Cluster, folder: Path, profile: Path, call: str, number: int,
    breaking: Callable[[], object],
) -> Ended:  # fmt: skip
    """Verify a cluster that fails right before a call."""
    with paused(
        folder / "paused", call, number, "verify", cluster.url, "--profile", profile,
        "--grace", "0s", "--format", "json", "--jobs", "1",
    ) as run:  # fmt: skip
        breaking()
        ended = run.resumed()
    assert "Traceback" not in ended.stderr
    assert ended.seconds < QUICK_S
    return ended


def document_of(ended: Ended, exit_code: int) -> dict[str, Any]:
    assert ended.code == exit_code, ended
    document: dict[str, Any] = json.loads(ended.stdout)
    return document


def assert_lost(ended: Ended) -> None:
    """Assert exit code 3, an empty stdout and one line on stderr."""
    assert (ended.code, ended.stdout) == (3, "")
    assert len([line for line in ended.stderr.splitlines() if "hicachectl:" in line]) == 1


@pytest.mark.parametrize(
    ("call", "number"), some([(QUERY, 1), (READ, 1), (READ, 2)], (QUERY, 1), (READ, 2))
)
def test_a_master_killed_during_verify_ends_it(
    mooncake_package: None, profile: Path, tmp_path: Path, call: str, number: int
) -> None:
    with Cluster() as cluster:
        put_pages(cluster)
        assert_lost(broken_at(cluster, tmp_path, profile, call, number, cluster.kill_master))


def test_objects_on_a_killed_storage_process_are_found_as_out_of_reach(
    mooncake_package: None, profile: Path, tmp_path: Path
) -> None:
    with Cluster(stores=2) as cluster:
        keys = put_pages(cluster)
        killed = cluster.store_names()[-1]
        lost = {key for key in keys if cluster.store_of(key) == killed}
        assert 0 < len(lost) < len(keys)
        ended = broken_at(cluster, tmp_path, profile, READ, 1, lambda: cluster.kill_store(killed))
        document = document_of(ended, exit_code=4)
        assert document["complete"]
        assert document["gone"] == 0
        found = {(each["code"], each["severity"], each["key"]) for each in document["findings"]}
        assert found == {("no-replica", "warning", key) for key in lost}
        assert document["bytes_read"] == (len(keys) - len(lost)) * OBJECT_BYTES


def test_what_is_evicted_between_listing_and_reading_is_gone_and_no_finding(
    mooncake_cluster: Cluster, profile: Path, tmp_path: Path
) -> None:
    keys = put_pages(mooncake_cluster)
    evicted = keys[:4]  # two whole pages

    def evict() -> None:
        for key in evicted:
            mooncake_cluster.remove(key)

    ended = broken_at(mooncake_cluster, tmp_path, profile, READ, 1, evict)
    document = document_of(ended, exit_code=0)
    assert document["findings"] == []
    assert document["gone"] == len(evicted)


def test_objects_that_vanish_during_the_listing_are_left_out(
    mooncake_cluster: Cluster, profile: Path, tmp_path: Path
) -> None:
    keys = put_pages(mooncake_cluster)

    def vanish() -> None:
        for key in keys[:2]:
            mooncake_cluster.remove(key)

    ended = broken_at(mooncake_cluster, tmp_path, profile, QUERY, 1, vanish)
    document = document_of(ended, exit_code=0)
    assert (document["findings"], document["objects"]) == ([], len(keys) - 2)


@pytest.mark.parametrize("command", ["ls", "verify", "show", "rm"])
def test_an_absent_master_is_one_clear_line(
    mooncake_package: None, invoke: Invoke, command: str
) -> None:
    arguments: list[str] = {"show": ["00"], "rm": ["--model", "m", "--yes"]}.get(command, [])
    started = time.monotonic()
    url = f"mooncake://{NOBODY}?admin={NOBODY}&protocol=tcp"
    out = invoke(command, url, *arguments, exit_code=3)
    assert time.monotonic() - started < QUICK_S
    assert out.stdout == ""
    assert len(out.stderr.splitlines()) == 1
    assert NOBODY in out.stderr


def test_a_wrong_port_of_the_master_is_said_and_not_tried_for_minutes(
    mooncake_cluster: Cluster, invoke: Invoke, profile: Path
) -> None:
    """Mooncake's setup retries for 90 s if nothing listens, for 10 minutes at an HTTP server."""
    put_pages(mooncake_cluster)
    for wrong in (NOBODY, mooncake_cluster.admin):
        started = time.monotonic()
        url = f"mooncake://{wrong}?admin={mooncake_cluster.admin}&protocol=tcp"
        out = invoke("verify", url, "--profile", profile, exit_code=3)
        assert time.monotonic() - started < QUICK_S
        assert out.stdout == ""
        assert "--rpc_port" in out.stderr


@pytest.mark.parametrize(("place", "shown"), [("user:LOST@127.0.0.1", False), ("127.0.0.1", True)])
def test_no_password_is_in_the_log_of_the_library(
    mooncake_cluster: Cluster, profile: Path, place: str, shown: bool
) -> None:
    """The library logs the URL of a metadata service that it cannot reach."""
    put_pages(mooncake_cluster, 1)
    url = f"{mooncake_cluster.url}&metadata={quote(f'http://{place}:1/metadata')}"
    done = subprocess.run(
        [sys.executable, "-m", "hicachectl", "-vv", "verify", url, "--profile", profile,
         "--grace", "0s"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 3
    assert "LOST" not in said
    assert ("transfer_metadata" in said) == shown
    assert ("left out, as it shows the password" in said) != shown
