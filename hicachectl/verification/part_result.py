"""Result of a verification of a part: counts, findings, and why a repair was refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from hicachectl.formats.arrays import Count  # noqa: TC001 - msgspec reads it
from hicachectl.pages.census import MOST_BYTES
from hicachectl.text.units import minute

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pyarrow as pa

    from hicachectl.pages.tally import Tally


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why a repair did not believe the profile: a finding of most of the newest pages.

    code: the code of the finding.
    detail: both sizes of a wrong size, else "".
    newest: the number of newest pages judged.
    newest_affected: how many of these have the finding.
    pages: the number of all pages judged.
    affected: how many of all have the finding.
    part: the number of the run's part; None in one process.
    since: the time from which at least half of the pages have the finding, in Unix seconds; None
        without times.
    """

    code: str
    detail: str = ""
    newest: Count
    newest_affected: Count
    pages: Count
    affected: Count
    part: Count | None = None
    since: Annotated[float, msgspec.Meta(ge=0, le=2**32)] | None = None

    @property
    def text(self) -> str:
        """The finding with its counts, as a sentence."""
        detail = f" ({self.detail})" if self.detail else ""
        since = "" if self.since is None else f", since {minute(int(self.since) * 10**9)} UTC"
        return (
            f"{self.newest_affected} of the {self.newest} newest pages, and {self.affected} of all "
            f"{self.pages}, have {self.code}{detail}{since}"
        )


class ReadCounts(msgspec.Struct, kw_only=True):
    """Counts of a reading; `+` adds those of other objects.

    gone: objects that vanished since the listing.
    objects_read: objects that were tried.
    bytes_read: bytes of the objects that were read whole.
    compared: objects that the store compared with a digest of its own.
    undigested: objects without such a digest, in a store that has digests.
    unranked: objects read whole whose trailers name no rank.
    complete: whether the time limit left no object unread.
    """

    gone: Count = 0
    objects_read: Count = 0
    bytes_read: Count = 0
    compared: Count = 0
    undigested: Count = 0
    unranked: Count = 0
    complete: bool = True

    def __add__(self, other: ReadCounts) -> ReadCounts:
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        sums: dict[str, Any] = dict(zip(self.__struct_fields__, map(sum, pairs), strict=True))
        return ReadCounts(**sums | {"complete": self.complete and other.complete})


class VerifyFacts(msgspec.Struct, kw_only=True):
    """Counts and texts about a part; `+` adds those of another part.

    nbytes: listed bytes; None if a size is not known.
    in_flight: page groups in flight.
    sampled: pages with an object to read.
    to_read: objects chosen to be read.
    planned: objects chosen to be read, by check group.
    devices: names; none for the CPU.
    skipped: reason by name for `skipped_checks`.
    listed: objects of the part.
    explained: why nothing was checked in the part, else ""; a sum has none.
    repaired: page groups that a repair removed.
    quarantined: objects that a repair put into the quarantine.
    unrepaired: whether a repair failed.
    misleading: page groups with findings that mislead servers, if a repair removed groups.
    misleading_ns: mtime of their earliest object, Unix ns; None if there is none or it is unknown.
    refused: why a repair was refused.
    doubted: why repairs would be refused without --despite-profile, by the code that they name in
        addition to errors; "" is for a repair of errors alone.
    """

    nbytes: Count | None
    in_flight: Count = 0
    sampled: Count = 0
    to_read: Count = 0
    planned: dict[str, int] = {}
    reading: ReadCounts = msgspec.field(default_factory=ReadCounts)
    devices: tuple[str, ...] = ()
    seconds: float = 0.0
    remarks: tuple[str, ...] = ()
    skipped: dict[str, str] = {}
    listed: Count = 0
    explained: str = ""
    repaired: Count = 0
    quarantined: Count = 0
    unrepaired: bool = False
    misleading: Count = 0
    misleading_ns: int | None = None
    refused: tuple[Refusal, ...] = ()
    doubted: dict[str, Refusal] = {}

    def __add__(self, other: VerifyFacts) -> VerifyFacts:
        known = None not in (self.nbytes, other.nbytes)
        joined: dict[str, Any] = {
            "nbytes": min((self.nbytes or 0) + (other.nbytes or 0), MOST_BYTES) if known else None,
            "planned": {
                check: self.planned.get(check, 0) + other.planned.get(check, 0)
                for check in self.planned | other.planned
            },
            "devices": _distinct(self.devices + other.devices),
            "remarks": _distinct(self.remarks + other.remarks),
            "skipped": other.skipped | self.skipped,
            "doubted": other.doubted | self.doubted,
            "explained": "",
            "unrepaired": self.unrepaired or other.unrepaired,
            "misleading_ns": min(
                (one for one in (self.misleading_ns, other.misleading_ns) if one is not None),
                default=None,
            ),
        }
        for name in self.__struct_fields__:
            if name not in joined:
                joined[name] = getattr(self, name) + getattr(other, name)
        return VerifyFacts(**joined)


@dataclass(slots=True)
class PartResult:
    """Result of a part for the report.

    found: findings, of `checks.findings.RUN_SCHEMA`, or of NAMED_SCHEMA from a run directory.
    evidence: facts about some objects that were read, of `checks.evidence.EVIDENCE_SCHEMA`.
    """

    facts: VerifyFacts
    tally: Tally
    found: pa.Table
    evidence: pa.Table


def _distinct(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))
