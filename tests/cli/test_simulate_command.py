"""`hicachectl simulate`: its formats, its sentence, and its refusals."""

from __future__ import annotations

import csv
import io
import json
import shutil
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from hicachectl.cli.demo_store import PROFILE
from hicachectl.text.units import human_size
from tests.small_file_system import small_file_system
from tests.stores import OLD, contents
from tests.test_api import demo_tokens

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke

SIZE = PROFILE.page_size


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A trace of the demo store's chain, and of another one: each twice."""
    path = tmp_path / "trace.jsonl"
    tokens = demo_tokens()
    other = [7] * (2 * SIZE + 1)
    rows = [
        {"timestamp": OLD + 1800 * at, "token_ids": ids, "session_id": session}
        for at, (ids, session) in enumerate([(tokens, "a"), (other, "b")] * 2)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_a_table_compares_today_with_half_and_double(
    invoke: Invoke, source: Path, profile: Path, trace: Path
) -> None:
    before = contents(source)
    words = ("--trace", trace, "--profile", profile, "--prefetch-threshold", 1)
    said = invoke("simulate", *words, "--policy", "lru", "--by", "session-age", source)
    assert contents(source) == before
    curve, groups, losses, last = said.stdout.split("\n\n")
    assert curve.split("\n")[0].split() == [
        "POLICY", "CAPACITY", "HITS", "CURVE", "GAIN/MIB"
    ]  # fmt: skip
    assert losses.split("\n")[0].split() == ["LOST", "BY", "TOKENS", "SHARE"]
    assert groups.split("\n")[0].split() == ["SESSION-AGE", "REQUESTS", "TOKENS", "HITS", "CURVE"]
    assert [line.split()[:2] for line in groups.split("\n")[1:]] == [["first", "turn"], ["1", "h"]]
    now, last = last.splitlines()
    assert now.startswith("The store as it is serves 39.8% of 322 prompt tokens; ")
    assert last.startswith("lru: ")
    assert " would serve " in last
    assert last.strip().endswith("no cache of any size serves more than 79.5%")
    assert "prompt tokens of 4 requests" in said.stderr


def test_a_store_with_room_has_no_known_limit(
    invoke: Invoke, source: Path, profile: Path, trace: Path, tmp_path: Path
) -> None:
    said = "may not be the limit of the store"
    words = ("simulate", "--trace", trace, "--profile", profile, "--policy", "lru")
    with small_file_system(tmp_path / "mounted", "64m") as mounted:
        store = mounted / "store"
        shutil.copytree(source, store)
        size = sum(path.stat().st_size for path in store.iterdir())
        found = invoke(*words, store)
        assert f"Today's size, {human_size(size)}, {said}" in found.stderr
        free = invoke.document(*words, store)["free_bytes"]
        assert free > size
        (mounted / "other").write_bytes(bytes(free - size // 20))
        assert invoke.document(*words, store)["free_bytes"] <= size // 20
        assert said not in invoke(*words, store).stderr


def test_every_format_has_the_rows_of_the_document(
    invoke: Invoke, trace: Path, profile: Path, tmp_path: Path
) -> None:
    words = (
        "--trace",
        trace,
        "--profile",
        profile,
        "--by",
        "session-age",
        "--capacity",
        "1MiB,1GiB",
    )
    document = invoke.document("simulate", *words)
    rows = document["capacities"]
    assert invoke("simulate", *words, "--format", "jsonl").rows == rows
    assert {row["capacity_bytes"] for row in rows} == {1 << 20, 1 << 30}
    assert {row["group"] for row in rows} == {None, "first turn", "1 h and more"}
    assert document["hours"] == 1.5
    written = csv.DictReader(io.StringIO(invoke("simulate", *words, "--format", "csv").stdout))
    assert [int(row["hit_tokens"]) for row in written] == [row["hit_tokens"] for row in rows]
    path = tmp_path / "rows.parquet"
    invoke("simulate", *words, "--format", "parquet", "-o", path)
    assert pq.read_table(path).to_pylist() == rows


@pytest.mark.parametrize(
    ("largest", "unit", "scale"), [("1GiB", "GIB", 1 << 30), ("8TiB", "TIB", 1 << 40)]
)
def test_the_gain_is_in_the_unit_of_the_largest_capacity(
    invoke: Invoke, trace: Path, profile: Path, largest: str, unit: str, scale: int
) -> None:
    words = ("simulate", "--trace", trace, "--profile", profile, "--policy", "lru",
             "--capacity", f"256KiB,{largest}", "--prefetch-threshold", 1)  # fmt: skip
    head, *lines = invoke(*words).stdout.splitlines()[:3]
    assert head.split()[-1] == f"GAIN/{unit}"
    gain = invoke.document(*words)["capacities"][1]["gain_per_tib"]
    assert gain > 0
    percent = f"{gain * 100 * scale / (1 << 40):+.3g}"
    assert [line.split()[-1] for line in lines] == ["-", percent]


def test_a_trace_of_blocks_needs_no_profile(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "blocks.jsonl"
    row = {"timestamp": 0, "hash_ids": [0, 1], "input_length": 1000, "block_size": 512}
    path.write_text(f"{json.dumps(row)}\n" * 2)
    said = invoke("simulate", "--trace", path)
    assert "lru: 2 pages serve 50.0%; no cache of any size serves more than 50.0%" in said.stdout
    said = invoke("simulate", "--trace", path, "--warm-up", "50%", "--capacity", "2B")
    assert "serve 100.0%" in said.stdout
    assert "the first 1 request only warm the caches" in said.stderr


def test_caches_begin_with_a_plan_of_prewarm(
    invoke: Invoke, trace: Path, profile: Path, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.jsonl"
    invoke("prewarm", "--trace", trace, "--profile", profile, "--dry-run", "-o", plan)
    words = ("simulate", "--trace", trace, "--profile", profile, "--plan", plan)
    started = invoke.document(*words)["capacities"]
    cold = invoke.document(*words, "--cold")["capacities"]
    assert {row["start"] for row in started} == {"plan"}
    assert {row["start"] for row in cold} == {"cold"}
    assert started[-1]["hit_tokens"] > cold[-1]["hit_tokens"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--capacity 0", "--capacity"),
        ("--policy fifo", "'fifo' is not one of lru"),
        ("--by tenant", "'tenant' is not one of model"),
        ("--by adapter", "--by adapter: TRACE does not tell the adapter"),
        ("--warm-up 100%", "leaves no request"),
        ("--eviction-ratio 0", "eviction_ratio: 0 "),
        ("--what-if pages=3", "'pages' is not one of page_size"),
        ("--what-if tp=0", "--what-if: 'tp=0' is no number in 1..999999999; write tp=64"),
        ("--what-if tp=3", "linear TP size 3"),
        ("--l1 1GiB", "--l1 needs --l2 SIZE"),
        ("--servers 2", "--servers needs --l1 SIZE"),
        ("--plan NONE", "NONE: cannot read"),
    ],
)
def test_a_wrong_option_is_refused(
    invoke: Invoke, trace: Path, profile: Path, words: str, said: str
) -> None:
    command = ("simulate", "--trace", trace, "--profile", profile, *words.split())
    found = invoke(*command, exit_code=2)
    assert said.replace("TRACE", str(trace)) in found.stderr
    assert found.stdout == ""


def test_a_store_without_pages_is_refused(
    invoke: Invoke, trace: Path, profile: Path, tmp_path: Path
) -> None:
    store = tmp_path / "empty"
    store.mkdir()
    words = ("simulate", store, "--trace", trace, "--profile", profile)
    assert "check the mount" in invoke(*words, exit_code=3).stderr
    document = invoke.document(*words, "--allow-empty")
    assert document["served_tokens"] == document["today_bytes"] == 0
    assert "need a profile" in invoke("simulate", store, "--trace", trace, "--page-size", SIZE,
                                      exit_code=2).stderr  # fmt: skip
    assert invoke("simulate", tmp_path / "none", *words[2:], exit_code=3).stdout == ""
