"""Results of the parts of a verification, and the report that adds them up."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any, TypedDict

import msgspec
import pyarrow.compute as pc
from msgspec import UNSET, UnsetType

from hicachectl.checks.codes import DESPITE, SEVERITIES
from hicachectl.checks.findings import (
    PLACED_SCHEMA,
    SCHEMA,
    Finding,
    combine_named,
    name_findings,
    severity_ranks,
)
from hicachectl.checks.registry import (
    DIGESTS,
    VALUES,
    CheckSums,
    Need,
    Scope,
    checks,
    reading_groups,
)
from hicachectl.formats.arrays import Count  # noqa: TC001 - msgspec reads it
from hicachectl.formats.errors import UsageError
from hicachectl.pages.census import MOST_BYTES
from hicachectl.pages.selection import explain_parts
from hicachectl.profiles.identities import expected_identities
from hicachectl.results import Result
from hicachectl.text.units import minute
from hicachectl.text.vocabulary import DEADLINE, NEVER
from hicachectl.verification.coverage import (
    digest_gaps,
    impossible_checks,
    indistinct_dtypes,
    nothing_selected,
    rank_gaps,
    reading_gaps,
    unjudged,
)
from hicachectl.verification.reading import known_specs
from hicachectl.verification.report_text import Mending, report_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import pyarrow as pa

    from hicachectl.backends.base import Store
    from hicachectl.pages.deployments import AffixTable
    from hicachectl.pages.tally import Tally
    from hicachectl.results import Shown
    from hicachectl.text.tables import Screen
    from hicachectl.verification.request import VerifyRequest


class RefusalRow(TypedDict):
    """Row of a refused repair in the document."""

    code: str
    detail: str
    newest: int
    newest_affected: int
    pages: int
    affected: int
    part: int | None
    since: float | None


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why a repair did not believe the profile: a finding of most of the newest pages.

    code: the code of the finding.
    detail: both sizes of a wrong size, else "".
    newest: the number of newest pages judged.
    newest_affected: how many of these have the finding.
    pages: the number of all pages judged.
    affected: how many of all have the finding.
    since_ns: the time from which at least half of the pages have the finding; None without times.
    part: the number of the run's part; None in one process.
    """

    code: str
    detail: str = ""
    newest: Count
    newest_affected: Count
    pages: Count
    affected: Count
    since_ns: Count | None = None
    part: Count | None = None

    @property
    def text(self) -> str:
        """The finding with its counts, as a sentence."""
        detail = f" ({self.detail})" if self.detail else ""
        since = "" if self.since_ns is None else f", since {minute(self.since_ns)} UTC"
        return (
            f"{self.newest_affected} of the {self.newest} newest pages, and {self.affected} of all "
            f"{self.pages}, have {self.code}{detail}{since}"
        )

    @property
    def row(self) -> dict[str, Any]:
        """The refusal as a `RefusalRow`."""
        row: dict[str, Any] = msgspec.structs.asdict(self)
        since_ns = row.pop("since_ns")
        return row | {"since": None if since_ns is None else since_ns / 10**9}


class VerifyFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts and texts about a part; `+` adds those of another part.

    nbytes: listed bytes; None if a size is not known.
    in_flight: page groups in flight.
    gone: objects that vanished since the listing.
    sampled: pages with an object to read.
    to_read: objects chosen to be read.
    planned: objects chosen to be read, by check group.
    objects_read: objects that were tried.
    bytes_read: bytes of the objects that were read whole.
    compared: objects that the store compared with a digest of its own.
    undigested: objects without such a digest.
    unranked: objects read whole whose trailers name no rank.
    complete: whether the time limit left no object unread.
    devices: names; none for the CPU.
    skipped: reason by name for `skipped_checks`.
    listed: objects of the part.
    explained: why nothing was checked in the part, else ""; a sum has none.
    repaired: page groups that a repair removed.
    quarantined: objects that a repair put into the quarantine.
    unrepaired: whether a repair failed.
    refused: why a repair was refused.
    """

    nbytes: Count | None
    in_flight: Count = 0
    gone: Count = 0
    sampled: Count = 0
    to_read: Count = 0
    planned: dict[str, int] = {}
    objects_read: Count = 0
    bytes_read: Count = 0
    compared: Count = 0
    undigested: Count = 0
    unranked: Count = 0
    complete: bool = True
    devices: tuple[str, ...] = ()
    seconds: float = 0.0
    remarks: tuple[str, ...] = ()
    skipped: dict[str, str] = {}
    listed: Count = 0
    explained: str = ""
    repaired: Count = 0
    quarantined: Count = 0
    unrepaired: bool = False
    refused: tuple[Refusal, ...] = ()

    def __add__(self, other: VerifyFacts) -> VerifyFacts:
        known = None not in (self.nbytes, other.nbytes)
        joined: dict[str, Any] = {
            "nbytes": min((self.nbytes or 0) + (other.nbytes or 0), MOST_BYTES) if known else None,
            "planned": {
                check: self.planned.get(check, 0) + other.planned.get(check, 0)
                for check in self.planned | other.planned
            },
            "complete": self.complete and other.complete,
            "devices": _distinct(self.devices + other.devices),
            "remarks": _distinct(self.remarks + other.remarks),
            "skipped": other.skipped | self.skipped,
            "explained": "",
            "unrepaired": self.unrepaired or other.unrepaired,
        }
        for name in self.__struct_fields__:
            if name not in joined:
                joined[name] = getattr(self, name) + getattr(other, name)
        return VerifyFacts(**joined)


@dataclass(frozen=True, slots=True)
class PartResult:
    """Result of a part for the report.

    found: findings, of `checks.findings.RUN_SCHEMA`, or of NAMED_SCHEMA from a run directory.
    """

    facts: VerifyFacts
    tally: Tally
    found: pa.Table

    def repaired(
        self, *, groups: int, quarantined: int, failed: bool, seconds: float = 0.0
    ) -> PartResult:
        """Return the result with the counts of a repair. seconds: its duration."""
        facts = msgspec.structs.replace(
            self.facts,
            repaired=groups,
            quarantined=quarantined,
            unrepaired=failed,
            seconds=self.facts.seconds + seconds,
        )
        return replace(self, facts=facts)

    def refused(self, refusal: Refusal) -> PartResult:
        """Return the result with the refusal of a repair."""
        return replace(self, facts=msgspec.structs.replace(self.facts, refused=(refusal,)))


def _distinct(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))


class VerifyDocument(msgspec.Struct, kw_only=True):
    """Document of `verify`; the defaults are those of a run that has judged nothing."""

    store: str
    profile: str | None = None
    objects: int = 0
    pages: int = 0
    bytes: int | None = 0
    seconds: float = 0.0
    complete: bool = False
    stopped_by: str | None = None
    gone: int = 0
    in_flight: int = 0
    sampled: int = 0
    objects_read: int = 0
    bytes_read: int = 0
    unranked: int = 0
    device: str | None = None
    repaired: int = 0
    quarantined: int = 0
    checks: list[str] = []
    skipped_checks: list[str] = msgspec.field(default_factory=lambda: ["everything"])
    findings: list[Finding] | None = None
    counts: dict[str, int] = {}
    dry_run: bool | UnsetType = UNSET
    repair_refused: list[RefusalRow] | UnsetType = UNSET


# Counts of a part that the document adds up under the same name.
_COUNTS = set(VerifyFacts.__struct_fields__) & set(VerifyDocument.__struct_fields__) - {"seconds"}
# Members of skipped_checks that name no check.
_UNDONE = ("everything", "in-flight", "unread-objects")


def doubted(refused: Refusal, does: str = "repairs") -> str:
    """Return why a command doubts its profile, and what to do. does: the verb of the option."""
    return (
        f"{refused.text}: either the profile is not the servers', or everything since then is "
        f"wrong: compare with hicachectl profile --server; {DESPITE} {does}"
    )


class StoreDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a store that a report needs when the store is closed.

    unmet: reason by unmet need of checks.
    marked: whether keys have trailers.
    identified: whether the identities of the objects are known.
    unknown: why identities are not known, else "".
    """

    url: str
    unmet: dict[Need, str]
    marked: bool
    identified: bool
    unknown: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """Report of a verification; `document` has the members of `VerifyDocument`.

    placed: findings of `checks.findings.PLACED_SCHEMA`.
    undone: those of the remarks that name checks that could have run but did not.
    unrepaired: whether a repair failed.
    refused: why a repair, or parts of it, were refused.
    """

    document: dict[str, Any]
    placed: pa.Table
    remarks: tuple[str, ...] = ()
    undone: tuple[str, ...] = ()
    unrepaired: bool = False
    refused: tuple[Refusal, ...] = ()

    @classmethod
    def empty(cls, store: str) -> VerifyReport:
        """Return the report of a verification that has judged nothing. store: its URL."""
        document = msgspec.to_builtins(VerifyDocument(store=store))
        return cls(document=document, placed=PLACED_SCHEMA.empty_table())

    def fails(self, fail_on: str) -> bool:
        """Return whether a repair failed, or a finding is at least this severe (or "never")."""
        if fail_on == NEVER or self.unrepaired:
            return self.unrepaired
        return bool((severity_ranks(self.placed) >= SEVERITIES.index(fail_on)).any())

    def result(
        self,
        *,
        fail_on: str = "warning",
        dry_run: bool | None = None,
        mending: Mending = Mending(),  # noqa: B008 - frozen
    ) -> Result:
        """Return the result of the command.

        dry_run: whether the repair changed nothing; None without a repair.
        mending: what the commands that mend findings have in common.
        """
        document = self.document
        if dry_run is not None:
            rows = [refusal.row for refusal in self.refused]
            document = {**document, "dry_run": dry_run, "repair_refused": rows}

        def lines(document: dict[str, Any], screen: Screen, shown: Shown) -> Iterator[str]:
            return report_lines(document, self.placed, mending, shown, screen)

        return Result(
            document=document,
            rows=self.placed.select(SCHEMA.names),
            rows_name="findings",
            lines=lines,
            remarks=self.remarks,
            undone=self.undone,
            failed=self.fails(fail_on),
            ending=UsageError(self._refusal) if self.refused else None,
            dry_run=bool(dry_run),
        )

    @property
    def _refusal(self) -> str:
        """What was not repaired, and why, with the next step."""
        what = "nothing was repaired"
        parts = [str(refusal.part) for refusal in self.refused if refusal.part is not None]
        if parts:
            what = f"part{'s' * (len(parts) > 1)} {', '.join(parts)} repaired nothing"
        worst = max(self.refused, key=lambda refusal: refusal.affected)
        return f"{self.document['store']}: {what}: {doubted(worst)}"


