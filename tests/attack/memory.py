"""The peak memory of the command line over a million objects."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from typing import NamedTuple

LIMIT_BYTES = 1_500_000_000
OBJECTS = 1_000_000

# The listing of a directory "million": a million pages of one object each, without a file.
SYNTHETIC = """
import sys
import numpy as np
import pyarrow as pa
from hicachectl.backends.file import FileStore
OBJECTS, BATCH = 1_000_000, 65_536
listed = FileStore.scan
def scan(store, columns=("nbytes", "mtime_ns")):
    if not store.path.endswith("/million"):
        yield from listed(store, columns)
        return
    random = np.random.default_rng(1)
    digits = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)
    suffix = np.frombuffer(b"_org-model_0_1.bin", dtype=np.uint8)
    for start in range(0, OBJECTS, BATCH):
        count = min(BATCH, OBJECTS - start)
        names = np.empty((count, 64 + len(suffix)), dtype=np.uint8)
        names[:, :64] = digits[random.integers(0, 16, (count, 64), dtype=np.uint8)]
        names[:, 64:] = suffix
        width = names.shape[1]
        offsets = np.arange(0, (count + 1) * width, width, dtype=np.int32)
        keys = pa.BinaryArray.from_buffers(
            pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(names)]
        )
        made = {
            "key": keys,
            "nbytes": pa.array(np.full(count, 1024)),
            "mtime_ns": pa.array(np.full(count, 10**18)),
        }
        yield pa.RecordBatch.from_pydict({n: made[n] for n in dict.fromkeys(("key", *columns))})
FileStore.scan = scan
from hicachectl.__main__ import main
main(sys.argv[1:])
"""
REAL = "import sys; from hicachectl.__main__ import main; main(sys.argv[1:])"


class Used(NamedTuple):
    """How a command ended, and the most memory that it had resident."""

    status: int
    nbytes: int
    stderr: str


def peak_of(program: str, *arguments: object) -> Used:
    """Run a program in a process of its own; return its peak resident memory."""
    with tempfile.TemporaryFile("w+") as err, tempfile.TemporaryFile() as out:
        child = subprocess.Popen(
            [sys.executable, "-c", program, *map(str, arguments)], stdout=out, stderr=err
        )
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        err.seek(0)
        return Used(child.returncode, usage.ru_maxrss * 1024, err.read())
