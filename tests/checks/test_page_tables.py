"""Checks of page tables: compared with brute force, and on damage to SGLang's own server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.backends.hf3fs.snapshot import read_snapshot
from hicachectl.backends.page_tables import DataFile, PageTable, TableState
from hicachectl.checks import page_tables
from hicachectl.checks.findings import SCHEMA, combine
from hicachectl.checks.page_tables import (
    check_page_tables,
    holders,
    leaked_pages,
    mapped_and_free,
    out_of_range,
)
from tests.speed import examples

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.hf3fs_server import MetadataServer

PAGE = "0123456789abcdef" * 4
S = 1_000_000_000

PAGES = st.one_of(st.integers(0, 12), st.integers(0, 2**63 - 1))


@pytest.fixture(scope="module", autouse=True)
def _small_steps() -> Iterator[None]:
    """Make few pages take several steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_tables, "_COMPARED_AT_ONCE", 3)
        yield


def table_of(
    indices: Sequence[int] = (),
    free: Sequence[int] = (),
    num_pages: int = 10,
    *,
    rank: int = 0,
    namespace: str = "kv",
    keys: Sequence[str] | None = None,
) -> PageTable:
    names = keys or [f"key-{number}" for number in range(len(indices))]
    return PageTable(
        rank,
        namespace,
        num_pages,
        np.array(free, dtype=np.int64),
        pa.chunked_array([[f"{rank}:{namespace}:{name}".encode() for name in names]], pa.binary()),
        np.array(indices, dtype=np.int64),
    )


def state_of(tables: Sequence[PageTable], **facts: Any) -> TableState:
    known: dict[str, Any] = {"files": {}, "page_bytes": {}, "saved_at_ns": 0}
    return TableState(path="", tables=tuple(tables), live=False, **known | facts)


def found_in(*tables: PageTable, **facts: Any) -> list[dict[str, Any]]:
    earlier, grace_s = facts.pop("earlier", None), facts.pop("grace_s", 60)
    if earlier is not None:
        earlier = [state_of(saved) for saved in earlier]
    found = combine(check_page_tables(state_of(tables, **facts), grace_s=grace_s, earlier=earlier))
    assert found.schema == SCHEMA
    rows: list[dict[str, Any]] = found.to_pylist()
    return rows


