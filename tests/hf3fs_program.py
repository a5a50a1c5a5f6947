"""The program of the metadata server's process: `hf3fs_program.py PORT SNAPSHOT INTERVAL`.

It runs SGLang's file unchanged, in the interpreter that has SGLang. It replaces SGLang's storage
class, which that file imports only for its clients and which takes 9 s to load. It reads commands
from stdin.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import types
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

HOST = "127.0.0.1"
HF3FS_FOLDER = "srt/mem_cache/storage/hf3fs"


def _serve(port: int, snapshot: str, interval_s: int) -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # uvicorn logs requests to stdout
    module = _sglang_module()
    state_class = module.GlobalMetadataState
    saving, save = threading.Lock(), state_class.save_to_disk

    def save_alone(state: Any) -> None:
        with saving:  # the timer and a command would write to the same temporary file
            save(state)

    state_class.save_to_disk = save_alone
    threading.Thread(target=_obey, args=(module, answers), daemon=True).start()
    module.run_metadata_server(HOST, port, snapshot, interval_s)


def _obey(module: ModuleType, answers: IO[str]) -> None:
    for line in sys.stdin:
        state = module.server.state
        if line == "reset\n":
            state.ranks.clear()
            done = True
        else:
            before = _written(state)
            state.save_to_disk()  # logs errors instead of raising them
            done = _written(state) != before
        print("done" if done else "failed", file=answers, flush=True)


def _written(state: Any) -> tuple[int, int]:
    """Return inode and mtime, which identify a version of the snapshot: inodes alone are reused."""
    facts = state.persistence_path.stat()
    return facts.st_ino, facts.st_mtime_ns


def _sglang_module() -> ModuleType:
    """Load mini_3fs_metadata_server.py with stubs for the two modules that its clients need."""
    package = importlib.util.find_spec("sglang")
    if package is None or package.origin is None:
        sys.exit(f"sglang is not installed for {sys.executable}")
    for name, attribute, value in (
        ("hicache_storage", "PoolName", types.SimpleNamespace(KV="kv")),
        ("storage.hf3fs.storage_hf3fs", "Hf3fsMetadataInterface", object),
    ):
        stand_in = types.ModuleType(f"sglang.srt.mem_cache.{name}")
        setattr(stand_in, attribute, value)
        sys.modules[stand_in.__name__] = stand_in
    path = Path(package.origin).parent / HF3FS_FOLDER / "mini_3fs_metadata_server.py"
    spec = importlib.util.spec_from_file_location("mini_3fs_metadata_server", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
