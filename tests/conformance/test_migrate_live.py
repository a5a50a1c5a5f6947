"""Migrations while SGLang's own backends query, write and evict objects."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.conformance.store_cases import CASES
from tests.conformance.test_repair_live import PATIENCE_S, lines, serving
from tests.killed import Runner
from tests.move.migrations import migrated
from tests.stores import OLD, contents

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.conformance.conftest import Manifest, WriteStore
    from tests.conftest import Invoke
    from tests.killed import Unit
    from tests.mooncake_cluster import Cluster

pytestmark = pytest.mark.conformance

HERE = Path(__file__).parent
KILLS = 6
CASE_NAMES = ("mla_indexer", "hybrid_mamba")


class Poller:
    """An SGLang process that polls a store."""

    def __init__(
        self, python: Path, folder: Path, manifest: Manifest, place: str, backend: str
    ) -> None:
        folder.mkdir()
        self._folder = folder
        (folder / "manifest.json").write_text(json.dumps(manifest))
        with (folder / "errors").open("wb") as errors:
            self._process = subprocess.Popen(
                [
                    python, HERE / "poll_store.py", place, f"--backend={backend}",
                    f"--manifest={folder / 'manifest.json'}", f"--log={folder / 'log'}",
                    f"--until={folder / 'stop'}",
                ],
                env={k: v for k, v in os.environ.items() if not k.startswith("PYTHON")},
                stdout=errors,
                stderr=errors,
            )  # fmt: skip

    def rounds(self) -> list[dict[str, Any]]:
        return lines(self._folder / "log")

    def wait_until(self, done: Callable[[list[dict[str, Any]]], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not done(self.rounds()):
            assert self._process.poll() is None, self._said()
            assert time.monotonic() < deadline, self._said()
            time.sleep(0.05)

    def stop(self) -> list[dict[str, Any]]:
        """End the process; return all rounds that it saw."""
        (self._folder / "stop").touch()
        assert self._process.wait(PATIENCE_S) == 0, self._said()
        return self.rounds()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _said(self) -> str:
        return (self._folder / "errors").read_text(errors="replace")[-3000:]


@contextmanager
def polling(
    python: Path, folder: Path, manifest: Manifest, place: str, backend: str
) -> Iterator[Poller]:
    poller = Poller(python, folder, manifest, place, backend)
    try:
        poller.wait_until(bool)
        yield poller
    finally:
        poller.kill()


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
    sglang_python: Path,
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
        polling(sglang_python, tmp_path / "poller", manifest, place, backend) as poller,
    ):
        for _ in range(KILLS):
            kill = _somewhere(chance, backend, nbytes)
            runner.run(*arguments, home=tmp_path, kill=kill)
            looked = len(poller.rounds())
            poller.wait_until(lambda rounds, looked=looked: len(rounds) > looked + 1)  # type: ignore[misc]
        assert runner.run(*arguments, home=tmp_path).document["complete"]
        poller.wait_until(lambda rounds: rounds[-1]["seen"] == len(manifest["pages"]))
        rounds = poller.stop()
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
    sglang_python: Path,
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
    with serving(sglang_python, target, manifest, tmp_path / "server") as server:
        rounds = [server.start("write", rank) for rank in range(manifest["profile"].get("tp", 1))]
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
    sglang_python: Path,
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
    with serving(sglang_python, source, manifest, tmp_path / "server") as server:
        rounds = [server.start("fill", rank, f"--max-bytes={10 * held}") for rank in ranks]
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
