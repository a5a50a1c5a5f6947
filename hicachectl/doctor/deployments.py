"""Checks of `doctor` about a server's deployment beside the deployments of the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicachectl.doctor.checks import Check
    from hicachectl.doctor.live_server import LiveServer
    from hicachectl.doctor.stores import StoreSeen


def deployment_checks(server: LiveServer, seen: StoreSeen) -> list[Check]:
    """Return how a server's deployment differs from those that the store has pages of."""
    return []