def codes(rows: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    by_code: dict[str, list[str]] = {}
    for row in rows:
        by_code.setdefault(row["code"], []).append(row["key"])
    return by_code


TABLES = st.builds(
    table_of, st.lists(PAGES, max_size=15), st.lists(PAGES, max_size=15), st.integers(0, 15)
)


@pytest.mark.slow
@examples(100)
@given(table=TABLES, earlier=TABLES)
def test_the_arithmetic_agrees_with_sets(table: PageTable, earlier: PageTable) -> None:
    indices, free = table.indices.tolist(), set(table.free.tolist())
    assert (holders(table) > 1).tolist() == [indices.count(page) > 1 for page in indices]
    assert mapped_and_free(table).tolist() == [page in free for page in indices]
    assert out_of_range(table).tolist() == [page >= table.num_pages for page in indices]
    leaked = sorted(set(range(table.num_pages)) - free - set(indices))
    assert leaked_pages(table).first(99) == leaked
    assert len(leaked_pages(table)) == len(leaked)
    there = set(earlier.free.tolist()) | set(earlier.indices.tolist())
    both = [page for page in leaked if page < earlier.num_pages and page not in there]
    assert leaked_pages(table, earlier).first(99) == both


def test_a_sound_table_has_no_findings() -> None:
    assert found_in(table_of([3, 1], [0, 2], 4), table_of([0], [1, 2, 3], 4, rank=1)) == []
    assert found_in() == []
    assert found_in(table_of([], [], 0)) == []


def test_every_key_of_a_shared_page_is_named() -> None:
    keys = [f"{PAGE}-k", f"{PAGE}-v", "b", f"{PAGE}_mamba_0_2", "c"]
    rows = found_in(table_of([3, 4, 3, 5, 3], [], 6, keys=keys), earlier=[])
    assert [row["key"] for row in rows] == [f"0:kv:{key}" for key in (f"{PAGE}-k", "b", "c")]
    assert {row["detail"] for row in rows} == {
        "page 3 is held by 3 keys, so at most one of them reads its own bytes"
    }
    assert {(row["code"], row["severity"], row["pool"]) for row in rows} == {
        ("page-index-shared", "error", "kv")
    }
    assert [(row["page"], row["part"]) for row in rows] == [(PAGE, "k"), (None, None), (None, None)]


def test_a_page_beyond_the_table_is_out_of_range_and_nothing_else() -> None:
    (row,) = found_in(
        table_of([4, 3], [0, 1, 2], 4),
        files={"0:kv": DataFile("/f", 40, 0)},
        page_bytes={"0:kv": 10},
    )
    assert (row["code"], row["severity"]) == ("page-index-out-of-range", "error")
    assert (row["key"], row["detail"]) == ("0:kv:key-0", "page 4 is outside the table of 4 pages")


def test_a_page_that_is_mapped_and_free_is_an_error_of_its_key() -> None:
    (row,) = found_in(table_of([2, 1], [0, 2], 3, rank=7, namespace="indexer"))
    assert (row["code"], row["severity"]) == ("page-index-free", "error")
    assert (row["key"], row["pool"]) == ("7:indexer:key-0", "indexer")
    assert row["detail"] == "page 2 is also free, so the next writer may overwrite the page"


def test_leaked_pages_are_counted_and_the_first_ones_named() -> None:
    (row,) = found_in(table_of([3], [0], 30))
    assert (row["code"], row["severity"], row["key"]) == ("page-leaked", "warning", None)
    assert row["detail"].startswith("28 of 30 pages of 0:kv are neither free nor held by a key")
    assert row["detail"].endswith(": 1, 2, 4, 5, 6, 7, 8, 9, …")


def test_a_page_that_is_leaked_in_one_snapshot_alone_is_being_written() -> None:
    before, after = table_of([3], [0], 4), table_of([3, 1], [], 4)
    assert codes(found_in(before)) == {"page-leaked": [None]}
    (row,) = found_in(after, earlier=[[before]])
    assert row["detail"].startswith("1 of 4 pages")
    assert found_in(after, earlier=[]) == []


def test_an_absurd_page_count_takes_no_memory_of_its_size() -> None:
    table = table_of([2**62, 5], [7], 1 << 32)
    assert len(leaked_pages(table)) == (1 << 32) - 2
    assert len(leaked_pages(table).starts) == 3
    assert set(codes(found_in(table))) == {"page-leaked", "page-index-out-of-range"}


def test_keys_beyond_the_end_of_the_file_are_truncated() -> None:
    rows = found_in(
        table_of([0, 1, 2, 3], [], 4),
        files={"0:kv": DataFile("/d/p.0.bin", 25, 0)},
        page_bytes={"0:kv": 10},
    )
    assert codes(rows) == {
        "truncated": ["0:kv:key-2", "0:kv:key-3"],
        "page-count-mismatch": [None],
    }
    assert rows[0]["severity"] == "error"
    assert rows[0]["detail"] == (
        "page 2 lies beyond the end of /d/p.0.bin: the file has 25 bytes, 2 whole pages of 10 bytes"
    )
    assert "0:kv has 4 pages, but /d/p.0.bin has 2 pages of 10 bytes" in rows[2]["detail"]


def test_what_is_left_of_a_file_that_is_no_whole_page_is_no_page() -> None:
    facts = {"files": {"0:kv": DataFile("/f", 49, 0)}, "page_bytes": {"0:kv": 10}}
    assert found_in(table_of([3], [0, 1, 2], 4), **facts) == []
    assert codes(found_in(table_of([4], [0, 1, 2, 3], 5), **facts)).keys() == {
        "truncated",
        "page-count-mismatch",
    }


def test_without_the_page_size_no_file_is_too_short() -> None:
    table = table_of([3], [0, 1, 2], 4)
    assert found_in(table, files={"0:kv": DataFile("/f", 0, 0)}) == []
    assert found_in(table, page_bytes={"0:kv": 10}) == []


def test_ranks_with_other_page_counts_are_told_by_namespace() -> None:
    tables = [
        table_of(free=range(4), num_pages=4, rank=0),
        table_of(free=range(4), num_pages=4, rank=1),
        table_of(free=range(6), num_pages=6, rank=2),
        table_of(free=range(9), num_pages=9, rank=0, namespace="indexer"),
    ]
    (row,) = found_in(*tables)
    assert (row["code"], row["severity"]) == ("page-count-mismatch", "warning")
    assert (row["key"], row["pool"]) == (None, "kv")
    assert row["detail"].endswith(": 4 pages at rank 0, 1; 6 pages at rank 2")


STALE = "the saved tables may not describe the file"


@pytest.mark.parametrize(("behind_s", "stale"), [(-9999, False), (60, False), (61, True)])
def test_a_file_written_long_after_the_snapshot_makes_it_stale(behind_s: int, stale: bool) -> None:
    rows = found_in(
        table_of([0], [], 1),
        files={"0:kv": DataFile("/f", 10, (10_000 + behind_s) * S)},
        saved_at_ns=10_000 * S,
    )
    assert codes(rows) == ({"snapshot-stale": [None]} if stale else {})
    assert [row["detail"] for row in rows] == [
        "/f was written 0:01:01 after the snapshot was saved, so " + STALE
    ] * stale


@pytest.mark.parametrize(
    ("behind_ns", "said"),
    [(1, "1 ms"), (2_000_000, "2 ms"), (1_520_000_000, "1.5 s"), (61 * S, "0:01:01"),
     (90_061 * S, "1 day, 1:01:01")],
)  # fmt: skip
def test_how_stale_a_snapshot_is_reads_well(behind_ns: int, said: str) -> None:
    (row,) = found_in(
        table_of([0], [], 1),
        files={"0:kv": DataFile("/f", 10, 10_000 * S + behind_ns)},
        saved_at_ns=10_000 * S,
        grace_s=0,
    )
    assert row["detail"] == f"/f was written {said} after the snapshot was saved, so {STALE}"


def test_each_kind_of_damage_that_sglang_s_server_lets_happen_is_found(
    metadata_server: MetadataServer,
) -> None:
    metadata_server.initialize(0, 8)
    metadata_server.initialize(1, 9)
    metadata_server.put(1, ["sound"])
    assert metadata_server.put(0, ["a", "b", "c"]) == [7, 6, 5]
    metadata_server.confirm(0, [("twin of a", 7), ("far", 8), ("twin of b", 6)])
    metadata_server.reserve(0, ["never confirmed"])
    metadata_server.delete(0, ["twin of b"])
    rows = found_in(*read_snapshot(metadata_server.save()).tables)
    assert codes(rows) == {
        "page-index-shared": ["0:kv:a", "0:kv:twin of a"],
        "page-index-out-of-range": ["0:kv:far"],
        "page-index-free": ["0:kv:b"],
        "page-leaked": [None],
        "page-count-mismatch": [None],
    }


def test_a_table_that_only_serves_has_no_findings(metadata_server: MetadataServer) -> None:
    metadata_server.initialize(0, 4)
    for number in range(9):  # five of them are evicted
        metadata_server.put(0, [f"key-{number}"])
    metadata_server.delete(0, ["key-8"])
    assert found_in(*read_snapshot(metadata_server.save()).tables) == []
