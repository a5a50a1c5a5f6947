"""`simulate`: rows counted by hand, groups, starts, and the causes of lost hits on small stores."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hicachectl
from hicachectl.backends.base import open_store
from hicachectl.formats.errors import EmptyStore, FormatError, UsageError
from hicachectl.formats.hashing import page_hashes_hex
from hicachectl.formats.profile import parse_profile
from hicachectl.prewarming.ranking import PlannedPages
from hicachectl.requests.chains import Hashing, requests_of, requests_of_pages
from hicachectl.requests.forms import Request
from hicachectl.simulation.changes import parse_changes
from hicachectl.simulation.simulate import SimulateRequest, simulate
from tests.prewarming.traces import trace_of
from tests.stores import DSA, OLD, put

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hicachectl.requests.chains import Requests
    from hicachectl.results import Result

PROFILE = parse_profile(DSA)
SIZE, PAGE_BYTES = 4, 9216 + 1056
TIB = 1 << 40

# Blocks of 512 tokens; the last block of a prompt has 488.
ROWS: list[dict[str, Any]] = [
    {"timestamp": 0, "input_length": 1000, "hash_ids": [0, 1], "block_size": 512},
    {"timestamp": 1_800_000, "input_length": 512, "hash_ids": [2], "block_size": 512},
    {"timestamp": 3_600_000, "input_length": 1000, "hash_ids": [0, 1], "block_size": 512},
]


def asked(lines: Sequence[tuple[float | None, Sequence[int]]], **labels: Any) -> Requests:
    """Return requests of token ids at some times. labels: members by name, one for each request."""
    requests = [
        Request(
            f"request {number}",
            list(tokens),
            time=time,
            input_tokens=len(tokens),
            **{name: values[number] for name, values in labels.items()},
        )
        for number, (time, tokens) in enumerate(lines)
    ]
    return requests_of(requests, Hashing.of(PROFILE))


def chain(number: int, pages: int, more: int = 1) -> list[int]:
    """Return the tokens of a chain of its own: some pages, and tokens after them."""
    return [1000 * number + at for at in range(pages * SIZE + more)]


def put_chain(store: Path, tokens: list[int], mtime: float = OLD, pools: str = "both") -> list[str]:
    """Write the pages of a request of the DSA model; return their hashes."""
    pages = page_hashes_hex(tokens, SIZE)
    for name in pages:
        put(store, f"{name}_x-dsa.bin", 9216, mtime)
        if pools == "both":
            put(store, f"{name}.indexer_x-dsa.bin", 1056, mtime)
    return pages


def hits(result: Result, policy: str, by: str | None = None) -> dict[Any, int]:
    """Return the hit tokens of a policy by capacity in pages, or by group and capacity."""
    return {
        (row["group"], row["capacity_pages"]) if by else row["capacity_pages"]: row["hit_tokens"]
        for row in result.rows.to_pylist()
        if row["policy"] == policy and row["by"] == by
    }


def causes(result: Result) -> dict[str, int]:
    losses = result.document["losses"]
    assert (
        sum(row["tokens"] for row in losses)
        == result.rows["tokens"][0].as_py() - (result.document["served_tokens"])
    )
    return {row["cause"]: row["tokens"] for row in losses}


def test_the_rows_are_those_counted_by_hand() -> None:
    result = simulate(SimulateRequest(requests=trace_of(ROWS), capacities=(1, 2, 3)))
    assert hits(result, "lru") == {1: 0, 2: 512, 3: 1000}
    assert hits(result, "optimal") == {1: 512, 2: 1000, 3: 1000}
    assert result.rows.to_pylist()[1] == {
        "what_if": None,
        "by": None,
        "group": None,
        "capacity_bytes": None,
        "capacity_pages": 2,
        "policy": "lru",
        "start": "cold",
        "requests": 3,
        "tokens": 2512,
        "hit_tokens": 512,
        "device_tokens": None,
        "host_tokens": None,
        "hit_share": 512 / 2512,
        "tokens_saved_per_hour": 512,
        "gain_per_tib": None,
        "limit_bytes": None,
    }
    assert result.document["most_share"] == 1000 / 2512
    assert "2512 prompt tokens of 3 requests" in result.remarks[0]


def test_the_first_share_of_the_requests_is_not_counted() -> None:
    request = SimulateRequest(requests=trace_of(ROWS), capacities=(3,), warm_up=0.34)
    result = simulate(request)
    (row, _) = result.rows.to_pylist()
    assert (row["requests"], row["tokens"], row["hit_tokens"]) == (2, 1512, 1000)
    assert row["tokens_saved_per_hour"] == 2000
    assert result.document["warm_up_requests"] == 1
    assert "the first 1 request only" in result.remarks[0]


def test_hits_below_the_threshold_do_not_count() -> None:
    requests = trace_of(ROWS)
    for threshold, found in ((1024, 1000), (1025, 0)):
        request = SimulateRequest(requests=requests, capacities=(3,), threshold=threshold)
        assert hits(simulate(request), "lru") == {3: found}


def test_a_profile_gives_bytes_and_the_gain_of_each_tebibyte() -> None:
    requests = asked([(0, chain(1, 3)), (1, chain(2, 3)), (2, chain(1, 3))])
    request = SimulateRequest(
        requests=requests, profile=PROFILE, capacities=(PAGE_BYTES, 6 * PAGE_BYTES + 5)
    )
    small, large = simulate(request).rows.to_pylist()[:2]
    assert (small["capacity_pages"], small["hit_tokens"], small["gain_per_tib"]) == (1, 0, None)
    assert (large["capacity_pages"], large["hit_tokens"]) == (6, 12)
    assert large["capacity_bytes"] == 6 * PAGE_BYTES + 5
    assert large["gain_per_tib"] == pytest.approx(12 / 39 / (5 * PAGE_BYTES + 5) * TIB)


def test_capacities_by_default_are_powers_of_two_that_end_with_all_pages() -> None:
    rows = simulate(SimulateRequest(requests=trace_of(ROWS))).rows
    assert rows["capacity_pages"].to_pylist() == [1, 2, 4] * 2
    requests = asked([(0, chain(1, 5000))])
    rows = simulate(SimulateRequest(requests=requests, profile=PROFILE)).rows
    sizes = rows["capacity_bytes"].to_pylist()
    assert sizes == [1 << power for power in range(15, 27)] * 2
    assert sizes[-1] // 2 < 5000 * PAGE_BYTES <= sizes[-1]


def test_blocks_are_merged_to_pages_or_stay_as_several() -> None:
    rows = [{"timestamp": at, "hash_ids": [*range(7)], "input_length": 14} for at in (0, 1)]
    requests = trace_of([{**row, "block_size": 2} for row in rows])
    result = simulate(SimulateRequest(requests=requests, profile=PROFILE))
    assert result.document["page_bytes"] == PAGE_BYTES
    assert max(hits(result, "lru").values()) == 12
    rows = [{"timestamp": at, "hash_ids": [0, 1, 2], "input_length": 24} for at in (0, 1)]
    requests = trace_of([{**row, "block_size": 8} for row in rows])
    result = simulate(SimulateRequest(requests=requests, profile=PROFILE))
    assert result.document["page_bytes"] == 2 * PAGE_BYTES
    assert max(hits(result, "lru").values()) == 16  # the last token is computed
    with pytest.raises(UsageError, match=r"has blocks of 3 tokens.*page size 4; give token ids"):
        simulate(
            SimulateRequest(
                requests=trace_of([{**row, "block_size": 3} for row in rows]), profile=PROFILE
            )
        )


def test_groups_sum_to_the_whole() -> None:
    random = np.random.default_rng(7)
    lines = [
        (OLD + 40.0 * at, chain(int(random.integers(6)), int(random.integers(1, 5))))
        for at in range(200)
    ]
    labels: dict[str, list[str | None]] = {
        name: [f"{name}{number}" if number else None for number in random.integers(3, size=200)]
        for name in ("model", "cache_salt", "adapter", "server")
    }
    labels["session"] = [
        f"s{number}" if number < 5 else None for number in random.integers(7, size=200)
    ]
    by = ("model", "salt", "adapter", "session-age", "server")
    request = SimulateRequest(
        requests=asked(lines, **labels), profile=PROFILE, by=by, warm_up=0.2,
        capacities=(3 * PAGE_BYTES, 9 * PAGE_BYTES), policies=("lru", "hicachefile"),
    )  # fmt: skip
    rows = simulate(request).rows.to_pylist()
    whole = [row for row in rows if row["by"] is None]
    assert len(whole) == 4
    assert whole[1]["hit_tokens"] > 0
    for name in by:
        for one in whole:
            same = [
                row
                for row in rows
                if row["by"] == name
                and (row["policy"], row["capacity_pages"]) == (one["policy"], one["capacity_pages"])
            ]
            assert len(same) > 2
            for count in ("requests", "tokens", "hit_tokens"):
                assert sum(row[count] for row in same) == one[count]


def test_the_age_of_a_session_counts_from_its_first_request() -> None:
    times = [0, 59, 60, 600, 3600, 10]
    lines = [(OLD + time, chain(1, 1)) for time in times]
    requests = asked(lines, session=["a"] * 5 + [None])
    request = SimulateRequest(
        requests=requests, profile=PROFILE, by=("session-age",), capacities=(PAGE_BYTES,)
    )
    rows = simulate(request).rows.to_pylist()
    found = Counter({row["group"]: row["requests"] for row in rows if row["by"]})
    assert found == {
        "first turn": 1, "< 1 min": 1, "< 10 min": 1, "< 1 h": 1, "1 h and more": 1, None: 1,
    }  # fmt: skip


@pytest.mark.parametrize("by", ["model", "salt", "adapter", "session-age", "server"])
def test_a_group_that_the_input_does_not_tell_is_refused_by_name(by: str) -> None:
    with pytest.raises(UsageError, match=f"--by {by}: .*does not tell the"):
        simulate(SimulateRequest(requests=trace_of(ROWS), by=(by,)))


def test_the_age_of_a_session_needs_times() -> None:
    requests = asked([(None, chain(1, 1))], session=["a"])
    with pytest.raises(UsageError, match=r"--by session-age: .* no times"):
        simulate(SimulateRequest(requests=requests, profile=PROFILE, by=("session-age",)))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"policies": ("fifo",)}, "policies: 'fifo' is not one of lru"),
        ({"capacities": (0,)}, "capacities: .*positive"),
        ({"capacities": tuple(range(1, 1002))}, "capacities: give at most 1000"),
        ({"eviction_ratio": 0.0}, "eviction_ratio: 0 "),
        ({"warm_up": 1.0}, "warm_up: 1 leaves no request"),
        ({"by": ("tenant",)}, "by: 'tenant' is not one of model"),
    ],
)
def test_a_wrong_request_is_refused(fields: dict[str, Any], said: str) -> None:
    requests = trace_of(ROWS)
    with pytest.raises(UsageError, match=said):
        simulate(SimulateRequest(requests=requests, **fields))


def test_other_settings_give_other_bytes_a_page() -> None:
    """With rows of fp8 a page has 5664 bytes; a page of 8 tokens has twice 10272."""
    lines = [(float(at), chain(1, 6)) for at in range(2)]
    what_ifs = ({"kv_cache_dtype": "fp8_e4m3"}, {"page_size": "8", "tp": "2"}, {"page_size": "3"})

    def reread(hashing: Hashing) -> Requests:
        assert hashing.page_size == 3
        return requests_of([Request("line", tokens, time=time) for time, tokens in lines], hashing)

    request = SimulateRequest(
        requests=asked(lines), profile=PROFILE, capacities=(4 * PAGE_BYTES,), policies=("lru",),
        what_ifs=what_ifs, reread=reread, threshold=1,
    )  # fmt: skip
    rows = simulate(request).rows.to_pylist()
    found = {row["what_if"]: (row["capacity_pages"], row["hit_tokens"]) for row in rows}
    assert found == {
        None: (4, 16),
        "kv_cache_dtype=fp8_e4m3": (7, 24),
        "page_size=8,tp=2": (2, 16),
        "page_size=3": (5, 15),
    }
    pages = requests_of_pages([page_hashes_hex(chain(1, 4), SIZE)] * 2, Hashing.of(PROFILE))
    without: tuple[dict[str, Any], ...] = ({"reread": None}, {"requests": pages})
    for changes in without:
        with pytest.raises(UsageError, match=r"has pages of 4 tokens.*page size 3; give token ids"):
            simulate(replace(request, **changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype=int4: the bytes of a page .* --profile"),
        ({"layout": "rows"}, "layout=rows: .*layer_first"),
        ({"tp": "100000000"}, "tp=100000000: tp: must be at most"),
    ],
)
def test_settings_that_do_not_exist_are_refused(changes: dict[str, str], said: str) -> None:
    request = SimulateRequest(
        requests=asked([(0, chain(1, 1))]), profile=PROFILE, what_ifs=(changes,)
    )
    with pytest.raises((FormatError, UsageError), match=said):
        simulate(request)
    with pytest.raises(UsageError, match="what_if: other settings need a profile"):
        simulate(replace(request, profile=None))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pages=3", "'pages' is not one of page_size"),
        ("tp", "'tp' has no value"),
        ("tp=0", "'tp=0' is no number in 1"),
        ("tp=2,tp=4", "tp is given twice"),
    ],
)
def test_settings_are_numbers_and_words(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_changes(text)
    assert parse_changes("page_size=64,layout=page_first") == {
        "page_size": "64",
        "layout": "page_first",
    }


def test_what_the_memory_of_servers_serves_is_no_hit_of_the_store() -> None:
    """Two servers in turn: each has its own chain on the device, and one that it must fetch."""
    one, two = chain(1, 3), chain(2, 3)
    lines = [(float(at), tokens) for at, tokens in enumerate((one, two, one, two, two, one))]
    fields: dict[str, Any] = {
        "requests": asked(lines, model=["m"] * 5 + [None]), "profile": PROFILE, "by": ("model",),
        "capacities": (PAGE_BYTES * 8,), "l1": 64 * PAGE_BYTES, "l2": 128 * PAGE_BYTES,
        "servers": 2, "threshold": 4,
    }  # fmt: skip
    for policy, names in (("write_through", {"lru", "optimal"}), ("write_back", {"lru"})):
        result = simulate(SimulateRequest(write_policy=policy, **fields))
        rows = [row for row in result.rows.to_pylist() if row["by"] is None]
        assert {row["policy"] for row in rows} == names
        for row in rows:
            assert (row["device_tokens"], row["host_tokens"]) == (24, 0)
            assert row["hit_tokens"] == (24 if policy == "write_through" else 0)
    groups = [row for row in result.rows.to_pylist() if row["by"]]
    assert sum(row["device_tokens"] for row in groups) == 24
    for policy in ("write_through", "write_back"):
        small = {**fields, "l1": PAGE_BYTES, "write_policy": policy}
        assert "6 requests: longer than L1" in simulate(SimulateRequest(**small)).remarks[1]
    with pytest.raises(UsageError, match="l1, l2: only one"):
        SimulateRequest(**{**fields, "l2": None})
    with pytest.raises(UsageError, match="optimal: cannot be replayed"):
        simulate(SimulateRequest(write_policy="write_back", policies=("optimal",), **fields))


# A store.


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store without pages."""
    path = tmp_path / "store"
    path.mkdir()
    return path


