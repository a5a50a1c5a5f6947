"""Detect from the bytes of a page in which order its rows were stored.

A row is one token of one layer and head. A channel keeps its relative magnitude from token to
token, and each (layer, head) has its own magnitudes. So rows of one layer and head resemble each
other more than they resemble other rows, unless rows are read in a wrong order.

Each test compares sets of five rows, a base row and four others:
    near, far  have the base's layer and head in the profile's order; near is the adjacent token,
    other      has the base's layer and head in a *rival* order only, and another token,
    control    has the base's layer and head in no order.
Resemblance is the correlation of log magnitudes over channels, without the part that all rows
share. Scales of rows, layers or heads do not matter. If the profile is right, `near` and `far`
resemble the base, and `other` resembles it no more than `control` does. If the rival is right, only
`other` resembles the base. There is a finding only if the rival order shows and the profile's order
does not. The test abstains if neither order shows, as in noise, or with few layers or tokens. It
also abstains if both orders show. Rows are then copies, or drift smoothly, or have RoPE phases, and
at least `near` resembles the base.

Float bits without the sign approximate the logarithm to within a few percent. The test compares
these bits, so any float format works.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hicachectl.formats.arrays import BoolArray, IntArray

    Floats = npt.NDArray[np.float32]
    # Takes page indices, row indices and the number of channels to read. Returns log magnitudes
    # [pages, tensors, rows, channels], which the caller may change.
    ReadRows = Callable[[IntArray, IntArray, int], Floats]

# A page contradicts the profile if it passes all these limits. By chance, less than one page in 1e8
# passes MIN_SIGMA. The other limits reject bytes that are neither random nor healthy rows.
MIN_SIGMA = 8.0
MIN_GAIN = 0.05  # least lead in correlation of the rival order over the control
MAX_OWN_SHARE = 0.25  # largest part of this lead that the profile's order may have
MIN_SETS = 32  # with fewer sets, a few odd rows could decide
MAX_SETS = 192

# Two quick looks at few rows and channels spare most pages the full test.
FIRST_SETS, FIRST_CHANNELS = 32, 32
SECOND_SETS, SECOND_CHANNELS = 64, 64
_SCREEN_OWN_SIGMA = 5.0  # above this, the profile's order counts as seen
_SCREEN_OTHER_SIGMA = 2.0  # below this, the full test would hardly reach MIN_SIGMA
_CHANNELS = 128

_DRAWS = 32_768
_ITEMS_AT_ONCE = 1 << 18

_COPY = 0.95  # above this correlation, rows are copies and show no order
# If a smaller share of a row's length is left without the mean of all rows, the row is like all
# others and shows no order.
NOTHING_LEFT = 0.05
# Log magnitudes below the row's mean by more than this many standard deviations are raised to this
# distance, because they show only that numbers are small.
FLOOR_SIGMA = 2.0

_BASE, _NEAR, _FAR, _OTHER, _CONTROL = range(5)


@dataclass(frozen=True, slots=True)
class RowOrder:
    """Order of a tensor's rows.

    axes: axes of the row number, outermost first: layer, token and, if present, head.
    lengths: lengths of the axes.
    """

    axes: tuple[str, ...]
    lengths: tuple[int, ...]

    def rows(self, layer: IntArray, token: IntArray, head: IntArray) -> IntArray:
        """Return the row numbers of (layer, token, head)."""
        by_name = {"layer": layer, "token": token, "head": head}
        number = np.zeros_like(layer)
        for axis, length in zip(self.axes, self.lengths, strict=True):
            number = number * length + by_name[axis]
        return number

    def coordinates(self, rows: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Return (layer, token, head) of row numbers; head is 0 if there is no head axis."""
        found = dict(zip(self.axes, np.unravel_index(rows, self.lengths), strict=True))
        return found["layer"], found["token"], found.get("head", np.zeros_like(rows))

    def length(self, axis: str) -> int:
        """Return the length of an axis; 1 if the rows do not have the axis."""
        return dict(zip(self.axes, self.lengths, strict=True)).get(axis, 1)

    @property
    def visible(self) -> tuple[str, ...]:
        """The axes longer than 1. The order of shorter axes does not change where rows lie."""
        return tuple(a for a, n in zip(self.axes, self.lengths, strict=True) if n > 1)


