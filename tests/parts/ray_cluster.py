"""A Ray cluster on a loopback address; each node has one CPU and 100 MB of object store."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.parts.runs import ROOT
from tests.processes import Closing
from tests.skips import need_module
from tests.waiting import wait_until

NODES = 3
# Ray gives 127.0.0.1 to no other process: it resolves it to the host's address.
_ADDRESS = "127.0.0.2"
_NODE = {"num_cpus": 1, "object_store_memory": 100_000_000, "node_ip_address": _ADDRESS}


class RayCluster(Closing):
    """A running cluster."""

    def __init__(self) -> None:
        cluster_utils = need_module("ray.cluster_utils")
        # Ray's sockets have names of up to 107 characters.
        self._folder = tempfile.mkdtemp(prefix="ray-", dir="/dev/shm")
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
        """Return the pids of the processes that do stages."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (process / "cmdline").read_bytes().split(b"\0")
                if b"hicachectl.parts.child" in words and self._folder.encode() in words[-2]:
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
        settings = {
            "PYTHONPATH": str(ROOT),
            "RAY_USAGE_STATS_ENABLED": "0",
            "TMPDIR": self._folder,
        }
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            return self._cluster.add_node(**_NODE, **options)
        finally:
            for name, value in before.items():
                del os.environ[name]
                if value is not None:
                    os.environ[name] = value

    def remove(self, node: Any) -> None:
        """Kill a node's processes."""
        self._cluster.remove_node(node, allow_graceful=False)
        if node in self._others:
            self._others.remove(node)

    def remove_any(self) -> None:
        """Kill the processes of a node that is not the head."""
        self.remove(self._others[0])

    def close(self) -> None:
        """End every process of the cluster."""
        self._cluster.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)


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
