"""Checks of `doctor` about a server's settings, by its own replies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicachectl.doctor.checks import FAIL, OK, SERVER, Check

if TYPE_CHECKING:
    from hicachectl.doctor.live_server import LiveServer


def setting_checks(server: LiveServer) -> list[Check]:
    """Return what a server's settings say, in the order of causes."""
    if server.problem:
        what, _, remedy = server.problem.partition("; ")
        return [_check(server, "reachable", FAIL, what, next=remedy)]
    return [_check(server, "reachable", OK, "The server answers")]


def _check(
    server: LiveServer, name: str, status: str, detail: str, *, evidence: str = "", next: str = ""
) -> Check:
    return Check(
        name=name,
        group=SERVER,
        status=status,
        detail=detail,
        evidence=evidence,
        next=next,
        server=server.url,
    )
