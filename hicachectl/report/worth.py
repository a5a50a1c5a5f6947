"""Measure the worth of a cache to requests: its hits by capacity, and the hits lost today."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hicachectl.formats.errors import FormatError, UsageError
from hicachectl.formats.eviction import Policy
from hicachectl.simulation.losses import look_at_listed
from hicachectl.simulation.shares import answer, room_texts, served_text
from hicachectl.simulation.simulate import SimulateRequest, simulate

if TYPE_CHECKING:
    from hicachectl.pages.groups import PageGroups
    from hicachectl.requests.hits import Hits
    from hicachectl.requests.measuring import HitsRequest


@dataclass(frozen=True, slots=True)
class Worth:
    """Hits of caches of several capacities.

    verdicts: messages on the result, on the share that the store serves today, and on its free
        space.
    rows: rows of `simulate` for all requests.
    document: document of `simulate`.
    remarks: messages about the tokens that are 100% of the shares, and about facts that no share
        shows.
    """

    verdicts: tuple[str, ...]
    rows: list[dict[str, Any]]
    document: dict[str, Any]
    remarks: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """Number of prompt tokens that are 100% of the shares."""
        return int(self.rows[0]["tokens"])


def worth_of(
    measured: HitsRequest,
    policy: Policy,
    held: tuple[PageGroups, Hits] | None,
    free_bytes: int | None = None,
) -> Worth | str:
    """Return the hits of caches, or why they are unknown.

    measured: requests, in the order of their times.
    policy: policy by which the store evicts.
    held: all pages of the store, and the hits of the requests in its first deployment. If None, the
        result says nothing about the present pages of the store.
    free_bytes: free bytes of the store; None if unknown.
    """
    request = SimulateRequest(
        requests=measured.requests,
        profile=measured.profile,
        policies=tuple(dict.fromkeys((policy, Policy.OPTIMAL))),
        threshold=measured.threshold,
    )
    try:
        today = None
        if held is not None:
            today = look_at_listed(*held, measured.requests, request.prefetch_threshold)
            today = replace(today, free_bytes=free_bytes)
        result = simulate(request, today=today)
    except (FormatError, UsageError) as error:
        return str(error)
    rows = result.rows.to_pylist()
    document, room = result.document, tuple(room_texts(result.document))
    texts = (answer(rows, document), *served_text(document), *room)
    remarks = tuple(text for text in result.remarks if text not in room)
    return Worth(texts, rows, document, remarks)
