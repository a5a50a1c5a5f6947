"""Takes a claim in a process of its own: `python -m tests.parts.claimant DIR LOG [NAME=VALUE …]`.

It appends lines `begin ATTEMPT PID` and `end ATTEMPT PID` to LOG, and holds the claim until
log.stop beside it exists. Settings: stale, hold (seconds), ahead (of the right time), host.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from hicachectl.backends.disk.directory import Directory
from hicachectl.parts import claims


def settle(values: dict[str, str]) -> None:
    """Change the clock, the host and the patience of claims in this process."""
    claims.BEAT_SECONDS, claims.LOOK_SECONDS = 0.1, 0.05
    claims.STALE_SECONDS = float(values.get("stale", 0.8))
    if "ahead" in values:
        real, real_ns, ahead = time.time, time.time_ns, float(values["ahead"])
        time.time = lambda: real() + ahead
        time.time_ns = lambda: real_ns() + int(ahead * 1e9)
    if "host" in values:
        host = claims.Host(values["host"], values["host"])
        claims.host_identity = lambda: host


def _main(directory: str, log: Path, *settings: str) -> None:
    values = dict(setting.split("=") for setting in settings)
    settle(values)
    stop = log.with_suffix(".stop")

    def say(text: str) -> None:
        with log.open("a") as lines:
            lines.write(f"{text} {os.getpid()}\n")

    with Directory.named(directory, writes=True) as opened:
        claim = claims.Claim.take(opened, "claim", done=stop.exists)
        if claim is None:
            say("done -1")
            return
        try:
            with claim:
                say(f"begin {claim.attempt}")
                until = time.monotonic() + float(values.get("hold", 120))
                while time.monotonic() < until and not stop.exists():
                    claim.check()
                    time.sleep(0.01)
                say(f"end {claim.attempt}")
        except claims.ClaimLostError as error:
            say(f"lost {claim.attempt}")
            sys.exit(str(error))


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
