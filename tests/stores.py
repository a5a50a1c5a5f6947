"""Small file stores for tests, written name by name."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

OLD = 1_700_000_000  # long before any --grace

# A profile of a model with an indexer: per page 9216 bytes of kv and 1056 bytes of indexer.
DSA = """
model = "x/dsa"
page_size = 4
prefetch_threshold = 4
[[pools]]
name = "kv"
kind = "mla"
layers = 2
kv_lora_rank = 512
qk_rope_head_dim = 64
row = "bf16"
[[pools]]
name = "indexer"
kind = "dsa_indexer"
layers = 2
index_head_dim = 128
"""


Contents = dict[str, tuple[bytes, int]]  # name to bytes and mtime


def page(number: int) -> str:
    """Return the page hash of a test store's n-th page."""
    return hashlib.sha256(str(number).encode()).hexdigest()


def put(directory: Path, name: str, nbytes: int = 64, mtime: float = OLD) -> Path:
    """Write one object of pattern bytes with the given time; make the directory if necessary."""
    directory.mkdir(exist_ok=True)
    path = directory / name
    path.write_bytes(bytes(range(1, 256)) * (nbytes // 255 + 1) if nbytes else b"")
    os.truncate(path, nbytes)
    os.utime(path, (mtime, mtime))
    return path


def put_pages(
    directory: Path, pages: range, *stems: str, nbytes: int = 64, mtime: float = OLD
) -> None:
    """Write the objects `<hash><stem>.bin` of each page."""
    for number in pages:
        for stem in stems:
            put(directory, f"{page(number)}{stem}.bin", nbytes, mtime)


def contents(directory: Path) -> Contents:
    """Return names, bytes and times of a store's objects."""
    return {
        path.name: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in directory.iterdir()
        if path.is_file()
    }
