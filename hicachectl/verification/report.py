"""Report of a verification, from the results of its parts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow.compute as pc

from hicachectl.checks.codes import DESPITE, SEVERITIES
from hicachectl.checks.findings import SCHEMA, combine_named, name_findings, severity_ranks
from hicachectl.checks.registry import (
    DIGESTS,
    VALUES,
    CheckSums,
    Need,
    Scope,
    checks,
    reading_groups,
)
from hicachectl.pages.unmatched import explain_parts
from hicachectl.profiles.identities import expected_identities
from hicachectl.text.vocabulary import LOCK, NEVER
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

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from hicachectl.backends.base import Store
    from hicachectl.pages.deployments import AffixTable
    from hicachectl.pages.tally import Tally
    from hicachectl.verification.facts import PartResult, Refusal, VerifyFacts
    from hicachectl.verification.request import VerifyRequest


# Members of skipped_checks that are no check that cannot run.
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
    """Result of a verification; `document` has the members of the JSON contract.

    placed: findings of `checks.findings.PLACED_SCHEMA`.
    undone: those of the remarks that name checks that could have run but did not.
    unrepaired: whether a repair failed.
    refused: why a repair, or parts of it, were refused.
    """

    document: dict[str, Any]
    placed: pa.Table
    remarks: tuple[str, ...]
    undone: tuple[str, ...]
    unrepaired: bool
    refused: tuple[Refusal, ...] = ()

    @property
    def findings(self) -> pa.Table:
        """The rows of the document."""
        return self.placed.select(SCHEMA.names)

    @property
    def refusal(self) -> str:
        """What was not repaired, and why, with the next step; empty if no repair was refused."""
        if not self.refused:
            return ""
        what = "nothing was repaired"
        parts = [str(refusal.part) for refusal in self.refused if refusal.part is not None]
        if parts:
            what = f"part{'s' * (len(parts) > 1)} {', '.join(parts)} repaired nothing"
        worst = max(self.refused, key=lambda refusal: refusal.affected)
        return f"{self.document['store']}: {what}: {doubted(worst)}"

    def add_repair(self, *, dry_run: bool) -> None:
        """Add the members of a run with a repair to the document."""
        self.document["dry_run"] = dry_run
        self.document["repair_refused"] = [refusal.document for refusal in self.refused]

    def fails(self, fail_on: str) -> bool:
        """Return whether a repair failed, or a finding is at least this severe (or "never")."""
        if fail_on == NEVER or self.unrepaired:
            return self.unrepaired
        return bool((severity_ranks(self.findings) >= SEVERITIES.index(fail_on)).any())


def not_begun(store: str) -> dict[str, Any]:
    """Return the document of a verification that a lock prevented."""
    return {
        "store": store,
        "profile": None,
        "objects": 0,
        "pages": 0,
        "bytes": 0,
        "seconds": 0.0,
        "complete": False,
        "stopped_by": LOCK,
        "gone": 0,
        "in_flight": 0,
        "sampled": 0,
        "objects_read": 0,
        "bytes_read": 0,
        "unranked": 0,
        "device": None,
        "repaired": 0,
        "quarantined": 0,
        "checks": [],
        "skipped_checks": [],
        "findings": None,
        "counts": {},
    }


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
    found = combine_named(
        [*(part.found for part in parts), name_findings(of_sums, pool=request.selection.pool)]
    )
    impossible = impossible_checks(request.checks, store.unmet)
    if nothing_selected(request.selection, table, tally, facts.objects_read):
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
    document = not_begun(store.url) | {
        "profile": "inferred" if profile is None else profile.model,
        "objects": int(tally.objects.sum()),
        "pages": tally.pages,
        "bytes": facts.nbytes,
        "seconds": round(facts.seconds, 3),
        "complete": facts.complete,
        "stopped_by": None if facts.complete else "deadline",
        "gone": facts.gone,
        "in_flight": facts.in_flight,
        "sampled": facts.sampled,
        "objects_read": facts.objects_read,
        "bytes_read": facts.bytes_read,
        "unranked": facts.unranked,
        "device": ",".join(facts.devices) or "cpu",
        "repaired": facts.repaired,
        "quarantined": facts.quarantined,
        "checks": ran,
        "skipped_checks": list(skipped),
        "counts": {one["values"]: one["counts"] for one in sorted(counts, key=_by_code)},
    }
    reasons = {
        check: why if check == "everything" else f"{check}: {why}" for check, why in skipped.items()
    }
    return VerifyReport(
        document=document,
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
