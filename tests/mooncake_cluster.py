"""A real Mooncake cluster for tests: a master, and processes that own segments, on loopback.

As in production, separate processes hold the data, so a test can kill any part.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.processes import Closing, following

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

HOST = "127.0.0.1"
STARTS = 3  # another process can take a free port before the master binds it
PORT_TIMEOUT_S = 60  # longest wait for another process to release a killed master's port
START_TIMEOUT_S = 30
STOP_TIMEOUT_S = 5
LOCAL_BUFFER_BYTES = 16 << 20
PROBE = "hicachectl-probe"
# The owner's program, given a master and bytes, holds a segment until its stdin ends.
OWNER = str(Path(__file__).with_name("mooncake_owner.py"))


class Cluster(Closing):
    """A master and its segment owners. This is a context manager that ends them all.

    offload: directory, where each owner writes its objects to files, in `rank_0_N_0_0` as SGLang's
        N-th rank does.
    environment: additional variables for all processes.
    flags: additional options of mooncake_master, such as eviction_ratio=0.1.

    Raises RuntimeError with the end of the log if a process does not start.
    """

    def __init__(
        self,
        segment_bytes: int = 64 << 20,
        *,
        lease_ms: int = 10_000,
        stores: int = 1,
        offload: Path | None = None,
        environment: Mapping[str, str] | None = None,
        **flags: object,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mooncake-")
        self._segment_bytes = segment_bytes
        self._flags = {"default_kv_lease_ttl": lease_ms, **flags}
        self._offload = offload
        self._environment = dict(environment or {})
        if offload is not None:
            self._flags["enable_offload"] = True
        self._client: Any = None
        self._stores: dict[str, subprocess.Popen[bytes]] = {}
        self._numbers = itertools.count()
        self._master: subprocess.Popen[bytes] | None = None
        self.master = self.admin = ""
        try:
            self._start_master()
            for _ in range(stores):
                self.add_store()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """URL of the cluster as a store."""
        return f"mooncake://{self.master}?admin={self.admin}&protocol=tcp"

    def add_store(self, segment_bytes: int | None = None) -> str:
        """Start a segment owner. Return its name once it accepts objects."""
        known = self._segments()
        number = next(self._numbers)
        program = [OWNER, self.master, str(segment_bytes or self._segment_bytes)]
        if self._offload is not None:
            directory = self._offload / f"rank_0_{number}_0_0"
            directory.mkdir(exist_ok=True)
            program.append(str(directory))
        process = self._spawn(f"store-{number}", sys.executable, *program, stdin=subprocess.PIPE)
        self._stores[f"starting-{number}"] = process
        fresh = self._await(process, f"store-{number}", lambda: self._segments() - known)
        if self._offload is not None:  # only objects put from then on are offloaded
            log = self._log(f"store-{number}")
            self._await(process, f"store-{number}", lambda: "set up" in log.read_text())
        name: str = fresh.pop()
        self._stores[name] = self._stores.pop(f"starting-{number}")
        if number == 0:
            self._probe(process)
        return name

    def kill_store(self, name: str | None = None) -> None:
        """SIGKILL an owner (default: the last). The master notices after its client_ttl."""
        _kill(self._stores.pop(name) if name else self._stores.popitem()[1])

    def pause_store(self) -> None:
        """SIGSTOP an owner, which then does not answer."""
        next(iter(self._stores.values())).send_signal(signal.SIGSTOP)

    def kill_master(self) -> None:
        """SIGKILL the master."""
        if self._master is not None:
            _kill(self._master)
        self._master = None

    def restart_master(self) -> None:
        """Start a killed master at its port, without objects. The owners register again."""
        self._start_master([int(each.rpartition(":")[2]) for each in (self.master, self.admin)])
        _await(
            lambda: len(self._segments()) == len(self._stores),
            "no owner comes back",
            4 * START_TIMEOUT_S,
        )

    def client(self) -> Any:
        """Return a MooncakeDistributedStore without a segment, the same at every call."""
        if self._client is None:
            client = _new_store()
            if client.setup(HOST, "P2PHANDSHAKE", 0, LOCAL_BUFFER_BYTES, "tcp", "", self.master):
                raise RuntimeError(f"no client of {self.master}\n{self._log_end('master')}")
            self._client = client
        return self._client

    def put(self, key: str, value: bytes) -> None:
        """Put an object, and replace an existing one."""
        client = self.client()
        client.remove(key, True)  # a put on an existing key keeps the old bytes
        code = client.put(key, value)
        assert code == 0, f"put of {key}: {code}"

    def remove(self, key: str) -> None:
        """Remove an object, leased or not."""
        code = self.client().remove(key, True)
        assert code == 0, f"remove of {key}: {code}"

    def store_names(self) -> list[str]:
        """Return the names of the segments, in order of addition."""
        return list(self._stores)

    def store_of(self, key: str) -> str:
        """Return the owner of an object's memory."""
        replicas = json.loads(self.ask(f"batch_query_keys?keys={key}"))["data"][key]["values"]
        segments = json.loads(self.ask("get_segments_detail"))["segments"]
        names = {segment["te_endpoint"]: str(segment["segment_name"]) for segment in segments}
        return names[replicas[0]["transport_endpoint_"]]

    def list_keys(self) -> list[str]:
        """Return every key that the master lists."""
        return self.ask("get_all_keys").splitlines()

    def ask(self, path: str) -> str:
        """Return the answer of a GET request to the master's admin port."""
        with urllib.request.urlopen(f"http://{self.admin}/{path}", timeout=10) as reply:
            return str(reply.read().decode())

    @property
    def can_pin(self) -> bool:
        """Whether the master can pin the objects that it has, which 0.3.14 and later can."""
        try:
            urllib.request.urlopen(f"http://{self.admin}/api/v1/soft_unpin", b"{}", timeout=10)
        except urllib.error.HTTPError as refused:
            return refused.code != http.client.NOT_FOUND
        raise AssertionError("a request without keys succeeded")

    def clear(self) -> None:
        """Remove every object, leased or not."""
        self.client().remove_all(True)
        _await(lambda: not self.list_keys(), "keys stay after remove_all", START_TIMEOUT_S)

    def close(self) -> None:
        """End every process and remove the logs."""
        self._client = None  # its close() takes seconds, and would crash a late caller
        children = [*self._stores.values(), *([self._master] if self._master else [])]
        for child in children:
            child.terminate()
        for child in children:
            _kill(child, STOP_TIMEOUT_S)
        self._stores, self._master = {}, None
        self._folder.cleanup()

    def _start_master(self, ports_before: Sequence[int] = ()) -> None:
        deadline = time.monotonic() + (PORT_TIMEOUT_S if ports_before else 0)
        for attempt in itertools.count(1):
            ports = ports_before or free_ports(2)
            self.master, self.admin = (f"{HOST}:{port}" for port in ports)
            flags = {
                "rpc_address": HOST,
                "rpc_port": ports[0],
                "rpc_thread_num": 4,
                "metrics_host": HOST,
                "metrics_port": ports[1],
                "logtostderr": True,
                **self._flags,
            }
            options = [f"--{name}={_flag(value)}" for name, value in flags.items()]
            self._master = self._spawn("master", str(_package() / "mooncake_master"), *options)
            try:
                self._await(self._master, "master", self._healthy)
                return
            except RuntimeError:
                self.kill_master()
                if attempt >= STARTS and time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def _healthy(self) -> bool:
        # If the port was taken, another cluster's master may answer: check the process after the
        # reply, not before (as _await does). A master reports that it is ready before it binds
        # its other port, and ends if that port is taken.
        port = int(self.master.rpartition(":")[2])
        ready = '"service_ready":true' in self.ask("health")
        return ready and self._master is not None and port in listening_ports(self._master.pid)

    def _segments(self) -> set[str]:
        return set(self.ask("get_all_segments").split())

    def _probe(self, owner: subprocess.Popen[bytes]) -> None:
        """Put, get and remove an object."""
        client = self.client()
        self._await(owner, "store-0", lambda: client.put(PROBE, PROBE.encode()) == 0)
        self._await(owner, "store-0", lambda: client.get(PROBE) == PROBE.encode())
        self.remove(PROBE)

    def _spawn(self, name: str, *command: str, stdin: int | None = None) -> subprocess.Popen[bytes]:
        with self._log(name).open("wb") as log:
            return subprocess.Popen(
                following(sys.executable, *command),
                stdin=stdin or subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._folder.name,
                env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **self._environment},
            )

    def _await(self, process: subprocess.Popen[bytes], name: str, ready: Callable[[], Any]) -> Any:
        """Wait until `ready` returns a true value, while the process runs."""

        def check() -> Any:
            found = None
            with contextlib.suppress(OSError):
                found = ready()
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended: {process.returncode}\n{self._log_end(name)}")
            return found

        return _await(check, f"{name} does not come up", START_TIMEOUT_S)

    def _log(self, name: str) -> Path:
        return Path(self._folder.name) / f"{name}.log"

    def _log_end(self, name: str) -> str:
        return self._log(name).read_text(errors="replace")[-3000:]


def _new_store() -> Any:
    from mooncake.store import MooncakeDistributedStore

    return MooncakeDistributedStore()


def _package() -> Path:
    import mooncake

    return Path(next(iter(mooncake.__path__)))


def _flag(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def free_ports(count: int) -> list[int]:
    """Return ports that no process has now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]


def listening_ports(pid: int) -> set[int]:
    """Return the ports at which a process listens."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = {
        f"socket:[{row[9]}]": int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"
    }
    held = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            held.add(str(link.readlink()))
    return {port for name, port in listening.items() if name in held}


def _await(ready: Callable[[], Any], complaint: str, timeout_s: float) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := ready()):
        if time.monotonic() > deadline:
            raise RuntimeError(complaint)
        time.sleep(0.01)
    return found


def _kill(process: subprocess.Popen[bytes], patience_s: float = 0) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience_s)
    process.kill()
    process.wait()
    if process.stdin is not None:
        process.stdin.close()
