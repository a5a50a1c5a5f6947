"""Models with what SGLang allocates and stores for them, recorded from SGLang.

`tests/data/models.json` has `models` by architecture: origin (of the config), config (absent where
origin is a file of this repository), code, flags, env and gpu (of the server), profile (fields of
DeploymentFlags) and rows (tests/conformance/model_pools.py). record_models.py writes the rows.
Several models of one architecture have longer names: the architecture, then what differs. A model
with fields that the published config lacks has `target`, the name of the published model, and
`fields` instead of origin and config.

`tests/data/quantised.json` has quantised checkpoints by name: target (an architecture), fields (set
in its config), section (fields set in the config's section on the language model only) and rows.

`tests/data/drafts.json` has drafts by "TARGET DRAFT", two architectures and perhaps a word: origin
(of the draft's config), draft (its config; absent where the target's checkpoint has the draft),
fields (set in the target's config), flags and rows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_DATA = Path(__file__).parent / "data"

RECORDS: dict[str, Any] = json.loads((_DATA / "models.json").read_text())
DRAFT_RECORDS: dict[str, dict[str, Any]] = json.loads((_DATA / "drafts.json").read_text())
QUANTISED_RECORDS: dict[str, dict[str, Any]] = json.loads((_DATA / "quantised.json").read_text())
# Every model with its config.
MODELS: dict[str, dict[str, Any]] = {
    name: model
    if "config" in model
    else {**model, "config": json.loads((_DATA.parents[1] / model["origin"]).read_text())}
    for name, model in RECORDS["models"].items()
    if "origin" in model
}


def _with_target(target: dict[str, Any], draft: dict[str, Any]) -> dict[str, Any]:
    config = {**target["config"], **draft.get("fields", {})}
    for name in {"text_config", "llm_config"} & set(config):
        config[name] = {**config[name], **draft.get("fields", {}), **draft.get("section", {})}
    flags = {**target.get("flags", {}), **draft.get("flags", {})}
    return {"origin": target["origin"], **draft, "config": config, "flags": flags}


MODELS |= {
    name: _with_target(MODELS[model["target"]], model)
    for name, model in RECORDS["models"].items()
    if "target" in model
}


# Every draft with the config and flags of its target.
DRAFTS: dict[str, dict[str, Any]] = {
    name: _with_target(MODELS[name.split(maxsplit=1)[0]], draft)
    for name, draft in DRAFT_RECORDS.items()
}
# Every quantised checkpoint with its config.
QUANTISED: dict[str, dict[str, Any]] = {
    name: _with_target(MODELS[model["target"]], model) for name, model in QUANTISED_RECORDS.items()
}


def write() -> None:
    """Write all records, one model a line."""
    (_DATA / "models.json").write_text(f'{{"models": {_lines(RECORDS["models"])}}}\n')
    (_DATA / "drafts.json").write_text(_lines(DRAFT_RECORDS) + "\n")
    (_DATA / "quantised.json").write_text(_lines(QUANTISED_RECORDS) + "\n")


def _lines(records: dict[str, Any]) -> str:
    lines = (f"{json.dumps(name)}: {json.dumps(x)}" for name, x in sorted(records.items()))
    return "{\n" + ",\n".join(lines) + "\n}"
