"""`ls` and `show`: rows, filters and the fields that other programs read."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.stores import DSA, OLD, page, put, put_pages

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a store of two models: four pages of `a/b` (TP 2, one with Mamba), two of MLA `c`."""
    directory = tmp_path / "store"
    directory.mkdir()
    put_pages(directory, range(4), "_a-b_0_2", "_a-b_1_2", nbytes=100)
    put_pages(directory, range(3, 4), ".mamba_a-b_0_2", ".mamba_a-b_1_2", nbytes=300)
    put_pages(directory, range(4, 6), "_c", ".indexer_c", nbytes=50)
    return directory


def rows(invoke: Invoke, *arguments: object) -> list[dict[str, Any]]:
    return invoke("ls", *arguments, "--format", "jsonl").rows


def test_objects_have_the_fields_of_the_contract(invoke: Invoke, store: Path) -> None:
    found = {row["key"]: row for row in rows(invoke, store, "--objects")}
    assert len(found) == 14
    assert found[f"{page(3)}.mamba_a-b_1_2.bin"] == {
        "key": f"{page(3)}.mamba_a-b_1_2.bin",
        "page": page(3),
        "model": "a-b",
        "tag": None,
        "pool": "mamba",
        "part": None,
        "tp_rank": 1,
        "tp_size": 2,
        "pp_rank": None,
        "pp_size": None,
        "cp_rank": None,
        "cp_size": None,
        "dcp_rank": None,
        "dcp_size": None,
        "layers": None,
        "heads": None,
        "nbytes": 300,
        "mtime": OLD,
        "replicas": None,
        "offset": None,
    }
    assert found[f"{page(4)}_c.bin"]["tp_rank"] is None


def test_pages_have_the_fields_of_the_contract(invoke: Invoke, store: Path) -> None:
    found = {row["page"]: row for row in rows(invoke, store)}
    assert found[page(3)] == {
        "page": page(3),
        "group": "a-b tp2",
        "model": "a-b",
        "tag": None,
        "state": "whole",
        "nbytes": 800,
        "mtime": OLD,
        "pools": {"kv": {"present": 2, "expected": 2}, "mamba": {"present": 2, "expected": 2}},
        "missing": [],
        "tp_size": 2,
        "pp_size": None,
        "cp_size": None,
        "dcp_size": None,
    }
    assert list(found[page(3)]) == [
        "page", "group", "model", "tag", "tp_size", "pp_size", "cp_size", "dcp_size", "state",
        "nbytes", "mtime", "pools", "missing",
    ]  # fmt: skip
    assert found[page(0)]["pools"]["mamba"] == {"present": 0, "expected": 0}
    assert found[page(4)]["pools"] == {
        "kv": {"present": 1, "expected": 1},
        "indexer": {"present": 1, "expected": 1},
    }


def test_foreign_and_ambiguous_objects_are_listed_with_what_is_known(
    invoke: Invoke, store: Path
) -> None:
    put(store, "README")
    put(store, f"{page(9)}_x_0_4.bin")
    found = {row["key"]: row for row in rows(invoke, store, "--objects")}
    assert (found["README"]["page"], found["README"]["pool"]) == (None, None)
    open_row = found[f"{page(9)}_x_0_4.bin"]
    assert (open_row["page"], open_row["pool"], open_row["model"]) == (page(9), "kv", None)


def test_a_foreign_object_is_of_no_page_even_where_its_name_has_a_hash(
    invoke: Invoke, store: Path
) -> None:
    strange = (f"{page(9)}.bin", f"{page(3)}_a-b_0_2.safetensors", f"copy-of-{page(3)}_a-b_0_2.bin")
    for name in strange:
        put(store, name, 7)
    found = {row["key"]: row for row in rows(invoke, store, "--objects")}
    assert [found[name]["page"] for name in strange] == [None, None, None]
    totals = invoke("ls", store, "--summary", "--format", "json").document["summary"]
    foreign = [row for row in totals if row["pool"] is None]
    assert [(row["pages"], row["objects"], row["nbytes"]) for row in foreign] == [(0, 3, 21)]
    only = store.parent / "only"
    only.mkdir()
    put(only, strange[0])
    assert "no HiCacheFile objects" in invoke("ls", only).stderr


