"""An hour of `rm --keep-free` on a small disk under a writer in a process of its own; run by hand.

    python -m pytest -s tests/soak/soak_room.py

HICACHECTL_SOAK_ROOM: seconds, 3,600 by default. Each run of `rm` is checked as in
tests/prewarming/test_targets.py; each minute prints the pages written and removed so far.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from hicachectl.formats.profile import dump_profile
from tests.move.repairs import DSA
from tests.prewarming.rooms import PAGE_SPACE, Room, free_bytes
from tests.skips import needs_root
from tests.small_file_system import small_file_system

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized
    from pathlib import Path

SECONDS = float(os.environ.get("HICACHECTL_SOAK_ROOM", "3600"))
DISK, LIMIT = 64 << 20, 16 << 20  # 4,096 pages, and room for 1,024
PAGES_PER_S = 60
PAUSE_S = 5.0


def write(store: Path, first: int, written: Synchronized[int], until: float) -> None:
    """Write pages at an even rate while there is room. first: number of pages written before."""
    room, begun = Room(store, first), time.monotonic()
    while time.monotonic() < until:
        due = (time.monotonic() - begun) * PAGES_PER_S
        if room.written - first >= due or free_bytes(store) < 2 * PAGE_SPACE:
            time.sleep(0.01)
            continue
        room.write()
        written.value = room.written - first


@needs_root
def test_an_hour(tmp_path: Path) -> None:
    profile, written = tmp_path / "dsa.toml", multiprocessing.Value("q", 0)
    profile.write_text(dump_profile(DSA))
    with small_file_system(tmp_path / "disk", DISK) as disk:
        room, until = Room(disk / "store"), time.monotonic() + SECONDS
        while free_bytes(disk) > LIMIT:
            room.write()
        room.step(120)
        place = (disk / "store", room.written, written, until)
        writer = multiprocessing.Process(target=write, args=place)
        writer.start()
        removed, runs, said, lowest = 0, 0, time.monotonic(), DISK
        try:
            while time.monotonic() < until:
                time.sleep(PAUSE_S)
                lowest = min(lowest, free_bytes(disk))
                removal = room.watch()
                words = ["rm", str(room.store), "--keep-free", str(LIMIT), "--yes", "--profile"]
                done = subprocess.run(
                    [sys.executable, "-m", "hicachectl", *words, str(profile), "--format", "json"],
                    capture_output=True, text=True, check=False,
                )  # fmt: skip
                assert done.returncode == 0, done.stdout[-2000:] + done.stderr
                document, runs = json.loads(done.stdout), runs + 1
                removal.check_free(document, LIMIT, done.stderr)
                removed += removal.check_order(document, judged=True, told=done.stderr)
                if time.monotonic() - said > 60:
                    said = time.monotonic()
                    print(f"\n{runs} runs: {written.value} pages written, {removed} removed, "
                          f"least free {lowest}", flush=True)  # fmt: skip
        finally:
            writer.join(timeout=60)
    assert not writer.exitcode
    print(f"\n{runs} runs, {written.value} pages written, {removed} removed")
    assert removed > 0