def of_store(store: Path, requests: Requests, **fields: Any) -> Result:
    fields = {"profile": PROFILE, "policies": ("lru",), **fields}
    with open_store(str(store)) as opened:
        return hicachectl.simulate(hicachectl.SimulateRequest(requests=requests, **fields), opened)


def test_lost_hits_have_their_causes(store: Path) -> None:
    """Eight chains of three pages, one for each cause, and one that is served."""
    served, first, evicted, gone, cut, misplaced, hole, short = (chain(n, 3) for n in range(1, 9))
    lines = [(OLD - 50.0, evicted), (OLD + 1.0, gone), (OLD + 2.0, cut), (OLD + 3.0, hole)]
    lines += [(OLD + 4.0, misplaced)]
    lines += [
        (OLD + 10.0 + at, tokens)
        for at, tokens in enumerate((served, first, evicted, gone, cut, misplaced, hole))
    ]
    put_chain(store, served, OLD)
    put_chain(store, cut, OLD + 5, pools="kv")
    for name in page_hashes_hex(misplaced, SIZE):
        put(store, f"{name}_x-other.bin", 9216, OLD + 5)
    (store / f"{put_chain(store, hole, OLD + 5)[0]}_x-dsa.bin").unlink()
    assert causes(of_store(store, asked(lines))) == {
        "first use": 12 + 12 + 12,  # of evicted, gone and first
        "evicted": 12,
        "never written or removed": 12,
        "incomplete or damaged": 2 * 12 + 2 * 12,  # both uses of cut, and of hole
        "another deployment": 2 * 12,
        "not looked up": 12,
    }
    put_chain(store, short[:SIZE], OLD)
    threshold = of_store(store, asked([(OLD, short), (OLD, served)]), threshold=8)
    assert causes(threshold) == {"below the threshold": 4, "first use": 8, "not looked up": 2}
    assert threshold.document["served_tokens"] == 12


