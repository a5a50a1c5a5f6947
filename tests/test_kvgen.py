"""The generator of model-like pages has the properties that it states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec.structs import replace

from hicachectl.formats.spec import object_specs
from hicachectl.kernels.values import to_float32
from tests.checks.value_cases import (
    DEEPSEEK,
    LLAMA_8B,
    QWEN3_32B,
    expected_of,
    profile_of,
    tiny,
)
from tests.kvgen import KvGenerator, encode, page_tokens, uniform_noise
from tests.speed import seed_of_run

if TYPE_CHECKING:
    from hicachectl.formats.profile import Profile

KINDS = ("bfloat16", "float8_e4m3fn", "latent", "fp8", "fp8_scaled", "indexer", "mamba")


def entropy_bits(codes: Any) -> float:
    counts = np.bincount(codes.reshape(-1))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


@pytest.mark.slow
@pytest.mark.parametrize(
    "profile",
    [
        profile_of(LLAMA_8B),
        profile_of(LLAMA_8B, tp=8, page_size=16),
        profile_of(QWEN3_32B, tp=4),
        profile_of(DEEPSEEK),
    ],
    ids=["llama", "llama tp8", "qwen3-32b", "deepseek"],
)
def test_exponents_have_the_entropy_of_real_kv(profile: Profile) -> None:
    expected = expected_of(profile)
    for page in KvGenerator(expected, profile, seed_of_run()).objects(range(3)):
        assert 2.8 <= entropy_bits(page.view(np.uint16) >> 7 & 0xFF) <= 3.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_and_page_numbers_decide_the_bytes(kind: str) -> None:
    profile, pool = tiny(kind)
    expected = expected_of(profile, pool)
    one = KvGenerator(expected, profile, 7).objects([5, 9, 6])
    two = KvGenerator(expected, profile, 7).objects([9])
    assert np.array_equal(one[1], two[0])
    assert not np.array_equal(one[0], one[2])
    assert not np.array_equal(KvGenerator(expected, profile, 8).objects([9]), two)


@pytest.mark.parametrize("kind", ["bfloat16", "fp8_scaled"])
def test_layouts_hold_the_same_rows_in_another_order(kind: str) -> None:
    made = []
    for layout in ("layer_first", "page_first"):
        profile, pool = tiny(kind, layout)
        expected = expected_of(profile, pool)
        tensor = expected.tensors[0]
        page = KvGenerator(expected, profile, 3).objects([1])[0]
        part = page[: tensor.nbytes].reshape(*tensor.shape[:2], -1)
        made.append(part if tensor.axes[0] == "layer" else part.swapaxes(0, 1))
    assert np.array_equal(*made)


def test_ranks_differ_and_replicas_of_a_head_do_not() -> None:
    profile = profile_of(LLAMA_8B | {"kv_heads": 2, "layers": 2}, page_size=4, tp=4)
    ranks = [KvGenerator(e, profile, 1).objects([0]) for e in object_specs(profile, "file")]
    assert np.array_equal(ranks[0], ranks[1])
    assert np.array_equal(ranks[2], ranks[3])
    assert not np.array_equal(ranks[1], ranks[2])


@pytest.mark.slow
def test_channels_keep_their_magnitude_and_tokens_repeat() -> None:
    profile = profile_of(LLAMA_8B, layout="layer_first", tp=8)
    expected = expected_of(profile)
    pages = KvGenerator(expected, profile, seed_of_run()).objects(range(8))
    values = to_float32(pages.view(np.uint16), "bfloat16").reshape(8, 2, 32, 64, 128)
    sizes = np.log(np.abs(values) + 1e-9)
    v = sizes[:, 1, 5]
    halves = np.corrcoef(v[:4].mean(axis=(0, 1)), v[4:].mean(axis=(0, 1)))[0, 1]
    assert halves > 0.8
    tokens = page_tokens(1, 0, 4096)
    assert np.mean(tokens == 1) > 0.1
    assert len(np.unique(tokens)) > 400


def test_rotation_keeps_the_length_of_pairs() -> None:
    """For equal tokens at two positions, V is equal and K's pairs have equal length."""
    profile = profile_of(LLAMA_8B | {"layers": 1, "dtype": "float32"}, page_size=64)
    expected = expected_of(profile)
    page = KvGenerator(expected, profile, 2).objects([0])[0].view(np.float32)
    k, v = page.reshape(2, 64, 8, 2, 64)
    tokens = page_tokens(2, 0, 64)
    first = [i for i in range(64) if tokens[i] == 1][:2]
    assert np.array_equal(v[first[0]], v[first[1]])
    assert not np.allclose(k[first[0]], k[first[1]])
    length = np.hypot(k[:, :, 0], k[:, :, 1])
    assert np.allclose(length[first[0]], length[first[1]], rtol=1e-4)


def test_encoding_rounds_to_the_nearest() -> None:
    values = np.array([1.0, -1.0, 1.00390625, 500.0, -0.0, 1e-9], np.float32)
    assert encode(values, "bfloat16").view(np.uint16).tolist()[:2] == [0x3F80, 0xBF80]
    codes = encode(values, "float8_e4m3fn")
    assert codes.tolist() == [0x38, 0xB8, 0x38, 0x7E, 0x80, 0x00]
    assert encode(values, "float8_e4m3fnuz")[4] == 0x00


@pytest.mark.parametrize("kind", KINDS)
def test_noise_has_the_right_size(kind: str) -> None:
    profile, pool = tiny(kind)
    expected = expected_of(profile, pool)
    assert uniform_noise(expected, profile, 2, 1).shape == (2, expected.nbytes)
    assert replace(profile, tp=1) == profile