def test_names_that_are_not_utf8_are_escaped(invoke: Invoke, store: Path) -> None:
    (store / b"caf\xe9".decode("utf-8", "surrogateescape")).write_bytes(b"x")
    keys = {row["key"] for row in rows(invoke, store, "--objects")}
    assert "caf\\xe9" in keys


@pytest.mark.parametrize(
    ("arguments", "pages"),
    [
        (["--model", "a/b"], range(4)),
        (["--model", "a-b"], range(4)),
        (["--model", "none"], []),
        (["--pool", "mamba"], [3]),
        (["--pool", "indexer"], [4, 5]),
        (["--page", page(2)[:10]], [2]),
        (["--state", "partial,orphan"], [1, 5]),
        (["--state", "whole"], [0, 2, 3, 4]),
        (["--since", "1d"], [0]),
        (["--before", "1d"], range(1, 6)),
        (["--before", "1d", "--since", "2d"], []),
    ],
)
def test_filters(invoke: Invoke, store: Path, arguments: list[str], pages: list[int]) -> None:
    put_pages(store, range(1), "_a-b_0_2", nbytes=100, mtime=time.time())
    (store / f"{page(1)}_a-b_1_2.bin").unlink()
    (store / f"{page(5)}_c.bin").unlink()
    found = {row["page"] for row in rows(invoke, store, *arguments)}
    assert found == {page(number) for number in pages}
    of_objects = {row["page"] for row in rows(invoke, store, "--objects", *arguments)}
    assert of_objects == found


def test_a_time_has_microseconds(invoke: Invoke, tmp_path: Path) -> None:
    """It divides pages that are a microsecond apart."""
    for number in range(40):
        put_pages(tmp_path, range(number, number + 1), "_m_0_1", nbytes=10)
        written_ns = OLD * 10**9 + number * 1000
        os.utime(tmp_path / f"{page(number)}_m_0_1.bin", ns=(written_ns, written_ns))
    for number in range(1, 40):
        time = f"2023-11-14T22:13:20.{number:06}Z"
        assert len(rows(invoke, tmp_path, "--since", time)) == 40 - number
        assert len(rows(invoke, tmp_path, "--before", time)) == number


def test_objects_of_one_pool(invoke: Invoke, store: Path) -> None:
    found = rows(invoke, store, "--objects", "--pool", "mamba")
    assert {row["pool"] for row in found} == {"mamba"}
    assert len(found) == 2


def test_summary_adds_up(invoke: Invoke, store: Path) -> None:
    put(store, "README", 7)
    found = invoke("ls", store, "--summary", "--format", "json").document["summary"]
    totals = [(r["model"], r["pool"], r["pages"], r["objects"], r["nbytes"]) for r in found]
    assert totals == [
        ("a-b", "kv", 4, 8, 800),
        ("a-b", "mamba", 1, 2, 600),
        ("c", "indexer", 2, 2, 100),
        ("c", "kv", 2, 2, 100),
        (None, None, 0, 1, 7),
    ]


