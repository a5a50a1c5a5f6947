"""Plans: prefix-closed, best first, and better than counting."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hicachectl.cli.demo_store import PROFILE
from hicachectl.formats.errors import UsageError
from hicachectl.prewarming.ranking import RankedBlocks, pages_within, rank_blocks
from hicachectl.prewarming.value.hazard import Factor, Waits, age_edges, fit_hazards
from hicachectl.prewarming.value.reuse import fit_reuse
from hicachectl.prewarming.value.traits import link_requests, walk_uses
from tests.bench.bench_prewarm_plan import captured
from tests.bench.warm_replay import part
from tests.formats.small_models import LOGICAL
from tests.prewarming.traces import Row, conversations, trace_of

if TYPE_CHECKING:
    from hicachectl.formats.profile import Profile


def chains(draw: st.DrawFn) -> list[list[int]]:
    """Draw chains of a random forest, in which a block's id determines its parent."""
    parents = draw(st.lists(st.integers(-1, 12), min_size=1, max_size=25))
    paths: list[list[int]] = []
    for block, parent in enumerate(parents):
        paths.append([*(paths[parent] if 0 <= parent < block else []), block])
    return draw(st.lists(st.sampled_from(paths), min_size=1, max_size=30))


def names(plan: RankedBlocks) -> list[int]:
    found: list[int] = plan.requests.names[plan.order].tolist()
    return found


@pytest.mark.slow
@given(
    ids=st.composite(chains)(),
    times=st.none() | st.lists(st.integers(0, 100), min_size=30, max_size=30),
    budget=st.none() | st.integers(1, 10),
)
def test_a_plan_has_every_block_once_behind_its_prefix(
    ids: list[list[int]], times: list[int] | None, budget: int | None
) -> None:
    rows: list[Row] = [{"hash_ids": chain} for chain in ids]
    if times is not None:
        rows = [{**row, "timestamp": time} for row, time in zip(rows, times, strict=False)]
    trace = trace_of(rows)
    whole, plan = rank_blocks(trace), rank_blocks(trace, budget=budget)
    assert sorted(whole.order.tolist()) == list(range(len(trace.names)))
    assert plan.order.tolist() == whole.order[:budget].tolist()
    place = np.empty(len(whole), np.int64)
    place[whole.order] = np.arange(len(whole))
    inner = np.flatnonzero(trace.forest.parents >= 0)
    assert (place[trace.forest.parents[inner]] < place[inner]).all()
    assert (np.diff(whole.values) <= 0).all()


def test_without_times_blocks_are_ordered_by_how_many_requests_share_them() -> None:
    plan = rank_blocks(trace_of([{"hash_ids": ids} for ids in ([1, 2], [3, 4], [3, 4], [3, 5])]))
    assert names(plan)[:2] == [3, 4]
    assert plan.values.tolist() == [3, 2, 1, 1, 1]
    assert plan.uses.tolist() == plan.values.tolist()
    assert plan.last_seen is None


def test_what_was_never_used_twice_is_ordered_by_recency() -> None:
    rows = [{"timestamp": at, "hash_ids": [at, at + 100]} for at in (1, 2, 3)]
    assert names(rank_blocks(trace_of(rows))) == [3, 103, 2, 102, 1, 101]


def test_a_plan_says_how_often_and_when_a_block_was_used_last() -> None:
    rows = [{"timestamp": 10 * k, "hash_ids": ids} for k, ids in enumerate([[1], [1, 2], [3]])]
    plan = rank_blocks(trace_of(rows))
    assert plan.last_seen is not None
    seen = dict(zip(names(plan), zip(plan.uses, plan.last_seen, strict=True), strict=True))
    assert seen == {1: (2, 10), 2: (1, 10), 3: (1, 20)}


def test_what_a_conversation_went_on_without_comes_last() -> None:
    rows = conversations(5, requests=600)
    end = rows[-1]["timestamp"]
    dropped, kept = [900_000, 900_001, 900_002], [900_000, 900_003, 900_004]
    rows += [{**rows[-1], "timestamp": end + 10, "hash_ids": dropped}]
    rows += [{**rows[-1], "timestamp": end + 20, "hash_ids": kept}]
    place = names(rank_blocks(trace_of(rows))).index
    assert place(900_004) < place(900_001)


def test_links_follow_conversations_and_not_shared_prompts() -> None:
    trace = trace_of(
        [
            {"timestamp": time, "hash_ids": ids}
            for time, ids in enumerate(
                [[0, 1, 2], [0, 3], [0, 1, 2, 4], [0, 5], [0, 1, 2, 4, 6], [0, 1, 7]]
            )
        ]
    )
    links = link_requests(trace, walk_uses(trace))
    assert links.known.tolist() == [0, 1, 3, 1, 4, 2]
    assert links.source.tolist()[2:] == [0, -1, 2, 4]
    assert links.turns.tolist()[2:] == [1, 0, 2, 3]
    assert links.first.tolist() == [0, 0, 0, 3, 0, 0]
    assert links.left.tolist()[2] == 4


