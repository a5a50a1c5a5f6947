"""A real SGLang server with HiCache on the CPU, of a tiny model (server/serve.py)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hicachectl.formats.hashing import page_hashes_hex
from tests.conformance.tiny_llama import VOCABULARY
from tests.processes import Closing, following
from tests.waiting import alive, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MODEL = "tiny"  # its served name
PAGE_SIZE = 64
DEVICE_TOKENS = 2048  # what fits into the device pool
HOST_TOKENS = 4 * DEVICE_TOKENS + PAGE_SIZE  # SGLang adds a page
KEY = "key-of-the-tests"  # its API key and admin key
_START_S = 600  # twenty on an idle machine
_REQUEST_S = 120
_LOG_CHARACTERS = 6000


def prompt(seed: int, pages: int = 5) -> list[int]:
    """Return random tokens, some more than a number of pages."""
    tokens = np.random.default_rng(seed).integers(3, VOCABULARY, pages * PAGE_SIZE + 10)
    return [int(token) for token in tokens]


def page_files(directory: Path, tokens: Sequence[int]) -> list[Path]:
    """Return where HiCacheFile stores the pages of a prompt, in order."""
    return [
        directory / f"{page}_{MODEL}_0_1.bin" for page in page_hashes_hex(list(tokens), PAGE_SIZE)
    ]


class Answer(NamedTuple):
    """An answer, and where its prompt's tokens came from."""

    tokens: list[int]
    logprobs: list[float]
    device: int  # tokens found on the device
    host: int  # tokens found in host memory
    storage: int  # tokens found in the store

    def same(self, other: Answer) -> bool:
        """Return whether the tokens are equal, and the logprobs nearly.

        Restored and computed values differ by rounding where chunks of a prompt differ.
        """
        return self.tokens == other.tokens and all(
            abs(one - two) < 5e-3 for one, two in zip(self.logprobs, other.logprobs, strict=True)
        )


class HeldCalls(NamedTuple):
    """Calls that `CpuServer.holding` has concerned."""

    log: Path

    @property
    def begun(self) -> int:
        """Calls that wait or waited, or failed."""
        return sum(not line.startswith("-") for line in self._lines())

    @property
    def made(self) -> int:
        """Calls that were made after they had waited."""
        return sum(line.startswith("-") for line in self._lines())

    def _lines(self) -> list[str]:
        return self.log.read_text().splitlines()