def test_the_summary_shows_deployments_object_sizes_and_times(
    invoke: Invoke, tmp_path: Path
) -> None:
    """One row for each deployment, pool and common object size; rare sizes share a row."""
    store = tmp_path / "store"
    store.mkdir()
    put_pages(store, range(4), "_m_0_2", "_m_1_2", nbytes=200)
    put_pages(store, range(2), *(f"_m_{rank}_4" for rank in range(4)), nbytes=100, mtime=OLD + 60)
    put_pages(store, range(4, 6), "_m_0_2", "_m_1_2", nbytes=400, mtime=OLD + 30)
    for number in range(6, 12):
        put_pages(store, range(number, number + 1), "_m_0_2", "_m_1_2", nbytes=10 + number)
    document = invoke("ls", store, "--summary", "--format", "json").document
    names = ("tp_size", "object_nbytes", "pages", "objects", "nbytes", "first_mtime", "last_mtime")
    assert [tuple(row[name] for name in names) for row in document["summary"]] == [
        (2, 16, 1, 2, 32, OLD, OLD),
        (2, 17, 1, 2, 34, OLD, OLD),
        (2, 200, 4, 8, 1600, OLD, OLD),
        (2, 400, 2, 4, 1600, OLD + 30, OLD + 30),
        (2, None, 4, 8, 2 * (18 + 19 + 20 + 21), OLD, OLD),
        (4, 100, 2, 8, 800, OLD + 60, OLD + 60),
    ]
    assert document["total"] == {
        "pages": 12, "objects": 32, "nbytes": 4222, "first_mtime": OLD, "last_mtime": OLD + 60,
    }  # fmt: skip
    disk = os.statvfs(store)
    assert document["free_bytes"] == pytest.approx(disk.f_bavail * disk.f_frsize, rel=0.2)
    out = invoke("ls", store, "--summary").stdout.splitlines()
    heads = ["MODEL", "SIZES", "POOL", "OBJECT", "PAGES", "OBJECTS", "SIZE", "OLDEST", "NEWEST"]
    assert out[0].split() == heads  # no column without a value
    assert out[-2].split()[0] == "total"
    assert out[-1].endswith("free in the store")
    assert [len(rows(invoke, store, "--summary", *more)) for more in ([], ["--limit", "2"])] == [
        6,
        2,
    ]


def test_the_summary_names_the_layout_of_a_profile(invoke: Invoke, tmp_path: Path) -> None:
    """Only the deployment that the profile describes has a layout; keys do not state it."""
    profile = tmp_path / "profile.toml"
    profile.write_text(DSA.replace("page_size", 'layout = "layer_first"\npage_size'))
    store = tmp_path / "store"
    store.mkdir()
    put_pages(store, range(2), "_x-dsa", nbytes=9216)
    put_pages(store, range(2), "_other", nbytes=9216)
    found = rows(invoke, store, "--summary", "--profile", profile)
    assert [(row["model"], row["layout"]) for row in found] == [
        ("other", None), ("x-dsa", "layer_first"),
    ]  # fmt: skip
    assert {row["layout"] for row in rows(invoke, store, "--summary")} == {None}


@pytest.mark.slow
def test_lines_are_sorted_and_limited(invoke: Invoke, store: Path) -> None:
    """Nulls come last in both directions, and equal lines keep their order."""
    put_pages(store, range(1), "_a-b_0_2", nbytes=100, mtime=OLD + 60)
    found = rows(invoke, store)
    by_size = sorted(found, key=lambda row: -row["nbytes"])
    assert rows(invoke, store, "--sort-by", "-size") == by_size
    assert rows(invoke, store, "--sort-by", "-nbytes", "--limit", "2") == by_size[:2]
    assert rows(invoke, store, "--sort-by", "age")[0]["page"] == page(0)
    assert rows(invoke, store, "--sort-by", "-mtime")[0]["page"] == page(0)
    for column in ("part", "-part", "tp_size"):
        listed = [
            row[column.strip("-")] for row in rows(invoke, store, "--objects", "--sort-by", column)
        ]
        assert listed == sorted(listed, key=lambda value: (value is None, value))
    models = [row["model"] for row in rows(invoke, store, "--summary", "--sort-by", "-model")]
    assert models == sorted(models, reverse=True)
    said = invoke("ls", store, "--limit", "2").stderr
    assert "Only the first 2 of 6 lines; a larger --limit shows more" in said
    assert "--limit" not in invoke("ls", store, "--limit", "6").stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("listed", "options"), [("pages", []), ("objects", ["--objects"]), ("summary", ["--summary"])]
)
def test_the_columns_to_sort_by_are_those_of_json(
    invoke: Invoke, store: Path, listed: str, options: list[str]
) -> None:
    """A column that is not there is refused with its name and the names of all that are."""
    put(store, "README")
    flat = [
        name
        for name, value in rows(invoke, store, *options)[0].items()
        if not isinstance(value, (dict, list)) and name != "replicas"  # a list, null in this store
    ]
    for column in flat:
        invoke("ls", store, *options, "--sort-by", column)
    said = invoke("ls", store, *options, "--sort-by", "-pools", exit_code=2).stderr
    assert "--sort-by: '-pools' is not a column of " + listed in said
    assert f"; give one of {', '.join(flat)}\n" in said