@dataclass(frozen=True, slots=True)
class OrderVerdict:
    """Evidence of one page against the profile's order.

    rival: index of the better order.
    own: the base's mean correlation with `near` or with `far`, the larger one, minus its mean
        correlation with `control`.
    other: the base's mean correlation with `other`, minus its mean correlation with `control`.
    sigma: least number of standard errors by which `other` exceeds `control`, `near` and `far`.
    sets: number of sets in the means.
    """

    rival: int
    own: float
    other: float
    sigma: float
    sets: int


@dataclass(frozen=True, slots=True, eq=False)
class OrderLook:
    """Rows of each tensor that a look compares: [3, sets], a base and two others.

    A look reads every `step`-th of the first `width` items of a row. If `scaled`, the items are
    codes, and their scales (fp32, one for every 128 codes) follow the codes in the row.
    """

    layer: IntArray
    token: IntArray
    head: IntArray
    width: int
    step: int
    itemsize: int
    scaled: bool


class OrderTest:
    """Comparison of the profile's row order with rival orders."""

    def __init__(self, stored: RowOrder, rivals: Sequence[RowOrder], layers: Iterable[int]) -> None:
        """Draw the rows to compare.

        stored: the profile's order.
        rivals: the orders to compare with.
        layers: indices of the stored layers that are not padding.
        """
        self.stored = stored
        usable = tuple(sorted(layers))
        distinct = {r.visible: (n, r) for n, r in enumerate(rivals) if r.visible != stored.visible}
        others = tuple(rival for _, rival in distinct.values())
        sets = {n: _draw(stored, rival, others, usable) for n, rival in distinct.values()}
        self._sets = {n: rows for n, rows in sets.items() if rows.shape[1] >= MIN_SETS}

    @property
    def decidable(self) -> bool:
        """Whether any rival order can be distinguished from the profile's."""
        return bool(self._sets)

    def contradictions(self, read: ReadRows, pages: int) -> dict[int, OrderVerdict]:
        """Return the verdict of each page that contradicts the profile. pages: number of pages."""
        found: dict[int, OrderVerdict] = {}
        suspects = _filtered(np.arange(pages), self.unseen, read)
        for number, sets in self._sets.items():
            for page in _filtered(suspects, partial(_is_hinted, sets), read).tolist():
                verdict = _verdict(number, _read_sets(read, np.array([page]), sets, _CHANNELS))
                if verdict and (page not in found or found[page].other < verdict.other):
                    found[page] = verdict
        return found

    def unseen(self, read: ReadRows, pages: IntArray) -> BoolArray:
        """Return which pages do not show the profile's order at a first look: [pages]."""
        if not self._sets or not len(pages):
            return np.zeros(len(pages), np.bool_)
        base, near, far = _read_sets(read, pages, self.first_sets, FIRST_CHANNELS)
        own = _correlation(base, near) + _correlation(base, far)
        return is_unseen(own * np.float32(0.5), _filled(base))

    @property
    def first_sets(self) -> IntArray:
        """Rows of a first look, in the profile's order: [base near far, sets]."""
        return next(iter(self._sets.values()))[: _FAR + 1, :FIRST_SETS]

    @property
    def second_sets(self) -> list[IntArray]:
        """Rows of a second look, for each rival: [base other control, sets]."""
        return [sets[[_BASE, _OTHER, _CONTROL], :SECOND_SETS] for sets in self._sets.values()]


