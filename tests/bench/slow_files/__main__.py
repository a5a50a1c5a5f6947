"""Mount a directory so that each call waits, until Ctrl-C, and print the calls; run by hand.

    python -m tests.bench.slow_files DIRECTORY MOUNT --delay-ms 0.5

The delay and the counts lie in MOUNT.slow_files/control, as `slow_files.c` says.
--with-attributes: directories are listed with attributes.
"""

from __future__ import annotations

import argparse
import signal
from contextlib import suppress
from pathlib import Path

from tests.bench.slow_files.mounting import ATTRIBUTE_SECONDS, slow_mount


def main() -> None:
    """Mount, wait for Ctrl-C or SIGTERM, and print the calls."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("mount", type=Path)
    parser.add_argument("--delay-ms", type=float, default=0.5)
    parser.add_argument("--attribute-seconds", type=float, default=ATTRIBUTE_SECONDS)
    parser.add_argument("--with-attributes", action="store_true")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell may start this with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    with slow_mount(
        options.directory, options.mount, options.delay_ms,
        with_attributes=options.with_attributes, attribute_seconds=options.attribute_seconds,
    ) as slow:  # fmt: skip
        print(
            f"{slow.path}: each call waits {slow.delay_ms:g} ms, in process {slow.pid}", flush=True
        )
        with suppress(KeyboardInterrupt):
            signal.pause()
        counts = ", ".join(f"{count} {name}" for name, count in sorted(slow.calls().items()))
        print(f"{counts or 'no calls'}; at most {slow.most_in_flight} at once")


if __name__ == "__main__":
    main()
