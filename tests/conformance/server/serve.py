"""Start SGLang's HTTP server on a machine without a GPU: `serve.py ARGUMENTS of launch_server`.

Runs inside the SGLang environment, with tests/conformance on PYTHONPATH. SGLang's server is the
real one, with all its processes; `cpu_engine` lists what is replaced. SGLang would start its
scheduler and detokenizer with `spawn`; here they are forks, which need not import SGLang again.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import runpy
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.conformance import sglang_env
    from tests.conformance.server import cpu_engine, held_calls
else:
    import cpu_engine
    import held_calls
    import sglang_env

_PR_SET_PDEATHSIG = 1


def fork_processes() -> None:
    """Let processes of SGLang be forks that end with the process that forked them."""
    parent = os.getpid()

    def follow() -> None:
        nonlocal parent
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before
            os._exit(1)
        parent = os.getpid()

    os.register_at_fork(after_in_child=follow)
    multiprocessing.set_start_method("fork")
    # SGLang asks for `spawn` later.
    multiprocessing.set_start_method = lambda *_, **__: None


fork_processes()
given = {name: os.environ[name] for name in os.environ.get("HICACHECTL_GIVEN", "").split()}
sglang_env.clean_environment()
os.environ.update(cpu_engine.ENVIRONMENT, **given)
held_calls.install()
sglang_env.replace_missing_packages()
cpu_engine.install()
runpy.run_module("sglang.launch_server", run_name="__main__")
