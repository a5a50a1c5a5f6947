"""Result of the verification of a part of a run: counts, findings, reasons for refused repairs."""

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
    """Reason why a repair was refused.

    Most of the newest pages have one finding, so the repair did not trust the profile.
    code: code of the finding.
    detail: the wrong and the right size, if the finding is about sizes; else "".
    newest: number of newest pages judged.
    newest_affected: number of the newest pages that have the finding.
    pages: number of all pages judged.
    affected: number of all judged pages that have the finding.
    part: number of the part of the run; None if the run has one process.
    since: Unix seconds. Of the pages written from then on, at least half have the finding. None if
        the store keeps no times.
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
    """Counts of a reading. `+` adds the counts of other objects.

    gone: number of objects that vanished since the listing.
    objects_read: number of objects whose read was tried.
    bytes_read: bytes of the objects that were read whole.
    compared: number of objects that the store compared with its own digest of the object.
    undigested: number of objects that were not compared, because the store has no digest of them.
    unranked: number of objects that were read whole and whose trailers name no rank.
    complete: whether each object was read or tried before the time limit.
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
    """Counts and texts about a part. `+` adds the counts and texts of another part.

    nbytes: listed bytes; None if a size is unknown.
    in_flight: number of page groups in flight.
    sampled: number of pages with an object to read.
    to_read: number of objects chosen to be read.
    planned: number of objects chosen to be read, by check group.
    devices: names of the devices; empty for the CPU.
    skipped: why something was not checked, by its name in `skipped_checks`.
    listed: number of objects in the part.
    explained: why nothing was checked in the part; "" if something was, and in the sum of parts.
    repaired: number of page groups that a repair removed.
    quarantined: number of objects that a repair put into the quarantine.
    repairs: remarks of the repair.
    unrepaired: whether a repair failed.
    misleading: number of removed page groups with findings that mislead servers; 0 if no repair
        removed a group.
    misleading_ns: mtime of the earliest object of the misleading groups, Unix nanoseconds; None if
        there are no such groups or the time is unknown.
    refused: reasons why a repair was refused.
    doubted: why a repair would be refused without --despite-profile, by the code that the repair
        takes in addition to errors. The key "" stands for a repair of errors alone.
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
    repairs: tuple[str, ...] = ()
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

    found: findings in the columns of `checks.findings.RUN_SCHEMA`. Findings that were read from a
        run directory have the columns of NAMED_SCHEMA.
    evidence: facts about some of the objects read, in the columns of
        `checks.evidence.EVIDENCE_SCHEMA`.
    """

    facts: VerifyFacts
    tally: Tally
    found: pa.Table
    evidence: pa.Table


def _distinct(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))
