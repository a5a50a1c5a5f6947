"""A million files under 1.5 GB of memory, by every command that lists; run by hand, as root.

    python -m pytest tests/soak/soak_million.py -s

Takes minutes, and a tmpfs of a million inodes, about 1 GB of memory. -s shows the peak of each
command.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from tests.attack.memory import LIMIT_BYTES, OBJECTS, REAL, peak_of
from tests.small_file_system import small_file_system

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROFILE = """
model = "org/model"
page_size = 1
layout = "page_first"
[[pools]]
name = "kv"
kind = "mha"
dtype = "bfloat16"
layers = 1
kv_heads = 2
head_dim = 128
"""


@pytest.fixture(scope="module")
def million(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A store of a million files of 1 KiB without blocks."""
    folder = tmp_path_factory.mktemp("million")
    with small_file_system(folder / "fs", "100m,nr_inodes=1100000") as place:
        store = place / "store"
        store.mkdir()
        directory = os.open(store, os.O_RDONLY)
        for number in range(OBJECTS):
            name = f"{hashlib.sha256(b'%d' % number).hexdigest()}_org-model_0_1.bin"
            file = os.open(name, os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=directory)
            os.truncate(file, 1024)
            os.close(file)
        os.close(directory)
        yield store


def test_every_command_stays_below_the_limit(million: Path, tmp_path: Path) -> None:
    profile, ids, out = tmp_path / "p.toml", tmp_path / "ids.jsonl", tmp_path / "out"
    profile.write_text(PROFILE)
    ids.write_text(f"{json.dumps(list(range(2000)))}\n")
    commands: list[list[object]] = [
        ["ls", million, "--summary"],
        ["ls", million, "--format", "json"],
        ["ls", million, "--objects", "--format", "parquet"],
        ["ls", million, "--objects", "--format", "jsonl"],
        ["verify", million, "--checks", "names,groups,sizes"],
        ["verify", million, "--profile", profile, "--fail-on", "never"],
        ["rm", million, "--model", "org/model", "--dry-run"],
        ["hits", million, "--profile", profile, "--token-ids", ids],
        ["migrate", million, tmp_path / "new", "--dry-run"],
        ["prewarm", tmp_path / "warm", "--from", million, "--all", "--profile", profile,
         "--dry-run"],
    ]  # fmt: skip
    peaks = {}
    for command in commands:
        used = peak_of(REAL, *command, "-o", out)
        name = " ".join(word for word in map(str, command) if not word.startswith("/"))
        print(f"{used.nbytes / 1e6:7.0f} MB  {name}")
        assert used.status == 0, (name, used.stderr)
        peaks[name] = used.nbytes
        with suppress(FileNotFoundError):
            out.unlink()
    assert max(peaks.values()) < LIMIT_BYTES, peaks
