"""Migrations while SGLang's own backends query, write and evict objects."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from typing import TYPE_CHECKING

import pytest

from tests.conformance.busy_store import PATIENCE_S, BusyStore, lines
from tests.conformance.store_cases import CASES
from tests.killed import Runner
from tests.move.migrations import migrated
from tests.stores import OLD, contents

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conformance.conftest import SglangSession, WriteStore
    from tests.conftest import Invoke
    from tests.killed import Unit
    from tests.mooncake_cluster import Cluster

pytestmark = pytest.mark.conformance

KILLS = 6
CASE_NAMES = ("mla_indexer", "hybrid_mamba")


@pytest.fixture(params=["file", "mooncake"])
def destination(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str, str]:
    """An empty store: its URL, and its name and backend for SGLang."""
    if request.param == "file":
        (tmp_path / "target").mkdir()
        return f"file://{tmp_path}/target", str(tmp_path / "target"), "file"
    cluster: Cluster = request.getfixturevalue("mooncake_cluster")
    return cluster.url, cluster.master, "mooncake"


@pytest.mark.parametrize("case", CASE_NAMES)
def test_no_reader_ever_sees_half_a_page_whatever_is_killed(
    sglang_store: WriteStore,
    sglang_session: SglangSession,
    tmp_path: Path,
    destination: tuple[str, str, str],
    case: str,
) -> None:
    source, manifest = sglang_store(case)
    (tmp_path / "profile.json").write_text(json.dumps(manifest["profile"]))
    url, place, backend = destination
    arguments = (
        "migrate", source, url, "--profile", tmp_path / "profile.json", "--grace", "0s",
        "--buffer-bytes", "768KiB", "--jobs", "2", "--bwlimit", "2MiB", "--format", "json",
    )  # fmt: skip
    chance = random.Random(case)
    nbytes = sum(path.stat().st_size for path in source.iterdir())
    with (
        Runner(tmp_path) as runner,
        BusyStore(sglang_session, place, manifest, tmp_path / "poller") as server,
    ):
        log = server.poll(backend)
        server.wait_until(lambda: lines(log))
        for _ in range(KILLS):
            kill = _somewhere(chance, backend, nbytes)
            runner.run(*arguments, home=tmp_path, kill=kill)
            looked = len(lines(log))
            server.wait_until(lambda looked=looked: len(lines(log)) > looked + 1)  # type: ignore[misc]
        assert runner.run(*arguments, home=tmp_path).document["complete"]
        server.wait_until(lambda: lines(log)[-1]["seen"] == len(manifest["pages"]))
        server.stop()
    rounds = lines(log)
    assert rounds[0]["seen"] == 0
    assert len({each["seen"] for each in rounds}) > 2, "it saw no page come"
    assert [each["half"] for each in rounds if each["half"]] == []


def _somewhere(chance: random.Random, backend: str, nbytes: int) -> tuple[Unit, int]:
    """Return a random point in the first half of a run; bytes put into Mooncake are not counted."""
    if backend == "mooncake":
        return "steps", chance.randint(1, 6)
    return "bytes", chance.randint(1, nbytes // 2)


@pytest.mark.parametrize("case", CASE_NAMES)
def test_a_server_that_writes_the_same_pages_to_the_destination_is_no_conflict(
    sglang_store: WriteStore,
    sglang_session: SglangSession,
    invoke: Invoke,
    tmp_path: Path,
    case: str,
) -> None:
    """Both write the same bytes: no object is mixed, and in the end every page is whole."""
    source, manifest = sglang_store(case)
    manifest = {**manifest, "node_pages": CASES[case].node_pages}
    target, profile = tmp_path / "target", tmp_path / "profile.json"
    target.mkdir()
    profile.write_text(json.dumps(manifest["profile"]))
    options = ("--profile", profile, "--grace", "0s", "--verify", "--buffer-bytes", "2MiB")
    expected = {name: data for name, (data, _) in contents(source).items()}
    with BusyStore(sglang_session, target, manifest, tmp_path / "server") as server:
        rounds = [server.serve("write", rank) for rank in range(manifest["profile"].get("tp", 1))]
        server.wait_until(lambda: all(len(lines(log)) > 1 for log in rounds))
        for _ in range(8):
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(exist_ok=True)
            document = migrated(invoke, source, target, *options)
            assert (document["failed"], document["conflicts"]) == (0, 0)
            assert document["pages"] + document["skipped"] == len(manifest["pages"])
        server.stop()
    assert {name: data for name, (data, _) in contents(target).items()} == expected


def test_pages_that_a_server_evicts_from_the_source_are_counted(
    sglang_store: WriteStore,
    sglang_session: SglangSession,
    invoke: Invoke,
    tmp_path: Path,
) -> None:
    """SGLang's LRU evictor runs at its own threshold while SGLang fills the directory.

    The model's ranks share their objects: for other models, each rank evicts its own.
    """
    pristine, manifest = sglang_store("mla_indexer")
    manifest = {**manifest, "node_pages": CASES["mla_indexer"].node_pages}
    source, target, profile = (tmp_path / n for n in ("source", "target", "profile.json"))
    shutil.copytree(pristine, source)
    for path in source.iterdir():
        os.utime(path, (OLD, OLD))
    profile.write_text(json.dumps(manifest["profile"]))
    held = sum(path.stat().st_size for path in source.iterdir())
    gone = pages = 0
    ranks = range(manifest["profile"].get("tp", 1))
    with BusyStore(sglang_session, source, manifest, tmp_path / "server") as server:
        rounds = [server.serve("fill", rank, max_bytes=10 * held) for rank in ranks]
        server.wait_until(lambda: all(len(lines(log)) > 12 for log in rounds))
        deadline = time.monotonic() + PATIENCE_S
        while not (gone and pages):
            assert time.monotonic() < deadline, (gone, pages)
            document = migrated(invoke, source, target, "--profile", profile)
            gone, pages = gone + document["gone"], pages + document["pages"]
            assert document["failed"] == 0
            if document["pages"]:
                checks = ("--checks", "names,groups,sizes", "--grace", "0s", "--format", "json")
                out = invoke("verify", target, "--profile", profile, *checks).stdout
                assert json.loads(out)["findings"] == []
        server.stop()
    shutil.rmtree(source)
