"""`hits --summary`, `--by` and `--limit`: the sums are those of a loop over the requests."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hicachectl
from hicachectl.formats.profile import parse_profile
from hicachectl.requests.chains import Hashing, requests_of
from hicachectl.requests.forms import Request
from tests.stores import DSA, OLD, put
from tests.text.test_tables import shown_on

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke

PROFILE = parse_profile(DSA)
HASHING = Hashing(4)
KV, INDEXER = ("_x-dsa.bin", 9216), (".indexer_x-dsa.bin", 1056)
WORDS = ("model", "salt", "adapter", "session-age", "server")
CAUSE = ("reason", "fault", "pool", "part", "exists_at")
LABELS = ("model", "cache_salt", "adapter", "session", "server")


def chain(number: int, pages: int) -> list[int]:
    """Return the tokens of a chain of its own: some pages, and a token after them."""
    return [1000 * number + at for at in range(pages * 4 + 1)]


def random_requests(random: np.random.Generator, count: int) -> list[Request]:
    """Return prompts of few chains with few labels, not in the order of their times."""
    found = []
    for number in range(count):
        labels: dict[str, Any] = {
            name: f"{name} {chosen}" if (chosen := int(random.integers(3))) else None
            for name in LABELS
        }
        tokens = chain(int(random.integers(8)), 8)[: int(random.integers(34))]
        time = OLD + float(random.integers(4000))
        found.append(Request(f"request {number}", tokens, time=time, **labels))
    return found


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store that lacks some objects of eight chains, and has some of another size."""
    random = np.random.default_rng(5)
    store = tmp_path / "store"
    for number in range(8):
        for salt in (None, "cache_salt 1", "cache_salt 2"):
            request = Request("", chain(number, 8), cache_salt=salt)
            for page in HASHING.hashes(request):
                for suffix, nbytes in (KV, INDEXER):
                    if random.random() > 0.05:
                        short = int(random.random() < 0.02)
                        put(store, f"{page.tobytes().hex()}{suffix}", nbytes - short)
    return store


