"""Digests of a store against `b3sum` and `cat`; run by hand.

    python tests/bench/bench_digests.py --objects 2400 --bytes 4500000 [--directory DIR] [--cold]
    python tests/bench/bench_digests.py --objects 200000 --bytes 52000

Writes a store of random objects unless DIR has one, then runs each pair of commands in turn and
prints the median ratio. One more run measures the memory of all its processes together. b3sum is
Debian's package of that name. --cold drops the page cache before each run, which needs root, and
compares with `cat`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SMALL_BYTES = 1 << 20


def fill(directory: Path, objects: int, nbytes: int) -> None:
    """Write objects of random bytes, one per page."""
    block = os.urandom(nbytes + objects)
    for number in range(objects):
        page = hashlib.sha256(str(number).encode()).hexdigest()
        (directory / f"{page}_m_0_1.bin").write_bytes(block[number : number + nbytes])


def timed(command: list[str], *, cold: bool) -> float:
    """Return the wall seconds of a command; its output is discarded."""
    if cold:
        subprocess.run(["sync"], check=True)
        Path("/proc/sys/vm/drop_caches").write_text("3")
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def peak_megabytes(command: list[str]) -> float:
    """Return the peak memory of a command and its children, shared pages counted once."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        peak = max(peak, _proportional_kilobytes(process.pid))
        time.sleep(0.02)
    return peak / 1024


def _proportional_kilobytes(pid: int) -> int:
    try:
        facts = Path(f"/proc/{pid}/smaps_rollup").read_text()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # the process has just ended
        return 0
    own = next((line for line in facts.splitlines() if line.startswith("Pss:")), "Pss: 0")
    return int(own.split()[1]) + sum(_proportional_kilobytes(int(child)) for child in children)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--objects", type=int, default=2400)
    parser.add_argument("--bytes", type=int, default=4_500_000)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hicachectl-bench-") as scratch:
        directory = options.directory or Path(scratch) / "store"
        directory.mkdir(exist_ok=True)
        if not any(directory.iterdir()):
            fill(directory, options.objects, options.bytes)
        catalog = str(Path(scratch) / "catalog.parquet")
        ours = [sys.executable, "-m", "hicachectl", "verify", str(directory), "--checks", "digests",
                "--catalog", catalog, "--update-catalog", "--grace", "0s"]  # fmt: skip
        if options.cold:
            theirs = ["sh", "-c", f"find {directory} -type f -print0 | xargs -0 cat"]
        elif options.bytes < SMALL_BYTES:
            theirs = ["sh", "-c", f"find {directory} -name '*.bin' -print0 | "
                      "xargs -0 -n 1000 -P 2 b3sum --no-mmap --num-threads 1"]  # fmt: skip
        else:
            theirs = ["sh", "-c", f"find {directory} -name '*.bin' -print0 | xargs -0 b3sum"]
        total = sum(entry.stat().st_size for entry in os.scandir(directory) if entry.is_file())
        if not options.cold:
            timed(theirs, cold=False)
        pairs = []
        for _ in range(options.runs):
            Path(catalog).unlink(missing_ok=True)
            pairs.append((timed(ours, cold=options.cold), timed(theirs, cold=options.cold)))
        ratio = statistics.median(other / own for own, other in pairs)
        own, other = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
        Path(catalog).unlink(missing_ok=True)
        print(
            f"{total / 1e9:.1f} GB: ours {own:.2f} s ({total / own / 1e9:.2f} GB/s), "
            f"{theirs[-1].split()[-1] if options.cold else 'b3sum'} {other:.2f} s, "
            f"throughput ratio {ratio:.2f}, difference {own - other:+.2f} s, "
            f"peak {peak_megabytes(ours):.0f} MB"
        )


if __name__ == "__main__":
    main()