def test_without_unix_times_absence_is_one_cause(store: Path) -> None:
    put_chain(store, chain(1, 1))
    requests = asked([(1.0, chain(2, 2)), (2.0, chain(2, 2))])
    assert causes(of_store(store, requests)) == {
        "first use": 8,
        "evicted, never written or removed": 8,
        "not looked up": 2,
    }


def test_losses_sum_to_what_is_not_served_on_damaged_stores(store: Path) -> None:
    """Random chains with common prefixes, and a store of some of their objects."""
    random = np.random.default_rng(3)
    texts = [chain(0, 3, 0) * int(random.integers(2)) + chain(n, 8, 0) for n in range(1, 13)]
    lines = [
        (OLD + float(at - 40), text[: int(random.integers(1, len(text) + 1))])
        for at, text in enumerate(texts[int(random.integers(12))] for _ in range(80))
    ]
    for text in texts:
        for name in put_chain(store, text):
            for pool in ("", ".indexer"):
                if random.random() < 0.1:
                    os.truncate(store / f"{name}{pool}_x-dsa.bin", 5)
                elif random.random() < 0.2:
                    (store / f"{name}{pool}_x-dsa.bin").unlink(missing_ok=True)
    requests = asked(lines)
    result = of_store(store, requests, warm_up=0.25, threshold=8)
    assert {"incomplete or damaged", "first use"} < causes(result).keys()
    with open_store(str(store)) as opened:
        counted = hicachectl.hits(
            opened,
            hicachectl.HitsRequest(
                requests=requests.take(np.arange(20, 80)), profile=PROFILE, threshold=8
            ),
        )
    assert result.document["served_tokens"] == counted.document["served_tokens"] > 0


