"""Run the probe of `hicachectl profile --print-probe` for models, as on a machine with a GPU.

Runs inside the SGLang environment: `run_probe.py PROBE REQUEST`. PROBE is the printed script, and
the request a JSON object of models by name: config (a config.json), arguments (of the server) and
gpu ("hopper" or "blackwell").
Prints a JSON object of answers: code, stdout and stderr of the probe.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.conformance import model_pools, sglang_env
else:
    import model_pools
    import sglang_env


def main() -> None:
    """Answer the request that the command line names."""
    parser = argparse.ArgumentParser(description="Run the probe.")
    parser.add_argument("probe", type=Path)
    parser.add_argument("request", type=Path)
    options = parser.parse_args()
    spec = importlib.util.spec_from_file_location("printed_probe", options.probe)
    assert spec is not None
    assert spec.loader is not None
    probe = importlib.util.module_from_spec(spec)
    sys.modules["printed_probe"] = probe
    spec.loader.exec_module(probe)
    logging.disable(logging.CRITICAL)
    answers = {}
    with contextlib.redirect_stdout(sys.stderr), model_pools.without_a_gpu():
        for name, model in json.loads(options.request.read_text()).items():
            with model_pools.on_a_gpu(model["gpu"], {}):
                answers[name] = _answer(probe, model["config"], model["arguments"])
    print(json.dumps(answers))


def _answer(probe: Any, config: dict[str, Any], arguments: list[str]) -> dict[str, Any]:
    output, errors = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        launch = ["--model-path", folder, "--device", "cuda", *arguments]
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            try:
                code = probe.main(launch)
            except SystemExit as end:  # unknown flags
                code = end.code
    return {"code": code, "stdout": output.getvalue(), "stderr": errors.getvalue()}


if __name__ == "__main__":
    sglang_env.prepare()
    main()
