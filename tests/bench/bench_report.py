"""The report of a large store against its listing, whole processes; run by hand.

    python -m tests.bench.bench_report --objects 1000000 [--directory DIR] [--runs 3]

Fills a directory as bench_ls does, unless it is filled, and removes some objects. Runs `report`
in turn with `ls --summary`, and once more with the requests of a prefix tree. Prints seconds of
report, the difference, peak memory and the size of the page.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.bench.bench_ls import SUFFIXES, fill
from tests.bench.runner import HICACHECTL, Command, alternating, options_of, scratch

_CHAIN = 1000  # pages of each request
_MISSING = 1000


def write_requests(file: Path, directory: Path) -> None:
    """Write a chain for each thousand pages, in any order: they need no tokens."""
    pages = sorted({path.name[:64] for path in directory.glob(f"*{SUFFIXES[0]}.bin")})
    chains = [pages[at : at + _CHAIN] for at in range(0, len(pages), _CHAIN)]
    file.write_text("".join(json.dumps(chain) + "\n" for chain in chains))


def main() -> None:
    """Measure and print."""
    options = options_of(__doc__, objects=1_000_000, directory=Path, runs=3)
    with scratch() as place:
        store = options.directory or place / "store"
        if not store.is_dir() or not any(store.iterdir()):
            store.mkdir(parents=True, exist_ok=True)
            fill(store, options.objects, folders=False, trailers=False)
            for path in sorted(store.glob(f"*{SUFFIXES[1]}.bin"))[::_MISSING]:
                path.unlink()
        requests = place / "chains.jsonl"
        write_requests(requests, store)
        page = place / "report.html"
        plain = ("report", store, "-o", page, "--grace", "0s", "--fail-on", "never")
        for name, command in (("", plain), (", requests", (*plain, "--pages", requests))):
            report, listing = (
                Command(*HICACHECTL, *words) for words in (command, ("ls", store, "--summary"))
            )
            turns = alternating({"report": report, "ls": listing}, options.runs)
            beyond = np.median(turns.of("report") - turns.of("ls"))
            print(
                f"report{name}: {turns.median('report'):.2f} s, {beyond:.2f} s beyond "
                f"ls --summary, peak {report.peak_mb:.0f} MB, "
                f"page {page.stat().st_size / 1e6:.2f} MB"
            )


if __name__ == "__main__":
    main()
