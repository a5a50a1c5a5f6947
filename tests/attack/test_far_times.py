"""Files of times that do not fit 64 bits of nanoseconds: before 1678 and after 2262."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from hicachectl.backends.base import open_store
from hicachectl.backends.testing import PAGE_HASHES
from tests.mooncake_ssd_files import put_bucket
from tests.stores import put_pages

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke

YEAR = 31_557_600
FAR = [(year - 1970) * YEAR for year in (2263, 2400, 2600, 9999)]
LATEST_NS = (1 << 63) - 1


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Pages of 2001 and of the far future; a file system may hold only nearer times."""
    directory = tmp_path / "store"
    for number, at in enumerate([10**9, *FAR]):
        put_pages(directory, range(number, number + 1), "_m_0_1", mtime=at)
    return directory


def test_the_listing_has_the_nearest_times(store: Path) -> None:
    real = {path.name.encode(): path.stat().st_mtime_ns for path in store.iterdir()}
    with open_store(str(store)) as opened:
        for columns in (("nbytes", "mtime_ns"), ("mtime_ns", "atime_ns", "version")):
            rows = [row for batch in opened.scan(columns) for row in batch.to_pylist()]
            times = {row["key"]: row["mtime_ns"] for row in rows}
            assert times == {name: min(at, LATEST_NS) for name, at in real.items()}


def test_commands_take_them_for_the_newest(store: Path, tmp_path: Path, invoke: Invoke) -> None:
    (row,) = invoke.document("ls", store, "--summary")["summary"]
    assert row["first_mtime"] == 10**9
    catalog = tmp_path / "catalog.parquet"
    for _ in range(2):  # the second compares
        invoke("verify", store, "--checks", "digests", "--catalog", catalog, "--update-catalog")
    for choice in (("--before", "1d"), ("--free", "1B")):
        invoke("rm", store, *choice, "--yes")
        assert len(list(store.glob("*.bin"))) == len(FAR)
        put_pages(store, range(1), "_m_0_1", mtime=10**9)


def test_files_of_the_ssd_tier(tmp_path: Path, invoke: Invoke) -> None:
    for number, at in enumerate(FAR):
        key = f"m_{PAGE_HASHES[number]}_0_k".encode()
        bucket = put_bucket(tmp_path, number + 1, {key: b"x" * 64})
        os.utime(bucket, (at, at))
    url = f"mooncake-ssd://{tmp_path}"
    assert len(invoke.document("ls", url)["pages"]) == len(FAR)
    invoke("migrate", url, f"pack://{tmp_path}/copy.hcpack", "--verify")
