"""A run on a Ray cluster gives the result of one process, whatever is killed or removed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.formats.errors import UsageError
from hicachectl.parts.cluster import Cluster, parse_address
from tests.parts.ray_cluster import NODES, RayCluster, ended, wait_for_end
from tests.parts.runs import NUMBERS, ROOT, ToyRun, names_in, toy_run  # noqa: F401 - a fixture
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

on_cluster = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

UNDISTURBED = {
    "copied": NUMBERS,
    "complete": True,
    "finished": NUMBERS - 1,
    "parts": NODES,
    "missing_parts": [],
    "numbers": list(range(NUMBERS)),
}


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[RayCluster]:
    with RayCluster() as running:
        yield running


@pytest.fixture
def cluster(shared_cluster: RayCluster) -> RayCluster:
    """Return a cluster of three nodes."""
    shared_cluster.fill()
    return shared_cluster


class Driven:
    """A driver of a toy run, in a process of its own."""

    def __init__(self, cluster: RayCluster, run: ToyRun, **settings: float) -> None:
        self._run = run
        given = [f"{name}={value}" for name, value in settings.items()]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.parts.toy_driver", cluster.address, run.folder, *given],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.remarks = ""

    def document(self) -> dict[str, Any]:
        """Wait for the end; return the only thing on stdout."""
        output, self.remarks = self._process.communicate(timeout=120)
        assert not self._process.returncode, self.remarks
        document: dict[str, Any] = json.loads(output)
        return document

    def end(self, signal_number: int) -> int:
        """Send a signal; return the exit status."""
        self._process.send_signal(signal_number)
        _, self.remarks = self._process.communicate(timeout=120)
        return self._process.returncode

    def children(self) -> list[list[int]]:
        """Wait until each node works; return the pids of each child and of its parent."""
        file = self._run.folder / "processes"
        wait_until(
            lambda: file.exists() and len(file.read_text().splitlines()) >= NODES, "no part works"
        )
        wait_until(lambda: len(names_in(self._run.destination)) >= NODES, "nothing is copied")
        return [[int(pid) for pid in line.split()] for line in file.read_text().splitlines()]


class TestOnCluster:
    pytestmark = on_cluster

    def test_a_node_that_cannot_open_the_store_is_left_out(
        self,
        cluster: RayCluster,
        toy_run: ToyRun,  # noqa: F811
    ) -> None:
        """The others do all parts of one listing; stdout has only the document."""
        node = cluster.add(TOY_REFUSES="1")
        try:
            driver = Driven(cluster, toy_run)
            assert driver.document() == UNDISTURBED
        finally:
            cluster.remove(node)
        said = driver.remarks.splitlines()
        assert len(said) == 1, said
        assert "is left out: " in said[0]
        assert said[0].endswith(f"{toy_run.store}: not mounted here")
        assert toy_run.listings == 1
        assert not toy_run.path.exists()

    def test_lost_processes_and_nodes_lose_nothing(
        self,
        cluster: RayCluster,
        toy_run: ToyRun,  # noqa: F811
    ) -> None:
        """Kill a child, the process of another task, and last all processes of a node."""
        driver = Driven(cluster, toy_run, seconds=0.7)
        (child, _), (other_child, other_worker), _ = driver.children()
        os.kill(child, signal.SIGKILL)
        os.kill(other_worker, signal.SIGKILL)
        wait_for_end([other_child])
        cluster.remove_any()
        assert driver.document() == UNDISTURBED
        assert "was killed by signal 9 (Killed)" in driver.remarks
        assert driver.remarks.count("is done again: ") >= 2
        assert toy_run.listings == 1

    def test_an_ended_driver_is_continued(
        self,
        cluster: RayCluster,
        toy_run: ToyRun,  # noqa: F811
    ) -> None:
        """An interrupted driver ends its children first, a killed one soon after."""
        first = Driven(cluster, toy_run, seconds=0.7, kept=1)
        children = first.children()
        assert first.end(signal.SIGINT)
        assert all(ended(child) for child, _ in children), "a child outlived the driver"
        (toy_run.folder / "processes").unlink()
        second = Driven(cluster, toy_run, seconds=0.7, kept=1)
        children = second.children()
        assert second.end(signal.SIGKILL)
        wait_for_end([child for child, _ in children])
        assert len(names_in(toy_run.destination)) < NUMBERS
        assert Driven(cluster, toy_run, kept=1).document() == UNDISTURBED
        assert toy_run.listings == 1

    def test_a_part_that_always_crashes_is_missing(
        self,
        cluster: RayCluster,
        toy_run: ToyRun,  # noqa: F811
    ) -> None:
        """After three attempts the other parts still give a result, which names the missing one."""
        driver = Driven(cluster, toy_run, aborts=1)
        document = driver.document()
        assert (document["missing_parts"], document["complete"]) == ([1], False)
        assert document["numbers"] == [n for n in range(NUMBERS) if n % NODES != 1]
        assert "Part 1 was lost 3 times, at last on" in driver.remarks
        assert "killed by signal 6" in driver.remarks


# without a cluster


def test_without_ray_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError) as refusal:
        Cluster("local")
    assert str(refusal.value) == "--ray local: needs Ray; run pip install 'hicachectl[ray]'"


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("ray://head:10001", "a Ray client cannot do this"),
        ("head", "give auto, local or HOST:PORT"),
        ("", "give auto, local or HOST:PORT"),
    ],
)
def test_other_addresses_are_refused(address: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as refusal:
        parse_address(address)
    assert "\n" not in str(refusal.value)
