"""Group requests by model, salt, adapter, server, or the age of their session."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.formats.errors import UsageError
from hicachectl.formats.wording import not_one_of
from hicachectl.text.vocabulary import GROUPINGS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicachectl.formats.arrays import IntArray
    from hicachectl.requests.chains import Requests

_LABELS = {name: name for name in GROUPINGS} | {"session-age": "session"}
_AGES = ((60, "< 1 min"), (600, "< 10 min"), (3600, "< 1 h"))
_FIRST, _OLDER = "first turn", "1 h and more"


@dataclass(frozen=True, eq=False, slots=True)
class Grouping:
    """Requests in groups.

    by: a word of `GROUPINGS`; None for one group of all requests.
    names: name of each group; None for requests of which the group is unknown.
    ids: [requests] group of each request.
    """

    by: str | None
    names: Sequence[str | None]
    ids: IntArray


def grouping_of(requests: Requests, by: str) -> Grouping:
    """Return the groups of requests. Raises UsageError if the input does not tell the groups."""
    if by not in GROUPINGS:
        raise UsageError(not_one_of("by", by, GROUPINGS))
    found = requests.labels.get(_LABELS[by])
    if found is None:
        raise UsageError(
            f"--by {by}: {requests.source} does not tell the {_LABELS[by]} of a request; leave out "
            f"{by}, or record it"
        )
    if by != "session-age":
        return Grouping(by, found.names, found.ids.astype(np.int64))
    if requests.times is None or requests.seconds_per_unit is None:
        raise UsageError(
            f"--by {by}: {requests.source} has no times in a known unit; leave out {by}, or record "
            "times"
        )
    seconds = requests.times * requests.seconds_per_unit
    order = np.argsort(seconds, kind="stable")
    sessions, places = np.unique(found.ids[order], return_index=True)
    starts = order[places]
    first = np.zeros(len(found.names))
    first[sessions] = seconds[starts]
    ages = seconds - first[found.ids]
    ids = 1 + np.searchsorted([limit for limit, _ in _AGES], ages, side="right")
    ids[starts] = 0
    # Requests of an unknown session belong to the last group, which has no name.
    unknown = [name is None for name in found.names]
    ids[np.array(unknown)[found.ids]] = len(_AGES) + 2
    return Grouping(by, (_FIRST, *(text for _, text in _AGES), _OLDER, None), ids)


def everyone(requests: Requests) -> Grouping:
    """Return one group of all requests."""
    return Grouping(None, (None,), np.zeros(len(requests), np.int64))