def test_tables_are_for_people(invoke: Invoke, store: Path) -> None:
    out = invoke("ls", store).stdout.splitlines()
    assert out[0].split() == ["PAGE", "MODEL", "SIZES", "POOLS", "SIZE", "AGE", "STATE"]
    assert any(line.startswith(page(3)[:16]) and "mamba 2/2" in line for line in out)
    assert "tp 1/2" in invoke("ls", store, "--objects").stdout


def test_remarks_go_to_stderr_and_quiet_drops_them(invoke: Invoke, store: Path) -> None:
    assert "No --profile" in invoke("ls", store).stderr
    assert invoke("-q", "ls", store).stderr == ""


def test_show_takes_a_prefix_and_says_everything(invoke: Invoke, store: Path) -> None:
    (store / f"{page(3)}.mamba_a-b_0_2.bin").unlink()
    out = invoke("show", store, page(3)[:12], "--format", "json").stdout
    document = json.loads(out)
    assert document["page"] == page(3)
    assert [group["state"] for group in document["groups"]] == ["partial"]
    assert document["groups"][0]["missing"] == [f"{page(3)}.mamba_a-b_0_2.bin"]
    assert len(document["objects"]) == 3
    assert [f["code"] for f in document["findings"]] == ["missing-rank"]
    table = invoke("show", store, page(3)).stdout
    assert f"missing {page(3)}.mamba_a-b_0_2.bin" in table


def test_show_knows_the_sizes_of_the_other_pages(invoke: Invoke, store: Path) -> None:
    put(store, f"{page(2)}_a-b_0_2.bin", 99)
    document = invoke("show", store, page(2), "--format", "json").document
    assert [f["code"] for f in document["findings"]] == ["truncated"]


@pytest.mark.slow
@pytest.mark.parametrize("output_format", ["table", "json", "jsonl", "csv", "parquet", "arrow"])
def test_every_format_writes_stores_without_pages(
    invoke: Invoke, tmp_path: Path, output_format: str
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    out = tmp_path / "out"
    for name in (None, "foreign", f"{page(0)}_x_0_4.bin"):
        if name is not None:
            put(store, name)
        for rows in ([], ["--objects"], ["--summary"]):
            invoke("ls", store, *rows, "--format", output_format, "-o", out)


def test_ambiguous_keys_get_a_line_on_stderr(invoke: Invoke, tmp_path: Path) -> None:
    put_pages(tmp_path, range(1), "_x_0_4")
    said = invoke("ls", tmp_path).stderr
    meanings = "kv of model 'x_0_4' or kv of model 'x' tp 0/4"
    assert f"1 key <hash>_x_0_4.bin can be {meanings}; give --profile to decide" in said


def test_topologies_of_one_model_are_told_apart(invoke: Invoke, tmp_path: Path) -> None:
    put_pages(tmp_path, range(1), "_m_0_2", "_m_1_2", *(f"_m_{rank}_4" for rank in range(4)))
    assert sorted(row["tp_size"] for row in rows(invoke, tmp_path)) == [2, 4]
    assert "tp 4" in invoke("ls", tmp_path).stdout
