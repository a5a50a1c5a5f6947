"""Counters that an SGLang server shows at `/metrics`: one bounded look, and growth between two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicachectl.backends.http import HttpService

    Sample = tuple[str, frozenset[tuple[str, str]]]  # name and labels


@dataclass(frozen=True, slots=True)
class Look:
    """Counters of a server at one moment, or their growth.

    at: time of the look on the monotonic clock, in seconds.
    samples: value of each counter or histogram bucket, by name and labels; None without metrics.
    problem: why `samples` is None, in one sentence with the next step; else empty.
    """

    at: float
    samples: Mapping[Sample, float] | None
    problem: str = ""

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of a name that have these labels; 0 without any."""
        wanted = labels.items()
        return sum(
            value
            for (sample, found), value in (self.samples or {}).items()
            if sample == name and wanted <= found
        )


def look_at(service: HttpService, base: str) -> Look:
    """Return one look at a server's metrics.

    service, base: the client and path of `profiles.server.server_service`. Metrics that are off, or
    cannot be read, are a look with a `problem`. Raises nothing.
    """
    raise NotImplementedError


def growth(first: Look, second: Look) -> Look | None:
    """Return by how much each counter grew between two looks; None if the server has restarted.

    A counter that falls or vanishes tells a restart. A look without metrics has no growth.
    """
    raise NotImplementedError
