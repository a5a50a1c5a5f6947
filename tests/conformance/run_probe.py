"""Run the probe of `hicachectl profile --print-probe` for models, as on a machine with a GPU.

Runs inside the SGLang environment: `run_probe.py PROBE REQUEST`. PROBE is the printed script, and
the request a JSON object of models by name: config (a config.json), arguments (of the server) and
gpu ("hopper" or "blackwell").
Prints a JSON object of answers: code, stdout and stderr of the probe.
"""

from __future__ import annotations

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
    from tests.conformance import model_pools
else:
    import model_pools


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Run the probe of a file for each model."""
    spec = importlib.util.spec_from_file_location("printed_probe", question["probe"])
    assert spec is not None
    assert spec.loader is not None
    probe = importlib.util.module_from_spec(spec)
    sys.modules["printed_probe"] = probe
    spec.loader.exec_module(probe)
    logging.disable(logging.CRITICAL)
    answers = {}
    with model_pools.without_a_gpu():
        for name, model in question["models"].items():
            with model_pools.on_a_gpu(model["gpu"], {}):
                answers[name] = _answer(probe, model["config"], model["arguments"])
    return answers


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