def test_caches_begin_with_the_whole_pages_of_the_store(store: Path) -> None:
    """A cache smaller than the store has its latest pages, of one time the first of a chain."""
    put_chain(store, chain(1, 3), OLD)
    put_chain(store, chain(2, 4), OLD + 10)
    put_chain(store, chain(3, 1), OLD + 20, pools="kv")
    before = {path.name: path.stat().st_mtime_ns for path in store.iterdir()}
    requests = asked([(OLD + 100.0, chain(2, 4)), (OLD + 101.0, chain(1, 3))])
    sizes = tuple(pages * PAGE_BYTES for pages in (3, 4, 7))
    result = of_store(store, requests, capacities=sizes, policies=("lru", "optimal"))
    today = 7 * PAGE_BYTES + 9216
    assert result.document["today_bytes"] == today
    assert set(result.rows["start"].to_pylist()) == {"store"}
    assert {size: hits(result, "lru")[size] for size in (3, 4, 7)} == {3: 12, 4: 16, 7: 28}
    assert {size: hits(result, "optimal")[size] for size in (3, 4, 7)} == {3: 12, 4: 16, 7: 28}
    assert today in result.rows["capacity_bytes"].to_pylist()
    cold = of_store(store, requests, capacities=sizes, cold=True)
    assert set(hits(cold, "lru").values()) == {0}
    assert {path.name: path.stat().st_mtime_ns for path in store.iterdir()} == before


