"""Listing against `find`, whole processes, and start-up; run by hand.

    python tests/bench/bench_ls.py --objects 200000 [--directory DIR] [--runs 7] [--folders]
        [--trailers]

Fills a directory with objects without content (sparse, 52 KB each) unless they exist, then runs
each command in turn with find. Prints the median of the pairwise ratios, and peak memory.
--folders: 256 folders. --trailers: the files are longer by a trailer, and markers say so.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hicachectl.backends.file.folders import ObjectDirectory
from hicachectl.backends.object_files.markers import Marker, write_marker
from hicachectl.formats.identity import Identity
from hicachectl.formats.trailer import TRAILER_BYTES

SUFFIXES = ("_Qwen-Qwen3-32B_0_2", "_Qwen-Qwen3-32B_1_2", ".mamba_Qwen-Qwen3-32B_0_2",
            ".mamba_Qwen-Qwen3-32B_1_2")  # fmt: skip
OBJECT_BYTES = 52_000


def fill(directory: Path, objects: int, *, folders: bool, trailers: bool) -> None:
    """Write the names of a TP=2 hybrid model."""
    nbytes = OBJECT_BYTES + TRAILER_BYTES * trailers
    with ObjectDirectory.create(str(directory), folders=folders or None) as place:
        for number in range(objects // len(SUFFIXES)):
            page = hashlib.sha256(str(number).encode()).hexdigest()
            for suffix in SUFFIXES:
                where, name = place.place_for_new(f"{page}{suffix}.bin".encode())
                descriptor = os.open(name, os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=where)
                os.truncate(descriptor, nbytes)
                os.close(descriptor)
        for suffix in SUFFIXES if trailers else ():
            identity = Identity(model="Qwen-Qwen3-32B", weights="w")
            with place.outer(writes=True) as outer:
                write_marker(outer, Marker(f"{suffix}.bin", OBJECT_BYTES, identity, "xxh3"))


def timed(command: list[str]) -> tuple[float, float]:
    """Return wall seconds and peak resident MB of one run; the output is discarded."""
    start = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - start
    assert status == 0, command
    return seconds, usage.ru_maxrss / 1024


def against_find(directory: Path, arguments: list[str], runs: int) -> str:
    """Print one line: seconds, ratio to the neighbouring run of find, peak memory."""
    find = ["find", str(directory), "-printf", "%s %f\\n"]
    command = [sys.executable, "-m", "hicachectl", *arguments]
    timed(find), timed(command)  # warm-up
    pairs = [(timed(find)[0], *timed(command)) for _ in range(runs)]
    ratio = statistics.median(ours / theirs for theirs, ours, _ in pairs)
    theirs = statistics.median(pair[0] for pair in pairs)
    ours = statistics.median(pair[1] for pair in pairs)
    peak = max(pair[2] for pair in pairs)
    return f"{ours:6.2f} s   find {theirs:5.2f} s   ratio {ratio:4.2f}   peak {peak:5.0f} MB"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--objects", type=int, default=200_000)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--folders", action="store_true")
    parser.add_argument("--trailers", action="store_true")
    options = parser.parse_args()
    directory = options.directory or Path(tempfile.mkdtemp(prefix="hicachectl-bench-"))
    directory.mkdir(parents=True, exist_ok=True)
    if not any(directory.iterdir()):
        fill(directory, options.objects, folders=options.folders, trailers=options.trailers)
    with tempfile.TemporaryDirectory() as outputs:
        parquet = str(Path(outputs) / "objects.parquet")
        cases = {
            "ls --objects --format parquet": ["ls", str(directory), "--objects", "--format",
                                              "parquet", "-o", parquet],
            "ls --summary": ["ls", str(directory), "--summary"],
            "verify": ["verify", str(directory), "--fail-on", "never"],
        }  # fmt: skip
        print(f"{options.objects} objects in {directory}, {options.runs} runs, medians")
        for name, arguments in cases.items():
            print(f"{name:32} {against_find(directory, arguments, options.runs)}")
    for option in ("--help", "--version"):
        times = [timed([sys.executable, "-m", "hicachectl", option])[0] for _ in range(15)]
        print(f"{option:32} {1000 * statistics.median(times):6.0f} ms")
    if options.directory is None:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
