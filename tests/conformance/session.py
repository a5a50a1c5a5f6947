"""Run scripts of this folder in forks of one process, because importing SGLang takes seconds.

Runs inside the SGLang environment: `session.py ADDRESS`, the name of an abstract Unix socket. Each
connection has a fork of its own, which says "ready". The process ends when all connections have.
Without ADDRESS it only imports, so that all modules are compiled.

Each line of a connection is {"script": name without .py, "question"}, which goes to the script's
function `answer`, or {"script", "arguments"} for its `main`. Each answer is a line, {"code",
"output", "error"}: the exit code, the answer as JSON or what `main` printed, and the traceback of
its exception. Every script runs in a separate fork, which also ends its Mooncake clients: to close
one takes a second. A fork of a process with native threads may crash before the script begins; only
then is the script started once more. With "stays", the script runs in the connection's own process,
where the next such script finds what it has imported.

With "output", a file, the answer comes as soon as the script has begun: {"pid"}. It goes on beside
the scripts that follow, and ends with the connection. {"wait": pid} is answered by its exit code.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import io
import json
import mmap
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import IO

    from tests.conformance import prompt_nodes, sglang_env
else:
    import prompt_nodes
    import sglang_env

# Modules that the scripts import when they run.
_IMPORTED_ONCE = (
    "mooncake.store",
    "hicachectl.backends.sglang.plugin",
    "blake3",
    "sglang.srt.configs.mamba_utils",
    "sglang.srt.layers.cp.utils",
    "sglang.srt.mem_cache.deepseek_v4_memory_pool",
    "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller",
    "sglang.srt.mem_cache.pool_host.dsa",
    "sglang.srt.mem_cache.pool_host.mamba",
    "sglang.srt.mem_cache.pool_host.mha",
    "sglang.srt.mem_cache.pool_host.mla",
    "attached_rank",
    "live_store",
    "plugin_ranks",
    "read_back",
    "write_store",
    "sglang.srt.mem_cache.storage.hf3fs.mini_3fs_metadata_server",
    "sglang.srt.mem_cache.storage.mooncake_store.mooncake_store",
    "sglang.srt.runtime_context",
)


_UNUSED_S = 60.0  # the process that started this one may have been killed


def main() -> None:
    """Import everything, then accept connections until all have ended."""
    os.dup2(2, 1)  # output of libraries goes to stderr
    sys.path.append(str(Path(__file__).parents[2]))  # SGLang imports the plug-in from there
    for name in _IMPORTED_ONCE:
        importlib.import_module(name)
    if importlib.util.find_spec("nixl") is not None:
        importlib.import_module("sglang.srt.mem_cache.storage.nixl.hicache_nixl")
    prompt_nodes.hash_pages([0], page_size=1)  # loads SGLang's extension of page hashes
    if len(sys.argv) == 1:
        return
    gc.collect()
    gc.freeze()  # forks leave these objects alone: a look at each would copy its page
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{sys.argv[1]}")
    listener.listen()
    listener.settimeout(0.5)
    forks: set[int] = set()
    until = time.monotonic() + _UNUSED_S
    while forks or time.monotonic() < until:
        with contextlib.suppress(TimeoutError):
            connection, _ = listener.accept()
            until = 0.0
            if child := os.fork():
                forks.add(child)
                connection.close()
            else:
                listener.close()
                _serve(connection)
                os._exit(0)
        forks = {fork for fork in forks if not os.waitpid(fork, os.WNOHANG)[0]}


def _serve(connection: socket.socket) -> None:
    """Answer a connection's lines until it ends."""
    connection.settimeout(None)
    answers = os.fdopen(os.dup(connection.fileno()), "w", buffering=1)
    print("ready", file=answers)
    for line in connection.makefile():
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), file=answers)
            continue
        if request.pop("stays", False):
            print(json.dumps(_run(bytearray(1), **request)), file=answers)
            continue
        if "output" in request:
            pid = _started(**request) or _started(**request)
            print(json.dumps({"pid": pid}), file=answers)
            continue
        status, begun = _answered(line, answers)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV and not begun:
            status, _ = _answered(line, answers)
        if status:
            failure = {"code": status, "output": "", "error": "the script crashed"}
            print(json.dumps(failure), file=answers)


def _answered(line: str, answers: IO[str]) -> tuple[int, bool]:
    """Run the script in a fork; return the exit status, and whether the script began."""
    with mmap.mmap(-1, 1) as begun:  # shared with the fork
        child = os.fork()
        if not child:
            print(json.dumps(_run(begun, **json.loads(line))), file=answers)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        return status, begun[0] != 0


def _started(script: str, question: Any, output: str) -> int | None:
    """Start a script in a fork; return its pid, or None if it crashed before it began."""
    with mmap.mmap(-1, 1) as begun:  # shared with the fork
        child = os.fork()
        if not child:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(file, 1)
            os.dup2(file, 2)
            done = _run(begun, script, question=question)
            os.write(2, done["error"].encode())
            os._exit(done["code"])
        while not begun[0]:
            if os.waitpid(child, os.WNOHANG)[0]:
                return None
            time.sleep(0.001)
    return child


def _run(
    begun: mmap.mmap | bytearray,
    script: str,
    arguments: list[str] | None = None,
    question: Any = None,
) -> dict[str, Any]:
    module = importlib.import_module(script)
    sys.argv = [script, *(arguments or [])]
    begun[0] = 1
    output = io.StringIO()
    code, error = 0, ""
    with contextlib.redirect_stdout(output):
        try:
            if arguments is None:
                with contextlib.redirect_stdout(sys.stderr):
                    found = module.answer(question)
                print(json.dumps(found, default=str))
            else:
                module.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 2
            error = "" if isinstance(end.code, int) else str(end.code)
        except Exception:  # reported to the caller; the next script can still run
            code, error = 1, traceback.format_exc()
    return {"code": code, "output": output.getvalue(), "error": error}


if __name__ == "__main__":
    sglang_env.prepare()
    main()