def describe_store(store: Store, request: VerifyRequest) -> StoreDescription:
    """Describe an open store for `report_of`."""
    expected = expected_identities(store, request.real_profile)
    return StoreDescription(
        url=store.url,
        unmet=request.unmet(store),
        marked=bool(expected.marked),
        identified=bool(expected.identities),
        unknown=expected.unknown,
    )


def report_of(
    parts: Sequence[PartResult],
    store: StoreDescription,
    table: AffixTable,
    request: VerifyRequest,
) -> VerifyReport:
    """Return the report of a store from the results of all its parts, in their order."""
    facts = reduce(add, (part.facts for part in parts))
    tally = reduce(add, (part.tally for part in parts))
    of_sums = (
        (check.name, check.find(CheckSums(table, tally)))
        for check in checks(request.checks)
        if check.scope is Scope.SUMS and check.needs.isdisjoint(store.unmet)
    )
    found = combine_named([*(part.found for part in parts), name_findings(of_sums)])
    impossible = impossible_checks(request.checks, store.unmet)
    if nothing_selected(tally, facts.objects_read):
        nothing = explain_parts((part.facts.listed, part.facts.explained) for part in parts)
        skipped = {"everything": nothing}
    else:
        skipped = _skipped(facts, tally, table, store, request, impossible)
    skipped |= facts.skipped
    ran = [
        name
        for name in request.checks
        if (
            facts.planned.get(name) and name not in skipped
            if name in reading_groups()
            else name not in impossible
        )
    ]
    counts = pc.value_counts(found.column("code").combine_chunks()).to_pylist()
    profile = request.real_profile
    same: dict[str, Any] = {name: getattr(facts, name) for name in _COUNTS}
    document = VerifyDocument(
        store=store.url,
        profile="inferred" if profile is None else profile.model,
        objects=int(tally.objects.sum()),
        pages=tally.pages,
        bytes=facts.nbytes,
        seconds=round(facts.seconds, 3),
        stopped_by=None if facts.complete else DEADLINE,
        device=",".join(facts.devices) or "cpu",
        checks=ran,
        skipped_checks=list(skipped),
        counts={one["values"]: one["counts"] for one in sorted(counts, key=_by_code)},
        **same,
    )
    reasons = {
        check: why if check == "everything" else f"{check}: {why}" for check, why in skipped.items()
    }
    return VerifyReport(
        document=msgspec.to_builtins(document),
        placed=found,
        remarks=(*facts.remarks, *reasons.values()),
        undone=tuple(why for check, why in reasons.items() if check in _UNDONE),
        unrepaired=facts.unrepaired,
        refused=facts.refused,
    )


def _by_code(counted: dict[str, Any]) -> str:
    code: str = counted["values"]
    return code


def _skipped(
    facts: VerifyFacts,
    tally: Tally,
    table: AffixTable,
    store: StoreDescription,
    request: VerifyRequest,
    impossible: dict[str, str],
) -> dict[str, str]:
    """Return the name and the reason of everything not judged, for stderr."""
    gaps = reading_gaps(
        {check: n for check, n in facts.planned.items() if check not in impossible},
        rows=facts.to_read,
        reached=facts.objects_read,
        groups=tally.groups,
        in_flight=facts.in_flight,
        sampled=request.sample is not None,
    )
    marked = store.marked and DIGESTS.name in request.checks
    stated = marked and store.identified and not facts.undigested  # An identity states the dtype.
    valued = bool(facts.planned.get(VALUES.name))
    own = DIGESTS.name in request.checks and Need.DIGESTS not in store.unmet
    without = 0 if request.compares_catalog else facts.undigested
    skipped: dict[str, str] = {}
    for name, why in (
        *impossible.items(),
        *gaps,
        *(digest_gaps(facts.compared, without, store.unknown if marked else "") if own else ()),
        *rank_gaps(facts.unranked if DIGESTS.name in request.checks else 0),
        *indistinct_dtypes(known_specs(table).values() if valued and not stated else ()),
        *unjudged(table, tally, request.checks, request.real_profile),
    ):
        skipped[name] = f"{skipped[name]}; {why}" if name in skipped else why
    return skipped
