"""The sparse loader: its rows, compared with their pages, and the input that it refuses.

tests/kernels/test_sparse.py proves its choice of slots; these tests check its device memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings

from tests.device.devices import DEVICES, HAS_CUDA, NATIVE, torch
from tests.device.sparse_cases import (
    SEQUENCE,
    Episode,
    Step,
    episodes,
    host_rows,
    true_rows,
)

from hicachectl.device.sparse import SparseLoader  # isort: skip

if TYPE_CHECKING:
    from numpy.typing import NDArray

LAYOUTS = pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
DEVICE = "cuda" if HAS_CUDA else "cpu"


def int32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


class Decoder:
    """Driver of a loader, which writes the newest rows as a model does."""

    def __init__(self, loader: SparseLoader, truth: NDArray[np.uint8]) -> None:
        self.loader = loader
        self.truth = truth  # [R, layers, positions, row_bytes]

    def step(self, layer: int, step: Step) -> NDArray[np.int64]:
        """Run a step, compare all rows at the returned locs, and return the locs."""
        lengths = int32(step.lengths)
        newest = self.loader.newest_locs(lengths)
        pool = self.loader.pool(layer)
        for request, length in enumerate(step.lengths):
            if length:
                row = torch.from_numpy(self.truth[request, layer, length - 1])
                pool[newest[request]] = row.to(pool.device)
        locs = self.loader.step(layer, int32(step.top_k), lengths).long()
        found = pool[locs.clamp(min=0)].cpu().numpy()
        for request, length in enumerate(step.lengths):
            for entry, position in enumerate(step.top_k[request]):
                if 0 <= position < length:
                    expected = self.truth[request, layer, position]
                    np.testing.assert_array_equal(found[request, entry], expected)
                else:
                    assert locs[request, entry] == -1
        answer: NDArray[np.int64] = locs.cpu().numpy()
        return answer


@pytest.mark.slow
@DEVICES
@LAYOUTS
@settings(max_examples=20)
@given(episode=episodes(requests=2, most_steps=6))
def test_every_loc_holds_the_row_of_its_token(layout: str, device: str, episode: Episode) -> None:
    with host_rows(
        device, requests=2, layers=2, page_size=episode.page_size, layout=layout
    ) as rows:
        loader = SparseLoader(rows, top_k=episode.k, slots=episode.slots)
        decoder = Decoder(loader, true_rows(rows, layout))
        for step in episode.steps:
            mirrored = replace(step, top_k=[row[::-1] for row in step.top_k])
            decoder.step(0, step)
            decoder.step(1, mirrored)


@pytest.mark.slow
@DEVICES
@LAYOUTS
def test_rows_of_a_dsa_model_arrive_whole(layout: str, device: str) -> None:
    rng = np.random.default_rng(7)
    with host_rows(device, requests=3, layers=2, page_size=4, row_bytes=656, layout=layout) as rows:
        decoder = Decoder(SparseLoader(rows, top_k=7), true_rows(rows, layout))
        for length in (13, 14, 15, 16, 24):
            for layer in range(2):
                top_k = [rng.choice(length, 7, replace=False).tolist() for _ in range(3)]
                decoder.step(layer, Step([length] * 3, top_k))


@DEVICES
def test_duplicates_share_a_loc_and_minus_one_stays(device: str) -> None:
    with host_rows(device, requests=1, layers=1, page_size=4) as rows:
        loader = SparseLoader(rows, top_k=5)
        decoder = Decoder(loader, true_rows(rows, "page_first"))
        locs = decoder.step(0, Step([30], [[9, -1, 4, 9, 4]]))
        assert locs.tolist() == [[0, -1, 1, 0, 1]]
        assert loader.fetched.tolist() == [2]


@DEVICES
def test_slots_are_twice_the_top_k_unless_given(device: str) -> None:
    with host_rows(device, requests=1, layers=1, page_size=4) as rows:
        assert SparseLoader(rows, top_k=3).slots == 6
        assert SparseLoader(rows, top_k=3, slots=4).slots == 4


@DEVICES
def test_host_memory_is_not_read_again_while_the_sequence_fits(device: str) -> None:
    with host_rows(device, requests=2, layers=1, page_size=4) as rows:
        loader = SparseLoader(rows, top_k=4)
        decoder = Decoder(loader, true_rows(rows, "page_first"))
        decoder.step(0, Step([3, 6], [[0, 1, 2, -1]] * 2))
        assert loader.fetched.tolist() == [2, 5]
        if device == "cuda":
            torch.cuda.synchronize()
        rows.memory.fill_(0xEE)
        for grown in range(1, 3):
            top_k = [[2 + grown, 0, 2, 1], [5 + grown, 4, 0, 5]]
            decoder.step(0, Step([3 + grown, 6 + grown], top_k))
            assert loader.fetched.tolist() == [0, 0]


@DEVICES
def test_only_missing_rows_are_read_from_the_host(device: str) -> None:
    with host_rows(device, requests=1, layers=1, page_size=4) as rows:
        loader = SparseLoader(rows, top_k=4)
        truth = true_rows(rows, "page_first")
        decoder = Decoder(loader, truth)
        decoder.step(0, Step([30], [[3, 9, 27, 1]]))
        if device == "cuda":
            torch.cuda.synchronize()
        rows.memory.fill_(0xEE)
        truth[0, 0, 12] = 0xEE
        decoder.step(0, Step([30], [[27, 12, 3, 9]]))
        assert loader.fetched.tolist() == [1]


@pytest.mark.slow
@DEVICES
def test_a_reset_request_is_fetched_anew_and_the_others_are_not(device: str) -> None:
    with host_rows(device, requests=2, layers=2, page_size=4) as rows:
        loader = SparseLoader(rows, top_k=3)
        decoder = Decoder(loader, true_rows(rows, "page_first"))
        step = Step([30, 30], [[3, 9, 27], [1, 2, 3]])
        for layer in (0, 1):
            decoder.step(layer, step)
        loader.reset(0)
        for layer in (0, 1):
            assert decoder.step(layer, step)[0].tolist() == [0, 1, 2]
            assert loader.fetched.tolist() == [3, 0]


@DEVICES
def test_a_reset_short_request_is_loaded_anew(device: str) -> None:
    with host_rows(device, requests=1, layers=1, page_size=4) as rows:
        loader = SparseLoader(rows, top_k=3)
        decoder = Decoder(loader, true_rows(rows, "page_first"))
        for _ in range(2):
            decoder.step(0, Step([5], [[1, 2, 3]]))
            assert loader.fetched.tolist() == [4]
            loader.reset(0)


@DEVICES
def test_layers_and_requests_do_not_touch_each_other(device: str) -> None:
    with host_rows(device, requests=3, layers=2, page_size=4) as rows:
        loader = SparseLoader(rows, top_k=3)
        for layer in range(2):
            loader.pool(layer).fill_(0xA5)
        decoder = Decoder(loader, true_rows(rows, "page_first"))
        decoder.step(1, Step([0, 30, 0], [[3, 9, 27]] * 3))
        assert bool((loader.pool(0) == 0xA5).all())
        others = loader.pool(1).view(3, loader.slots + 1, -1)[[0, 2]]
        assert bool((others == 0xA5).all())
        assert bool((loader.tokens[0] == -1).all())


@pytest.mark.parametrize("device", [NATIVE])
def test_a_batch_of_a_server_s_size_gets_its_rows(device: str) -> None:
    rng = np.random.default_rng(9)
    context, k = 8192, 2048
    with host_rows(
        device, requests=4, layers=2, page_size=64, row_bytes=656, context=context
    ) as rows:
        decoder = Decoder(SparseLoader(rows, top_k=k), true_rows(rows, "page_first"))
        lengths = [4095, 4096, 4097, 8000]
        for _ in range(4):
            for layer in range(2):
                top_k = [rng.integers(-1, length, k).tolist() for length in lengths]
                decoder.step(layer, Step(lengths, top_k))
            lengths = [length + 1 for length in lengths]


@DEVICES
def test_a_top_k_larger_than_the_buffer_is_refused(device: str) -> None:
    with host_rows(device, requests=1, layers=1, page_size=4) as rows:
        with pytest.raises(ValueError, match="top-k of 5 tokens: must be 1 to 4"):
            SparseLoader(rows, top_k=5, slots=4)
        loader = SparseLoader(rows, top_k=2)
        with pytest.raises(ValueError, match="top-k of 5 tokens: must be 1 to 4"):
            loader.step(0, int32([[1, 2, 3, 4, 5]]), int32([30]))


@DEVICES
def test_steps_of_wrong_shape_or_type_are_refused(device: str) -> None:
    with host_rows(device, requests=2, layers=1, page_size=4) as rows:
        loader = SparseLoader(rows, top_k=2)
        top_k, lengths = int32([[1, 2], [3, 4]]), int32([9, 9])
        with pytest.raises(ValueError, match="layer 1: must be at least 0 and below 1"):
            loader.step(1, top_k, lengths)
        with pytest.raises(ValueError, match="topk is"):
            loader.step(0, top_k.long(), lengths)
        with pytest.raises(ValueError, match="topk is"):
            loader.step(0, top_k[:1], lengths)
        with pytest.raises(ValueError, match="topk is"):
            loader.step(0, top_k.T, lengths)
        with pytest.raises(ValueError, match="seq_len is"):
            loader.step(0, top_k, lengths[:1])


@DEVICES
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("row_bytes", 40, "row_bytes 40 is not a multiple of 16"),
        ("page_stride", 200, "page_stride 200 is not a multiple of 16"),
        ("token_stride", 8, "token_stride 8 is not a multiple of 16"),
        ("layer_stride", 100, "layer_stride 100 is not a multiple of 16"),
        ("token_stride", -16, "is negative"),
        ("page_size", 0, "below 1"),
    ],
)
def test_rows_that_16_byte_accesses_cannot_reach_are_refused(
    field: str, value: int, message: str, device: str
) -> None:
    with (
        host_rows(device, requests=1, layers=1, page_size=4) as rows,
        pytest.raises(ValueError, match=message),
    ):
        replace(rows, **{field: value})  # type: ignore[arg-type]


def test_memory_that_begins_or_ends_between_units_is_refused() -> None:
    with host_rows("cpu", requests=1, layers=1, page_size=4) as rows:
        for part in (slice(1, None), slice(8, None), slice(None, -8)):
            with pytest.raises(ValueError, match="does not begin and end at multiples of 16"):
                replace(rows, memory=rows.memory[part])


@pytest.mark.parametrize("device", [NATIVE])
def test_host_memory_that_is_not_page_locked_is_refused(device: str) -> None:
    with host_rows("cpu", requests=1, layers=1, page_size=4) as rows:
        on_device = replace(rows, pages=rows.pages.to(device))
        with pytest.raises(ValueError, match="cudaHostRegister"):
            SparseLoader(on_device, top_k=2)


@pytest.mark.slow
@DEVICES
def test_pages_outside_of_memory_are_never_read(device: str) -> None:
    with host_rows(device, requests=1, layers=1, page_size=4) as rows:
        for number in (-1, -(2**63), rows.page_limit, 2**62):
            rows.pages[0, 2] = number
            loader = SparseLoader(rows, top_k=3)
            locs = loader.step(0, int32([[3, 9, 12]]), int32([SEQUENCE]))
            assert locs.tolist() == [[0, -1, 1]]
            loader.reset(0)
            locs = loader.step(0, int32([[3, 1, 0]]), int32([6]))
            assert locs.tolist() == [[3, 1, 0]]


@DEVICES
def test_memory_ends_with_the_last_row_of_its_last_page(device: str) -> None:
    with host_rows(device, requests=1, layers=1, page_size=4, row_bytes=48) as rows:
        used = len(rows.memory) - 16  # a gap follows every page
        assert replace(rows, memory=rows.memory[:used]).page_limit == rows.page_limit == 10
        assert replace(rows, memory=rows.memory[: used - 16]).page_limit == 9
        assert replace(rows, memory=rows.memory[:176]).page_limit == 0
