"""What a cache is worth to requests: hits by capacity, and the hits that a store loses today."""

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

    verdicts: what the rows say, what the store serves as it is, and whether it has room.
    rows: rows of `simulate` for all requests.
    document: its document.
    remarks: what the shares refer to, and what they do not show.
    """

    verdicts: tuple[str, ...]
    rows: list[dict[str, Any]]
    document: dict[str, Any]
    remarks: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """Number of prompt tokens that shares refer to."""
        return int(self.rows[0]["tokens"])


def worth_of(
    measured: HitsRequest,
    policy: Policy,
    held: tuple[PageGroups, Hits] | None,
    free_bytes: int | None = None,
) -> Worth | str:
    """Return the hits of caches, or why they are unknown.

    measured: the requests, in the order of their times.
    policy: policy by which the store evicts.
    held: all pages of the store, of which the first deployment is measured, and the hits of the
        requests in them; None leaves out what the store holds and loses today.
    free_bytes: bytes that the store has free; None if it does not tell.
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
