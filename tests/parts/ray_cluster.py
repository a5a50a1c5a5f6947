"""A Ray cluster on a loopback address; each node has one CPU and 100 MB of object store."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.parts.runs import ROOT
from tests.processes import Closing, following
from tests.skips import missing, need_module, need_tool
from tests.waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

NODES = 2
# Ray gives 127.0.0.1 to no other process: it resolves it to the host's address.
_ADDRESS = "127.0.0.2"
_NODE = {"num_cpus": 1, "object_store_memory": 100_000_000, "node_ip_address": _ADDRESS}


class RayCluster(Closing):
    """A running cluster."""

    def __init__(self) -> None:
        cluster_utils = need_module("ray.cluster_utils")
        # Ray's sockets have names of up to 107 characters.
        self._folder = tempfile.mkdtemp(prefix="ray-", dir="/dev/shm")
        self._settings = {
            "PYTHONPATH": str(ROOT),
            "RAY_USAGE_STATS_ENABLED": "0",
            "TMPDIR": self._folder,
        }
        self._cluster: Any = cluster_utils.Cluster()
        self._add(include_dashboard=False)
        self._others: list[Any] = []
        self.fill()

    @property
    def address(self) -> str:
        """The address for --ray."""
        address: str = self._cluster.address
        return address

    def children(self) -> list[int]:
        """Return the pids of the processes that do stages, on all nodes."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (process / "cmdline").read_bytes().split(b"\0")
                settings = (process / "environ").read_bytes().split(b"\0")
                is_ours = f"TMPDIR={self._folder}".encode() in settings
                if is_ours and b"hicachectl.parts.child" in words:
                    found.append(int(process.name))
        return found

    def fill(self) -> None:
        """Add nodes in place of removed ones."""
        while len(self._others) < NODES - 1:
            self._others.append(self.add())

    def add(self, **environment: str) -> Any:
        """Add a node, whose tasks have the environment."""
        return self._add(env_vars=environment)

    def _add(self, **options: Any) -> Any:
        """Add a node; the first is the head."""
        before = {name: os.environ.get(name) for name in self._settings}
        os.environ.update(self._settings)
        try:
            return self._cluster.add_node(**_NODE, **options)
        finally:
            for name, value in before.items():
                del os.environ[name]
                if value is not None:
                    os.environ[name] = value

    @contextmanager
    def node_without(self, directory: Path) -> Iterator[None]:
        """Add a node where a directory is empty, as if a file system were not mounted.

        Skips the test if this process may not mount.
        """
        mount = ["mount", "-t", "tmpfs", "none", str(directory)]
        unshare = [need_tool("unshare", "util-linux"), "-m"]
        if subprocess.run([*unshare, *mount], capture_output=True, check=False).returncode:
            missing("the right to mount a tmpfs", "run the tests as root, with CAP_SYS_ADMIN")
        start = f"{sys.executable} -m ray.scripts.scripts start --block --disable-usage-stats"
        start += f" --address={self.address} --node-ip-address={_ADDRESS}"
        start += f" --num-cpus=1 --object-store-memory={_NODE['object_store_memory']}"
        nodes = self._count_nodes()
        with Path(self._folder, "node.log").open("w") as log:
            node = subprocess.Popen(
                following(
                    sys.executable, *unshare, "sh", "-c", f"{shlex.join(mount)} && exec {start}"
                ),
                env={**os.environ, **self._settings},
                stdout=log,
                stderr=log,
            )
        try:
            wait_until(lambda: self._count_nodes() > nodes, "the node does not start")
            yield
        finally:
            node.terminate()
            node.wait(PATIENCE_S)

    def _count_nodes(self) -> int:
        return sum(node["Alive"] for node in self._cluster.global_state.node_table())

    def remove(self, node: Any) -> None:
        """Kill a node's processes."""
        self._cluster.remove_node(node, allow_graceful=False)
        if node in self._others:
            self._others.remove(node)

    @property
    def removable(self) -> Any:
        """A node that is not the head."""
        return self._others[0]

    def close(self) -> None:
        """End every process of the cluster."""
        self._cluster.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)


def is_below(process: int, node: Any) -> bool:
    """Return whether a node has started a process, through others."""
    (raylet,) = node.all_processes["raylet"]
    while process > 1:
        if process == raylet.process.pid:
            return True
        process = parent_of(process)
    return False


def parent_of(process: int) -> int:
    """Return the pid of the parent of a process; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def ended(process: int) -> bool:
    """Return whether a process has ended."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


def wait_for_end(processes: list[int]) -> None:
    """Wait until processes have ended."""
    wait_until(lambda: all(ended(process) for process in processes), f"{processes} still run")
