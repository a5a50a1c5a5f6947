"""Fixtures for stores written by SGLang itself, which runs in a separate environment."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.conformance import tiny_llama
from tests.conformance.cpu_server import CpuServer
from tests.hf3fs_fixtures import REMEDY
from tests.skips import missing
from tests.waiting import alive

if TYPE_CHECKING:
    from typing import IO

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
    base = tmp_path_factory.getbasetemp()
    # Under xdist, each worker has a separate folder inside the session's folder.
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "sglang-stores"
    shared.mkdir(exist_ok=True)

    def written(folder: Path, case: str, *options: str) -> Manifest:
        """Return the manifest of a folder's store; the first caller of all processes writes it."""
        folder.mkdir(exist_ok=True)
        manifest = folder / "manifest.json"
        arguments = (case, str(folder / "store"), *options, f"--manifest={manifest}.new")
        with _locked(folder / "lock"):
            if not manifest.exists():
                if case in CASES and CASES[case].sglang == LEGACY:
                    _write_as_legacy(sglang_python, *arguments)
                else:
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
    """A process that has imported SGLang and runs scripts of this folder (session.py)."""

    def __init__(self, python: Path, log: Path) -> None:
        self._log = log
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [python, HERE / "session.py"],
                env={**_environment(), "PYTHONPATH": str(_nixl_packages(python))},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                bufsize=1,
            )

    def run(self, script: str, *arguments: object) -> Any:
        """Run a script and return the JSON that it prints, if it prints."""
        return self._output(script=script, arguments=list(map(str, arguments)))

    def ask(self, script: str, question: Any = None) -> Any:
        """Return a script's answer to a question; both are JSON values."""
        return self._output(script=script, question=question)

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
        print(json.dumps(request), file=self._stream(self._process.stdin))
        line = self._stream(self._process.stdout).readline()
        assert line, self._log_text()[-4000:]
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _log_text(self) -> str:
        return self._log.read_text(errors="replace")

    def close(self) -> None:
        """End the process."""
        self._stream(self._process.stdin).close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stream(self._process.stdout).close()

    @staticmethod
    def _stream(stream: IO[str] | None) -> IO[str]:
        assert stream is not None
        return stream


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
    """Start one process with SGLang for all tests of a worker."""
    session = SglangSession(sglang_python, tmp_path_factory.mktemp("sglang") / "session.log")
    yield session
    session.close()


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


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write_as_legacy(python: Path, *arguments: str) -> None:
    """Write a store by the older SGLang, in a process of its own."""
    packages = python.parents[1] / "legacy"
    if not packages.is_dir():
        missing(f"SGLang {LEGACY}", REMEDY)
    done = subprocess.run(
        [python, HERE / "write_store.py", *arguments],
        env={**_environment(), "PYTHONPATH": str(packages)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"write_store.py {arguments}\n{done.stderr[-4000:]}"


def _nixl_packages(python: Path) -> Path:
    """Return the folder with NIXL's wheels, which only processes that use it have on their path."""
    return python.parents[1] / "nixl"


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
