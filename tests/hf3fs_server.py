"""SGLang's real 3FS metadata server for tests, in the interpreter that has SGLang."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import tempfile
import time
import urllib.error
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.processes import Closing, following

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import IO

HOST = "127.0.0.1"
STARTS = 3  # another process can take a free port before the server binds it
START_TIMEOUT_S = 60
TAKEN = "address already in use"
PORT_TIMEOUT_S = 60  # longest wait for another process to release the port
ANSWER_TIMEOUT_S = 30
NEVER_S = 1 << 20  # a save interval longer than any test
PROGRAM = str(Path(__file__).with_name("hf3fs_program.py"))


class MetadataServer(Closing):
    """One server process with persistence. This is a context manager that removes all files.

    The server saves at start, at `save()` and, with save_interval_s, by its own timer. Port and
    snapshot stay the same after `kill` and `start`. Raises RuntimeError with the end of the log if
    the server does not start.
    """

    def __init__(self, python: Path, *, save_interval_s: int = NEVER_S) -> None:
        self._python = python
        self._interval_s = save_interval_s
        self._folder = tempfile.TemporaryDirectory(prefix="hf3fs-metadata-")
        self._process: subprocess.Popen[str] | None = None
        self.snapshot = Path(self._folder.name) / "metadata.json"
        self.port = 0
        try:
            self._start_anywhere()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """The URL that SGLang's config calls metadata_server_url."""
        return f"http://{HOST}:{self.port}"

    def write_config(self, folder: Path, file_size: int) -> Path:
        """Write a config for SGLang's clients, with data files of this size in folder/data."""
        path = folder / "hf3fs.json"
        settings = {
            "file_path_prefix": str(folder / "data" / "hicache"),
            "file_size": file_size,
            "numjobs": 2,
            "entries": 4,
            "metadata_server_url": self.url,
        }
        path.write_text(json.dumps(settings))
        return path

    def save(self) -> Path:
        """Make the server write its snapshot of the current state. Return its path."""
        self._command("save")
        return self.snapshot

    def reset(self) -> None:
        """Remove every rank from memory and snapshot."""
        self._command("reset")
        self.save()

    def kill(self) -> None:
        """SIGKILL the server. Unsaved changes are lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError):
                    _stream(pipe).close()
        self._process = None

    def start(self) -> None:
        """Start the server again at the same port, with the snapshot as it is now."""
        deadline = time.monotonic() + PORT_TIMEOUT_S
        while True:
            try:
                self._start()
                return
            except RuntimeError:
                if TAKEN not in self._said() or time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def initialize(self, rank: int, num_pages: int, namespace: str = "kv") -> None:
        """Create a table, as a starting server rank does. Keep an existing table."""
        self.post(rank, "initialize", num_pages=num_pages, namespace=namespace)

    def reserve(
        self, rank: int, keys: Sequence[str], namespace: str = "kv"
    ) -> list[tuple[bool, int]]:
        """Reserve pages. Return for each key whether it existed, and its page."""
        pairs = [[key, ""] for key in keys]
        verb = "reserve_and_allocate_page_indices"
        reply = self.post(rank, verb, keys=pairs, namespace=namespace)
        return [(existed, index) for existed, index in reply["indices"]]

    def confirm(
        self,
        rank: int,
        written: Sequence[tuple[str, int]],
        released: Sequence[int] = (),
        namespace: str = "kv",
    ) -> None:
        """Map keys to pages, and free other pages. The server checks nothing."""
        body = {"written_keys_to_confirm": list(written), "pages_to_release": list(released)}
        self.post(rank, "confirm_write", **body, namespace=namespace)

    def put(self, rank: int, keys: Sequence[str], namespace: str = "kv") -> list[int]:
        """Reserve and confirm pages. Return the page of each key."""
        indices = [index for _, index in self.reserve(rank, keys, namespace)]
        self.confirm(rank, list(zip(keys, indices, strict=True)), namespace=namespace)
        return indices

    def delete(self, rank: int, keys: Sequence[str], namespace: str = "kv") -> None:
        """Delete keys and free their pages."""
        self.post(rank, "delete_keys", keys=list(keys), namespace=namespace)

    def exists(self, rank: int, keys: Sequence[str], namespace: str = "kv") -> list[bool]:
        """Return which keys exist."""
        found: list[bool] = self.post(rank, "exists", keys=list(keys), namespace=namespace)[
            "exists"
        ]
        return found

    def page_indices(
        self, rank: int, keys: Sequence[str], namespace: str = "kv"
    ) -> list[int | None]:
        """Return the page of each key. This query makes the keys the most recent."""
        body = {"keys": list(keys), "namespace": namespace}
        indices: list[int | None] = self.post(rank, "get_page_indices", **body)["indices"]
        return indices

    def post(self, rank: int | str, verb: str, **body: object) -> Any:
        """Call a verb and return its reply, or None. Raises urllib.error.HTTPError."""
        place = http.client.HTTPConnection(HOST, self.port, timeout=ANSWER_TIMEOUT_S)
        with contextlib.closing(place):
            place.request("POST", f"/{rank}/{verb}", json.dumps(body))
            reply = place.getresponse()
            said = reply.read()
        if reply.status >= http.client.BAD_REQUEST:
            raise urllib.error.HTTPError(verb, reply.status, reply.reason, reply.headers, None)
        return json.loads(said or b"null")

    def saved(self) -> dict[str, dict[str, Any]]:
        """Save, and return the parsed snapshot."""
        document: dict[str, dict[str, Any]] = json.loads(self.save().read_bytes())
        return document

    def keys_by_recency(self, rank: int, namespace: str = "kv") -> list[str]:
        """Return the keys of a table in order of eviction."""
        return [key for key, _ in self.saved()[f"{rank}:{namespace}"]["key_to_index"]]

    def close(self) -> None:
        """End the server and remove its files."""
        self.kill()
        self._folder.cleanup()

    @property
    def _log(self) -> Path:
        return Path(self._folder.name) / "server.log"

    def _start_anywhere(self) -> None:
        for attempt in range(STARTS):
            with socket.create_server((HOST, 0)) as listener:
                self.port = listener.getsockname()[1]
            try:
                self._start()
                return
            except RuntimeError:
                if attempt == STARTS - 1:
                    raise

    def _start(self) -> None:
        self.kill()
        program = (PROGRAM, str(self.port), str(self.snapshot), str(self._interval_s))
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                following(self._python, str(self._python), *program),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self._folder.name,
                env={**environment, "PYTHONDONTWRITEBYTECODE": "1"},
                text=True,
            )
        self._await_listening(self._process)

    def _await_listening(self, process: subprocess.Popen[str]) -> None:
        # Wait for this process's own report: on a taken port, another server would answer.
        deadline = time.monotonic() + START_TIMEOUT_S
        while "Uvicorn running on" not in (said := self._said()):
            # Without its port, the server shuts down but its process does not end.
            ended = TAKEN in said or process.poll() is not None
            if ended or time.monotonic() > deadline:
                raise RuntimeError(f"the metadata server does not come up\n{said[-3000:]}")
            time.sleep(0.01)

    def _command(self, word: str) -> None:
        if self._process is None:
            raise RuntimeError("the metadata server was killed")
        print(word, file=_stream(self._process.stdin), flush=True)
        if _stream(self._process.stdout).readline() != "done\n":
            raise RuntimeError(f"the metadata server did not {word}\n{self._said()[-3000:]}")

    def _said(self) -> str:
        return self._log.read_text(errors="replace")


def _stream(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream
