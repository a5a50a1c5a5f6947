"""Listing against `find`, whole processes, and start-up; run by hand.

    python -m tests.bench.bench_ls --objects 200000 [--directory DIR] [--runs 7] [--folders]
        [--trailers]

Fills a directory with objects without content (sparse, 52 KB each) unless they exist, then runs
each command in turn with find. Prints the median of the pairwise ratios, and peak memory.
--folders: 256 folders. --trailers: the files are longer by a trailer, and markers say so.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from hicachectl.backends.file.folders import ObjectDirectory
from hicachectl.backends.object_files.markers import Marker, write_marker
from hicachectl.formats.identity import Identity
from hicachectl.formats.trailer import TRAILER_BYTES
from tests.bench.runner import HICACHECTL, Command, alternating, options_of, scratch
from tests.stores import page

if TYPE_CHECKING:
    import argparse

SUFFIXES = ("_Qwen-Qwen3-32B_0_2", "_Qwen-Qwen3-32B_1_2", ".mamba_Qwen-Qwen3-32B_0_2",
            ".mamba_Qwen-Qwen3-32B_1_2")  # fmt: skip
OBJECT_BYTES = 52_000


def fill(directory: Path, objects: int, *, folders: bool, trailers: bool) -> None:
    """Write the names of a TP=2 hybrid model."""
    nbytes = OBJECT_BYTES + TRAILER_BYTES * trailers
    with ObjectDirectory.create(str(directory), folders=folders or None) as place:
        for number in range(objects // len(SUFFIXES)):
            for suffix in SUFFIXES:
                where, name = place.place_for_new(f"{page(number)}{suffix}.bin".encode())
                descriptor = os.open(name, os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=where)
                os.truncate(descriptor, nbytes)
                os.close(descriptor)
        for suffix in SUFFIXES if trailers else ():
            identity = Identity(model="Qwen-Qwen3-32B", weights="w")
            with place.outer(writes=True) as outer:
                write_marker(outer, Marker(f"{suffix}.bin", OBJECT_BYTES, identity, "xxh3"))


def against_find(directory: Path, arguments: list[str], runs: int) -> str:
    """Return one line: seconds, ratio to the neighbouring run of find, peak memory."""
    ours = Command(*HICACHECTL, *arguments)
    find = Command("find", directory, "-printf", "%s %f\\n")
    turns = alternating({"ours": ours, "find": find}, runs)
    return (
        f"{turns.median('ours'):6.2f} s   find {turns.median('find'):5.2f} s   "
        f"ratio {turns.ratio('ours', to='find'):4.2f}   peak {ours.peak_mb:5.0f} MB"
    )


def main() -> None:
    """Measure and print."""
    options = options_of(
        __doc__, objects=200_000, directory=Path, runs=7, folders=False, trailers=False
    )
    with scratch() as folder:
        measure(options.directory or folder / "store", options)


def measure(directory: Path, options: argparse.Namespace) -> None:
    """Fill a directory if it is empty; print a line for each command."""
    directory.mkdir(parents=True, exist_ok=True)
    if not any(directory.iterdir()):
        fill(directory, options.objects, folders=options.folders, trailers=options.trailers)
    with scratch() as outputs:
        parquet = str(outputs / "objects.parquet")
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
        turns = alternating({option: Command(*HICACHECTL[:-1], option)}, 15)
        print(f"{option:32} {1000 * turns.median(option):6.0f} ms")


if __name__ == "__main__":
    main()
