"""Tests of table_repair, on SGLang's own server."""

from __future__ import annotations

import shutil
import time
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING
from unittest.mock import create_autospec

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.backends.hf3fs.metadata import MetadataClient
from hicachectl.backends.hf3fs.snapshot import (
    read_snapshot,
    write_repaired,
)
from hicachectl.backends.page_tables import PageTable, PageTables, Snapshot
from hicachectl.checks.page_tables import holders, leaked_pages, mapped_and_free, out_of_range
from hicachectl.formats.errors import UsageError
from hicachectl.move import table_repair
from hicachectl.move.table_repair import (
    TableRepairResult,
    bad_rows,
    delete_keys,
    plan_repair,
    releasable,
    release_pages,
    repaired_table,
)
from tests.speed import examples

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.hf3fs_server import MetadataServer

PAGES = st.integers(0, 12)


@pytest.fixture
def client(metadata_server: MetadataServer) -> Iterator[MetadataClient]:
    with closing(MetadataClient(metadata_server.url)) as client:
        yield client


def table_now(server: MetadataServer, name: str = "0:kv") -> PageTable:
    return next(t for t in read_snapshot(server.save()).tables if t.name == name)


def mapping(table: PageTable) -> dict[str, int]:
    keys = [key.decode() for key in table.names_at(np.arange(len(table.keys))).to_pylist()]
    return dict(zip(keys, table.indices.tolist(), strict=True))


def is_sound(table: PageTable) -> bool:
    wrong = (holders(table) > 1) | mapped_and_free(table) | out_of_range(table)
    free: list[int] = table.free.tolist()
    return (
        not wrong.any() and len(free) == len(set(free)) and all(p < table.num_pages for p in free)
    )


def delete(client: MetadataClient, table: PageTable, *keys: str) -> list[TableRepairResult]:
    bad = bad_rows(table, [f"{table.name}:{key}".encode() for key in keys])
    return list(delete_keys(client, plan_repair(table, bad)))


def test_a_bad_key_goes_and_its_page_is_free(
    metadata_server: MetadataServer, client: MetadataClient
) -> None:
    metadata_server.initialize(0, 4)
    metadata_server.put(0, ["a", "b"])
    assert delete(client, table_now(metadata_server), "a") == [TableRepairResult(("a",), ())]
    table = table_now(metadata_server)
    assert mapping(table) == {"b": 2}
    assert sorted(table.free.tolist()) == [0, 1, 3]


def test_keys_of_another_table_are_not_touched(
    metadata_server: MetadataServer, client: MetadataClient
) -> None:
    for rank, namespace in ((0, "kv"), (1, "kv"), (0, "indexer")):
        metadata_server.initialize(rank, 4, namespace)
        metadata_server.put(rank, ["a"], namespace)
    table = table_now(metadata_server, "1:kv")
    bad = bad_rows(table, [b"0:kv:a", b"0:indexer:a", b"11:kv:a"])
    assert not bad.any()
    delete(client, table, "a")
    assert metadata_server.exists(0, ["a"]) == metadata_server.exists(0, ["a"], "indexer") == [True]
    assert metadata_server.exists(1, ["a"]) == [False]


