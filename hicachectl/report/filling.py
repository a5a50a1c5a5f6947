"""Measure how fast a store fills. Count its bytes by last write, by deployment, and by last use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.pages.census import byte_sum, byte_sums
from hicachectl.report.writes import owners_of
from hicachectl.verification.report_text import AGE_BOUNDS, AGE_CLASSES

if TYPE_CHECKING:
    from hicachectl.pages.groups import PageGroups

_DAY = 86400
_WINDOWS = (_DAY, 7 * _DAY, 30 * _DAY)
_LEAST = 3600  # shortest time since the first write from which a rate is computed, in seconds


@dataclass(frozen=True, slots=True)
class Window:
    """Bytes written within a window of time that ends now.

    seconds: length of the window.
    nbytes: bytes of the objects last written in the window.
    is_all: whether the window begins with the first write of a page.
    """

    seconds: float
    nbytes: int
    is_all: bool = False

    @property
    def per_day(self) -> float:
        """Bytes written in a day, as the average of the window."""
        return self.nbytes * _DAY / self.seconds

    def days_until_full(self, free_bytes: int) -> float | None:
        """Return in how many days the free bytes are written; None if nothing is written."""
        return free_bytes / self.per_day if self.nbytes else None


@dataclass(frozen=True, slots=True)
class Owner:
    """Bytes of a deployment.

    recent: bytes last written in the main window of `Filling`.
    """

    name: str
    nbytes: int
    recent: int


@dataclass(frozen=True, slots=True)
class Use:
    """Pages whose last use is of one age class.

    age: name of the class.
    pages: number of page groups.
    nbytes: bytes of the pages; None if unknown.
    """

    age: str
    pages: int
    nbytes: int | None


@dataclass(frozen=True, slots=True)
class Filling:
    """Growth of a store.

    nbytes: bytes of all objects of known size.
    unsized: number of objects of unknown size.
    windows: windows of time, the shortest first; empty if the store keeps no write times, or if the
        first write is too recent.
    main: window from which the rate is taken; None if there are no windows.
    owners: deployments, most bytes first.
    uses: pages by the age of their last use; empty if the store keeps no times.
    read_pages: number of page groups read after their last write; None if the store keeps no times
        of reads.
    is_part: whether filters chose the objects.
    """

    nbytes: int
    unsized: int
    windows: tuple[Window, ...]
    main: Window | None
    owners: tuple[Owner, ...]
    uses: tuple[Use, ...]
    read_pages: int | None
    is_part: bool


def filling_of(groups: PageGroups, now: float, *, is_part: bool) -> Filling:
    """Measure how fast a store fills. now: Unix seconds. is_part: see `Filling`."""
    inventory = groups.inventory
    sizes = inventory.objects.column("nbytes")
    nbytes = sizes.fill_null(0).to_numpy()
    times = inventory.objects.column("mtime_ns")
    ages = np.where(times.is_valid(), now - times.fill_null(0).to_numpy() / 1e9, np.inf)
    of_pages = (groups.of_object >= 0) & np.isfinite(ages)
    windows = tuple(
        Window(seconds, byte_sum(nbytes[ages <= seconds]), is_all)
        for seconds, is_all in _spans(float(ages.max(initial=0, where=of_pages)))
    )
    # The rate is that of the last 7 days, or of all days if the first write is younger.
    weeks = [window for window in windows if window.seconds <= _WINDOWS[1]]
    main = weeks[-1] if weeks else None
    recent = ages <= main.seconds if main else np.zeros(len(ages), dtype=np.bool_)
    names, owners = owners_of(inventory)
    sums = [
        byte_sums(nbytes[chosen], owners[chosen], len(names)).tolist()
        for chosen in (slice(None), recent)
    ]
    of_owners = (Owner(*one) for one in zip(names, *sums, strict=True) if one[1])
    return Filling(
        nbytes=byte_sum(nbytes),
        unsized=sizes.null_count,
        windows=windows,
        main=main,
        owners=tuple(sorted(of_owners, key=lambda one: -one.nbytes)),
        uses=tuple(_uses(groups, now)),
        read_pages=(
            int((groups.used_ns > groups.newest_ns).sum())
            if "atime_ns" in inventory.objects.column_names
            else None
        ),
        is_part=is_part,
    )


def _spans(longest: float) -> list[tuple[float, bool]]:
    """Return the lengths of the windows, and whether each is the longest.

    longest: seconds since the first write.
    """
    shorter: list[tuple[float, bool]] = [(span, False) for span in _WINDOWS if span < longest]
    return [*shorter, (longest, True)] if longest >= _LEAST else []


def _uses(groups: PageGroups, now: float) -> list[Use]:
    if not groups.has_times:
        return []
    classes = np.searchsorted(AGE_BOUNDS, now - groups.used_ns / 1e9, side="right")
    uses = []
    for number, age in enumerate(AGE_CLASSES):
        chosen = np.flatnonzero(classes == number)
        uses.append(Use(age, len(chosen), groups.total_bytes(chosen)))
    return uses
