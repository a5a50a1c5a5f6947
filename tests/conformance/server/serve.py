"""Start SGLang's HTTP server on a machine without a GPU: `serve.py ARGUMENTS of launch_server`.

Runs inside the SGLang environment, with tests/conformance on PYTHONPATH. SGLang's server is the
real one, with all its processes; `cpu_engine` lists what is replaced. SGLang starts its scheduler
and detokenizer with `spawn`, which executes this file again in each: the replacements come there
from the top of this file, and the environment from the first process.
"""

from __future__ import annotations

import os
import runpy
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.conformance import sglang_env
    from tests.conformance.server import cpu_engine, held_calls
else:
    import cpu_engine
    import held_calls
    import sglang_env

if __name__ == "__main__":
    sglang_env.clean_environment()
    os.environ.update(cpu_engine.ENVIRONMENT)
held_calls.install()
sglang_env.replace_missing_packages()
cpu_engine.install()

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
