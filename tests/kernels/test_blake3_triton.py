"""The digest kernel against the blake3 package, over lengths, offsets and lanes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest
from blake3 import blake3

from tests.device.devices import DEVICES, HAS_CUDA, NATIVE, torch

from hicachectl.kernels.blake3_triton import LANES, digest_ranges, ranges_of  # isort: skip
from tests.speed import some

if TYPE_CHECKING:
    from collections.abc import Sequence

EDGES = (0, 1, 63, 64, 65, 127, 128, 1023, 1024, 1025, 2048, 2049, 3072, 4097, 5120)
TREES = ((1, 2), (2, 7), (16, 33))  # lanes and chunks
NO_BYTES = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"


def random_buffer(nbytes: int) -> np.ndarray:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)


def spread(lengths: tuple[int, ...], gap: int = 8) -> tuple[list[int], int]:
    """Place ranges with other bytes between them: return their offsets and the buffer size."""
    offsets, end = [], gap
    for length in lengths:
        offsets.append(end)
        end += -(-length // 8) * 8 + gap
    return offsets, end


def digests(
    buffer: torch.Tensor, offsets: list[int], lengths: Sequence[int], lanes: int = LANES
) -> torch.Tensor:
    """Digest byte ranges of a buffer: [n, 32] uint8 on its device."""
    upload = partial(torch.Tensor.to, device=buffer.device)
    return digest_ranges(buffer, ranges_of(buffer, offsets, lengths, upload=upload, lanes=lanes))


def assert_equal_to_the_package(
    buffer: np.ndarray, offsets: list[int], lengths: tuple[int, ...], device: str, lanes: int
) -> None:
    found = digests(torch.from_numpy(buffer).to(device), offsets, lengths, lanes=lanes)
    assert found.dtype == torch.uint8
    assert found.device.type == device
    expected = [
        blake3(buffer[offset : offset + length].tobytes()).hexdigest()
        for offset, length in zip(offsets, lengths, strict=True)
    ]
    assert [bytes(digest).hex() for digest in found.cpu().numpy()] == expected


@pytest.mark.slow
@DEVICES
def test_ranges_of_all_lengths_in_one_launch(device: str) -> None:
    lengths = tuple(np.random.default_rng(1).permutation(EDGES).tolist())
    offsets, size = spread(lengths)
    assert_equal_to_the_package(random_buffer(size), offsets, lengths, device, lanes=128)


@pytest.mark.slow
@DEVICES
@pytest.mark.parametrize(("lanes", "chunks"), TREES if HAS_CUDA else some(TREES, (16, 33)))
def test_a_tree_of_more_nodes_than_a_program_merges(lanes: int, chunks: int, device: str) -> None:
    """The lengths above try every smaller tree on each run."""
    length = chunks * 1024 - 1000
    assert_equal_to_the_package(random_buffer(length + 1000), [8], (length,), device, lanes)


@pytest.mark.slow
@DEVICES
def test_ranges_may_overlap_and_end_with_the_buffer(device: str) -> None:
    assert_equal_to_the_package(
        random_buffer(1200), [0, 8, 0, 1200], (1200, 1192, 1200, 0), device, lanes=8
    )


@pytest.mark.slow
@DEVICES
def test_no_bytes_have_the_digest_of_the_specification(device: str) -> None:
    found = digests(torch.zeros(8, dtype=torch.uint8, device=device), [0], [0])
    assert bytes(found.cpu().numpy()[0]).hex() == NO_BYTES


@DEVICES
def test_no_ranges_have_no_digests(device: str) -> None:
    assert digests(torch.zeros(8, dtype=torch.uint8, device=device), [], []).shape == (0, 32)


@pytest.mark.parametrize("device", [NATIVE])
@pytest.mark.parametrize("lanes", [32, 64, 128, 256])
def test_pages_and_states_at_their_real_sizes(lanes: int, device: str) -> None:
    lengths = (2_561_024, 515_328, 0, 4_497_408, 40_016, 75_497_472, 3, 1024 * 1024 + 1)
    offsets, size = spread(lengths)
    assert_equal_to_the_package(random_buffer(size), offsets, lengths, device, lanes)


@pytest.mark.parametrize("device", [NATIVE])
def test_thousands_of_random_lengths(device: str) -> None:
    lengths = tuple(np.random.default_rng(4).integers(0, 20_000, 5000).tolist())
    offsets, size = spread(lengths)
    assert_equal_to_the_package(random_buffer(size), offsets, lengths, device, lanes=128)


@pytest.mark.parametrize(
    ("offset", "length"), [(4, 8), (-8, 8), (8, -1), (8, 1017), (1032, 0), (2**63 - 8, 16)]
)
def test_ranges_that_do_not_fit_are_refused(offset: int, length: int) -> None:
    device = "cuda" if HAS_CUDA else "cpu"
    with pytest.raises(ValueError, match="not inside the buffer of 1024 bytes"):
        digests(torch.zeros(1024, dtype=torch.uint8, device=device), [offset], [length])


def test_buffers_that_cannot_be_read_by_words_are_refused() -> None:
    buffer = torch.zeros(1024, dtype=torch.uint8)
    for wrong in (buffer[1:1017], buffer[:1023]):
        with pytest.raises(ValueError, match="8-byte aligned"):
            digests(wrong, [0], [8])
    for wrong in (buffer.view(torch.int32), buffer.view(2, 512), buffer[::2]):
        with pytest.raises(ValueError, match="contiguous 1D uint8"):
            digests(wrong, [0], [8])


def test_wrong_arguments_are_refused() -> None:
    buffer = torch.zeros(1024, dtype=torch.uint8)
    with pytest.raises(ValueError, match="not a power of two"):
        digests(buffer, [0], [8], lanes=96)
    with pytest.raises(ValueError, match="differ"):
        digests(buffer, [0, 8], [8])
