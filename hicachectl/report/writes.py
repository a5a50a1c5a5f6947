"""Count the objects of a store by deployment and time of the last write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.pages.deployments import UNRESOLVED
from hicachectl.report.names import AMBIGUOUS, FOREIGN, deployment_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.formats.arrays import IntArray
    from hicachectl.pages.inventory import Inventory

_MINUTE, _HOUR, _DAY = 60, 3600, 86400
# Widths of a bin in seconds, with their names.
_WIDTHS = {5 * _MINUTE: "5 minutes", _HOUR: "hour", 6 * _HOUR: "6 hours", _DAY: "day",
           7 * _DAY: "7 days", 28 * _DAY: "28 days", 364 * _DAY: "364 days"}  # fmt: skip
_BINS = 72
_LEAST_BINS = 12
_TAIL = 0.02  # share of the times at each end that may be left out, so that the axis stays short
_SERIES = 6


@dataclass(frozen=True, slots=True)
class Writes:
    """Numbers of objects by deployment and time.

    start: Unix seconds of the start of the first bin.
    width: seconds of a bin.
    series: name and [bins] numbers of the largest deployments, most objects first, then of all
        others together.
    earlier, later: numbers of objects before and after the bins.
    """

    start: int
    width: int
    series: tuple[tuple[str, IntArray], ...]
    earlier: int
    later: int

    @property
    def bins(self) -> int:
        """Number of bins."""
        return len(self.series[0][1])

    @property
    def unit(self) -> str:
        """Name of the time of a bin, such as "hour"."""
        return _WIDTHS[self.width]

    @property
    def end(self) -> int:
        """Unix seconds of the end of the last bin."""
        return self.start + self.width * self.bins


def writes_of(inventory: Inventory) -> Writes | None:
    """Count the objects with a write time, by deployment and time. None if no object has a time."""
    times = inventory.objects.column("mtime_ns")
    known = times.is_valid().to_numpy()
    if not known.any():
        return None
    seconds = times.fill_null(0).to_numpy()[known] // 10**9
    names, owners = owners_of(inventory)
    owners = owners[known]
    first, last = _span(seconds)
    width = next((w for w in _WIDTHS if (last - first) // w < _BINS), max(_WIDTHS))
    end = last // width + 1
    start = min(first // width, end - _LEAST_BINS) * width
    # Times that lie decades apart could need any number of the widest bins.
    bins = min(end - start // width, 4 * _BINS)
    at = (seconds - start) // width
    drawn = (at >= 0) & (at < bins)
    return Writes(
        start=int(start),
        width=width,
        series=tuple(_series(names, owners[drawn], at[drawn], int(bins))),
        earlier=int((at < 0).sum()),
        later=int((at >= bins).sum()),
    )


def owners_of(inventory: Inventory) -> tuple[list[str], IntArray]:
    """Return the names of deployments, and the index of each object's name: [objects].

    Deployments of the same name count as one.
    """
    names = [*map(deployment_name, inventory.table.deployments), AMBIGUOUS, FOREIGN]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    of_affix = [
        numbers[(AMBIGUOUS if one.readings else FOREIGN) if at == UNRESOLVED else names[at]]
        for at, one in zip(inventory.table.deployment_ids, inventory.table.resolved, strict=True)
    ]
    return list(numbers), inventory.by_affix(of_affix, numbers[FOREIGN])


def _series(
    names: list[str], owners: IntArray, at: IntArray, bins: int
) -> Iterator[tuple[str, IntArray]]:
    """Yield the numbers of objects in each bin for the most frequent names, then for all others.

    owners: [objects] index of the object's name in `names`.
    at: [objects] bin of the object.
    """
    totals = np.bincount(owners, minlength=len(names))
    order = np.argsort(-totals, kind="stable")[: np.count_nonzero(totals)]
    places = np.full(len(names), _SERIES)
    places[order[:_SERIES]] = np.arange(len(order[:_SERIES]))
    codes = places[owners] * bins + at
    counts = np.bincount(codes, minlength=(_SERIES + 1) * bins).reshape(_SERIES + 1, bins)
    yield from zip((names[number] for number in order[:_SERIES].tolist()), counts, strict=False)
    if others := len(order[_SERIES:]):
        yield f"{others} others", counts[_SERIES]


def _span(seconds: IntArray) -> tuple[int, int]:
    """Return the first and the last time to draw.

    A few times are left out if they would squeeze all other times into one bin.
    """
    tail = int(len(seconds) * _TAIL)
    ordered = np.partition(seconds, (tail, len(seconds) - 1 - tail))
    low, high = int(ordered[tail]), int(ordered[len(seconds) - 1 - tail])
    first, last = int(seconds.min()), int(seconds.max())
    middle = max(high - low, _HOUR)
    return (
        first if low - first <= _BINS * middle else low,
        last if last - high <= _BINS * middle else high,
    )
