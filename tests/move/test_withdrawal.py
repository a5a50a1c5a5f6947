"""`withdraw_listed`: groups copied elsewhere leave their source completely or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hicachectl.backends.base import Result, Status
from hicachectl.backends.file.store import FileStore
from hicachectl.move import removal_plan
from hicachectl.move.removal_plan import ListedGroups, RepairPlan, plan_removal
from hicachectl.move.results import GroupStatus
from hicachectl.move.withdrawal import remove_groups, withdraw_listed
from tests.move.repairs import dsa_store, indexer, kv, scanned
from tests.stores import contents, page

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

PAGES = 6


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Make six pages of a model with an indexer."""
    return dsa_store(tmp_path / "store", PAGES)


def rewrite(path: Path) -> None:
    """Write an object as SGLang does: a temporary file, and a rename."""
    value = path.read_bytes()
    path.with_name(".w.tmp").write_bytes(value)
    path.with_name(".w.tmp").rename(path)


@pytest.fixture(params=[4, removal_plan.BATCH_OBJECTS], ids=["three batches", "one batch"])
def batches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let six pages leave in three batches, or in one."""
    monkeypatch.setattr(removal_plan, "BATCH_OBJECTS", request.param)


def test_batches_have_groups_from_all_over_the_listing(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So they have objects of all folders, in each of which only one object leaves at a time."""
    monkeypatch.setattr(removal_plan, "BATCH_OBJECTS", 4)
    with FileStore(store) as opened:
        plan = plan_removal(np.arange(PAGES))
        listed = ListedGroups(scanned(opened), plan).batches()
        assert [batch.numbers.tolist() for batch in listed] == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.usefixtures("batches")
def test_outcomes_are_told_in_the_order_of_the_plan(store: Path) -> None:
    """The rows of the report, and the statuses by which the next plan is made."""
    told: list[list[str]] = []

    def then(statuses: npt.NDArray[np.uint8]) -> RepairPlan | None:
        told.append([GroupStatus(status).name for status in statuses])
        return plan_removal(np.array([1])) if len(told) == 1 else None

    with FileStore(store) as opened:
        groups = scanned(opened)
        pages = groups.pages.to_pylist()
        number = pages.index(page(3))
        rewrite(store / kv(3))
        plan = plan_removal(np.array([n for n in range(PAGES) if n != 1]))
        report = remove_groups(opened, groups, plan, mode="delete", then=then)
    names = ["DONE"] * PAGES
    names[number] = "KEPT"
    first = pages.pop(1)
    names.pop(1)
    assert told == [names, ["KEPT" if number == 1 else "DONE"]]
    assert report.rows.column("page").to_pylist() == [*pages, first]
    assert list(contents(store)) != []


@pytest.mark.usefixtures("batches")
def test_what_was_written_since_the_listing_stays(store: Path) -> None:
    """A page of which a server has rewritten an object stays; one that has lost objects leaves."""
    with FileStore(store) as opened:
        groups = scanned(opened)
        for name in (indexer(1), kv(1), indexer(2), kv(5)):
            rewrite(store / name)
        for name in (indexer(3), kv(3), indexer(4)):
            (store / name).unlink()
        order = groups.pages.to_pylist()
        asked = [page(number) for number in (5, 0, 3, 1, 4, 2)]
        numbers = np.array([order.index(name) for name in asked])
        result = withdraw_listed(opened, groups, numbers)
    assert result.pages.to_pylist() == asked
    expected = ["KEPT", "DONE", "GONE", "KEPT", "DONE", "KEPT"]
    assert [GroupStatus(status).name for status in result.statuses] == expected
    assert set(contents(store)) == {name(n) for n in (1, 2, 5) for name in (kv, indexer)}
    assert (result.objects, result.problems) == (3, [])


def test_a_page_whose_anchor_stays_keeps_its_sidecars(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete = FileStore.delete

    def failing(opened: FileStore, rows: Any) -> Result:
        stuck = np.array([key == kv(2).encode() for key in rows.column("key").to_pylist()])
        delete(opened, rows.filter(~stuck))
        statuses = np.where(stuck, Status.ERROR, Status.OK).astype(np.uint8)
        return Result(statuses, {int(n): "busy" for n in np.flatnonzero(stuck)})

    monkeypatch.setattr(FileStore, "delete", failing)
    with FileStore(store) as opened:
        groups = scanned(opened)
        result = withdraw_listed(opened, groups, np.arange(PAGES))
    assert set(contents(store)) == {kv(2), indexer(2)}
    (problem,) = result.problems
    assert (problem.page, problem.key) == (page(2), kv(2))
    assert problem.detail == "cannot be removed: busy"
    assert result.pages[problem.group].as_py() == page(2)
    assert (result.statuses == GroupStatus.FAILED).sum() == 1
