"""Run scripts of this folder one after another, as importing SGLang takes seconds.

Runs inside the SGLang environment. Each line of stdin is {"script": name without .py,
"arguments": […]}; each answer on stdout a line {"code", "output", "error"}: the exit code, what
the script printed, and the traceback of what it raised. Every script runs in a fork of its own,
with which its Mooncake clients end: by themselves they take a second each. A fork of a process with
threads of native code may crash at its very beginning: then, and only then, there is a second one.
Ends with stdin.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import mmap
import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import IO

    from tests.conformance import sglang_env
else:
    import sglang_env

# What the scripts import when they run.
_IMPORTED_ONCE = (
    "mooncake.store",
    "sglang.srt.configs.mamba_utils",
    "sglang.srt.layers.cp.utils",
    "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller",
    "sglang.srt.mem_cache.storage.hf3fs.mini_3fs_metadata_server",
    "sglang.srt.mem_cache.storage.mooncake_store.mooncake_store",
    "sglang.srt.runtime_context",
)


def main() -> None:
    """Answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever libraries print
    for name in _IMPORTED_ONCE:
        importlib.import_module(name)
    for line in sys.stdin:
        status, begun = _answered(line, answers)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV and not begun:
            status, _ = _answered(line, answers)
        if status:
            failure = {"code": status, "output": "", "error": "the script crashed"}
            print(json.dumps(failure), file=answers)


def _answered(line: str, answers: IO[str]) -> tuple[int, bool]:
    """Have a fork answer; how it ended, and whether its script had begun."""
    with mmap.mmap(-1, 1) as begun:  # shared with the fork
        child = os.fork()
        if not child:
            print(json.dumps(_run(begun, **json.loads(line))), file=answers)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        return status, begun[0] != 0


def _run(begun: mmap.mmap, script: str, arguments: list[str]) -> dict[str, Any]:
    module = importlib.import_module(script)
    sys.argv = [script, *arguments]
    begun[0] = 1
    output = io.StringIO()
    code, error = 0, ""
    with contextlib.redirect_stdout(output):
        try:
            module.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 2
            error = "" if isinstance(end.code, int) else str(end.code)
        except Exception:  # handed over: the next script may fare better
            code, error = 1, traceback.format_exc()
    return {"code": code, "output": output.getvalue(), "error": error}


if __name__ == "__main__":
    sglang_env.prepare()
    main()
