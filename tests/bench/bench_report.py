"""The report of a large store against its listing, whole processes; run by hand.

    python -m tests.bench.bench_report --objects 1000000 [--directory DIR] [--runs 3]

Fills a directory as bench_ls does, unless it is filled, and removes some objects. Runs `report`
in turn with `ls --summary`, and once more with the requests of a prefix tree. Prints seconds of
report, the difference, peak memory and the size of the page.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from tests.bench.bench_ls import SUFFIXES, fill, timed

_CHAIN = 1000  # pages of each request
_MISSING = 1000


def write_requests(file: Path, directory: Path) -> None:
    """Write a chain for each thousand pages, in any order: they need no tokens."""
    pages = sorted({path.name[:64] for path in directory.glob(f"*{SUFFIXES[0]}.bin")})
    chains = [pages[at : at + _CHAIN] for at in range(0, len(pages), _CHAIN)]
    file.write_text("".join(json.dumps(chain) + "\n" for chain in chains))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--objects", type=int, default=1_000_000)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="bench-report-"))
    store = options.directory or place / "store"
    try:
        if not store.is_dir() or not any(store.iterdir()):
            store.mkdir(parents=True, exist_ok=True)
            fill(store, options.objects, folders=False, trailers=False)
            for path in sorted(store.glob(f"*{SUFFIXES[1]}.bin"))[::_MISSING]:
                path.unlink()
        requests = place / "chains.jsonl"
        write_requests(requests, store)
        page = place / "report.html"
        program = [sys.executable, "-m", "hicachectl", "-q"]
        listing = [*program, "ls", str(store), "--summary"]
        plain = [*program, "report", str(store), "-o", str(page), "--grace", "0s",
                 "--fail-on", "never"]  # fmt: skip
        timed(listing)  # warm-up
        for name, command in (("", plain), (", requests", [*plain, "--pages", str(requests)])):
            pairs = [(timed(listing), timed(command)) for _ in range(options.runs)]
            seconds = statistics.median(ours[0] for _, ours in pairs)
            beyond = statistics.median(ours[0] - listed[0] for listed, ours in pairs)
            peak = max(ours[1] for _, ours in pairs)
            print(
                f"report{name}: {seconds:.2f} s, {beyond:.2f} s beyond ls --summary, "
                f"peak {peak:.0f} MB, page {page.stat().st_size / 1e6:.2f} MB"
            )
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
