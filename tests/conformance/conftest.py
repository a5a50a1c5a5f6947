"""Fixtures for stores written by SGLang itself, which runs in a separate environment."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.conformance import tiny_llama
from tests.conformance.cpu_server import CpuServer
from tests.hf3fs_fixtures import REMEDY, sglang_interpreter
from tests.skips import missing

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
ReadBack = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    """Return the interpreter of the SGLang environment; skip if it is missing."""
    return sglang_interpreter()


@pytest.fixture(scope="session")
def sglang_store(sglang_python: Path, tmp_path_factory: pytest.TempPathFactory) -> WriteStore:
    """Return a function that writes a case's store once per session.

    It returns the store's directory and manifest. Options: layout, pages, seed. Stores are shared:
    a test that changes one copies it first.
    """
    base = tmp_path_factory.getbasetemp()
    # Under xdist, each worker has a separate folder inside the session's folder.
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "sglang-stores"
    shared.mkdir(exist_ok=True)

    def store(case: str, **options: Any) -> tuple[Path, Manifest]:
        layout = options.pop("layout", DEFAULT_LAYOUT)
        name = store_name(case, layout)
        if CASES[case].sglang != LEGACY and (case, layout) in VARIANTS and not options:
            # Importing SGLang takes seconds, so one process writes all stores.
            manifests = _written(sglang_python, shared / "all", ["all"])
            return shared / "all" / "store" / name, manifests[name]
        options["layout"] = layout
        arguments = [f"--{key}={value}" for key, value in sorted(options.items())]
        folder = shared / "".join((name, *arguments))
        return folder / "store", _written(sglang_python, folder, [case, *arguments])

    return store


@pytest.fixture(scope="session")
def sglang_read_back(sglang_python: Path, tmp_path_factory: pytest.TempPathFactory) -> ReadBack:
    """Return a function that reads a store with SGLang (read_back.py).

    SGLang runs as the manifest's deployments, or as `profile`.
    """

    def read(
        directory: Path, manifest: Manifest, profile: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        files = tmp_path_factory.mktemp("read-back")
        (files / "manifest.json").write_text(json.dumps(manifest))
        arguments = [str(directory), f"--manifest={files / 'manifest.json'}"]
        if profile is not None:
            (files / "profile.json").write_text(json.dumps(profile))
            arguments.append(f"--profile={files / 'profile.json'}")
        release = (profile or manifest["profile"])["sglang"]
        output = _run(sglang_python, "read_back.py", arguments, release, accepted=(0, 1))
        results: list[dict[str, Any]] = json.loads(output)
        return results

    return read


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

    def run(self, script: str, *arguments: object, accepted: tuple[int, ...] = (0,)) -> Any:
        """Run a script and return the JSON that it prints."""
        request = {"script": script, "arguments": [str(argument) for argument in arguments]}
        print(json.dumps(request), file=self._stream(self._process.stdin))
        line = self._stream(self._process.stdout).readline()
        died = {"code": None, "output": "", "error": ""}
        answer: dict[str, Any] = json.loads(line) if line else {**died, "error": self._log_text()}
        if answer["code"] not in accepted or not answer["output"]:
            pytest.fail(f"{script} {arguments}: exit {answer['code']}\n{answer['error'][-4000:]}")
        return json.loads(answer["output"])

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


def _written(python: Path, folder: Path, arguments: list[str]) -> Manifest:
    """Return the manifest of a folder's store; the first caller of all processes writes it."""
    folder.mkdir(exist_ok=True)
    manifest = folder / "manifest.json"
    release = CASES[arguments[0]].sglang if arguments[0] in CASES else ""
    with _locked(folder / "lock"):
        if not manifest.exists():
            case, *options = arguments
            output = _run(
                python, "write_store.py", [case, str(folder / "store"), *options], release
            )
            manifest.write_text(output)
    document: Manifest = json.loads(manifest.read_text())
    return document


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(
    python: Path, script: str, arguments: list[str], release: str, accepted: tuple[int, ...] = (0,)
) -> str:
    """Run a script of this folder with SGLang and return its stdout."""
    environment = _environment()
    if release == LEGACY:
        packages = python.parents[1] / "legacy"
        if not packages.is_dir():
            missing(f"SGLang {LEGACY}", REMEDY)
        environment["PYTHONPATH"] = str(packages)
    done = subprocess.run(
        [python, HERE / script, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode not in accepted or not done.stdout:
        pytest.fail(
            f"{script} {' '.join(arguments)}: exit {done.returncode}\n{done.stderr[-4000:]}"
        )
    return done.stdout


def _nixl_packages(python: Path) -> Path:
    """Return the folder with NIXL's wheels, which only processes that use it have on their path."""
    return python.parents[1] / "nixl"


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
