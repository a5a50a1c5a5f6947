"""`prewarm --dry-run`: plan files, and refused input."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from hicachectl.formats.errors import FormatError
from hicachectl.formats.hashing import page_hashes_hex
from hicachectl.formats.profile import parse_profile
from hicachectl.formats.spec import object_specs
from hicachectl.prewarming.ranking import read_plan
from tests import stores
from tests.move.migrations import profile_file
from tests.prewarming.traces import conversations

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke

PROFILE = parse_profile(stores.DSA)
PAGE = PROFILE.page_size


@pytest.fixture
def blocks(tmp_path: Path) -> Path:
    """A trace of block ids."""
    path = tmp_path / "blocks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in conversations(1, requests=50)))
    return path


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """A trace of token ids: two prompts that share two pages; the second has one page more."""
    path = tmp_path / "tokens.jsonl"
    shared = list(range(2 * PAGE))
    requests = [shared, [*shared, *range(PAGE + 3)]]
    rows = [{"timestamp": 60 * k, "token_ids": ids} for k, ids in enumerate(requests)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    return profile_file(tmp_path / "profile.toml", PROFILE)


def test_a_plan_of_block_ids_needs_no_store_and_says_that_it_cannot_be_executed(
    invoke: Invoke, blocks: Path, tmp_path: Path
) -> None:
    output = tmp_path / "plan.jsonl"
    said = invoke("prewarm", "--trace", blocks, "--dry-run", "-o", output)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    trace = [json.loads(line) for line in blocks.read_text().splitlines()]
    assert said.stdout == ""
    assert "cannot be executed" in said.stderr
    assert {row["page"] for row in rows} == {block for row in trace for block in row["hash_ids"]}
    assert rows[0]["page"] == 0
    assert rows[0]["parent"] is None
    assert rows[0]["requests"] == len(trace)
    assert rows[0]["last_seen"] == trace[-1]["timestamp"]
    with pytest.raises(FormatError, match=r"plan.jsonl: line 1: .* plan a trace of token ids"):
        read_plan(output)


def test_a_plan_of_token_ids_names_pages_with_their_parents(
    invoke: Invoke, tokens: Path, profile: Path, tmp_path: Path
) -> None:
    said = invoke("prewarm", "--trace", tokens, "--dry-run", "--profile", profile)
    rows = [json.loads(line) for line in said.stdout.splitlines()]
    longest = json.loads(tokens.read_text().splitlines()[1])["token_ids"]
    hashes = page_hashes_hex(longest, PAGE)
    assert [row["page"] for row in rows] == hashes
    assert [row["parent"] for row in rows] == [None, *hashes[:-1]]
    assert [row["depth"] for row in rows] == [0, 1, 2]
    assert [row["requests"] for row in rows] == [2, 2, 1]
    output = tmp_path / "plan.jsonl"
    output.write_text(said.stdout)
    planned = read_plan(output)
    assert planned.pages.to_pylist() == hashes
    assert planned.parents == [-1, 0, 1]


def test_budgets_cut_the_plan(invoke: Invoke, tokens: Path, profile: Path) -> None:
    def planned(*budget: object) -> int:
        command = ("prewarm", "--trace", tokens, "--dry-run", "--profile", profile, *budget)
        return len(invoke(*command).stdout.splitlines())

    page = sum(found.nbytes for found in object_specs(PROFILE, "file"))
    assert planned("--budget-pages", 2) == 2
    assert planned("--budget", f"{2 * page}B") == 2
    assert planned("--budget", f"{2 * page - 1}B") == 1
    assert planned("--budget", f"{2 * page}B", "--budget-pages", 1) == 1
    assert planned("--budget", "1TiB") == 3


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (["x"], "line 1"),
        ([{"page": "ab"}], "line 1: page: 'ab' is not a page hash"),
        (
            [{"page": "a" * 64}, {"page": "a" * 64}],
            "line 2: page a+ occurs twice; remove one of its rows",
        ),
        (
            [{"page": "a" * 64, "parent": "b" * 64}, {"page": "b" * 64}],
            "line 2: page b+ is the parent of an earlier page; list parents first",
        ),
        ([{"depth": 1}], "line 1"),
        ([{"page": "a" * 64}, {"page": 7}], "line 2: page: 7 is a block id"),
    ],
)
def test_what_is_no_plan_is_refused_by_its_line(
    tmp_path: Path, rows: list[object], reason: str
) -> None:
    path = tmp_path / "plan.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(FormatError, match=reason):
        read_plan(path)


def test_a_plan_may_be_a_bare_list_of_pages(tmp_path: Path) -> None:
    path = tmp_path / "plan.jsonl"
    pages = ["0" * 63 + str(k) for k in range(3)]
    path.write_text("".join(json.dumps({"page": page}) + "\n" for page in pages))
    planned = read_plan(path)
    assert planned.pages.to_pylist() == pages
    assert planned.parents == [-1, -1, -1]


def test_a_parent_outside_of_the_plan_was_at_the_destination(tmp_path: Path) -> None:
    path = tmp_path / "plan.jsonl"
    path.write_text(json.dumps({"page": "a" * 64, "parent": "b" * 64}) + "\n")
    assert read_plan(path).parents == [-1]
