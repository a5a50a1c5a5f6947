"""Record what the code of each published SGLang release does, in tests/data/releases.json.

    .venv/bin/python -m tests.conformance.record_releases WHEEL…

The wheels: `pip download --no-deps sglang==VERSION` for each release from 0.5.6 on.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from hicachectl.formats.releases import sglang_version
from tests.conformance.release_facts import facts, version

RECORDS = Path(__file__).parents[1] / "data" / "releases.json"


def main() -> None:
    """Write the facts of the wheels that the command line names, one release a line."""
    found = {version(Path(path)): facts(Path(path)) for path in sys.argv[1:]}
    lines = [
        f"{json.dumps(name)}: {json.dumps(found[name])}"
        for name in sorted(found, key=lambda name: (sglang_version(name), name))
    ]
    RECORDS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
