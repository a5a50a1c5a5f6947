"""Models with what SGLang allocates and stores for them, recorded from SGLang.

`tests/data/models.json` has `classes`, the architectures that SGLang registers, and `models` by
architecture: origin (of the config), config (absent where origin is a file of this repository),
flags (of the server) and rows (tests/conformance/model_pools.py). record_models.py writes the rows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
_FILE = _ROOT / "tests" / "data" / "models.json"

RECORDS: dict[str, Any] = json.loads(_FILE.read_text())
CLASSES: list[str] = RECORDS["classes"]
# Every model with its config.
MODELS: dict[str, dict[str, Any]] = {
    name: model
    if "config" in model
    else {**model, "config": json.loads((_ROOT / model["origin"]).read_text())}
    for name, model in RECORDS["models"].items()
}


def write() -> None:
    """Write RECORDS, one model a line."""
    lines = (
        f"{json.dumps(name)}: {json.dumps(x)}" for name, x in sorted(RECORDS["models"].items())
    )
    _FILE.write_text(
        '{"classes": ' + json.dumps(CLASSES) + ',\n"models": {\n' + ",\n".join(lines) + "\n}}\n"
    )
