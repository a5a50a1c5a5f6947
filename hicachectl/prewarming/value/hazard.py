"""Model of how soon blocks are used again.

The model is a rate for each age, times a ratio for each factor.
The age of a block is the time since its last use. The rate is the chance per unit of time that a
block of this age is used again: the number of uses (events) divided by the time that blocks waited
at this age (exposure). Blocks that still wait at the end of the trace count as exposure. Ratios are
fitted proportionally, one factor after another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]
    Codes = npt.NDArray[np.int64]

_ROUNDS = 30
_CLOSE_ENOUGH = 1e-3
_SPANS_TO_MEDIAN = 5
_GROWTH = 1.5
# Share of the longest wait. It bounds the number of spans if most waits are 0.
_SHORTEST_TAIL = 1e-4


class Factor(NamedTuple):
    """A property that multiplies the rate, split into levels and age groups."""

    name: str
    levels: int
    age_groups: int = 1


class Waits(NamedTuple):
    """Waits of blocks for their next use. Arrays are [waits].

    cells: int64, number of the wait's cell. Waits of one cell have the same level in every factor.
    durations: float64, length of the wait.
    used: bool, False if the trace ended before the next use.
    weights: float64. A negative weight subtracts the wait.
    """

    cells: Codes
    durations: Floats
    used: npt.NDArray[np.bool_]
    weights: Floats


@dataclass(frozen=True, eq=False, slots=True)
class Hazards:
    """Fitted rates.

    edges:  [ages] float64, start of each age span. The last span has no end.
    base:   [ages] rates common to all blocks.
    ratios: for each factor, [levels, ages] ratio by which a level multiplies the rate.
    fading: age at which the rate of the last span equals the span's mean rate. Within this span,
        the rate falls as 1 / age.
    """

    edges: Floats
    base: Floats
    ratios: tuple[Floats, ...]
    fading: float

    def rates(self, codes: Codes) -> Floats:
        """Return the rates [rows, ages] for rows of codes [rows, factors]."""
        rates = np.tile(self.base, (len(codes), 1))
        for column, ratios in enumerate(self.ratios):
            rates *= ratios[codes[:, column]]
        return rates

    def chances(self, codes: Codes, ages: Floats, horizons: Sequence[float]) -> Floats:
        """Return the chance of a use within each horizon from now: [horizons, rows].

        ages: [rows], time since the last use.
        """
        rates = self.rates(codes)
        return np.stack([-np.expm1(-self._sum(rates, ages, ages + far)) for far in horizons])

    def _sum(self, rates: Floats, start: Floats, end: Floats) -> Floats:
        total = np.zeros(len(rates))
        for age, (low, high) in enumerate(zip(self.edges[:-1], self.edges[1:], strict=True)):
            within = np.minimum(end, high) - np.maximum(start, low)
            total += rates[:, age] * np.maximum(within, 0)
        old = np.maximum(start, (self.edges[-1] or 1.0))
        total += rates[:, -1] * self.fading * np.log(np.maximum(end, old) / old)
        return total


def age_edges(durations: Floats) -> Floats:
    """Return the starts of age spans, which are short at ages with many next uses.

    Up to the median, all spans have equally many uses. Beyond the median, each span is 1.5 times as
    long as the previous span.
    durations: durations of the waits that ended with a use; at least one is above 0.
    """
    shares = np.quantile(durations, np.linspace(0, 0.5, _SPANS_TO_MEDIAN + 1)[1:])
    longest = float(durations.max())
    last = max(float(shares[-1]), longest * _SHORTEST_TAIL)
    growing = last * _GROWTH ** np.arange(1, np.log(longest / last) / np.log(_GROWTH))
    return np.concatenate(([0.0], np.unique(shares[shares > 0]), growing))


def fit_hazards(
    waits: Waits,
    codes: Codes,
    factors: Sequence[Factor],
    edges: Floats,
    *,
    longest: float,
    prior: float,
) -> Hazards:
    """Return the rates fitted to waits.

    codes: [cells, factors] levels.
    longest: the longest wait that the trace could show.
    prior: events added with ratio 1, which pull rarely observed levels towards the mean.
    """
    events, exposure = _tabulate(waits, len(codes), edges)
    tiny = 1e-9
    base = (events.sum(0) + tiny) / (exposure.sum(0) + tiny)
    groups = [_age_groups(factor.age_groups, len(edges)) for factor in factors]
    members = [_members(codes[:, k], factor.levels) for k, factor in enumerate(factors)]
    seen = [member @ events @ group for member, group in zip(members, groups, strict=True)]
    ratios = [np.ones((factor.levels, len(edges))) for factor in factors]
    expected = exposure * base
    for _ in range(_ROUNDS):
        change = 0.0
        for k, group in enumerate(groups):
            unscaled = members[k] @ expected @ group / _mean(ratios[k], group)
            ratio = ((seen[k] + prior) / (unscaled + prior)) @ group.T
            scale = ratio / ratios[k]
            expected *= scale[codes[:, k]]
            ratios[k] = ratio
            change = max(change, float(np.abs(np.log(scale)).max(initial=0)))
        scale = (events.sum(0) + tiny) / (expected.sum(0) + tiny)
        expected *= scale
        base *= scale
        if change < _CLOSE_ENOUGH:
            break
    last = edges[-1] or 1.0
    longest = max(longest, 1.01 * last)
    fading = (longest - last) / np.log(longest / last)
    return Hazards(edges, base, tuple(ratios), float(fading))


def _tabulate(waits: Waits, cells: int, edges: Floats) -> tuple[Floats, Floats]:
    """Return the number of next uses, and the time waited: two arrays [cells, ages]."""
    ages = len(edges)
    # A wait that ends at an edge belongs to the span before the edge. In the span after the edge it
    # has no exposure, so its event would give an infinite rate. All waits of a regular trace end at
    # edges.
    ends = np.maximum(np.searchsorted(edges, waits.durations, side="left") - 1, 0)
    place = waits.cells * ages + ends

    def table(weights: Floats) -> Floats:
        sums: Floats = np.bincount(place, weights, cells * ages).astype(np.float64)
        return sums.reshape(cells, ages)

    events = table(np.where(waits.used, waits.weights, 0.0))
    exposure = table(waits.weights * (waits.durations - edges[ends]))
    ended = table(waits.weights)
    longer = ended[:, ::-1].cumsum(1)[:, ::-1] - ended  # waits that outlast each span
    exposure[:, :-1] += longer[:, :-1] * np.diff(edges)
    return events, exposure


def _age_groups(groups: int, ages: int) -> Floats:
    """Return the membership [ages, groups] in groups of about equal length."""
    groups = min(groups, ages)
    member = np.zeros((ages, groups))
    member[np.arange(ages), np.arange(ages) * groups // ages] = 1
    return member


def _mean(ratios: Floats, group: Floats) -> Floats:
    means: Floats = (ratios @ group) / group.sum(0)
    return means


def _members(codes: Codes, levels: int) -> Floats:
    """Return the membership [levels, cells]. A product with it sums cells by level."""
    return np.equal(codes, np.arange(levels)[:, None]).astype(np.float64)
