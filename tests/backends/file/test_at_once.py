"""Calls on many files of one store: at once, each row with its own outcome."""

from __future__ import annotations

import errno
import resource
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest

from hicachectl.backends.arena import Arena
from hicachectl.backends.base import Status, attached
from hicachectl.backends.concurrency import MOST_CALLS, Concurrency
from hicachectl.backends.file.folders import ObjectDirectory
from hicachectl.backends.file.store import FileStore
from hicachectl.backends.object_files.store_files import StoreFiles
from hicachectl.formats.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROWS = 8


@pytest.fixture
def files(tmp_path: Path) -> Iterator[StoreFiles]:
    """The files of an empty store that gets as many calls at once as there are rows."""
    files = StoreFiles(ObjectDirectory.open(str(tmp_path)))
    files.concurrency = Concurrency(ROWS)
    yield files
    files.concurrency.close()
    files.objects.close()


def test_rows_are_done_at_once_and_keep_their_outcomes(files: StoreFiles) -> None:
    """Each row waits for all others; errors and statuses are those of the row."""
    together = threading.Barrier(ROWS, timeout=20)
    statuses = np.full(ROWS + 1, Status.SHORT, dtype=np.uint8)
    errors: dict[int, str] = {}

    def act(index: int) -> Status:
        together.wait()
        if index == 3:
            raise FileExistsError(errno.EEXIST, "")
        if index == 4:
            raise OSError(errno.EIO, "broken")
        return Status.CHANGED if index == 5 else Status.OK

    files.each("remove", range(ROWS), act, statuses, errors)
    expected = [Status.OK] * ROWS + [Status.SHORT]  # the last row was not asked for
    expected[3:6] = [Status.EXISTS, Status.ERROR, Status.CHANGED]
    assert statuses.tolist() == expected
    assert errors == {4: "broken"}


def test_a_lost_store_ends_all_rows(files: StoreFiles) -> None:
    """The error comes after all rows at work have ended."""
    ended: list[int] = []
    together = threading.Barrier(ROWS, timeout=20)

    def act(index: int) -> Status:
        together.wait()
        if not index:
            raise OSError(errno.ESTALE, "stale")
        ended.append(index)
        return Status.OK

    statuses = np.zeros(ROWS, dtype=np.uint8)
    with pytest.raises(StoreUnavailable):
        files.each("remove", range(ROWS), act, statuses, {})
    assert len(ended) == ROWS - 1


@pytest.fixture
def few_descriptors() -> Iterator[int]:
    """A process that may have few more open files, at first: returns its limit."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(int(one.name) for one in Path("/proc/self/fd").iterdir()) + 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    yield most
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_store_may_open_files_for_all_calls_at_once(tmp_path: Path, few_descriptors: int) -> None:
    """Shells allow 1024 open files, and many systems far more."""
    with FileStore(str(tmp_path)):
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= few_descriptors + 3 * MOST_CALLS


@pytest.mark.parametrize("use", ["read", "digest"])
def test_objects_without_a_free_descriptor_are_not_called_unreadable(
    tmp_path: Path, use: str
) -> None:
    """A finding about them would let a repair remove healthy pages."""
    (tmp_path / "a.bin").write_bytes(b"x")
    rows, sizes = pa.table({"key": pa.array([b"a.bin"], pa.binary())}), np.ones(1, dtype=np.int64)
    with FileStore(str(tmp_path)) as store, Arena(4096) as arena, attached(arena, store):
        at = np.zeros(1, dtype=np.int64)
        calls: dict[str, Callable[[], object]] = {
            "read": lambda: store.read_into(rows, at, sizes),
            "digest": lambda: store.digest(rows, sizes, at == 0),
        }
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
        try:
            with pytest.raises(StoreUnavailable) as refused:
                calls[use]()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "Too many open files; raise the limit of open files" in str(refused.value)
