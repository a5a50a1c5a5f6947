"""Fixtures for stores written by SGLang itself, which runs in a separate environment."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.conformance import tiny_llama
from tests.conformance.cpu_server import CpuServer
from tests.hf3fs_fixtures import REMEDY
from tests.mooncake_release import release_of_process
from tests.skips import missing
from tests.waiting import alive, wait_until

if TYPE_CHECKING:
    from tests.conformance.store_cases import CASES, DEFAULT_LAYOUT, LEGACY, VARIANTS, store_name
else:  # these modules also run where nothing of ours is installed: no package holds them
    sys.path.insert(0, str(Path(__file__).parent))
    from store_cases import CASES, DEFAULT_LAYOUT, LEGACY, VARIANTS, store_name

HERE = Path(__file__).parent
TIMEOUT_S = 600  # the page-hash extension is compiled on first use

Manifest = dict[str, Any]
WriteStore = Callable[..., tuple[Path, Manifest]]


@pytest.fixture(scope="session")
def sglang_store(
    sglang_python: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> WriteStore:
    """Return a function that writes a case's store once per session.

    It returns the store's directory and manifest. Options: layout, pages, seed. Stores are shared:
    a test that changes one copies it first.
    """
    shared = _shared_folder(tmp_path_factory) / "sglang-stores"
    shared.mkdir(exist_ok=True)

    def written(folder: Path, case: str, *options: str) -> Manifest:
        """Return the manifest of a folder's store; the first caller of all processes writes it."""
        folder.mkdir(exist_ok=True)
        manifest = folder / "manifest.json"
        with _locked(folder / "lock"):
            if not manifest.exists():
                if case in CASES and CASES[case].sglang == LEGACY:
                    extract_recorded(folder)
                else:
                    arguments = (case, folder / "store", *options, f"--manifest={manifest}.new")
                    session: SglangSession = request.getfixturevalue("sglang_session")
                    session.run("write_store", *arguments)
                    Path(f"{manifest}.new").rename(manifest)
        document: Manifest = json.loads(manifest.read_text())
        return document

    def store(case: str, **options: Any) -> tuple[Path, Manifest]:
        layout = options.pop("layout", DEFAULT_LAYOUT)
        name = store_name(case, layout)
        if CASES[case].sglang != LEGACY and (case, layout) in VARIANTS and not options:
            manifests = written(shared / "all", "all")
            return shared / "all" / "store" / name, manifests[name]
        options["layout"] = layout
        arguments = [f"--{key}={value}" for key, value in sorted(options.items())]
        folder = shared / "".join((name, *arguments))
        return folder / "store", written(folder, case, *arguments)

    return store


class SglangSession:
    """A connection to a process that has imported SGLang and runs scripts of this folder.

    All workers share the process (session.py), which the first of them starts.
    """

    def __init__(self, python: Path, folder: Path, *, stays: bool = False) -> None:
        """Connect; start the process if there is none.

        folder: the folder that names the process, for its log. stays: run scripts one after another
        in one process, which keeps what they import.
        """
        self._log = folder / "session.log"
        self._stays = {"stays": True} if stays else {}
        address = blake2b(bytes(folder), digest_size=16).hexdigest()
        with _locked(folder / "session.lock"):
            if not self._connects(address):
                packages = [str(_nixl_packages(python)), *release_of_process()]
                with self._log.open("ab") as stderr:
                    self._started = process = subprocess.Popen(
                        [python, HERE / "session.py", address],
                        env={**environment(), "PYTHONPATH": os.pathsep.join(packages)},
                        stdin=subprocess.DEVNULL,
                        stdout=stderr,
                        stderr=stderr,
                        start_new_session=True,  # other workers may need it longer
                    )
                wait_until(
                    lambda: self._connects(address) or process.poll() is not None,
                    "SGLang is not imported",
                    TIMEOUT_S,
                )
                assert process.poll() is None, self._log_text()[-4000:]

    def _connects(self, address: str) -> bool:
        connection = socket.socket(socket.AF_UNIX)
        with suppress(OSError):  # the process is not there, or just ends
            connection.connect(f"\0{address}")
            self._lines = connection.makefile("rw")
            if self._lines.readline():
                self._connection = connection
                return True
        connection.close()
        return False

    def run(self, script: str, *arguments: object) -> Any:
        """Run a script and return the JSON that it prints, if it prints."""
        return self._output(script=script, arguments=list(map(str, arguments)), **self._stays)

    def ask(self, script: str, question: Any = None) -> Any:
        """Return a script's answer to a question; both are JSON values."""
        return self._output(script=script, question=question, **self._stays)

    def _output(self, script: str, **request: Any) -> Any:
        answer = self._asked(script=script, **request)
        assert answer["code"] == 0, f"{script}: exit {answer['code']}\n{answer['error'][-4000:]}"
        return json.loads(answer["output"]) if answer["output"] else None

    def read_back(
        self,
        place: object,
        backend: str,
        manifest: Manifest,
        profile: dict[str, Any] | None = None,
    ) -> list[dict[str, Any]]:
        """Return what each rank of the manifest's deployments, or of a profile, reads from a store.

        See read_back.py.
        """
        question = {"place": str(place), "backend": backend}
        read: list[dict[str, Any]] = self.ask(
            "read_back", {**question, "manifest": manifest, "profile": profile}
        )
        return read

    def start(self, script: str, question: Any, output: Path) -> Started:
        """Start a script that goes on beside others. output: file for stdout and stderr."""
        pid = self._asked(script=script, question=question, output=str(output))["pid"]
        assert pid, output.read_text()
        return Started(self, pid)

    def exit_code(self, pid: int) -> int:
        """Wait for the end of a started script."""
        code: int = self._asked(wait=pid)["code"]
        return code

    def _asked(self, **request: Any) -> dict[str, Any]:
        print(json.dumps(request), file=self._lines, flush=True)
        line = self._lines.readline()
        assert line, self._log_text()[-4000:]
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _log_text(self) -> str:
        return self._log.read_text(errors="replace")

    def close(self) -> None:
        """End the connection."""
        self._lines.close()
        self._connection.close()


