"""The peak memory of the command line over a million objects."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import NamedTuple

LIMIT_BYTES = 1_500_000_000
OBJECTS, OBJECT_BYTES = 1_000_000, 1152
FIRST_PAGE = "0" * 64

# Directories named "million" list a million pages of one object each, without any file.
_SYNTHETIC = """
import sys
import numpy as np
import pyarrow as pa
from hicachectl.backends.base import scan_schema
from hicachectl.backends.file.store import FileStore
BATCH = 65_536
listed = FileStore.scan
def objects(keys, columns):
    made = {
        "key": keys,
        "nbytes": pa.array(np.full(len(keys), OBJECT_BYTES)),
        "mtime_ns": pa.array(np.full(len(keys), 10**18)),
        "version": pa.array([bytes(32)] * len(keys)) if "version" in columns else None,
        "cleared_ns": pa.nulls(len(keys), pa.int64()),
    }
    schema = scan_schema(columns)
    return pa.RecordBatch.from_arrays([made[name] for name in schema.names], schema=schema)
def scan(store, columns=("nbytes", "mtime_ns")):
    if not store.path.endswith("/million"):
        yield from listed(store, columns)
        return
    random = np.random.default_rng(1)
    digits = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)
    suffix = np.frombuffer(SUFFIX, dtype=np.uint8)
    width = 64 + len(suffix)
    for start in range(0, OBJECTS, BATCH):
        count = min(BATCH, OBJECTS - start)
        names = np.empty((count, width), dtype=np.uint8)
        names[:, :64] = digits[random.integers(0, 16, (count, 64), dtype=np.uint8)]
        names[:, 64:] = suffix
        if not start:
            names[0, :64] = digits[0]
        offsets = np.arange(0, (count + 1) * width, width, dtype=np.int32)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(names)]
        yield objects(pa.BinaryArray.from_buffers(pa.binary(), count, buffers), columns)
    if STRAYS:
        yield objects(pa.array(STRAYS, pa.binary()), columns)
FileStore.scan = scan
from hicachectl.__main__ import main
main(sys.argv[1:])
"""
_LAUNCHER = """
import os, sys
null = os.open(os.devnull, os.O_WRONLY)
actions = [(os.POSIX_SPAWN_DUP2, null, 1)]
child = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=actions)
_, status, usage = os.wait4(child, 0)
print(status, usage.ru_maxrss)
"""
REAL = "import sys; from hicachectl.__main__ import main; main(sys.argv[1:])"


class Used(NamedTuple):
    """How a command ended, and its peak resident memory."""

    status: int
    nbytes: int
    stderr: str


def synthetic(suffix: str, *strays: str) -> str:
    """Return a hicachectl program for which directories named "million" are large.

    They list OBJECTS pages, among them FIRST_PAGE, each as one file with this suffix, and further
    files by name.
    """
    names = [stray.encode() for stray in strays]
    return (
        f"OBJECTS, OBJECT_BYTES = {OBJECTS}, {OBJECT_BYTES}\n"
        f"SUFFIX, STRAYS = {suffix.encode()!r}, {names!r}\n{_SYNTHETIC}"
    )


def peak_of(program: str, *arguments: object) -> Used:
    """Run a program in a separate process; return its peak resident memory."""
    words = [sys.executable, "-c", program, *map(str, arguments)]
    # A process's peak includes the memory of its parent, so a small launcher starts it.
    launched = subprocess.run(
        [sys.executable, "-S", "-c", _LAUNCHER, *words], capture_output=True, text=True, check=True
    )
    status, kib = map(int, launched.stdout.split())
    return Used(os.waitstatus_to_exitcode(status), kib * 1024, launched.stderr)
