"""Reading objects of a 3FS store: in file order, with queries in large batches."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from blake3 import blake3

from hicachectl.backends.arena import ALIGNMENT
from hicachectl.checks.findings import combine
from hicachectl.pages.scanning import take_inventory
from hicachectl.verification import reading_plan
from hicachectl.verification.reading import ReadingResult, read_objects
from hicachectl.verification.reading_plan import ReadingPlan, known_specs, value_checkers
from tests.backends.hf3fs.place import NUM_PAGES, PAGE_BYTES, PROFILE, FreshStore, Place

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hicachectl.pages.inventory import Inventory
    from tests.hf3fs_server import MetadataServer

PAGES = NUM_PAGES // 2  # K and V of each


@pytest.fixture
def place(
    metadata_server: MetadataServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Place:
    """Both ranks full; the order of eviction differs from the order in the files."""
    monkeypatch.setattr(reading_plan, "_TASK_OBJECTS", 4)
    monkeypatch.setattr(reading_plan, "_WINDOW_OBJECTS", 32)
    place = Place(metadata_server, tmp_path / "hicache")
    place.create()
    for rank in range(2):
        names = [f"{page:064x}-{part}" for page in range(PAGES) for part in "kv"]
        metadata_server.put(rank, names)
        shuffled = np.random.default_rng(rank).permutation(names).tolist()
        metadata_server.page_indices(rank, shuffled)
        content = np.random.default_rng(rank).bytes(NUM_PAGES * PAGE_BYTES)
        place.file(f"{rank}:kv:").write_bytes(content)
    return place


@pytest.fixture
def store(place: Place) -> Iterator[FreshStore]:
    with place.open() as store:
        yield store


def whole(inventory: Inventory, *, digest: bool) -> ReadingPlan:
    """Read every page, with one thread."""
    count = len(inventory.objects)
    return ReadingPlan(
        rows=np.arange(count),
        capacities=np.full(count, PAGE_BYTES),
        digest=np.full(count, digest),
        noted=np.full(count, False),
        expected={},
        checkers={},
        sizes=np.zeros(0, dtype=np.int64),
        jobs=1,
    )


def read(store: FreshStore, *, digest: bool) -> tuple[Inventory, ReadingResult]:
    inventory = take_inventory(store, PROFILE)
    plan = whole(inventory, digest=digest)
    return inventory, read_objects(store, inventory, plan)


def test_objects_are_read_stretch_by_stretch_of_the_files(
    store: FreshStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []
    affixes: list[list[bytes]] = []
    real = store.read_into

    def read_into(rows: Any, *arguments: Any, **options: Any) -> Any:
        seen.append(rows.column("locator").to_pylist())
        affixes.append([key[:5] + key[-2:] for key in rows.column("key").to_pylist()])
        return real(rows, *arguments, **options)

    monkeypatch.setattr(store, "read_into", read_into)
    _, result = read(store, digest=False)
    assert result.counts.bytes_read == 2 * NUM_PAGES * PAGE_BYTES
    assert sorted(index for task in seen for index in task) == sorted([*range(NUM_PAGES)] * 2)
    # K and V are mixed in a file, and are read together in file order, without a gap.
    for task in seen:
        assert sorted(task) == list(range(min(task), min(task) + len(task)))
    assert any(len(set(of_task)) == 2 for of_task in affixes)
    for of_task in affixes:  # in memory, K and V are separate
        assert of_task == sorted(of_task, key=of_task.index)
        assert len({affix[:5] for affix in of_task}) == 1
    # A window of 32 objects is 16 pages of both files, so earlier tasks have lower pages.
    stretches = [{index // 16 for index in task} for task in seen]
    assert all(len(stretch) == 1 for stretch in stretches)
    order = [min(stretch) for stretch in stretches]
    assert order == sorted(order)


def test_many_tasks_are_asked_about_in_one_call(
    store: FreshStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store._server is not None
    asked: list[int] = []
    real = store._server.exists

    def exists(rank: int, namespace: str, keys: Any) -> Any:
        asked.append(len(keys))
        return real(rank, namespace, keys)

    monkeypatch.setattr(store._server, "exists", exists)
    inventory, result = read(store, digest=True)
    assert result.digested.all()
    # For each rank: one query for the listing, one for the objects read.
    assert asked == [NUM_PAGES] * 4
    for row, (key, index) in enumerate(
        zip(
            *(inventory.objects.column(name).to_pylist() for name in ("key", "locator")),
            strict=True,
        )
    ):
        path = store.settings.data_file(int(key[:1]), "kv")
        with open(path, "rb") as file:  # noqa: PTH123 - a text
            file.seek(index * PAGE_BYTES)
            assert result.digests[row].tobytes() == blake3(file.read(PAGE_BYTES)).digest()


def test_a_key_that_is_evicted_before_its_tasks_are_asked_about_is_gone(
    place: Place, store: FreshStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    evicted = f"0:kv:{3:064x}-v"
    real = store.exists

    def evict_and_ask(rows: Any) -> Any:
        place.delete(evicted)
        return real(rows)

    monkeypatch.setattr(store, "exists", evict_and_ask)
    inventory, result = read(store, digest=True)
    row = inventory.objects.column("key").to_pylist().index(evicted.encode())
    assert result.counts.gone == 1
    assert np.flatnonzero(~result.digested).tolist() == [row]


def test_without_digests_the_server_is_not_asked(
    store: FreshStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "exists", None)
    assert read(store, digest=False)[1].counts.bytes_read == 2 * NUM_PAGES * PAGE_BYTES


def test_a_task_fits_into_a_small_buffer_with_another(store: FreshStore) -> None:
    inventory = take_inventory(store, PROFILE)
    plan = replace(whole(inventory, digest=False), jobs=2, buffer_bytes=2 * ALIGNMENT)
    assert PAGE_BYTES <= ALIGNMENT
    assert read_objects(store, inventory, plan).counts.bytes_read == 2 * NUM_PAGES * PAGE_BYTES


def test_values_of_k_and_v_read_together_are_told_of_the_right_keys(
    place: Place, store: FreshStore
) -> None:
    inventory = take_inventory(store, PROFILE)
    keys, indices = (inventory.objects.column(name).to_pylist() for name in ("key", "locator"))
    rows = np.arange(len(keys))
    damaged = [rows[1], rows[2], rows[7], *rows[-9::2]]
    for rank in range(2):
        place.file(f"{rank}:kv:").write_bytes(b"\x80\x3f" * (NUM_PAGES * PAGE_BYTES // 2))
    for row in damaged:
        with place.file(keys[row]).open("r+b") as file:
            file.seek(indices[row] * PAGE_BYTES)
            file.write(b"\xc0\x7f")
    os.truncate(place.file("1:kv:"), (NUM_PAGES - 3) * PAGE_BYTES)
    plan = ReadingPlan(
        rows=rows,
        capacities=np.full(len(rows), PAGE_BYTES),
        digest=np.full(len(rows), False),
        noted=np.full(len(rows), False),
        expected={},
        checkers=value_checkers(known_specs(inventory.table), PROFILE),
        sizes=inventory.table.expected_sizes,
        jobs=2,
    )
    found = combine(read_objects(store, inventory, plan).findings(inventory)).to_pylist()
    cut = {
        key
        for key, index in zip(keys, indices, strict=True)
        if key.startswith(b"1:") and index >= NUM_PAGES - 3
    }
    by_code: dict[str, set[bytes]] = {}
    for finding in found:
        by_code.setdefault(finding["code"], set()).add(finding["key"].encode())
    assert by_code == {"truncated": cut, "nan": {keys[row] for row in damaged} - cut}
