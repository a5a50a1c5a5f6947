"""Run the command line as on another host: `python -m tests.parts.disturbed [NAME=VALUE …] -- …`.

Settings: those of `claimant.settle`, and listing (seconds that a listing takes longer).
"""

from __future__ import annotations

import sys
import time
from typing import Any

from hicachectl.__main__ import run
from hicachectl.backends.file.store import FileStore
from tests.parts.claimant import settle


def _slow_listings(seconds: float) -> None:
    scan = FileStore.scan

    def slow(*arguments: Any, **named: Any) -> Any:
        time.sleep(seconds)
        return scan(*arguments, **named)

    FileStore.scan = slow  # type: ignore[method-assign]


def _main(arguments: list[str]) -> int:
    at = arguments.index("--")
    values = dict(setting.split("=") for setting in arguments[:at])
    settle(values)
    _slow_listings(float(values.get("listing", 0)))
    return run(arguments[at + 1 :])


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
