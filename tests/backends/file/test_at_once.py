"""Calls on many files of one store: at once, each row with its own outcome."""

from __future__ import annotations

import errno
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hicachectl.backends.base import Status
from hicachectl.backends.concurrency import Concurrency
from hicachectl.backends.file.folders import ObjectDirectory
from hicachectl.backends.object_files.faults import StoreFiles
from hicachectl.formats.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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
