"""The layout statistic: what it must detect, and when it must abstain."""

from __future__ import annotations

from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hicachectl.kernels.layout import OrderTest, OrderVerdict, RowOrder, log_magnitudes

if TYPE_CHECKING:
    from collections.abc import Callable

    Values = Any  # [pages, layer, token, head, channel] float32

LAYERS, TOKENS, HEADS, CHANNELS = 32, 64, 8, 128
LENGTHS = {"layer": LAYERS, "token": TOKENS, "head": HEADS}
ORDERS: list[tuple[str, ...]] = [
    ("layer", "token", "head"),
    ("token", "layer", "head"),
    ("head", "token", "layer"),
]


def order(axes: tuple[str, ...], **lengths: int) -> RowOrder:
    return RowOrder(axes, tuple({**LENGTHS, **lengths}[axis] for axis in axes))


def verdicts(
    pages: Values, stored: tuple[str, ...], said: tuple[str, ...], rivals: list[tuple[str, ...]]
) -> dict[int, OrderVerdict]:
    """Judge pages [n, layer, token, head, channel] of one tensor, stored in some order."""
    lengths = dict(zip(("layer", "token", "head"), pages.shape[1:4], strict=True))
    axes = [("layer", "token", "head").index(axis) + 1 for axis in stored]
    rows = pages.transpose(0, *axes, 4).reshape(len(pages), -1, pages.shape[4])
    bits = np.ascontiguousarray(rows).view(np.uint32)
    others = [order(axes, **lengths) for axes in rivals if axes != said]
    test = OrderTest(order(said, **lengths), others, range(lengths["layer"]))

    def read(which: Any, numbers: Any, channels: int) -> Values:
        step = max(1, bits.shape[-1] // channels)
        return log_magnitudes(bits[..., ::step][which[:, None], numbers])[:, None]

    return test.contradictions(read, len(pages))


def noise(*shape: int, seed: int = 0) -> Values:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def structured(pages: int = 2, sigma: float = 0.6, seed: int = 0, **lengths: int) -> Values:
    """Gaussian rows with a magnitude for each (layer, head, channel)."""
    sizes = {**LENGTHS, **lengths}
    kinds = np.exp(sigma * noise(sizes["layer"], 1, sizes["head"], CHANNELS, seed=seed + 1))
    return noise(pages, *sizes.values(), CHANNELS, seed=seed) * kinds


def test_row_numbers_and_coordinates_are_inverse() -> None:
    for axes in permutations(("layer", "token", "head")):
        one = order(axes, layer=3, token=5, head=2)
        rows = np.arange(30)
        assert np.array_equal(one.rows(*one.coordinates(rows)), rows)
    without_head = RowOrder(("token", "layer"), (4, 3))
    layer, token, head = without_head.coordinates(np.arange(12))
    assert not head.any()
    assert (layer[:4].tolist(), token[:4].tolist()) == ([0, 1, 2, 0], [0, 0, 0, 1])


@pytest.mark.parametrize("stored", ORDERS)
@pytest.mark.parametrize("said", ORDERS)
def test_the_right_order_is_named_and_is_never_contradicted(
    stored: tuple[str, ...], said: tuple[str, ...]
) -> None:
    found = verdicts(structured(), stored, said, ORDERS)
    if stored == said:
        assert not found
    else:
        rivals = [axes for axes in ORDERS if axes != said]
        assert [rivals[verdict.rival] for verdict in found.values()] == [stored, stored]
        assert all(verdict.sigma > 15 and verdict.other > 0.15 for verdict in found.values())
        assert all(abs(verdict.own) < 0.05 for verdict in found.values())


@pytest.mark.parametrize(
    "lengths",
    [
        {"layer": 1, "head": 1},
        {"token": 1},
        {"token": 1, "head": 1},
        {"layer": 1, "token": 1},
    ],
)
def test_orders_of_the_same_bytes_are_not_decidable(lengths: dict[str, int]) -> None:
    for said in ORDERS:
        others = [order(axes, **lengths) for axes in ORDERS if axes != said]
        layers = range(lengths.get("layer", LAYERS))
        assert not OrderTest(order(said, **lengths), others, layers).decidable


def test_one_head_leaves_two_orders_alone() -> None:
    test = OrderTest(order(ORDERS[1], head=1), [order(ORDERS[2], head=1)], range(LAYERS))
    assert not test.decidable


def uniform(pages: int) -> Values:
    return np.random.default_rng(1).random((pages, LAYERS, TOKENS, 1, CHANNELS), np.float32) - 0.5


def layers_alike(pages: int) -> Values:
    """The same magnitudes in every layer."""
    kinds = np.exp(0.8 * noise(1, 1, 1, CHANNELS))
    return noise(pages, LAYERS, TOKENS, 1, CHANNELS, seed=2) * kinds


def layers_copied(pages: int) -> Values:
    return np.repeat(noise(pages, 1, TOKENS, 1, CHANNELS), LAYERS, axis=1)


def tokens_copied(pages: int) -> Values:
    return np.repeat(noise(pages, LAYERS, 1, 1, CHANNELS), TOKENS, axis=2)


def tokens_repeated(pages: int) -> Values:
    """Few distinct tokens, with exactly equal rows, the same in every layer."""
    tokens = np.minimum(np.random.default_rng(3).zipf(1.3, TOKENS), 50)
    return np.repeat(noise(pages, 1, 51, 1, CHANNELS)[:, :, tokens], LAYERS, axis=1)


def constant_channels(pages: int) -> Values:
    return np.ones((pages, LAYERS, TOKENS, 1, CHANNELS), np.float32)


def constant_rows(pages: int) -> Values:
    """One number in each row: nothing but what channels have in common."""
    return np.broadcast_to(
        noise(pages, LAYERS, TOKENS, 1, 1), (pages, LAYERS, TOKENS, 1, CHANNELS)
    ).copy()


def rotated_alike(pages: int) -> Values:
    """The same constant key in every layer, rotated: only phases differ."""
    half = CHANNELS // 2
    angles = np.arange(TOKENS)[:, None] * 10_000.0 ** (-np.arange(half) / half)
    pair = noise(2, half)
    turned = np.concatenate(
        [
            pair[0] * np.cos(angles) - pair[1] * np.sin(angles),
            pair[1] * np.cos(angles) + pair[0] * np.sin(angles),
        ],
        axis=1,
    )
    shape = (pages, LAYERS, TOKENS, 1, CHANNELS)
    return (turned[None, None, :, None] * (1 + 0.05 * noise(*shape, seed=4))).astype(np.float32)


def drifting(pages: int) -> Values:
    """Magnitudes that change slowly from layer to layer."""
    steps = 0.1 * noise(LAYERS, 1, 1, CHANNELS, seed=5)
    return noise(pages, LAYERS, TOKENS, 1, CHANNELS, seed=6) * np.exp(np.cumsum(steps, axis=0))


def counting(pages: int) -> Values:
    """A counter through the whole page, as in test patterns."""
    count = np.arange(LAYERS * TOKENS * CHANNELS, dtype=np.uint32)
    bits = 0x3F800000 + count.reshape(1, LAYERS, TOKENS, 1, CHANNELS)
    return np.repeat(bits, pages, axis=0).view(np.float32)


def zeros(pages: int) -> Values:
    return np.zeros((pages, LAYERS, TOKENS, 1, CHANNELS), np.float32)


def layers_in_two_kinds(pages: int) -> Values:
    """All even layers are alike, and all odd layers."""
    kinds = np.exp(noise(2, 1, 1, CHANNELS))[np.arange(LAYERS) % 2]
    return noise(pages, LAYERS, TOKENS, 1, CHANNELS, seed=7) * kinds


def tokens_alike(pages: int) -> Values:
    """One pattern per token, similar in all layers, as if layers shared weights."""
    shape = (pages, LAYERS, TOKENS, 1, CHANNELS)
    return noise(pages, 1, TOKENS, 1, CHANNELS, seed=8) + 0.5 * noise(*shape, seed=9)


ADVERSARIAL = [
    tokens_alike,
    uniform,
    layers_alike,
    layers_copied,
    tokens_copied,
    tokens_repeated,
    constant_channels,
    constant_rows,
    rotated_alike,
    drifting,
    counting,
    zeros,
    layers_in_two_kinds,
]


@pytest.mark.parametrize("said", ORDERS[:2])
@pytest.mark.parametrize("made", ADVERSARIAL, ids=lambda made: made.__name__)
def test_pages_in_the_profiles_order_are_never_contradicted(
    made: Callable[[int], Values], said: tuple[str, ...]
) -> None:
    assert not verdicts(made(3), said, said, ORDERS[:2])


@pytest.mark.parametrize("lengths", [(2, 64, 1), (3, 16, 1), (2, 16, 2), (1, 64, 4), (4, 4, 1)])
@pytest.mark.parametrize("said", ORDERS)
def test_small_pages_in_the_profiles_order_are_never_contradicted(
    lengths: tuple[int, int, int], said: tuple[str, ...]
) -> None:
    layer, token, head = lengths
    for sigma in (0.0, 0.3, 2.0):
        pages = structured(16, sigma, layer=layer, token=token, head=head)
        assert not verdicts(pages, said, said, ORDERS)


@pytest.mark.slow
def test_noise_says_nothing_over_many_pages() -> None:
    pages = noise(200, 8, 16, 2, CHANNELS, seed=int(np.random.default_rng().integers(2**31)))
    for said in ORDERS:
        assert not verdicts(pages, ORDERS[0], said, ORDERS)


def test_weak_structure_is_left_alone_rather_than_guessed() -> None:
    pages = structured(8, sigma=0.1, head=1)
    assert not verdicts(pages, ORDERS[0], ORDERS[1], ORDERS)


def test_rows_of_padding_are_not_looked_at() -> None:
    said, rival = order(ORDERS[0], head=1), order(ORDERS[1], head=1)
    test = OrderTest(said, [rival], range(LAYERS - 1))
    read_rows: list[int] = []

    def read(which: Any, numbers: Any, channels: int) -> Values:
        read_rows.extend(numbers.tolist())
        return noise(len(which), 1, len(numbers), channels)

    test.contradictions(read, 1)
    layers, _, _ = said.coordinates(np.array(read_rows))
    assert layers.max() < LAYERS - 1
