"""Digests of a store against `b3sum` and `cat`; run by hand.

    python -m tests.bench.bench_digests --objects 2400 --bytes 4500000 [--directory DIR] [--cold]
    python -m tests.bench.bench_digests --objects 2400 --bytes 4500000 --no-mmap
    python -m tests.bench.bench_digests --objects 200000 --bytes 52000

Writes a store of random objects unless DIR has one, then runs each pair of commands in turn and
prints the median ratio. One more run measures the memory of all its processes together. b3sum is
Debian's package of that name. It maps files of 1 MiB and more into memory, which `verify` does not:
a file that shrinks meanwhile would kill it. --no-mmap lets b3sum read them, too. --cold drops the
page cache before each run, which needs root, and compares with `cat`.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.bench.runner import HICACHECTL, Command, alternating, options_of, scratch
from tests.stores import page

if TYPE_CHECKING:
    from tests.bench.runner import Way

SMALL_BYTES = 1 << 20


def fill(directory: Path, objects: int, nbytes: int) -> None:
    """Write objects of random bytes, one per page."""
    block = os.urandom(nbytes + objects)
    for number in range(objects):
        (directory / f"{page(number)}_m_0_1.bin").write_bytes(block[number : number + nbytes])


def peak_megabytes(command: list[object]) -> float:
    """Return the peak memory of a command and its children, shared pages counted once."""
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL)
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


def dropped(way: Way) -> Way:
    """Return a way that first drops the page cache, which takes no part in its seconds."""

    def cold() -> float:
        subprocess.run(["sync"], check=True)
        Path("/proc/sys/vm/drop_caches").write_text("3")
        return way()

    return cold


def main() -> None:
    """Measure and print."""
    options = options_of(
        __doc__, objects=2400, bytes=4_500_000, directory=Path, cold=False, runs=5, no_mmap=False
    )
    with scratch() as folder:
        directory = options.directory or folder / "store"
        directory.mkdir(exist_ok=True)
        if not any(directory.iterdir()):
            fill(directory, options.objects, options.bytes)
        catalog = folder / "catalog.parquet"
        command = [*HICACHECTL, "verify", directory, "--checks", "digests", "--catalog", catalog,
                   "--update-catalog", "--grace", "0s"]  # fmt: skip
        if options.cold:
            theirs = f"find {directory} -type f -print0 | xargs -0 cat"
        elif options.bytes < SMALL_BYTES or options.no_mmap:
            theirs = (f"find {directory} -name '*.bin' -print0 | "
                      "xargs -0 -n 300 -P 2 b3sum --no-mmap --num-threads 1")  # fmt: skip
        else:
            theirs = f"find {directory} -name '*.bin' -print0 | xargs -0 b3sum"
        ours = Command(*command)

        def digest_anew() -> float:
            catalog.unlink(missing_ok=True)
            return ours()

        ways: dict[str, Way] = {"ours": digest_anew, "theirs": Command("sh", "-c", theirs)}
        if options.cold:
            ways = {name: dropped(way) for name, way in ways.items()}
        total = sum(entry.stat().st_size for entry in os.scandir(directory) if entry.is_file())
        turns = alternating(ways, options.runs, warm_up=int(not options.cold))
        own, other = map(turns.median, ways)
        catalog.unlink(missing_ok=True)
        print(
            f"{total / 1e9:.1f} GB: ours {own:.2f} s ({total / own / 1e9:.2f} GB/s), "
            f"{'cat' if options.cold else 'b3sum'} {other:.2f} s, throughput ratio "
            f"{turns.ratio('theirs', to='ours'):.2f}, difference {own - other:+.2f} s, "
            f"peak {peak_megabytes(command):.0f} MB"
        )


if __name__ == "__main__":
    main()
