"""Checks of `doctor` about requests: what the store can serve, and what servers restored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicachectl.doctor.checks import Check
    from hicachectl.doctor.stores import StoreSeen
    from hicachectl.requests.measuring import HitsRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Requests, and what servers say of them.

    request: the requests, the profile that they are measured by, and the prefetch threshold.
    server: URL of the server, else "".
    restored: tokens that the server took from storage since it started, by its metrics; None if
        unknown. Counts of a server's log come first.
    """

    request: HitsRequest
    server: str = ""
    restored: int | None = None


def request_checks(seen: StoreSeen, asked: Asked) -> list[Check]:
    """Return what a store can serve of requests beside what servers restored, causes first."""
    return []
