"""The plan of a sparse step: the model on cases solved by hand, the kernel against the model."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from tests.device.devices import DEVICES, NATIVE, torch
from tests.device.sparse_cases import Episode, Step, episodes, host_rows
from tests.kernels.sparse_reference import Fetch, SparseModel
from tests.speed import examples

from hicachectl.kernels.sparse_triton import StepPlan, plan_step  # isort: skip

ALL = [True] * 100


def filled(slots: int, *steps: list[int], length: int = 100) -> SparseModel:
    model = SparseModel(slots)
    for step in steps:
        model.step(step, length, ALL)
    return model


def test_missing_tokens_take_the_lowest_empty_slots_in_the_order_of_the_top_k() -> None:
    model = SparseModel(4)
    locs, fetches = model.step([30, 10, 20], 100, ALL)
    assert locs == [0, 1, 2]
    assert fetches == [Fetch(30, 0), Fetch(10, 1), Fetch(20, 2)]
    assert model.tokens == [30, 10, 20, -1]
    assert model.lru == [3, 0, 1, 2]


def test_duplicates_have_one_slot_and_are_fetched_once() -> None:
    model = SparseModel(4)
    assert model.step([7, 3, 7, 3], 100, ALL) == ([0, 1, 0, 1], [Fetch(7, 0), Fetch(3, 1)])


def test_the_least_recent_slot_is_overwritten() -> None:
    model = filled(3, [1, 2], [3], [1])
    assert model.lru == [1, 2, 0]
    assert model.step([4], 100, ALL) == ([1], [Fetch(4, 1)])


def test_slots_used_in_one_step_keep_their_order() -> None:
    model = filled(3, [1, 2], [3], [1])
    assert model.lru == [1, 2, 0]
    model.step([1, 2], 100, ALL)
    assert model.lru == [2, 1, 0]
    assert model.step([5, 6], 100, ALL) == ([2, 1], [Fetch(5, 2), Fetch(6, 1)])
    assert model.lru == [0, 2, 1]


def test_a_slot_that_the_step_selects_is_never_overwritten() -> None:
    model = filled(3, [1, 2, 3], [2, 3])
    assert model.step([4, 1], 100, ALL) == ([1, 0], [Fetch(4, 1)])


def test_the_newest_token_of_a_long_sequence_has_the_slot_outside() -> None:
    model = SparseModel(4)
    assert model.step([99, 5], 100, ALL) == ([4, 0], [Fetch(5, 0)])
    assert model.step([99, 100], 101, ALL) == ([1, 4], [Fetch(99, 1)])


def test_entries_that_are_no_position_or_have_no_page_get_nothing() -> None:
    model = SparseModel(4)
    there = [position != 6 for position in range(100)]
    assert model.step([-1, 6, 100, -5, 5], 100, there) == ([-1, -1, -1, -1, 0], [Fetch(5, 0)])


def test_a_short_sequence_is_loaded_once_in_its_order() -> None:
    model = SparseModel(4)
    assert model.step([2, 0], 3, ALL) == ([2, 0], [Fetch(0, 0), Fetch(1, 1)])
    assert model.step([3, 1], 4, ALL) == ([3, 1], [])
    assert model.tokens == [0, 1, 2, 3]
    assert model.step([4, 0], 5, ALL) == ([4, 0], [])
    assert model.step([4, 5], 6, ALL) == ([2, 4], [Fetch(4, 2)])


def test_what_was_cut_back_is_fetched_anew() -> None:
    model = filled(3, [50, 20])
    assert model.step([20], 50, ALL) == ([1], [])
    assert model.step([50, 20], 100, ALL) == ([2, 1], [Fetch(50, 2)])


def test_the_token_that_became_the_newest_by_a_cut_is_not_taken_from_the_buffer() -> None:
    model = filled(3, [50, 20])
    assert model.step([50], 51, ALL) == ([3], [])
    assert model.tokens == [-1, 20, -1]


def test_a_pause_changes_nothing() -> None:
    model = filled(3, [50, 20])
    assert model.step([1, 2], 0, ALL) == ([-1, -1], [])
    assert model.step([50, 20], 100, ALL) == ([0, 1], [])


class Pair:
    """Kernel state and a model for each request, stepped together."""

    def __init__(self, requests: int, slots: int, context: int, device: str) -> None:
        self.models = [SparseModel(slots) for _ in range(requests)]
        self.tokens = torch.full((requests, slots), -1, dtype=torch.int32, device=device)
        order = torch.arange(slots, dtype=torch.int32, device=device)
        self.lru = order.repeat(requests, 1)
        self.loaded = torch.zeros(requests, dtype=torch.int32, device=device)
        self.plan = StepPlan(requests, slots, context, torch.device(device))
        self.device = device

    def step(self, step: Step, rows: object, there: list[list[bool]]) -> None:
        locs = plan_step(
            torch.tensor(step.top_k, dtype=torch.int32, device=self.device),
            torch.tensor(step.lengths, dtype=torch.int32, device=self.device),
            rows,  # type: ignore[arg-type]
            self.tokens,
            self.lru,
            self.loaded,
            self.plan,
        )
        counts = self.plan.counts.tolist()
        for request, model in enumerate(self.models):
            expected, fetches = model.step(
                step.top_k[request], step.lengths[request], there[request]
            )
            base = request * (model.slots + 1)
            assert locs[request].tolist() == [x + base if x >= 0 else -1 for x in expected]
            positions = self.plan.positions[request, : counts[request]].tolist()
            slots = self.plan.slots[request, : counts[request]].tolist()
            assert list(map(Fetch, positions, slots)) == fetches
            assert self.tokens[request].tolist() == model.tokens
            assert self.lru[request].tolist() == model.lru
        marks = self.plan.marks
        assert bool(((marks >= 0) & (marks < model.slots)).all()), "the next layer reads these"


@pytest.mark.slow
@DEVICES
@examples(60)
@given(episode=episodes(requests=2, most_steps=8))
def test_the_kernel_agrees_with_the_model_bit_for_bit(device: str, episode: Episode) -> None:
    with host_rows(device, requests=2, layers=1, page_size=episode.page_size) as rows:
        rows.pages[0, 3] = -1
        rows.pages[1, 1] = rows.page_limit
        columns = rows.pages.cpu().repeat_interleave(rows.page_size, dim=1)
        there = ((columns >= 0) & (columns < rows.page_limit)).tolist()
        context = columns.shape[1]
        pair = Pair(2, episode.slots, context, device)
        for step in episode.steps:
            pair.step(step, rows, there)


@DEVICES
def test_marks_of_others_are_left_alone_where_a_sequence_outgrew_its_pages(device: str) -> None:
    slots, context = 12, 8
    with host_rows(device, requests=1, layers=1, page_size=4, context=context) as rows:
        pair = Pair(1, slots, context, device)
        memory = torch.zeros(4 * context, dtype=torch.int32, device=device)
        memory[:context] = pair.plan.marks[0]
        pair.plan.marks = memory[:context].view(1, context)
        there = [[True] * context + [False] * 20]
        pair.step(Step([11], [[1, 9, 10, 7, 2]]), rows, there)
        pair.step(Step([13], [[1, 9, 12, 7, 11]]), rows, there)
        assert not bool(memory[context:].any())


@pytest.mark.parametrize("device", [NATIVE])
def test_the_kernel_agrees_with_the_model_at_the_size_of_a_server(device: str) -> None:
    requests, slots, k, context = 8, 4096, 2048, 16384
    rng = np.random.default_rng(5)
    with host_rows(
        device, requests=requests, layers=1, page_size=64, row_bytes=16, context=context
    ) as rows:
        pair = Pair(requests, slots, context, device)
        there = [[True] * context] * requests
        lengths = [4090, 4096, 4097, 5000, 16000, 16384, 100, 9000]
        hot = [rng.integers(0, length, 2 * k) for length in lengths]
        for _ in range(8):
            top_k = [
                np.where(rng.random(k) < 0.8, rng.choice(mine, k), rng.integers(-1, length, k))
                for mine, length in zip(hot, lengths, strict=True)
            ]
            pair.step(Step(lengths, [row.tolist() for row in top_k]), rows, there)
            lengths = [min(length + 1, context) for length in lengths]
