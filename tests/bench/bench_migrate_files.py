"""Copying a file store, against `cp -r` and `rclone copy --transfers 4`; run by hand.

    python -m tests.bench.bench_migrate_files [--pages 512] [--bytes 4500000] [--runs 5]

Makes a store of kv objects. Each of the three copies it in turn, to a new directory each time;
times include start-up and a final `sync`. `hicachectl migrate` makes every batch durable before the
next; the other two leave that to the sync. Prints median seconds, the median ratios of our
throughput to the others', and our peak memory. --tp-reshard compares instead a migration of TP 4 to
TP 8 with one that changes nothing. --no-rclone: rclone takes minutes for many small objects.
"""

from __future__ import annotations

import os
import shutil
import time
from functools import partial
from pathlib import Path

import numpy as np

from tests.bench.runner import HICACHECTL, Command, alternating, options_of, scratch, timed
from tests.stores import page


def fill(store: Path, pages: int, suffixes: list[str], nbytes: int) -> None:
    """Write pages of random bytes, one object per suffix."""
    store.mkdir()
    noise = np.random.default_rng(0).bytes(nbytes + (1 << 16))
    for number in range(pages):
        start = number % (1 << 16)
        for suffix in suffixes:
            (store / f"{page(number)}{suffix}.bin").write_bytes(noise[start : start + nbytes])
    os.sync()


def put_away(target: Path) -> None:
    """Empty the files of a copy but keep them, to give the next copy a fresh start.

    ext4 does not reuse an inode number for a minute or more, and each creation of a file searches
    through all freed inodes. After a deletion of 100,000 files that is most of a copy's time.
    """
    spent = target.with_name(f"spent-{time.time_ns()}")
    target.rename(spent)
    for entry in os.scandir(spent):
        os.truncate(entry.path, 0)


def measure(ways: dict[str, Command], target: Path, runs: int) -> None:
    """Run the commands in turn, each to an empty target; print medians and ratios to the first."""

    def to_empty(command: Command) -> float:
        os.sync()
        seconds = command() + timed(os.sync)()
        put_away(target)
        return seconds

    turns = alternating({name: partial(to_empty, way) for name, way in ways.items()}, runs, 0)
    ours, *others = ways
    print(f"{ours}: {turns.median(ours):.2f} s, {ways[ours].peak_mb:.0f} MiB of memory at most")
    for name in others:
        ratio = turns.ratio(name, to=ours)
        print(f"{name}: {turns.median(name):.2f} s; throughput of ours {ratio:.2f} of it")


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
    options = options_of(
        __doc__, pages=512, bytes=4_500_000, runs=5, dir=Path, jobs=int, tp_reshard=False,
        no_rclone=False,
    )  # fmt: skip
    with scratch(options.dir) as folder:
        source, target = folder / "source", folder / "target"
        ours = [*HICACHECTL, "migrate", source, target]
        ours += [] if options.jobs is None else ["--jobs", options.jobs]
        run = partial(Command, env={**os.environ, "XDG_STATE_HOME": str(folder)})
        if options.tp_reshard:
            profile = folder / "profile.toml"
            profile.write_text(PROFILE.format(tp=4))
            nbytes = 2 * 64 * 32 * 2 * 128 * 2
            fill(source, options.pages, [f"_bench_{rank}_4" for rank in range(4)], nbytes)
            ours += ["--profile", profile]
            ways = {"TP 4 to 8": run(*ours, "--to-tp", 8), "plain copy": run(*ours)}
        else:
            fill(source, options.pages, ["_bench"], options.bytes)
            ways = {
                "hicachectl migrate": run(*ours),
                "cp -r": run("cp", "-r", source, target),
            }
            if (rclone := shutil.which("rclone")) and not options.no_rclone:
                ways["rclone copy"] = run(rclone, "copy", "--transfers", 4, source, target)
        measure(ways, target, options.runs)


if __name__ == "__main__":
    main()
