"""Backups of page groups: exact copies under unused keys, whole groups only."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest

from hicachectl.backends.base import Result, Status, open_store
from hicachectl.backends.file.store import FileStore
from hicachectl.move.backups import copy_groups, copy_memory, same_bytes
from hicachectl.move.order import GroupObjects
from hicachectl.move.results import GroupStatus

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

    from hicachectl.backends.base import Store
    from hicachectl.move.results import MoveResult

GROUPS, SIZE = 3, 3
MTIME_NS = 1_700_000_000 * 10**9


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[tuple[Store, Store]]:
    """Open a store of three groups, each an anchor and two sidecars, and an empty store."""
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    for number in range(GROUPS * SIZE):
        (tmp_path / "one" / f"{number}.bin").write_bytes(content(number))
    with open_store(str(tmp_path / "one")) as one, open_store(str(tmp_path / "other")) as other:
        yield one, other


def content(number: int) -> bytes:
    return bytes([number]) * (5000 + number)


def rows(template: str = "{}.bin") -> pa.Table:
    keys = [template.format(number).encode() for number in range(GROUPS * SIZE)]
    return pa.table(
        {
            "key": pa.array(keys, pa.binary()),
            "mtime_ns": pa.array([MTIME_NS + n for n in range(GROUPS * SIZE)]),
        }
    )


def copied(stores: tuple[Store, Store], **options: Any) -> MoveResult:
    """Copy all groups; their objects are interleaved."""
    numbers = np.arange(GROUPS * SIZE)
    names = pa.array([f"page {n}".encode() for n in numbers], pa.binary())
    objects = GroupObjects(names, numbers % GROUPS, numbers < GROUPS)
    sizes = np.array([len(content(n)) for n in range(len(numbers))])
    pages = pa.array([f"{n:064x}" for n in range(GROUPS)])
    with nullcontext() if "arena" in options else copy_memory(stores[0], 1 << 20) as memory:
        options = {"arena": memory, **options}
        return copy_groups(
            stores[0], rows(), stores[1], rows("copy-{}.bin"), objects, sizes, pages, **options
        )


def held(store: Store) -> set[int]:
    """Return the numbers of the copies; check bytes and time of each."""
    numbers = set()
    for batch in store.scan(("mtime_ns",)):
        for row in batch.to_pylist():
            number = int(row["key"].decode().removesuffix(".bin").removeprefix("copy-"))
            assert row["mtime_ns"] == MTIME_NS + number
            numbers.add(number)
    return numbers


def group(number: int) -> set[int]:
    return set(range(number, GROUPS * SIZE, GROUPS))


def test_all_that_is_asked_for_is_copied(stores: tuple[Store, Store]) -> None:
    with copy_memory(stores[0], 1 << 20) as memory:
        result = copied(stores, arena=memory)
        assert stores[0].arena is memory
        assert stores[1].arena is None
        sizes = [len(content(number)) for number in range(GROUPS * SIZE)]
        copies = rows("copy-{}.bin").take([0, 5, 1])
        some, nbytes = rows().take([0, 5, 0]), np.array([sizes[0], sizes[5], sizes[1]])
        same = same_bytes(stores[0], some, stores[1], copies, nbytes, arena=memory)
        assert same.tolist() == [True, True, False]
    assert result.statuses.tolist() == [GroupStatus.DONE] * GROUPS
    assert (result.objects, result.nbytes, result.problems) == (GROUPS * SIZE, sum(sizes), [])
    assert held(stores[1]) == set(np.flatnonzero(result.written)) == set(range(GROUPS * SIZE))
    assert not result.full


def test_a_group_of_which_an_object_exists_is_a_conflict(
    stores: tuple[Store, Store], tmp_path: Path
) -> None:
    (tmp_path / "other" / "copy-1.bin").write_bytes(content(1))
    result = copied(stores)
    (tmp_path / "other" / "copy-1.bin").unlink()
    assert result.statuses.tolist() == [GroupStatus.DONE, GroupStatus.CONFLICT, GroupStatus.DONE]
    assert [problem.key for problem in result.problems] == ["page 1"]
    assert held(stores[1]) == set(np.flatnonzero(result.written)) == group(0) | group(2)


def test_an_object_that_is_gone_is_left_out_or_fails_its_group(
    stores: tuple[Store, Store], tmp_path: Path
) -> None:
    (tmp_path / "one" / "4.bin").unlink()
    result = copied(stores, on_gone="is gone")
    assert result.statuses.tolist() == [GroupStatus.DONE, GroupStatus.FAILED, GroupStatus.DONE]
    assert [(p.key, p.detail) for p in result.problems] == [("page 4", "is gone")]
    assert held(stores[1]) == group(0) | group(2)
    stores[1].delete(rows("copy-{}.bin"))
    result = copied(stores)
    assert result.statuses.tolist() == [GroupStatus.DONE] * GROUPS
    assert held(stores[1]) == set(np.flatnonzero(result.written)) == set(range(9)) - {4}


def test_a_group_with_an_object_that_does_not_fit_stays_behind(
    stores: tuple[Store, Store],
) -> None:
    with copy_memory(stores[0], 4096) as memory:
        result = copied(stores, arena=memory)
    assert result.statuses.tolist() == [GroupStatus.FAILED] * GROUPS
    sizes = [len(content(number)) for number in range(GROUPS, 2 * GROUPS)]  # sidecars come first
    assert [p.detail for p in result.problems] == [
        f"{size} bytes, but at most 2048 fit into the copy buffer" for size in sizes
    ]
    assert held(stores[1]) == set()


def test_no_room_for_one_group_stops_no_other(
    stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_from = FileStore.copy_from

    def short_of_room(self: FileStore, source: Store, origins: Any, *args: Any, **opts: Any) -> Any:
        done = copy_from(self, source, origins, *args, **opts)
        for index, key in enumerate(origins.column("key").to_pylist()):
            if key == b"3.bin":
                self.delete(args[0].slice(index, 1))
                done.statuses[index] = Status.FULL
                done.errors[index] = "no space"
        return Result(done.statuses, done.errors)

    monkeypatch.setattr(FileStore, "copy_from", short_of_room)
    result = copied(stores)
    assert result.full
    assert result.statuses.tolist() == [GroupStatus.FAILED, GroupStatus.DONE, GroupStatus.DONE]
    assert [(p.key, p.detail) for p in result.problems] == [("page 3", "no space")]
    assert held(stores[1]) == group(1) | group(2)


def test_a_batch_of_which_nothing_can_be_read_fails_its_groups(
    stores: tuple[Store, Store], tmp_path: Path
) -> None:
    for number in range(GROUPS):
        (tmp_path / "one" / f"{number}.bin").unlink()
    result = copied(stores, on_gone="is gone")
    assert result.statuses.tolist() == [GroupStatus.FAILED] * GROUPS
    assert {p.detail for p in result.problems} == {"is gone"}
    assert held(stores[1]) == set(np.flatnonzero(result.written)) == set()


@pytest.mark.parametrize("on_gone", [None, "is gone"])
def test_an_object_that_goes_between_reading_and_copying_is_left_out_or_fails_its_group(
    stores: tuple[Store, Store],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    on_gone: str | None,
) -> None:
    copy_from = FileStore.copy_from

    def gone(self: FileStore, source: Store, origins: Any, *args: Any, **opts: Any) -> Any:
        (tmp_path / "one" / "4.bin").unlink(missing_ok=True)
        return copy_from(self, source, origins, *args, **opts)

    monkeypatch.setattr(FileStore, "copy_from", gone)
    result = copied(stores, on_gone=on_gone)
    first = GroupStatus.DONE if on_gone is None else GroupStatus.FAILED
    assert result.statuses.tolist() == [GroupStatus.DONE, first, GroupStatus.DONE]
    assert [(p.key, p.detail) for p in result.problems] == [("page 4", "is gone")] * bool(on_gone)
    left = {4} if on_gone is None else group(1)
    assert held(stores[1]) == set(np.flatnonzero(result.written)) == set(range(9)) - left


def test_a_store_without_room_fails_groups_in_words(
    stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileStore, "traits", replace(stores[1].traits, append_only=True))
    monkeypatch.setattr(FileStore, "free_bytes", lambda self: 100)
    result = copied(stores)
    assert result.full
    assert result.statuses.tolist() == [GroupStatus.FAILED] * GROUPS
    assert len(result.problems) == GROUPS
    assert held(stores[1]) == set()


@pytest.mark.parametrize("memory_bytes", [24 << 10, 1 << 20], ids=["one object", "all"])
def test_groups_of_any_size_are_copied(stores: tuple[Store, Store], memory_bytes: int) -> None:
    """Groups that do not fit into the arena twice are copied one object at a time."""
    with copy_memory(stores[0], memory_bytes) as arena:
        result = copied(stores, arena=arena)
    assert result.open.all()
    assert (result.objects, result.problems) == (GROUPS * SIZE, [])
    assert result.nbytes == sum(len(content(n)) for n in range(GROUPS * SIZE))
    assert held(stores[1]) == set(range(GROUPS * SIZE))


def test_a_large_group_with_an_object_that_exists_is_rolled_back(
    stores: tuple[Store, Store], tmp_path: Path
) -> None:
    """If the anchor conflicts, the group's sidecars, copied one at a time, are removed again."""
    (tmp_path / "other" / "copy-0.bin").write_bytes(b"another")
    with copy_memory(stores[0], 24 << 10) as arena:
        result = copied(stores, arena=arena)
    assert result.statuses.tolist() == [GroupStatus.CONFLICT, GroupStatus.DONE, GroupStatus.DONE]
    (tmp_path / "other" / "copy-0.bin").unlink()
    assert held(stores[1]) == {n for n in range(GROUPS * SIZE) if n % GROUPS}


def test_a_large_group_keeps_what_is_left_of_it(
    stores: tuple[Store, Store], tmp_path: Path
) -> None:
    """In a group copied one object at a time, a vanished object is left out or fails the group."""
    (tmp_path / "one" / "3.bin").unlink()
    with copy_memory(stores[0], 24 << 10) as arena:
        result = copied(stores, arena=arena)
    assert result.open.all()
    assert not result.written[3]
    assert held(stores[1]) == set(range(GROUPS * SIZE)) - {3}


def test_a_large_group_fails_where_its_object_is_gone(
    stores: tuple[Store, Store], tmp_path: Path
) -> None:
    (tmp_path / "one" / "3.bin").unlink()
    with copy_memory(stores[0], 24 << 10) as arena:
        result = copied(stores, arena=arena, on_gone="is gone")
    assert result.statuses.tolist() == [GroupStatus.FAILED, GroupStatus.DONE, GroupStatus.DONE]
    assert [(each.key, each.detail) for each in result.problems] == [("page 3", "is gone")]
    assert held(stores[1]) == {n for n in range(GROUPS * SIZE) if n % GROUPS}