def test_caches_begin_with_the_best_pages_of_a_plan() -> None:
    import pyarrow as pa

    best, other = page_hashes_hex(chain(1, 3), SIZE), page_hashes_hex(chain(2, 3), SIZE)
    plan = PlannedPages("plan", pa.array([*best, *other]), [-1, 0, 1, -1, 3, 4])
    requests = asked([(0.0, chain(2, 3)), (1.0, chain(1, 3))])
    request = SimulateRequest(
        requests=requests, profile=PROFILE, plan=plan, policies=("lru",),
        capacities=(3 * PAGE_BYTES, 6 * PAGE_BYTES),
    )  # fmt: skip
    result = simulate(request)
    assert hits(result, "lru") == {3: 0, 6: 24}
    assert set(result.rows["start"].to_pylist()) == {"plan"}


def test_a_store_without_pages_is_refused(store: Path) -> None:
    requests = asked([(0.0, chain(1, 1))])
    with pytest.raises(EmptyStore):
        of_store(store, requests)
    assert causes(of_store(store, requests, allow_empty=True)) == {
        "first use": 4,
        "not looked up": 1,
    }


def test_a_store_needs_a_profile_and_requests_of_pages(store: Path) -> None:
    put_chain(store, chain(1, 1))
    with pytest.raises(UsageError, match="block ids"):
        of_store(store, trace_of([{**row, "block_size": 4} for row in ROWS]))
    with pytest.raises(UsageError, match="need a profile"):
        of_store(store, asked([(0.0, chain(1, 1))]), profile=None)
