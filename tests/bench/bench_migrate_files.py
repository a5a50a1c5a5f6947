"""Copying a file store, against `cp -r` and `rclone copy --transfers 4`; run by hand.

    python -m tests.bench.bench_migrate_files [--pages 512] [--bytes 4500000] [--runs 5]

Makes a store of kv objects. Each of the three copies it in turn, to a new directory each time;
times include start-up and a final `sync`. `hicachectl migrate` makes every batch durable before the
next; the other two leave that to the sync. Prints median seconds, the median ratios of our
throughput to the others', and our peak memory. --tp-reshard compares instead a migration of TP 4 to
TP 8 with one that changes nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np


def fill(store: Path, pages: int, suffixes: list[str], nbytes: int) -> None:
    """Write pages of random bytes, one object per suffix."""
    store.mkdir()
    noise = np.random.default_rng(0).bytes(nbytes + (1 << 16))
    for number in range(pages):
        page = hashlib.sha256(str(number).encode()).hexdigest()
        start = number % (1 << 16)
        for suffix in suffixes:
            (store / f"{page}{suffix}.bin").write_bytes(noise[start : start + nbytes])
    os.sync()


def cost_of(command: list[str], environment: dict[str, str]) -> tuple[float, int]:
    """Return the seconds of a command and a sync after it, and the command's peak bytes."""
    os.sync()
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    os.sync()
    return time.perf_counter() - began, usage.ru_maxrss << 10


def put_away(target: Path) -> None:
    """Empty the files of a copy but keep them, to give the next copy a fresh start.

    ext4 does not reuse an inode number for a minute or more, and each creation of a file searches
    through all freed inodes. After a deletion of 100,000 files that is most of a copy's time.
    """
    spent = target.with_name(f"spent-{time.time_ns()}")
    target.rename(spent)
    for entry in os.scandir(spent):
        os.truncate(entry.path, 0)


def measure(
    ways: dict[str, list[str]], target: Path, runs: int, environment: dict[str, str]
) -> None:
    """Run the commands in turn, each to an empty target; print medians and ratios to the first.

    Each command is first in some rounds, since the order changes how much memory is free.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    first = next(iter(ways))
    memory = 0
    for run in range(runs):
        start = run % len(ways)
        for name in [*ways, *ways][start : start + len(ways)]:
            seconds, most = cost_of(ways[name], environment)
            times[name].append(seconds)
            memory = max(memory, most if name == first else 0)
            put_away(target)
    ours = np.array(times.pop(first))
    print(f"{first}: {np.median(ours):.2f} s, {memory / (1 << 20):.0f} MiB of memory at most")
    for name, others in times.items():
        ratio = float(np.median(np.array(others) / ours))
        print(f"{name}: {np.median(others):.2f} s; throughput of ours {ratio:.2f} of it")


PROFILE = """
model = "bench"
page_size = 64
layout = "page_first"
tp = {tp}
[[pools]]
name = "kv"
kind = "mha"
dtype = "bfloat16"
layers = 32
kv_heads = 8
head_dim = 128
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", type=int, default=512)
    parser.add_argument("--bytes", type=int, default=4_500_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--tp-reshard", action="store_true")
    parser.add_argument("--no-rclone", action="store_true", help="for many small objects: minutes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        source, target = Path(folder, "source"), Path(folder, "target")
        environment = {**os.environ, "XDG_STATE_HOME": folder}
        tool = [sys.executable, "-m", "hicachectl", "migrate", str(source), str(target)]
        tool += [] if options.jobs is None else ["--jobs", str(options.jobs)]
        if options.tp_reshard:
            profile = Path(folder, "profile.toml")
            profile.write_text(PROFILE.format(tp=4))
            nbytes = 2 * 64 * 32 * 2 * 128 * 2
            fill(source, options.pages, [f"_bench_{rank}_4" for rank in range(4)], nbytes)
            tool += ["--profile", str(profile)]
            ways = {"TP 4 to 8": [*tool, "--to-tp", "8"], "plain copy": tool}
        else:
            fill(source, options.pages, ["_bench"], options.bytes)
            ways = {
                "hicachectl migrate": tool,
                "cp -r": ["cp", "-r", str(source), str(target)],
            }
            if (rclone := shutil.which("rclone")) and not options.no_rclone:
                ways["rclone copy"] = [rclone, "copy", "--transfers", "4", str(source), str(target)]
        measure(ways, target, options.runs, environment)


if __name__ == "__main__":
    main()
