"""`doctor` of a million pages and of their real server, within a minute; run by hand, as root.

    python -m pytest tests/soak/soak_doctor.py -s

Takes two minutes, and a tmpfs of a million inodes, about 1 GB of memory. -s shows the times.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.attack.memory import LIMIT_BYTES, OBJECTS, REAL, peak_of
from tests.conformance.conftest import shared_cpu_server, tiny_model  # noqa: F401 - fixtures
from tests.conformance.plugin_site import PAGE_BYTES
from tests.small_file_system import small_file_system

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conformance.cpu_server import CpuServer

MOST_S = 60.0


@pytest.fixture(scope="module")
def million(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A store of a million pages, which are links to one file."""
    folder = tmp_path_factory.mktemp("million")
    with small_file_system(folder / "fs", "200m,nr_inodes=1100000") as place:
        store = place / "store"
        store.mkdir()
        values = np.random.default_rng(1).standard_normal(PAGE_BYTES // 2, np.float32)
        page = store / f"{hashlib.sha256(b'first').hexdigest()}_tiny_0_1.bin"
        page.write_bytes((values.view(np.uint32) >> 16).astype("<u2").tobytes())  # bfloat16
        os.utime(page, (time.time() - 3600,) * 2)  # younger pages are not read
        directory = os.open(store, os.O_RDONLY)
        for number in range(OBJECTS):
            name = f"{hashlib.sha256(b'%d' % number).hexdigest()}_tiny_0_1.bin"
            os.link(page.name, name, src_dir_fd=directory, dst_dir_fd=directory)
        os.close(directory)
        yield store


@pytest.mark.parametrize("asks", [False, True], ids=["alone", "server"])
def test_doctor_ends_within_a_minute(
    shared_cpu_server: CpuServer,  # noqa: F811 - a fixture
    million: Path,
    tmp_path: Path,
    *,
    asks: bool,
) -> None:
    """With the default options, below the memory limit of every command."""
    shared_cpu_server.detach()
    shared_cpu_server.attach("file", {"file_storage_path": str(million)})
    options = ("--server", shared_cpu_server.url) if asks else ()
    out = tmp_path / "out"
    start = time.monotonic()
    used = peak_of(REAL, "doctor", million, *options, "--format", "json", "-o", out)
    seconds = time.monotonic() - start
    print(f"{seconds:5.1f} s, {used.nbytes / 1e6:5.0f} MB")
    for check in json.loads(out.read_text())["checks"]:
        print("  ", check["status"], check["group"], check["name"], check["detail"])
    assert used.status in (0, 4), used.stderr
    assert seconds < MOST_S
    assert used.nbytes < LIMIT_BYTES