def test_all_keys_of_a_page_go_in_one_call(
    metadata_server: MetadataServer, client: MetadataClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []
    real = client.delete

    def counted(rank: int, namespace: str, keys: list[str]) -> None:
        calls.append(keys)
        real(rank, namespace, keys)

    monkeypatch.setattr(client, "delete", counted)
    monkeypatch.setattr(table_repair, "MAX_BATCH", 2)
    metadata_server.initialize(0, 9)
    metadata_server.put(0, ["a", "b", "c", "d"])
    metadata_server.confirm(0, [("a'", 8), ("a''", 8)])
    delete(client, table_now(metadata_server), "a'", "b", "c", "d")
    assert calls == [["d", "c"], ["b"], ["a", "a'", "a''"]]
    table = table_now(metadata_server)
    assert is_sound(table)
    assert not len(table.keys)
    assert len(table.free) == 9


def test_a_key_that_moved_or_went_since_the_snapshot_is_left(
    metadata_server: MetadataServer, client: MetadataClient
) -> None:
    metadata_server.initialize(0, 4)
    metadata_server.put(0, ["a", "b"])
    metadata_server.confirm(0, [("a'", 3)])
    table = table_now(metadata_server)
    metadata_server.confirm(0, [("b", 0)], [2])  # b was written again
    metadata_server.delete(0, ["a'"])  # page 3 may be another key's by now
    assert delete(client, table, "a", "b") == [TableRepairResult((), ("b", "a", "a'"))]
    assert metadata_server.exists(0, ["a", "b"]) == [True, True]


def test_a_key_on_a_free_page_does_not_take_it_from_who_has_it_by_now(
    metadata_server: MetadataServer, client: MetadataClient
) -> None:
    metadata_server.initialize(0, 4)
    metadata_server.put(0, ["a"])
    metadata_server.confirm(0, [("a'", 3)])
    metadata_server.delete(0, ["a'"])
    table = table_now(metadata_server)
    assert mapped_and_free(table).all()
    assert metadata_server.put(0, ["new owner"]) == [3]
    assert delete(client, table, "a") == [TableRepairResult(("a",), ())]
    table = table_now(metadata_server)
    assert mapping(table) == {"new owner": 3}
    assert sorted(table.free.tolist()) == [0, 1, 2]
    assert not len(leaked_pages(table))


def test_a_key_on_a_free_page_that_nobody_took_goes_as_well(
    metadata_server: MetadataServer, client: MetadataClient
) -> None:
    metadata_server.initialize(0, 2)
    metadata_server.put(0, ["a"])
    metadata_server.confirm(0, [("a'", 1)])
    metadata_server.delete(0, ["a'"])
    delete(client, table_now(metadata_server), "a")
    table = table_now(metadata_server)
    assert is_sound(table)
    assert sorted(table.free.tolist()) == [0, 1]


def test_a_key_beyond_the_table_is_left_since_its_page_would_become_free(
    metadata_server: MetadataServer, client: MetadataClient
) -> None:
    metadata_server.initialize(0, 2)
    metadata_server.confirm(0, [("far", 7)])
    table = table_now(metadata_server)
    assert plan_repair(table, bad_rows(table, [b"0:kv:far"])).left == ("far",)
    assert delete(client, table, "far") == []
    assert metadata_server.saved()["0:kv"]["free_pages"] == [0, 1]


def test_batches_are_small_where_the_server_has_many_free_pages() -> None:
    few, many = empty_table(10), empty_table(1_000_000)
    assert table_repair._batch_size(few) == table_repair.MAX_BATCH
    assert table_repair._batch_size(many) == 4
    assert table_repair._batch_size(empty_table(5_000_000)) == 1


def empty_table(num_pages: int) -> PageTable:
    nothing = np.zeros(0, dtype=np.int64)
    return PageTable(
        0, "kv", num_pages, np.arange(num_pages), pa.chunked_array([], pa.binary()), nothing
    )


# leaked pages


def test_leaked_pages_are_free_again_after_the_writers_stopped(
    metadata_server: MetadataServer, client: MetadataClient
) -> None:
    metadata_server.initialize(0, 6)
    metadata_server.put(0, ["a"])
    metadata_server.reserve(0, ["b", "c"])
    earlier = read_snapshot(metadata_server.save())
    later = read_snapshot(metadata_server.save())
    pages = releasable("0:kv", earlier, later)
    assert pages.tolist() == [3, 4]
    release_pages(client, later.tables[0], pages)
    table = table_now(metadata_server)
    assert not len(leaked_pages(table))
    assert is_sound(table)


def test_no_snapshot_from_before_the_command_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots are dated by the server, whose clock may be ahead of this host's."""
    store = create_autospec(PageTables, instance=True)
    last_ns = time.time_ns() + 120 * 10**9
    store.table_state.return_value = Snapshot(last_ns, ())
    asked: list[int] = []

    def saved_after(_: object, moment_ns: int) -> Snapshot:
        asked.append(moment_ns)
        return Snapshot(moment_ns + 1, ())

    monkeypatch.setattr(table_repair, "_saved_after", saved_after)
    table_repair.release_leaked(store, dry_run=False, say=lambda text: None)
    assert asked == [last_ns, last_ns + 1]


def test_a_page_that_was_confirmed_between_the_snapshots_is_not_released(
    metadata_server: MetadataServer,
) -> None:
    metadata_server.initialize(0, 6)
    ((_, late), _) = metadata_server.reserve(0, ["late", "never"])
    earlier = read_snapshot(metadata_server.save())
    metadata_server.confirm(0, [("late", late)])
    later = read_snapshot(metadata_server.save())
    assert releasable("0:kv", earlier, later).tolist() == [4]


def test_an_absurd_number_of_leaked_pages_is_refused() -> None:
    table = replace(empty_table(3), num_pages=1 << 32)
    said = r"^0:kv: \d{10} leaked pages, but at most \d+ can be freed; clear the table$"
    with pytest.raises(UsageError, match=said):
        releasable("0:kv", Snapshot(2, (table,)), Snapshot(3, (table,)))
    with pytest.raises(UsageError, match=said):
        repaired_table(table, np.zeros(0, dtype=np.bool_), release_leaked=True)


# repaired snapshots


@pytest.mark.slow
@examples(200)
@given(data=st.data())
def test_a_repaired_table_is_sound_whatever_it_was(data: st.DataObject) -> None:
    indices = data.draw(st.lists(PAGES, max_size=12))
    keys = [f"key-{number}" for number in range(len(indices))]
    table = PageTable(
        0,
        "kv",
        data.draw(st.integers(0, 12)),
        np.array(data.draw(st.lists(PAGES, max_size=12)), dtype=np.int64),
        pa.chunked_array([[f"0:kv:{key}".encode() for key in keys]], pa.binary()),
        np.array(indices, dtype=np.int64),
    )
    chosen = data.draw(st.sets(st.sampled_from(keys))) if keys else set()
    wrong = np.flatnonzero((holders(table) > 1) | mapped_and_free(table))
    named = chosen | {keys[row] for row in wrong}
    bad = bad_rows(table, [f"0:kv:{key}".encode() for key in named])
    repaired = repaired_table(table, bad)
    assert is_sound(repaired)
    kept = {k: i for k, i in mapping(table).items() if k not in named and i < table.num_pages}
    assert list(mapping(repaired).items()) == list(kept.items())
    leaked = leaked_pages(table).first(99)
    assert leaked_pages(repaired).first(99) == leaked
    whole = repaired_table(table, bad, release_leaked=True)
    assert sorted([*whole.free.tolist(), *kept.values()]) == list(range(table.num_pages))


def test_a_server_that_was_down_starts_sound_from_a_repaired_snapshot(
    sglang_python: Path, tmp_path: Path
) -> None:
    from tests.hf3fs_server import MetadataServer

    with MetadataServer(sglang_python) as server:
        server.initialize(0, 8)
        server.put(0, ["a", "b", "c"])
        server.confirm(0, [("a'", 7), ("far", 9), ("b'", 6)])
        server.delete(0, ["b'"])
        server.save()
        server.kill()
        snapshot = read_snapshot(server.snapshot)
        (table,) = snapshot.tables
        bad = bad_rows(table, [b"0:kv:a", b"0:kv:b", b"0:kv:far"])
        repaired = server.snapshot.with_name("repaired.json")
        write_repaired([repaired_table(table, bad)], repaired)
        assert read_snapshot(server.snapshot).tables[0].keys.equals(table.keys)
        shutil.move(repaired, server.snapshot)
        server.start()
        assert server.exists(0, ["a", "a'", "b", "far", "c"]) == [False] * 4 + [True]
        assert is_sound(table_now(server))
        assert sorted(server.put(0, [f"new-{number}" for number in range(7)])) == [
            0,
            1,
            2,
            3,
            4,
            6,
            7,
        ]


def test_a_table_must_be_in_both_snapshots() -> None:
    table = PageTable(0, "kv", 1, np.zeros(0, np.int64), pa.chunked_array([[]], pa.binary()),
                      np.zeros(0, np.int64))  # fmt: skip
    said = "0:kv: this table is missing from one of the two snapshots; check that both come from"
    with pytest.raises(UsageError, match=said):
        releasable("0:kv", Snapshot(2, (table,)), Snapshot(3, ()))
