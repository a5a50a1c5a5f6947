"""Reading a metadata server's snapshot, against a bare parse of the same file; run by hand.

    python -m tests.bench.bench_hf3fs_snapshot [--keys 1000000] [--runs 5] [--file FILE]

Writes a snapshot as SGLang's server does, with half of its pages free. Each run reads the file and
parses it with msgspec and with orjson (if installed) into Python objects, and right afterwards with
read_snapshot. Prints medians, and the peak memory of each in a separate process. The aim: at most
twice the time of a bare parse, and memory of the size of the columns.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from hicachectl.backends.hf3fs.snapshot import read_snapshot, write_repaired
from hicachectl.backends.page_tables import PageTable
from tests.bench.runner import alternating, options_of, scratch, timed
from tests.stores import page

if TYPE_CHECKING:
    from collections.abc import Callable

PEAK = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tests.bench.bench_hf3fs_snapshot import PARSERS, peak_kib
before = peak_kib()
PARSERS[sys.argv[2]](Path(sys.argv[3]))
print(peak_kib() - before)
"""


def peak_kib() -> int:
    """Return the peak memory of this process; ru_maxrss would include the parent's."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def write_sample(path: Path, keys: int) -> None:
    """Write a rank of an MHA model: keys of K and V objects, and equally many free pages."""
    pages = map(page, range(-(-keys // 2)))
    names = [f"0:kv:{name}{part}".encode() for name in pages for part in ("-k", "-v")][:keys]
    indices = np.arange(2 * keys - 1, keys - 1, -1)
    listed = pa.chunked_array([names], pa.binary())
    table = PageTable(0, "kv", 2 * keys, np.arange(keys), listed, indices)
    write_repaired([table], path)


def bare_msgspec(path: Path) -> object:
    """Parse with msgspec."""
    import msgspec

    return msgspec.json.decode(path.read_bytes())


def bare_orjson(path: Path) -> object:
    """Parse with orjson."""
    import orjson

    return orjson.loads(path.read_bytes())


PARSERS: dict[str, Callable[[Path], object]] = {
    "msgspec": bare_msgspec,
    "orjson": bare_orjson,
    "read_snapshot": read_snapshot,
}


def measure(path: Path, runs: int) -> None:
    """Print times, ratios and memory."""
    names = [name for name in PARSERS if name != "orjson" or find_spec("orjson")]
    turns = alternating({name: timed(partial(PARSERS[name], path)) for name in names}, runs)
    print(f"{path.stat().st_size / 1e6:.0f} MB")
    for name in names:
        ratio = turns.median("read_snapshot") / turns.median(name)
        print(
            f"{name:14} {turns.median(name):7.3f} s   read_snapshot takes {ratio:.2f}x   "
            f"{peak_mib(name, path)} MiB"
        )


def peak_mib(name: str, path: Path) -> int:
    """Return the memory that a parse adds to a fresh process."""
    root = str(Path(__file__).parents[2])
    output = subprocess.check_output([sys.executable, "-c", PEAK, root, name, str(path)], text=True)
    return int(output) >> 10


def main() -> None:
    """Measure as the command line asks."""
    options = options_of(__doc__, keys=1_000_000, runs=5, file=Path)
    with scratch() as folder:
        path = options.file or folder / "metadata.json"
        if options.file is None:
            write_sample(path, options.keys)
        measure(path, options.runs)


if __name__ == "__main__":
    main()