def test_uses_equal_a_walk_in_plain_python() -> None:
    trace = trace_of(conversations(11, requests=80))
    uses = walk_uses(trace)
    last: dict[int, int] = {}
    count: dict[int, int] = {}
    for request in range(len(trace)):
        for at in range(*trace.offsets[request : request + 2].tolist()):
            block = int(trace.blocks[at])
            assert uses.previous[at] == last.get(block, -1)
            assert uses.earlier[at] == count.get(block, 0)
            last[block], count[block] = request, count.get(block, 0) + 1
    assert uses.last.tolist() == [last[block] for block in range(len(last))]
    assert uses.counts.tolist() == [count[block] for block in range(len(count))]


def test_rates_are_measured_as_events_over_exposure() -> None:
    random = np.random.default_rng(2)
    cells = random.integers(0, 2, 40_000)
    durations = random.exponential(np.where(cells == 1, 10.0, 40.0))
    seen = random.uniform(0, 100, len(cells))  # the trace ends at that age
    waits = Waits(cells, np.minimum(durations, seen), durations < seen, np.ones(len(cells)))
    edges = age_edges(waits.durations[waits.used])
    codes = np.array([[0], [1]])
    factors = [Factor("kind", 2)]
    hazards = fit_hazards(waits, codes, factors, edges, longest=100.0, prior=1.0)
    chances = hazards.chances(codes, np.array([3.0, 3.0]), [5.0, 20.0])
    expected = 1 - np.exp(-np.outer([5.0, 20.0], [1 / 40, 1 / 10]))
    assert chances == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("censored", [30.0, 60.0, 90.0])
def test_equal_waits_have_finite_rates_and_no_warning(censored: float) -> None:
    random = np.random.default_rng(3)
    used = random.random(2000) < 0.9
    waits = Waits(
        cells=random.integers(0, 6, 2000),
        durations=np.where(used, 60.0, censored),
        used=used,
        weights=np.ones(2000),
    )
    codes = np.array([[cell % 3, cell % 2] for cell in range(6)])
    factors = [Factor("one", 3, 2), Factor("two", 2)]
    edges = age_edges(waits.durations[used])
    with np.errstate(all="raise"):
        hazards = fit_hazards(waits, codes, factors, edges, longest=3600.0, prior=3.0)
        chances = hazards.chances(codes, np.zeros(6), [30.0, 3600.0])
    expected = used.sum() / np.minimum(waits.durations, 60.0).sum()
    assert hazards.base[0] == pytest.approx(expected, rel=0.05)
    assert ((chances >= 0) & (chances <= 1)).all()
    assert (chances[1] > chances[0]).all()


@pytest.mark.slow
def test_the_rate_of_blocks_that_were_left_behind_counts_their_time_since_then() -> None:
    """Conversations continue without a block, which is used as often afterwards as before."""
    random = np.random.default_rng(4)
    conversations_, end, until_used, until_left = 3000, 400.0, 100.0, 50.0
    rows: list[tuple[float, list[int]]] = []
    for first in range(0, 3 * conversations_, 3):
        root, used, other = first, first + 1, first + 2
        begun = float(random.uniform(0, end))
        again = begun + float(random.exponential(until_used))
        left = begun + float(random.exponential(until_left))
        rows.append((begun, [root, used]))
        rows.append((again, [root, used]))
        if left < again:
            rows.append((left, [root, other]))
    rows = sorted((at, chain) for at, chain in rows if at < end)
    trace = trace_of([{"timestamp": 1000 * at, "hash_ids": chain} for at, chain in rows])
    uses = walk_uses(trace)
    times = np.array([at for at, _ in rows])
    reuse = fit_reuse(trace, times, end, uses)
    assert reuse is not None
    horizon = until_used / 2
    chances = np.concatenate([found[0] for _, found in reuse.chances([horizon])])
    waiting = (trace.names % 3 == 1) & (uses.counts == 1)
    waiting &= link_requests(trace, uses).left[uses.last] < len(trace)
    assert waiting.sum() > 300
    expected = 1 - np.exp(-horizon / until_used)
    assert chances[reuse.group_of[waiting]].mean() == pytest.approx(expected, rel=0.15)


@pytest.mark.slow
def test_a_plan_captures_more_than_counting_does() -> None:
    shares: dict[str, list[float]] = {}
    for seed in range(2):
        trace = trace_of(conversations(seed, requests=3000, think=300_000))
        for name, row in captured(part(trace, 0, 1500), part(trace, 1500, 3000)).items():
            shares.setdefault(name, []).append(float(row[-1]))
    means = {name: np.mean(values) for name, values in shares.items()}
    assert means["ours"] > 1.05 * max(value for name, value in means.items() if name != "ours")


@pytest.mark.parametrize(
    ("profile", "hashed", "said"),
    [
        (None, False, "--budget: block ids have no size; give --budget-pages"),
        (None, True, "--budget: page sizes need a profile; give --profile, or --budget-pages"),
        (
            replace(PROFILE, pools=(LOGICAL,)),
            True,
            "--budget: the profile does not give a page's bytes; give --budget-pages",
        ),
    ],
)
def test_a_budget_in_bytes_needs_the_size_of_a_page(
    profile: Profile | None, hashed: bool, said: str
) -> None:
    with pytest.raises(UsageError) as refusal:
        pages_within(1 << 30, profile, hashed=hashed)
    assert str(refusal.value) == said
