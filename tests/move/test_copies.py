"""Copies between a store and a quarantine run: exact, under unused keys, whatever fits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest

from hicachectl.backends.base import Result, Status, open_store
from hicachectl.backends.file.store import FileStore
from hicachectl.move.copies import copier

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hicachectl.backends.base import Store

COUNT = 9
MTIME_NS = 1_700_000_000 * 10**9


@pytest.fixture(params=["by the system", "through memory"])
def stores(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Store, Store]]:
    """Open a store of nine objects, and an empty store."""
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    for number in range(COUNT):
        (tmp_path / "one" / f"{number}.bin").write_bytes(content(number))
    if request.param == "through memory":
        monkeypatch.setattr(FileStore, "can_copy_from", lambda self, source: False)
    with open_store(str(tmp_path / "one")) as one, open_store(str(tmp_path / "other")) as other:
        yield one, other


def content(number: int) -> bytes:
    return bytes([number]) * (5000 + number)


def copied(stores: tuple[Store, Store], memory_bytes: int = 1 << 20) -> Result:
    """Copy all objects."""
    keys = pa.array([f"{number}.bin".encode() for number in range(COUNT)], pa.binary())
    rows = pa.table({"key": keys, "mtime_ns": [MTIME_NS + n for n in range(COUNT)]})
    sizes = np.array([len(content(number)) for number in range(COUNT)])
    with copier(*stores, memory_bytes) as memory:
        return memory.copy(stores[0], rows, stores[1], rows, sizes)


def held(directory: Path) -> dict[str, tuple[bytes, int]]:
    return {
        path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in directory.glob("*.bin")
    }


def expected(*without: int) -> dict[str, tuple[bytes, int]]:
    numbers = set(range(COUNT)) - set(without)
    return {f"{number}.bin": (content(number), MTIME_NS + number) for number in numbers}


@pytest.mark.parametrize("memory_bytes", [8 << 10, 1 << 20], ids=["one object", "all"])
def test_bytes_and_times_are_copied(
    stores: tuple[Store, Store], tmp_path: Path, memory_bytes: int
) -> None:
    assert copied(stores, memory_bytes).all_ok
    assert held(tmp_path / "other") == expected()


def test_each_object_has_its_status(stores: tuple[Store, Store], tmp_path: Path) -> None:
    """One is gone, one has another size, and one exists already: the others are copied."""
    (tmp_path / "one" / "3.bin").unlink()
    (tmp_path / "one" / "4.bin").write_bytes(b"short")
    (tmp_path / "other" / "5.bin").write_bytes(b"another")
    found = copied(stores).statuses.tolist()
    assert [found[3], found[4], found[5]] == [Status.GONE, Status.SHORT, Status.EXISTS]
    assert found.count(Status.OK) == COUNT - 3
    assert (tmp_path / "other" / "5.bin").read_bytes() == b"another"
    (tmp_path / "other" / "5.bin").unlink()
    assert held(tmp_path / "other") == expected(3, 4, 5)


def test_an_object_larger_than_the_memory_is_said(
    stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileStore, "can_copy_from", lambda self, source: False)
    found = copied(stores, 4096)
    assert set(found.statuses.tolist()) == {Status.ERROR}
    assert found.errors[0] == "5000 bytes, but at most 4096 fit into the buffer"


def test_equal_bytes_are_told_from_others(stores: tuple[Store, Store], tmp_path: Path) -> None:
    copied(stores)
    data = bytearray(content(2))
    data[-1] ^= 1
    (tmp_path / "other" / "2.bin").write_bytes(data)
    keys = pa.table({"key": pa.array([f"{n}.bin".encode() for n in range(COUNT)], pa.binary())})
    sizes = np.array([len(content(number)) for number in range(COUNT)])
    with copier(*stores) as memory:
        same = memory.same(stores[0], keys, stores[1], keys, sizes)
    assert same.tolist() == [number != 2 for number in range(COUNT)]