class Started(NamedTuple):
    """A script that a session has started."""

    session: SglangSession
    pid: int

    @property
    def is_alive(self) -> bool:
        """Whether the script runs."""
        return alive(self.pid)

    def wait(self) -> int:
        """Wait for the end; return the exit code."""
        return self.session.exit_code(self.pid)

    def kill(self) -> None:
        """Kill the script."""
        os.kill(self.pid, signal.SIGKILL)
        self.wait()


@pytest.fixture(scope="session")
def sglang_session(
    sglang_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SglangSession]:
    """Return the worker's connection to the process with SGLang."""
    session = SglangSession(sglang_python, _shared_folder(tmp_path_factory))
    yield session
    session.close()


@pytest.fixture(scope="session")
def modelling_session(
    sglang_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SglangSession]:
    """Return a connection for scripts that import all models of SGLang, which takes seconds.

    Tests that use it are in the xdist group "probe", so that one worker imports them.
    """
    session = SglangSession(sglang_python, _shared_folder(tmp_path_factory), stays=True)
    yield session
    session.close()


def _shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the session's folder, which all workers share."""
    base = tmp_path_factory.getbasetemp()
    # Under xdist, each worker has a separate folder inside the session's folder.
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def nixl_package(sglang_python: Path) -> None:
    """Skip if the SGLang environment lacks NIXL."""
    if not (_nixl_packages(sglang_python) / "nixl").is_dir():
        missing("NIXL", REMEDY)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the model directory of the servers."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    tiny_llama.write_model(directory, seed=7)
    return directory


@pytest.fixture(scope="session")
def shared_cpu_server(
    sglang_python: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CpuServer]:
    """Start one server (page_first, kernel I/O) for all tests of a worker: it takes 20 s.

    Tests that use it are in the xdist group "sglang-server", so that one worker starts it.
    """
    log = tmp_path_factory.mktemp("server") / "server.log"
    with CpuServer(sglang_python, tiny_model, log) as server:
        yield server


@pytest.fixture
def cpu_server(shared_cpu_server: CpuServer) -> Iterator[CpuServer]:
    """The worker's server, with empty pools and without a storage backend."""
    shared_cpu_server.detach()
    yield shared_cpu_server
    shared_cpu_server.detach()


@pytest.fixture(scope="module")
def module_cpu_server(
    sglang_python: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CpuServer]:
    """Start a server for the tests of one module: `doctor` judges counts since a server's start.

    The module names it `shared_cpu_server`.
    """
    log = tmp_path_factory.mktemp("server") / "server.log"
    with CpuServer(sglang_python, tiny_model, log) as server:
        yield server


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def extract_recorded(folder: Path) -> None:
    """Make the store that the older SGLang wrote, and its manifest, with the present time.

    test_written_stores.py compares the record with what that SGLang writes.
    """
    with tarfile.open(HERE.parent / "data" / f"sglang-{LEGACY}-store.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    for path in folder.rglob("*.bin"):
        path.touch()


def _nixl_packages(python: Path) -> Path:
    """Return the folder with NIXL's wheels, which only processes that use it have on their path."""
    return python.parents[1] / "nixl"


def environment() -> dict[str, str]:
    """Return the variables of processes with other packages than this one's."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