def test_causes_and_groups_sum_the_rows_as_a_loop_does(store: Path) -> None:
    """Every number of both tables, and the most first; no request is lost between groups."""
    requests = random_requests(np.random.default_rng(6), 300)
    asked = hicachectl.HitsRequest(
        requests=requests_of(requests, HASHING), profile=PROFILE, threshold=13, by=WORDS
    )
    with hicachectl.open_store(str(store)) as opened:
        found = hicachectl.hits(opened, asked)
    rows = found.rows.to_pylist()
    requested = [max(len(r.token_ids) - 1, 0) // 4 * 4 or len(r.token_ids) for r in requests]
    causes: dict[Any, Counter[str]] = defaultdict(Counter)
    for row, tokens in zip(rows, requested, strict=True):
        if (stop := row["stopped_by"]) is not None:
            causes[tuple(stop[name] for name in CAUSE)].update(
                requests=1,
                lost_pages=row["lost_pages"],
                lost_tokens=tokens - row["served_tokens"],
                unreachable_pages=row["unreachable_pages"],
            )
    listed = found.causes.to_pylist()
    assert len(listed) > 4
    assert {row["fault"] for row in listed} == {None, "missing", "wrong_size"}
    assert {row["reason"] for row in listed} == {None, "below_threshold"}
    assert causes == {
        tuple(row[name] for name in CAUSE): {
            name: row[name]
            for name in ("requests", "lost_pages", "lost_tokens", "unreachable_pages")
        }
        for row in listed
    }
    lost = [row["lost_tokens"] for row in listed]
    assert lost == sorted(lost, reverse=True)
    document = found.document
    assert document["unreachable_pages"] == sum(row["unreachable_pages"] for row in rows) > 0
    assert document["short_requests"] == sum(len(r.token_ids) - 1 < 16 for r in requests)
    for word, label in zip(WORDS, LABELS, strict=True):
        groups = found.groups[word].to_pylist()
        sizes = [row["requested_tokens"] for row in groups]
        assert sizes == sorted(sizes, reverse=True)
        if word != "session-age":
            counts = Counter(getattr(request, label) for request in requests)
            assert {row["group"]: row["requests"] for row in groups} == counts
            for row in groups:
                of_group = [
                    one
                    for one, request in zip(rows, requests, strict=True)
                    if getattr(request, label) == row["group"]
                ]
                for name in ("usable_tokens", "served_tokens", "unreachable_pages"):
                    assert row[name] == sum(one[name] for one in of_group)
        for name in ("requests", "requested_tokens", "served_tokens", "unreachable_pages"):
            assert sum(row[name] for row in groups) == document[name]


def test_the_age_of_a_session_counts_from_its_first_request_in_time(store: Path) -> None:
    """The lines of a log of several servers are in no order."""
    requests = [
        Request(str(time), chain(1, 3), time=OLD + float(time), session=session)
        for time, session in ((3600, "a"), (0, "a"), (59, "a"), (7, "b"), (9, None))
    ]
    asked = hicachectl.HitsRequest(
        requests=requests_of(requests, HASHING), profile=PROFILE, by=("session-age",)
    )
    with hicachectl.open_store(str(store)) as opened:
        groups = hicachectl.hits(opened, asked).groups["session-age"].to_pylist()
    found = {row["group"]: row["requests"] for row in groups}
    assert found == {"first turn": 2, "< 1 min": 1, "1 h and more": 1, None: 1}


@pytest.fixture
def words(store: Path, tmp_path: Path) -> tuple[object, ...]:
    """Words of `hits` for thirty requests: the last ten lose five pages each, the others one."""
    trace, profile = tmp_path / "trace.jsonl", tmp_path / "dsa.toml"
    profile.write_text(DSA)
    chains = [*range(100, 120), *range(200, 210)]
    with trace.open("w") as file:
        for number in chains:
            tokens = chain(number, 4 if number < 200 else 8)
            pages = [page.tobytes().hex() for page in HASHING.hashes(Request("", tokens))]
            for place, page in enumerate(pages):
                if place not in (3, 6):
                    for suffix, nbytes in (KV, INDEXER):
                        put(store, f"{page}{suffix}", nbytes)
            file.write(json.dumps({"token_ids": tokens, "cache_salt": None, "model": "m"}) + "\n")
    return ("hits", store, "--trace", trace, "--profile", profile)


def test_a_summary_has_causes_in_place_of_requests(
    invoke: Invoke, words: tuple[object, ...]
) -> None:
    whole, document = invoke.document(*words), invoke.document(*words, "--summary")
    chains = whole.pop("chains")
    assert len(chains) == 30
    assert document == whole
    (cause,) = document["causes"]
    assert cause == {
        "reason": None, "fault": "missing", "pool": "kv", "part": None, "shard": {},
        "exists_at": None, "requests": 30, "lost_pages": 70, "lost_tokens": 280,
        "unreachable_pages": 30,
    }  # fmt: skip
    assert invoke(*words, "--summary", "--format", "jsonl").rows == [cause]
    assert invoke(*words, "--summary").stdout.splitlines() == [
        "STOPPED BY  REQUESTS  LOST PAGES  LOST TOKENS  UNREACHABLE",
        "kv                30          70          280           30",
        "30 whole pages are out of reach, because servers can restore only shorter prefixes",
        "56% of 640 tokens served by x/dsa tp 1",
    ]


def test_groups_follow_the_requests_in_a_table_of_each_word(
    invoke: Invoke, words: tuple[object, ...]
) -> None:
    out = invoke(*words, "--by", "model", "--summary").stdout.split("\n\n")
    assert [line.split() for line in out[1].splitlines()] == [
        ["MODEL", "REQUESTS", "TOKENS", "SERVED", "UNREACHABLE"],
        ["m", "30", "640", "56.2%", "30"],
    ]
    (group,) = invoke.document(*words, "--by", "model")["groups"]
    assert (group["by"], group["group"], group["served_tokens"]) == ("model", "m", 360)
    assert group["usable_share"] == 360 / 640


@pytest.mark.parametrize("by", ["salt", "adapter", "session-age", "server"])
def test_a_group_that_the_input_does_not_tell_is_refused_by_name(
    invoke: Invoke, words: tuple[object, ...], by: str
) -> None:
    refused = invoke(*words, "--by", by, exit_code=2)
    assert f"--by {by}: " in refused.stderr
    assert "does not tell the" in refused.stderr


def test_a_limit_shows_the_requests_that_lose_most(
    invoke: Invoke, words: tuple[object, ...]
) -> None:
    out = invoke(*words, "--limit", 12).stdout.splitlines()
    assert [int(line.split()[0]) for line in out[1:13]] == [*range(20, 30), 0, 1]
    assert out[13] == "and 18 requests more; --limit 30 shows all; --summary shows the causes"
    assert len(invoke(*words).stdout.splitlines()) == 1 + 30 + 2
    refused = invoke(*words, "--limit", 12, "--format", "json", exit_code=2).stderr
    assert "--limit: --format json always has every request; leave out --limit" in refused


def test_a_terminal_has_twenty_requests(words: tuple[object, ...]) -> None:
    """On 80 columns each row keeps what stops the request."""
    lines = shown_on(80, list(words))
    assert lines[0].split()[-2:] == ["STOPPED", "BY"]
    assert all("kv" in line for line in lines[1:21])
    assert lines[21].startswith("and 10 requests more; --limit 30 shows all")
    assert max(map(len, lines[:21])) <= 80
