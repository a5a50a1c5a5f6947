"""Run the command line as on another host: `python -m tests.parts.disturbed [NAME=VALUE …] -- …`.

Settings: those of `settle`, and listing (seconds that a listing takes longer).
"""

from __future__ import annotations

import socket
import sys
import time
from typing import Any

from hicachectl.__main__ import run
from hicachectl.backends.file.store import FileStore


def settle(values: dict[str, str]) -> None:
    """Change this process's host and clock. values: host, and ahead (seconds of the right time)."""
    if "ahead" in values:
        real, real_ns, ahead = time.time, time.time_ns, float(values["ahead"])
        time.time = lambda: real() + ahead
        time.time_ns = lambda: real_ns() + int(ahead * 1e9)
    if "host" in values:
        socket.gethostname = lambda: values["host"]


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
