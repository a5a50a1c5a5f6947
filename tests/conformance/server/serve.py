"""Start SGLang's HTTP server on a machine without a GPU: `serve.py ARGUMENTS of launch_server`.

Runs inside the SGLang environment, with tests/conformance on PYTHONPATH. SGLang's server is the
real one, with all its processes; `cpu_engine` lists what is replaced. SGLang starts its scheduler
and detokenizer with `spawn`, which executes this file again in each: the replacements come there
from the top of this file, and the environment from the first process.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.conformance import sglang_env
    from tests.conformance.server import cpu_engine, held_calls
else:
    import cpu_engine
    import held_calls
    import sglang_env

_PARENT = "HICACHECTL_SERVER_PARENT"
_PR_SET_PDEATHSIG = 1


def follow_parent() -> None:
    """Let this process end with the one that started it, however that ends.

    SGLang's processes do so themselves, but only after imports that take many seconds.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.environ.get(_PARENT, str(os.getppid())) != str(os.getppid()):
        sys.exit("the parent is gone")
    os.environ[_PARENT] = str(os.getpid())  # for the processes that this one starts


follow_parent()
if __name__ == "__main__":
    sglang_env.clean_environment()
    os.environ.update(cpu_engine.ENVIRONMENT)
held_calls.install()
sglang_env.replace_missing_packages()
cpu_engine.install()

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
