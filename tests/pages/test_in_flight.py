"""Pages that servers may still be writing: every command judges them alike."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from hicachectl.backends.file.store import FileStore
from hicachectl.move.migration import MigrationRequest, migrate
from hicachectl.report.picture import PictureRequest, take_picture
from hicachectl.verification.inspection import inspect_page
from hicachectl.verification.request import VerifyRequest
from tests.stores import page, put, put_pages
from tests.verification.in_process import verify_store

if TYPE_CHECKING:
    from collections.abc import Collection, Generator
    from pathlib import Path

    import pyarrow as pa

LISTING_SECONDS = 30
REQUEST = VerifyRequest(checks=("groups",))


@pytest.fixture
def jump(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let both clocks jump by the sum of the list."""
    jumps: list[float] = []
    for name, factor in (("time_ns", 10**9), ("monotonic", 1)):
        clock = getattr(time, name)
        jumped = lambda clock=clock, factor=factor: clock() + factor * sum(jumps)  # noqa: E731
        monkeypatch.setattr(time, name, jumped)
    return jumps


class SlowStore(FileStore):
    """A file store whose listing takes half a minute."""

    jumps: list[float]

    def scan(self, columns: Collection[str] = ()) -> Generator[pa.RecordBatch, None, None]:
        """List the store, and let the time pass."""
        yield from super().scan(columns)
        self.jumps.append(LISTING_SECONDS)


def judgements(directory: Path, target: Path, jumps: list[float]) -> dict[str, bool]:
    """Return whether each command judges the page that lacks a rank."""
    judged: dict[str, bool] = {}
    for command in ("verify", "show", "report", "report page", "migrate"):
        jumps.clear()
        with SlowStore(directory) as store, FileStore(target) as destination:
            store.jumps = jumps
            if command == "verify":
                found = verify_store(store, REQUEST).findings
            elif command == "show":
                found = inspect_page(store, None, page(0)).findings
            elif command == "migrate":
                said = "".join(migrate(store, destination, MigrationRequest()).remarks)
                assert ("still being written" in said) != ("not whole" in said)
                judged[command] = "not whole" in said
                continue
            else:
                picture = take_picture(store, PictureRequest(verify=REQUEST, page=page(0)))
                assert picture.page is not None
                found = picture.verified.placed
                if command == "report page":
                    found = picture.page.findings
                shown = {share.rank: share.expected for share in picture.completeness[0].shares}
                assert shown == {"tp 0": 2 if len(found) else 1, "tp 1": 2 if len(found) else 1}
        judged[command] = found.column("code").to_pylist() == ["missing-rank"]
    return judged


@pytest.mark.parametrize(
    ("age", "judged"),
    [
        pytest.param(50, False, id="older than the grace only when the listing ends"),
        pytest.param(90, True, id="older than the grace"),
        pytest.param(-LISTING_SECONDS / 2, False, id="written during the listing"),
        pytest.param(-10 * 86400, True, id="dated in the future"),
    ],
)
def test_all_commands_judge_a_page_by_the_start_of_the_listing(
    tmp_path: Path, jump: list[float], age: float, judged: bool
) -> None:
    store, target = tmp_path / "store", tmp_path / "target"
    store.mkdir()
    target.mkdir()
    put_pages(store, range(1, 2), "_m_0_2", "_m_1_2")
    put(store, f"{page(0)}_m_0_2.bin", mtime=time.time() - age)
    assert set(judgements(store, target, jump).values()) == {judged}
