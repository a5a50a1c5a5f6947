"""A run on a Ray cluster gives the result of one process, whatever is killed or removed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.backends.disk.io import Closing
from hicachectl.formats.errors import StoreUnavailable
from hicachectl.parts.child import Moved
from hicachectl.parts.cluster import LostError, Node
from hicachectl.parts.driver import Driver
from tests.conftest import Invoke  # noqa: TC001 - pytest reads it
from tests.move.migrations import demo_store, profile_file
from tests.parts.ray_cluster import NODES, ended, is_below, wait_for_end
from tests.parts.runs import NUMBERS, ROOT, ToyRun, names_in, toy_run  # noqa: F401 - a fixture
from tests.parts.toy import LISTED_NS, ToyJob, opened
from tests.skips import need_module
from tests.speed import some
from tests.stores import contents
from tests.verification.damages import PAGES, at_once
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Collection, Generator
    from pathlib import Path

    from hicachectl.parts.child import Answer
    from tests.parts.ray_cluster import RayCluster

on_cluster = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

UNDISTURBED = {
    "copied": NUMBERS,
    "complete": True,
    "finished": NUMBERS - 1,
    "listed": LISTED_NS / 1e9,
    "parts": NODES,
    "missing_parts": [],
    "numbers": list(range(NUMBERS)),
}


COMMANDS = (
    ("migrate", "destination", signal.SIGTERM),
    ("verify", "source", signal.SIGTERM),
    ("migrate", "destination", signal.SIGKILL),
    ("prewarm", "source", signal.SIGKILL),
)


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

    def refusal(self) -> str:
        """Wait for the end with an error; return the last line of stderr."""
        output, self.remarks = self._process.communicate(timeout=120)
        assert (output, self._process.returncode) == ("", 2)
        return self.remarks.splitlines()[-1]

    def end(self, signal_number: int) -> int:
        """Send a signal; return the exit status."""
        self._process.send_signal(signal_number)
        _, self.remarks = self._process.communicate(timeout=120)
        return self._process.returncode

    def children(self, begun: int = NODES) -> list[list[int]]:
        """Wait for children; return the pids of each and of its parent, the earliest first.

        begun: number of children since the file of their pids was removed.
        """
        file = self._run.folder / "processes"
        wait_until(
            lambda: file.exists() and len(file.read_text().splitlines()) >= begun, "no part works"
        )
        wait_until(lambda: len(names_in(self._run.destination)) >= NODES, "nothing is copied")
        return [[int(pid) for pid in line.split()] for line in file.read_text().splitlines()]


class TestOnCluster:
    pytestmark = on_cluster

    def test_what_fails_for_good_is_named(
        self,
        ray_cluster: RayCluster,
        toy_run: ToyRun,  # noqa: F811
    ) -> None:
        """A node cannot open the store, and a part crashes three times; stdout is the document.

        The other nodes do the other parts of one listing.
        """
        node = ray_cluster.add(TOY_REFUSES="1")
        try:
            driver = Driven(ray_cluster, toy_run, aborts=1)
            document = driver.document()
        finally:
            ray_cluster.remove(node)
        assert (document["missing_parts"], document["complete"]) == ([1], False)
        assert document["numbers"] == [n for n in range(NUMBERS) if n % NODES != 1]
        left_out, *lost = driver.remarks.splitlines()
        assert "is left out: " in left_out
        assert left_out.endswith(f"{toy_run.store}: not mounted here")
        assert "is left out: " not in "".join(lost)
        assert "Part 1 was lost 3 times, at last on" in driver.remarks
        assert "killed by signal 6" in driver.remarks
        assert toy_run.listings == 1
        assert not toy_run.path.exists()

    def test_a_driver_of_another_release_of_ray_is_refused(
        self,
        ray_cluster: RayCluster,
        toy_run: ToyRun,  # noqa: F811
    ) -> None:
        refused = Driven(ray_cluster, toy_run, other_ray=1).refusal()
        said = "Version mismatch: .* Ray: 2.0.0 .*; check that the cluster runs, with "
        assert re.match(f"hicachectl: --ray {ray_cluster.address}: {said}", refused)

    def test_lost_drivers_processes_and_nodes_lose_nothing(
        self,
        ray_cluster: RayCluster,
        toy_run: ToyRun,  # noqa: F811
    ) -> None:
        """The children of a killed driver end soon, and another driver continues the run.

        It loses a child and the process of the other task. When both parts are begun again, it
        loses all processes of a node. Parts copy one number and wait until all that is over, so
        that each loss is in the middle of a part.
        """
        first = Driven(ray_cluster, toy_run, held=1, kept=1)
        children = first.children()
        assert first.end(signal.SIGKILL)
        wait_for_end([child for child, _ in children])
        assert len(names_in(toy_run.destination)) == NODES
        (toy_run.folder / "processes").unlink()
        driver = Driven(ray_cluster, toy_run, held=1, kept=1)
        (child, _), (_, other_worker) = driver.children()
        os.kill(child, signal.SIGKILL)
        os.kill(other_worker, signal.SIGKILL)
        begun_again = driver.children(begun=2 * NODES)[NODES:]
        removed = ray_cluster.removable
        (of_removed,) = [pid for pid, _ in begun_again if is_below(pid, removed)]
        ray_cluster.remove(removed)
        wait_for_end([of_removed])
        (toy_run.folder / "released").touch()
        assert driver.document() == UNDISTURBED
        assert "was killed by signal 9 (Killed)" in driver.remarks
        assert driver.remarks.count("is done again: ") == NODES + 1
        assert toy_run.listings == 1

    @pytest.mark.parametrize(("command", "hidden", "ending"), some(COMMANDS, *COMMANDS[:1]))
    def test_a_command_gives_the_result_of_one_process(
        self,
        ray_cluster: RayCluster,
        invoke: Invoke,
        tmp_path: Path,
        command: str,
        hidden: str,
        ending: int,
    ) -> None:
        """End the driver in the middle; the next one loses a child and a node.

        Another node of the second driver has nothing mounted at the source, or at the destination.
        On every run, tests/conformance/test_parts_stores.py compares each command on Ray with one
        process, and the tests above lose processes and nodes in the same driver.
        """
        for name in ("source", "destination"):
            (tmp_path / name).mkdir()
        at_once(demo_store(tmp_path / "source" / "store", PAGES))
        options = ["--profile", profile_file(tmp_path / "p.toml"), "--format", "json"]

        def arguments(name: str) -> list[object]:
            source, destination = tmp_path / "source" / "store", tmp_path / "destination" / name
            if command == "prewarm":
                return [command, destination, "--from", source, "--all", *options]
            stores = [source, destination] if command == "migrate" else [source]
            return [command, *stores, "--grace", "2h", *options]

        status = 0 if command == "migrate" else 4  # migrate leaves damaged pages out
        alone = invoke(*arguments("alone"), exit_code=status)
        on_ray = [*arguments("together"), "--ray", ray_cluster.address, "--run", tmp_path / "run"]
        on_ray += ["--bwlimit", "400KiB"]  # so that parts take a few seconds

        copies = None if command == "verify" else tmp_path / "destination" / "together"
        first, second = tmp_path / "said-first", tmp_path / "said-second"
        driver = started(first, *on_ray)
        wait_for_work(ray_cluster, first, copies)
        children = ray_cluster.children()
        driver.send_signal(ending)
        output, _ = driver.communicate(timeout=120)
        assert (output, driver.returncode) == ("", 143 if ending == signal.SIGTERM else -ending)
        continues = "Continue with the same command" in first.read_text()
        assert continues == (ending == signal.SIGTERM)
        if ending == signal.SIGTERM:
            assert all(map(ended, children)), "a child outlived the driver"
        wait_for_end(children)

        with ray_cluster.node_without(tmp_path / hidden):
            driver = started(second, *on_ray)
            wait_for_work(ray_cluster, second, copies)
            children = ray_cluster.children()
            removed = ray_cluster.removable
            (of_removed,) = [child for child in children if is_below(child, removed)]
            (killed,) = [child for child in children if child != of_removed]
            os.kill(killed, signal.SIGKILL)
            ray_cluster.remove(removed)
            wait_for_end(children)
            output, _ = driver.communicate(timeout=120)
        said = second.read_text()
        assert driver.returncode == status, said
        document = json.loads(output)
        own = _OF_ATTEMPTS[command]
        assert {**comparable(document), **own} == {**comparable(alone.document), **own}, said
        assert document["parts"] == NODES
        assert said.count("is done again: ") == NODES
        assert said.count("is left out: ") == 2
        assert f"{tmp_path / hidden}/" in said  # the reason of one node
        if command != "verify":
            stores = tmp_path / "destination"
            assert written(stores / "together") == written(stores / "alone")


_OF_ONE = {"seconds", "listed", "parts", "missing_parts", "destination"}


def wait_for_work(cluster: RayCluster, said: Path, copies: Path | None) -> None:
    """Wait until all nodes are in the middle of a part. said: stderr of the driver."""
    wait_until(lambda: "an equal share" in said.read_text(), "the nodes are not asked")
    wait_until(lambda: len(cluster.children()) == NODES, "a node does not work")
    if copies is not None:
        wait_until(lambda: list(copies.iterdir()), "nothing is copied")


# What the attempts at a part count for themselves; lost attempts tell nothing.
_OF_ATTEMPTS = {
    "verify": {},
    "migrate": dict.fromkeys(("pages", "objects", "bytes", "skipped"), 0),
    "prewarm": dict.fromkeys(("copied_pages", "already_there", "bytes"), 0),
}


def written(store: Path) -> dict[str, bytes]:
    """Return the objects of a store, and temporary files if any remain."""
    return {name: content for name, (content, _) in contents(store).items()}


def comparable(document: dict[str, Any]) -> dict[str, Any]:
    """Return what must be equal for one process and for a cluster."""
    kept = {name: value for name, value in document.items() if name not in _OF_ONE}
    rows = {
        name: sorted(value, key=repr) for name, value in kept.items() if isinstance(value, list)
    }
    return kept | rows


def started(said: Path, *arguments: object) -> subprocess.Popen[str]:
    """Start the command line in a process of its own. said: file for stderr."""
    with said.open("w") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", "hicachectl", *map(str, arguments)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
        )


# without a cluster


class LosingCluster(Closing):
    """Nodes that lose the store while they work; without a store, nodes that refuse at once."""

    has_store = True

    def __init__(self, address: str) -> None:
        self._nodes = [Node(name, name) for name in ("a", "b", "c")]

    def nodes(self) -> list[Node]:
        return self._nodes

    def refusals(self, nodes: Collection[Node], job: bytes) -> dict[Node, str]:
        return {} if self.has_store else dict.fromkeys(nodes, "not mounted here")

    def answers(self, *_: object) -> Generator[Answer, None, None]:
        self.has_store = False
        yield Moved(1, 2)
        raise LostError("the process was killed")

    def close(self) -> None:
        pass


@pytest.mark.parametrize("has_store", [True, False])
def test_without_a_node_that_can_work_the_run_ends(
    toy_run: ToyRun,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    has_store: bool,
) -> None:
    """The reason of each node is said once, at the start or when its part is lost."""
    monkeypatch.setattr("hicachectl.parts.driver.Cluster", LosingCluster)
    monkeypatch.setattr(LosingCluster, "has_store", has_store)
    said: list[str] = []
    moved: list[int] = []
    places = toy_run.store, toy_run.destination

    def drive() -> None:
        job, opens = ToyJob(*places), partial(opened, *places)
        with Driver("auto", job, opens, say=said.append) as driver:
            driver.begin()
            driver.work(lambda new, total: moved.append(new))

    with pytest.raises(StoreUnavailable) as refusal:
        drive()
    why = "No node is left that can work; see the reasons above, then run again"
    if not has_store:
        why = "--ray auto: no node of the cluster can work: 3 nodes left out; see the reasons above"
    assert str(refusal.value) == why
    left_out = [text for text in said if "is left out" in text]
    assert sorted(left_out) == [f"Node {n} is left out: not mounted here" for n in "abc"]
    assert sum(moved) == 0, "the progress of a lost part is not taken back"


@pytest.fixture
def ray_options(tmp_path: Path) -> list[object]:
    (tmp_path / "store").mkdir()
    return ["verify", tmp_path / "store", "--ray"]


def test_without_ray_one_line_says_how_to_install_it(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, ray_options: list[object]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    refused = invoke(*ray_options, "local", exit_code=2)
    assert refused.stderr == (
        f"hicachectl: --ray local: needs Ray; run {sys.executable} -m pip install ray\n"
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["ray://head:10001"], "a Ray client cannot run parts; run on a node of the cluster"),
        (["head"], "--ray head: give auto, local or HOST:PORT"),
        (["auto", "--shard", "0/2"], "--shard cannot be combined with --ray"),
        (["auto", "--repair", "delete"], "give --yes or --dry-run"),
        (["auto", "--run", "new", "--output", "new/o"], "new/o: is in the run directory new"),
    ],
)
def test_options_that_do_not_go_together(
    invoke: Invoke, ray_options: list[object], options: list[str], said: str
) -> None:
    refused = invoke(*ray_options, *options, exit_code=2)
    assert said in refused.stderr.splitlines()[-1]


def test_workers_need_a_cluster_and_moves_one_process(
    invoke: Invoke, ray_options: list[object], tmp_path: Path
) -> None:
    store = ray_options[1]
    assert "--workers needs --ray" in invoke("verify", store, "--workers", 2, exit_code=2).stderr
    move = ["migrate", store, tmp_path / "new", "--ray", "auto", "--move", "--yes"]
    assert "--move cannot be combined with --ray" in invoke(*move, exit_code=2).stderr


@pytest.mark.slow
def test_a_port_without_a_cluster(invoke: Invoke, ray_options: list[object]) -> None:
    """One line names the address, at once, with the exit status of a lost store."""
    need_module("ray")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    refused = invoke(*ray_options, f"127.0.0.1:{port}", exit_code=3)
    assert f"--ray 127.0.0.1:{port}: nothing answers there" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


def test_the_address_of_a_lost_cluster_in_the_environment(
    invoke: Invoke, ray_options: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray itself would try for minutes."""
    need_module("ray")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    refused = invoke(*ray_options, "auto", exit_code=3)
    assert f"--ray 127.0.0.1:{port}: nothing answers there" in refused.stderr
    assert "; give the address of the cluster's head node" in refused.stderr


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
def test_another_server(invoke: Invoke, ray_options: list[object], answer: bytes) -> None:
    """One line says that it is not Ray; nothing waits for Ray's own timeouts."""
    need_module("ray")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 10)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        port = server.getsockname()[1]
        refused = invoke(*ray_options, f"127.0.0.1:{port}", exit_code=3)
        thread.join()
    assert f"--ray 127.0.0.1:{port}: another program than Ray listens there" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


def test_a_silent_server(
    invoke: Invoke, ray_options: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    need_module("ray")
    monkeypatch.setattr("hicachectl.parts.cluster._CONNECT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        refused = invoke(*ray_options, f"127.0.0.1:{port}", exit_code=3)
    assert (
        f"--ray 127.0.0.1:{port}: another program than Ray listens there (timed out)"
        in refused.stderr
    )