class CpuServer(Closing):
    """A server on a free port; a context manager that ends all its processes.

    arguments: more of launch_server's options. tokenizes: whether the model directory has a
    tokenizer, for texts and chats. metrics: whether the server exports metrics. variables: more
    environment variables. Raises
    RuntimeError with the end of the log if it does not start, AssertionError if a request fails.
    """

    def __init__(
        self,
        python: Path,
        model: Path,
        log: Path,
        *arguments: str,
        tokenizes: bool = False,
        metrics: bool = True,
        **variables: str,
    ) -> None:
        self._log = log
        self._folder = tempfile.TemporaryDirectory(prefix="sglang-")  # of its sockets
        self._switch = Path(self._folder.name, "held-calls")
        self._port = _free_port()
        command = [
            *(str(HERE / "server" / "serve.py"), "--model-path", str(model)),
            *("--host", "127.0.0.1", "--port", str(self._port), "--admin-api-key", KEY),
            *("--device", "cpu", "--attention-backend", "torch_native"),
            *("--sampling-backend", "pytorch", "--disable-overlap-schedule"),
            *("--skip-server-warmup", *(() if tokenizes else ("--skip-tokenizer-init",))),
            *("--max-total-tokens", str(DEVICE_TOKENS), "--max-running-requests", "4"),
            *("--page-size", str(PAGE_SIZE), "--enable-hierarchical-cache", "--hicache-ratio", "4"),
            *("--hicache-storage-prefetch-policy", "wait_complete"),
            *(("--enable-metrics",) if metrics else ()),
            *("--enable-cache-report", "--sleep-on-idle"),
            *("--served-model-name", MODEL),
            *arguments,
        ]
        environment = {
            **os.environ,
            **variables,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}",
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": self._folder.name,
            "HICACHECTL_HELD_CALLS": str(self._switch),
            "HICACHECTL_GIVEN": " ".join(variables),
        }
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                following(python, str(python), *command),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._await_start()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """The server's URL."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def alive(self) -> bool:
        """Whether the server runs and answers."""
        with contextlib.suppress(OSError):
            return self._process.poll() is None and self._call("GET", "/health")[0] == 200
        return False

    def generate(self, tokens: Sequence[int], count: int = 6) -> Answer:
        """Answer a prompt with `count` tokens, greedily."""
        sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
        document = self.post(
            "/generate",
            {"input_ids": list(tokens), "return_logprob": True, "sampling_params": sampling},
        )
        meta = document["meta_info"]
        found = meta["cached_tokens_details"] or {}
        return Answer(
            document["output_ids"],
            [logprob for logprob, *_ in meta["output_token_logprobs"]],
            *(found.get(place) or 0 for place in ("device", "host", "storage")),
        )

    def get(self, path: str) -> Any:
        """Return a JSON answer."""
        return json.loads(self._expect("GET", path))

    def post(self, path: str, document: object) -> Any:
        """Return the JSON answer to a JSON document."""
        return json.loads(self._expect("POST", path, document))

    def flush(self) -> None:
        """Empty the device and host pools, once the server is idle."""
        self._expect("POST", f"/flush_cache?timeout={_REQUEST_S // 2}")

    def attach(
        self, backend: str, config: dict[str, Any], write_policy: str = "write_through"
    ) -> None:
        """Attach a storage backend."""
        refusal = self.refusal(backend, config, write_policy)
        assert not refusal, f"{refusal}\n{self.log_end()}"

    def refusal(
        self, backend: str, config: dict[str, Any], write_policy: str = "write_through"
    ) -> str:
        """Attach a storage backend; return why it is refused, or an empty text."""
        document = {
            "hicache_storage_backend": backend,
            "hicache_storage_backend_extra_config_json": json.dumps(
                {"prefetch_threshold": PAGE_SIZE, **config}
            ),
            "hicache_storage_prefetch_policy": "wait_complete",
            "hicache_write_policy": write_policy,
        }
        status, answer = self._call("PUT", "/hicache/storage-backend", document)
        return "" if status == 200 else answer

    def detach(self) -> None:
        """Detach the storage backend, if one is attached, once the server is idle."""
        self.flush()
        self._expect("DELETE", "/hicache/storage-backend")

    def configure_logging(self, level: int) -> None:
        """Let the request log tell as much as a level of --log-requests-level."""
        document = {
            "log_requests": True,
            "log_requests_level": level,
            "log_requests_format": "json",
        }
        self._expect("POST", "/configure_logging", document)

    def clear(self) -> None:
        """Clear the attached storage backend."""
        self._expect("POST", "/hicache/storage-backend/clear")

    def update_weights(self, model: Path, version: str | None = None) -> None:
        """Load the weights of a model directory."""
        document = {"model_path": str(model), "weight_version": version}
        self._expect("POST", "/update_weights_from_disk", document)

    @contextlib.contextmanager
    def holding(self, below: Path, *calls: str, error: int = 0) -> Iterator[HeldCalls]:
        """Let calls below a directory wait until the end of the block, or fail with an errno.

        calls: names in `os` (server/held_calls.py).
        """
        log = Path(f"{self._switch}.log")
        log.write_text("")
        unfinished = self._switch.with_name("switch")
        unfinished.write_text(json.dumps({"below": str(below), "calls": calls, "errno": error}))
        unfinished.rename(self._switch)
        try:
            yield HeldCalls(log)
        finally:
            self._switch.unlink(missing_ok=True)  # the server may have been closed

    def metrics(self) -> str:
        """Return the server's Prometheus metrics."""
        return self._expect("GET", "/metrics")

    def log(self) -> str:
        """Return what the server has logged."""
        return self._log.read_text(errors="replace")

    def log_end(self) -> str:
        """Return the last lines of the log."""
        return self.log()[-_LOG_CHARACTERS:]

    def close(self) -> None:
        """Kill the server's processes, and remove the shared memory that SGLang leaves."""
        self._kill(self._processes())
        self._folder.cleanup()

    def kill_first(self) -> None:
        """Kill the process that SGLang has started first; the others must end with it."""
        self._kill([Path(f"/proc/{self._process.pid}")])

    def _kill(self, killed: list[Path]) -> None:
        shared = {path for process in self._processes() for path in _shared_memory(process)}
        for process in killed:
            # Python's tracker of shared memory removes its own and ends by itself.
            with contextlib.suppress(OSError):
                if b"resource_tracker" not in (process / "cmdline").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)
        self._process.wait()
        wait_until(lambda: not self._processes(), "the server's processes do not end")
        for path in shared:
            path.unlink(missing_ok=True)

    def _processes(self) -> list[Path]:
        """Return the server's processes, as their directories in /proc."""
        return [
            process
            for process in Path("/proc").glob("[0-9]*")
            if _group(process) == self._process.pid and alive(int(process.name))
        ]

    def _await_start(self) -> None:
        deadline = time.monotonic() + _START_S
        while not self.alive:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server does not start\n{self.log_end()}")
            time.sleep(0.1)

    def _expect(self, method: str, path: str, document: object = None) -> str:
        try:
            status, answer = self._call(method, path, document)
        except OSError as error:
            raise AssertionError(f"{method} {path}: {error}\n{self.log_end()}") from error
        assert status == 200, f"{method} {path}: {status} {answer}\n{self.log_end()}"
        return answer

    def _call(self, method: str, path: str, document: object = None) -> tuple[int, str]:
        request = urllib.request.Request(
            f"{self.url}{path}",
            json.dumps(document).encode() if document is not None else None,
            {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=_REQUEST_S) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()


def _group(process: Path) -> int | None:
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(int(process.name))
    return None


def _shared_memory(process: Path) -> set[Path]:
    """Return the files in /dev/shm that a process maps."""
    with contextlib.suppress(OSError):
        maps = (process / "maps").read_text()
        return set(map(Path, re.findall(r"/dev/shm/\S+$", maps, re.MULTILINE)))
    return set()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
