"""Record what SGLang allocates and stores for models and drafts (tests/model_records.py).

    .venv/bin/python -m tests.conformance.record_models [ARCHITECTURE…]

Asks SGLang (model_pools.py) about all, or about the architectures named, and writes their rows. A
new model is an entry with `origin` and `config`, a new draft one with `origin`, `flags` and `draft`
or `fields`. What SGLang refuses keeps its words.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

from tests.hf3fs_fixtures import sglang_interpreter
from tests.model_records import (
    DRAFT_RECORDS,
    DRAFTS,
    MODELS,
    QUANTISED,
    QUANTISED_RECORDS,
    RECORDS,
    write,
)


def main() -> None:
    """Ask SGLang, and write the records."""
    parser = argparse.ArgumentParser(description="Record what SGLang stores for models.")
    parser.add_argument("architectures", nargs="*", metavar="ARCHITECTURE")
    chosen = set(parser.parse_args().architectures)
    known = {**MODELS, **DRAFTS, **QUANTISED}
    names = [name for name in known if not chosen or chosen & set(name.split())]
    script = Path(__file__).parent / "model_pools.py"
    with tempfile.NamedTemporaryFile("w", suffix=".json") as request:
        json.dump({name: known[name] for name in names}, request)
        request.flush()
        done = subprocess.run(
            [sglang_interpreter(), script, request.name], check=True, stdout=subprocess.PIPE
        )
    for name, rows in json.loads(done.stdout).items():
        {**RECORDS["models"], **DRAFT_RECORDS, **QUANTISED_RECORDS}[name]["rows"] = rows
    write()


if __name__ == "__main__":
    main()
