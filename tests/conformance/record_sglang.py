"""Record what an SGLang release says of its models and flags (formats/models/recorded.py).

    .venv/bin/python -m tests.conformance.record_sglang [--packages FOLDER] [--into FOLDER]

Asks the installed SGLang (sglang_facts.py), or the one in a folder that `pip install --no-deps
--target` made, and writes `sglang-RELEASE.json` beside the code that reads it, or into a folder.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tests.hf3fs_fixtures import sglang_interpreter
from tests.model_records import DRAFTS, MODELS

FOLDER = Path(__file__).parents[2] / "formats" / "models"
_BY_HAND = "by hand"


def main() -> None:
    """Ask SGLang, and write the file of its release."""
    parser = argparse.ArgumentParser(description="Record what SGLang says of models and flags.")
    parser.add_argument("--packages", type=Path, metavar="FOLDER")
    parser.add_argument("--into", type=Path, metavar="FOLDER", default=FOLDER)
    arguments = parser.parse_args()
    script = Path(__file__).parent / "sglang_facts.py"
    first = {"PYTHONPATH": str(arguments.packages)} if arguments.packages else {}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as request:
        json.dump(requested(), request)
        request.flush()
        done = subprocess.run(
            [sglang_interpreter(), script, request.name],
            check=True,
            stdout=subprocess.PIPE,
            env={**os.environ, **first},
        )
    facts = json.loads(done.stdout)
    path = arguments.into / f"sglang-{facts['release']}.json"
    path.write_text(recorded(facts))
    print(path)


def requested() -> dict[str, dict[str, Any]]:
    """Return one config of each architecture: its own, or its target's."""
    found: dict[str, dict[str, Any]] = {}
    for name, model in MODELS.items():
        found.setdefault(name.split()[0], {x: model[x] for x in ("config", "code") if x in model})
    for name, draft in DRAFTS.items():
        found.setdefault(name.split()[1], {"config": draft.get("draft") or draft["config"]})
    return found


def recorded(facts: dict[str, Any]) -> str:
    """Return the text of a release's file, one architecture or flag a line."""
    published, compared = _published(), requested()
    lines = []
    for name, row in sorted(facts["architectures"].items()):
        if name in compared and name not in published:
            row["unverified"] = True
        told = {x: value for x, value in row.items() if value not in ("", [], False, None)}
        lines.append(f"{json.dumps(name)}: {json.dumps(told)}")
    flags = [json.dumps(flag) for flag in facts["flags"]]
    return (
        '{"architectures": {\n' + ",\n".join(lines) + "\n},\n"
        '"flags": [\n' + ",\n".join(flags) + "\n],\n"
        '"read_again": ' + json.dumps(facts["read_again"]) + "}\n"
    )


def _published() -> set[str]:
    """Return the architectures of which a published config was compared with SGLang.

    A draft of the target's checkpoint is as good as the target's config.
    """
    found = {name.split()[0] for name, x in MODELS.items() if _BY_HAND not in x["origin"]}
    for name, draft in DRAFTS.items():
        target, architecture = name.split()[:2]
        of_target = draft["origin"].startswith("the target's")
        origin = MODELS[target]["origin"] if of_target else draft["origin"]
        if _BY_HAND not in origin:
            found.add(architecture)
    return found


if __name__ == "__main__":
    main()
