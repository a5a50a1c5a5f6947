"""Run scripts of this folder one after another in one process, as importing SGLang takes seconds.

Runs inside the SGLang environment. Each line of stdin is {"script": name without .py,
"arguments": […]}; each answer on stdout a line {"code", "output", "error"}: the exit code, what
the script printed, and the traceback of what it raised. Ends with stdin.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import sys
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.conformance import sglang_env
else:
    import sglang_env


def main() -> None:
    """Answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever libraries print
    for line in sys.stdin:
        print(json.dumps(_run(**json.loads(line))), file=answers)
    os._exit(0)  # a Mooncake client's end takes a second each


def _run(script: str, arguments: list[str]) -> dict[str, Any]:
    module = importlib.import_module(script)
    sys.argv = [script, *arguments]
    output = io.StringIO()
    code, error = 0, ""
    with contextlib.redirect_stdout(output):
        try:
            module.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 2
            error = "" if isinstance(end.code, int) else str(end.code)
        except Exception:  # handed over: the session goes on
            code, error = 1, traceback.format_exc()
    return {"code": code, "output": output.getvalue(), "error": error}


if __name__ == "__main__":
    sglang_env.prepare()
    main()
