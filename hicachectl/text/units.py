"""Readable sizes and ages."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterable


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


class Ago(float):
    """Unix seconds, by this host's clock, of a time that was given as an age.

    seconds: the age.
    """

    seconds: float

    def __new__(cls, seconds: float) -> Self:
        """Return the time some seconds ago."""
        ago = super().__new__(cls, time.time() - seconds)
        ago.seconds = seconds
        return ago

    def by(self, now_ns: int) -> float:
        """Return the time that is this age ago by another clock.

        now_ns: present Unix nanoseconds of that clock.
        """
        return now_ns / 1e9 - self.seconds


def human_size(nbytes: int | None) -> str:
    """Return a readable size, such as `1.5 KiB` for 1536 bytes and `? B` for an unknown size."""
    if nbytes is None:
        return "? B"
    unit, scale = unit_of(nbytes)
    return f"{nbytes / scale:.0f} {unit}" if scale == 1 else f"{nbytes / scale:.1f} {unit}"


def unit_of(nbytes: int) -> tuple[str, int]:
    """Return the largest unit that is not larger than a size, and the bytes of that unit."""
    power = min((max(int(nbytes), 1).bit_length() - 1) // 10, len(_UNITS) - 1)
    return _UNITS[power], 1 << 10 * power


def human_age(seconds: float) -> str:
    """Return an age in its largest whole unit, such as `2h` for 7260 seconds."""
    for length, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= length:
            return f"{int(seconds // length)}{unit}"
    return f"{max(0, int(seconds))}s"


def minute(ns: int) -> str:
    """Return a time to the minute, in UTC, such as `2023-11-14 22:13`. ns: Unix nanoseconds."""
    return datetime.fromtimestamp(ns // 10**9, UTC).strftime("%Y-%m-%d %H:%M")


def exact(ns: int) -> str:
    """Return a time in the form that options take, such as `2023-11-14T22:13:20Z`.

    A fraction of a second has three or six digits. Nanoseconds are left out.
    ns: Unix nanoseconds.
    """
    seconds, micros = divmod(ns // 1000, 10**6)
    unit = "milliseconds" if micros % 1000 == 0 else "microseconds"
    moment = datetime.fromtimestamp(seconds, UTC).replace(microsecond=micros, tzinfo=None)
    return f"{moment.isoformat(timespec=unit if micros else 'seconds')}Z"


def written_between(oldest_ns: int, newest_ns: int) -> str:
    """Return when objects were written: `written 2023-11-14 22:13 to 2023-11-15 08:00 UTC`."""
    ends = dict.fromkeys((minute(oldest_ns), minute(newest_ns)))
    return f"written {' to '.join(ends)} UTC"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 page`, `2 pages`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


_NAMED = 8


def first_of(texts: Iterable[str]) -> str:
    """Return one line with the first eight distinct texts, and the number of further texts."""
    every = sorted(set(texts))
    more = [f"{len(every) - _NAMED} more"] if len(every) > _NAMED else []
    return ", ".join([*every[:_NAMED], *more])
