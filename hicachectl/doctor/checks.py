"""A check of `doctor`, the statuses and order of checks, and their verdict."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, TypedDict

from hicachectl.formats.wording import divided

if TYPE_CHECKING:
    from collections.abc import Iterable

# Best first.
OK, UNKNOWN, WARN, FAIL = STATUSES = ("ok", "unknown", "warn", "fail")
SERVER, SAME_STORE, STORE, LIVE, REQUESTS = GROUPS = (
    "server",
    "same-store",
    "store",
    "live",
    "requests",
)


@dataclass(frozen=True, slots=True)
class Check:
    """Answer to one question about a server or its store.

    name: fixed name in the group, such as `page-size`.
    status: one of STATUSES; `unknown` if nothing was found that answers the question.
    detail: the answer, in one sentence that names its subject.
    group: one of GROUPS.
    evidence: observation behind the answer, such as `page_size 64 in internal_states[0]`; empty if
        `detail` has it.
    next: the next command or flag; empty if no action is needed.
    server: URL of the server that the check is about; empty if it is about the store alone.
    """

    name: str
    status: str
    detail: str
    _: KW_ONLY
    group: str
    evidence: str = ""
    next: str = ""
    server: str = ""

    @classmethod
    def of_message(
        cls, name: str, status: str, message: str, *, group: str, server: str = ""
    ) -> Check:
        """Return a check with the detail and the next step of a message."""
        detail, next_step = divided(message)
        return cls(name, status, detail, group=group, next=next_step, server=server)


class CheckRow(TypedDict):
    """Row of `doctor`."""

    name: str
    group: str
    server: str | None
    status: str
    detail: str
    evidence: str | None
    next: str | None


def ordered(checks: Iterable[Check]) -> list[Check]:
    """Return checks, the worst first. Checks of one status keep their order."""
    return sorted(checks, key=lambda check: -STATUSES.index(check.status))


def verdict_of(checks: Iterable[Check]) -> str:
    """Return the worst status of some checks; `unknown` if there are none."""
    return max((check.status for check in checks), key=STATUSES.index, default=UNKNOWN)