def is_unseen(own: Floats, usable: BoolArray, margin: float = 0.0) -> BoolArray:
    """Return which pages do not show the profile's order, from correlations [pages, sets].

    margin: rounding error of the correlations.
    """
    mean, error = _mean_and_error(own, usable, MIN_SETS // 2)
    unseen: BoolArray = (mean - margin < _SCREEN_OWN_SIGMA * error) | (mean - margin < MIN_GAIN)
    return unseen


def _filtered(
    pages: IntArray, keep: Callable[[ReadRows, IntArray], BoolArray], read: ReadRows
) -> IntArray:
    """Return the pages that `keep` selects. It is called with a bounded number of pages at once."""
    step = max(1, _ITEMS_AT_ONCE // (3 * SECOND_SETS * SECOND_CHANNELS))
    kept = [pages[i : i + step] for i in range(0, len(pages), step)]
    return np.concatenate([pages[:0], *(some[keep(read, some)] for some in kept)])


def _is_hinted(sets: IntArray, read: ReadRows, pages: IntArray) -> BoolArray:
    chosen = sets[[_BASE, _OTHER, _CONTROL], :SECOND_SETS]
    base, other, control = _read_sets(read, pages, chosen, SECOND_CHANNELS)
    gain = _correlation(base, other) - _correlation(base, control)
    return is_hinted(gain, _filled(base))


def is_hinted(gain: Floats, usable: BoolArray, margin: float = 0.0) -> BoolArray:
    """Return which pages hint at a rival order, from correlation gains [pages, sets].

    margin: see `is_unseen`.
    """
    mean, error = _mean_and_error(gain, usable, MIN_SETS // 2)
    hinted: BoolArray = mean + margin >= _SCREEN_OTHER_SIGMA * error
    return hinted


def log_magnitudes(bits: npt.NDArray[Any]) -> Floats:
    """Return log magnitudes of floats of any format, given as unsigned integers.

    Scale and offset of the logarithm depend on the format. NaN and infinity give large numbers.
    """
    magnitudes = bits & bits.dtype.type((1 << (8 * bits.itemsize - 1)) - 1)
    logarithms: Floats = magnitudes.astype(np.float32)
    return logarithms


# --- choosing rows ---


@lru_cache(maxsize=1024)  # the ranks of a deployment have few forms; a draw takes 20 ms
def _draw(
    stored: RowOrder, rival: RowOrder, rivals: tuple[RowOrder, ...], layers: tuple[int, ...]
) -> IntArray:
    """Draw distinct sets of rows: [base near far other control, sets], read-only."""
    tokens, heads = stored.length("token"), stored.length("head")
    if tokens < 3 or not len(layers):
        return np.zeros((5, 0), np.int64)
    rng = np.random.default_rng(20_011)  # the same rows in every page and run
    layer, layer_2 = rng.choice(layers, (2, _DRAWS))
    token, token_2, token_3, their_token = rng.integers(tokens, size=(4, _DRAWS))
    head, head_2 = rng.integers(heads, size=(2, _DRAWS))
    base = stored.rows(layer, token, head)
    near = stored.rows(layer, (token + rng.choice([-1, 1], _DRAWS)) % tokens, head)
    far = stored.rows(layer, token_2, head)
    their_layer, _, their_head = rival.coordinates(base)
    other = rival.rows(their_layer, their_token, their_head)
    other_layer, other_token, _ = stored.coordinates(other)
    control_token = np.where(rng.random(_DRAWS) < 0.5, other_token, token_3)
    control = stored.rows(layer_2, control_token, head_2)
    good = (token != token_2) & (other != base) & np.isin(other_layer, layers)
    good &= _strangers(stored, base, other) & _strangers(stored, base, control)
    for reading in rivals:
        for row in (near, far, control):
            good &= _strangers(reading, base, row)
    # Rows of one token may resemble each other across layers, and so may rows a fixed number of
    # tokens apart. Both kinds of rows can imitate a rival order. For example, a page with as many
    # layers as tokens, and equal weights in all layers, would seem transposed. So sets with such
    # rows are used only if too few others exist, as when the lengths of axes divide each other.
    elsewhere = other_token != token
    matched = control_token == other_token
    unlike = control_token != token
    ranked = (good & elsewhere & matched, good & elsewhere & unlike, good & matched, good & unlike)
    sets = np.stack([base, near, far, other, control])
    drawn = [_distinct(sets[:, chosen]) for chosen in ranked]
    enough = max(rows.shape[1] for rows in drawn) / 2
    best = next(rows for rows in drawn if rows.shape[1] >= enough)
    best.setflags(write=False)
    return best


def _distinct(sets: IntArray) -> IntArray:
    _, first = np.unique(sets[[_BASE, _OTHER]], axis=1, return_index=True)
    return np.ascontiguousarray(sets[:, np.sort(first)[:MAX_SETS]])


def _strangers(reading: RowOrder, base: IntArray, row: IntArray) -> BoolArray:
    """Return which pairs of rows differ in layer or head, read in an order: [sets]."""
    layer, _, head = reading.coordinates(base)
    layer_2, _, head_2 = reading.coordinates(row)
    return ~(np.equal(layer, layer_2) & np.equal(head, head_2))


# --- comparing rows ---


def _read_sets(read: ReadRows, pages: IntArray, sets: IntArray, channels: int) -> list[Floats]:
    """Read and standardise rows. Return [pages, tensors * sets, channels] for each role.

    sets: [roles, sets] row numbers.
    """
    rows = _standardised(read(pages, sets.reshape(-1), channels))
    n, tensors, _, width = rows.shape
    by_role = rows.reshape(n, tensors, *sets.shape, width)
    return [
        by_role[:, :, role].reshape(n, tensors * sets.shape[1], width) for role in range(len(sets))
    ]


def _standardised(rows: Floats) -> Floats:
    """Subtract the mean of all rows, and scale each row to length 1.

    A row of which nothing is left after the subtraction becomes 0, see NOTHING_LEFT.
    rows: [n, tensors, rows, channels], overwritten.
    """
    rows -= rows.mean(axis=-1, keepdims=True)
    spread = _lengths(rows) / np.sqrt(rows.shape[-1])
    np.maximum(rows, -FLOOR_SIGMA * spread.astype(np.float32), out=rows)
    rows -= rows.mean(axis=-1, keepdims=True)
    before = _lengths(rows)
    # Channels that are large in every layer resemble each other in any order.
    rows -= rows.mean(axis=-2, keepdims=True)
    length = _lengths(rows)
    rows /= np.where(length > NOTHING_LEFT * before, length, np.inf)
    return rows


def _lengths(rows: Floats) -> Floats:
    lengths: Floats = np.sqrt(np.einsum("...c,...c->...", rows, rows))[..., np.newaxis]
    return lengths


def _filled(rows: Floats) -> BoolArray:
    """Return which rows are not all zeros: [pages, sets]."""
    filled: BoolArray = np.einsum("nsc,nsc->ns", rows, rows) > 0
    return filled


def _correlation(one: Floats, two: Floats) -> Floats:
    correlation: Floats = np.einsum("nsc,nsc->ns", one, two)
    return correlation


def _mean_and_error(values: Floats, usable: BoolArray, least: int) -> tuple[Floats, Floats]:
    """Return the mean and the standard error of the usable values of each page: [pages].

    The mean is 0 if a page has fewer than `least` usable values.
    """
    count = np.maximum(usable.sum(axis=1), 2)
    mean = np.where(usable, values, 0).sum(axis=1) / count
    squares = np.where(usable, (values - mean[:, np.newaxis]) ** 2, 0).sum(axis=1)
    error = np.sqrt(squares / (count - 1) / count)
    mean = np.where(count >= least, mean, 0)
    return mean.astype(np.float32), np.maximum(error, 1e-6).astype(np.float32)


def _mean_of_page(values: Floats, usable: BoolArray) -> tuple[float, float]:
    mean, error = _mean_and_error(values, usable, MIN_SETS)
    return float(mean[0]), float(error[0])


def _verdict(rival: int, roles: list[Floats]) -> OrderVerdict | None:
    base = roles[_BASE]
    to_near, to_far, to_other, to_control = (_correlation(base, row) for row in roles[1:])
    usable = np.all([_filled(row) for row in roles], axis=0)
    usable &= np.max([to_near, to_far, to_other, to_control], axis=0) < _COPY
    gain, error = _mean_of_page(to_other - to_control, usable)
    sigma, own = gain / error, -1.0
    for to_own in (to_near, to_far):
        lead, error = _mean_of_page(to_other - to_own, usable)
        sigma = min(sigma, lead / error)
        own = max(own, gain - lead)
    if sigma < MIN_SIGMA or gain < MIN_GAIN or own > MAX_OWN_SHARE * gain:
        return None
    return OrderVerdict(rival, own, gain, sigma, int(usable.sum()))
