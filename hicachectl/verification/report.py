"""The report of a verification: the sum of its parts, and the checks that could not judge."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import UNSET, UnsetType

from hicachectl.checks.codes import DESPITE, SEVERITIES
from hicachectl.checks.dtypes import dtype_check
from hicachectl.checks.evidence import ENOUGH_OBJECTS
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
    GROUPS,
    SIZES,
    VALUES,
    CheckSums,
    Need,
    Scope,
    checks,
    reading_groups,
    value_groups,
)
from hicachectl.formats.errors import UsageError
from hicachectl.formats.spec import UNKNOWN_SIZE
from hicachectl.formats.wording import PAGES_COMPARED
from hicachectl.pages.group_table import UNKNOWN
from hicachectl.pages.naming import ambiguity_remark, deployment_document, deployment_text
from hicachectl.pages.selection import explain_parts
from hicachectl.profiles.identities import expected_identities
from hicachectl.results import Result
from hicachectl.text.units import counted, first_of
from hicachectl.text.vocabulary import DEADLINE, NEVER
from hicachectl.verification.part_result import ReadCounts, Refusal, VerifyFacts
from hicachectl.verification.reading_plan import known_specs
from hicachectl.verification.report_text import Mending, report_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from hicachectl.backends.base import Store
    from hicachectl.formats.arrays import IntArray
    from hicachectl.formats.profile import Profile
    from hicachectl.formats.spec import ObjectSpec
    from hicachectl.pages.deployments import AffixTable
    from hicachectl.pages.tally import Tally
    from hicachectl.results import Shown
    from hicachectl.text.tables import Screen
    from hicachectl.verification.part_result import PartResult
    from hicachectl.verification.request import VerifyRequest

# Sets of dtypes that have the same width.
_ALIKE = (
    {"bfloat16", "float16"},
    {"float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"},
)


class VerifyDocument(msgspec.Struct, kw_only=True):
    """Document of `verify`. The defaults are the values of a run that has judged nothing."""

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
    repair_refused: list[Refusal] | UnsetType = UNSET


# Counts that the document has under the same names.
_COUNTS = {*VerifyFacts.__struct_fields__, *ReadCounts.__struct_fields__} - {"seconds"}
_COUNTS &= set(VerifyDocument.__struct_fields__)
# Members of skipped_checks that name no check.
_UNDONE = ("everything", "in-flight", "unread-objects")


def doubted(refused: Refusal, does: str = "repairs") -> str:
    """Return why a command doubts its profile, and the next step.

    does: verb that says what --despite-profile does.
    """
    return (
        f"{refused.text}; either the profile or these pages are wrong; compare the profile with "
        f"hicachectl profile --server; {DESPITE} {does} them all the same"
    )


class StoreDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a store that a report needs after the store was closed.

    unmet: unmet needs of checks, each with the reason.
    marked: whether objects have trailers.
    identified: whether the identities that objects should have are known.
    unknown: why these identities are unknown, else "".
    """

    url: str
    unmet: dict[Need, str]
    marked: bool
    identified: bool
    unknown: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """Report of a verification.

    document: members of a `VerifyDocument`.
    placed: findings in the columns of `checks.findings.PLACED_SCHEMA`.
    undone: remarks about checks that could have run but did not.
    repairs, unrepaired: see `VerifyFacts`.
    misleading, misleading_ns: see `VerifyFacts`.
    refused: reasons why a repair was refused, one for each part of the run that refused.
    doubted: see `VerifyFacts`.
    """

    document: dict[str, Any]
    placed: pa.Table
    remarks: tuple[str, ...] = ()
    undone: tuple[str, ...] = ()
    repairs: tuple[str, ...] = ()
    unrepaired: bool = False
    misleading: int = 0
    misleading_ns: int | None = None
    refused: tuple[Refusal, ...] = ()
    doubted: Mapping[str, Refusal] = field(default_factory=dict)

    @classmethod
    def empty(cls, store: str) -> VerifyReport:
        """Return the report of a verification that has judged nothing. store: URL of the store."""
        document = msgspec.to_builtins(VerifyDocument(store=store))
        return cls(document=document, placed=PLACED_SCHEMA.empty_table())

    def fails(self, fail_on: str) -> bool:
        """Return whether the run counts as failed, because of a failed repair or a severe finding.
        fail_on: least severity of a finding that counts; "never" if no finding does.
        """
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

        dry_run: whether the repair was a dry run; None without a repair.
        mending: parts of the command line that the suggested commands reuse.
        """
        document = self.document
        if dry_run is not None:
            refused = msgspec.to_builtins(self.refused)
            document = {**document, "dry_run": dry_run, "repair_refused": list(refused)}

        refusals = [
            f"The repair would be refused, because {worst.text}" for worst in self._worst if dry_run
        ]
        steps = mending.next_steps(self.misleading_ns) if self.misleading else ()

        def lines(document: dict[str, Any], screen: Screen, shown: Shown) -> Iterator[str]:
            return report_lines(document, self.placed, mending, shown, screen, self.doubted)

        return Result(
            document=document,
            rows=self.placed.select(SCHEMA.names),
            rows_name="findings",
            lines=lines,
            remarks=(*self.remarks, *steps, *refusals),
            undone=self.undone,
            changes=(*self.repairs, *steps),
            failed=self.fails(fail_on),
            ending=UsageError(self._refusal) if self.refused else None,
            dry_run=bool(dry_run),
        )

    @property
    def _worst(self) -> list[Refusal]:
        """A list with the refusal that affects the most pages; empty if nothing was refused."""
        return sorted(self.refused, key=lambda refusal: -refusal.affected)[:1]

    @property
    def _refusal(self) -> str:
        """Message that says what was not repaired, why, and the next step."""
        what = "nothing was repaired"
        parts = [str(refusal.part) for refusal in self.refused if refusal.part is not None]
        if parts:
            what = f"part{'s' * (len(parts) > 1)} {', '.join(parts)} repaired nothing"
        (worst,) = self._worst
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
    """Return the report of a store. parts: results of all parts, in order."""
    facts = reduce(add, (part.facts for part in parts))
    tally = reduce(add, (part.tally for part in parts))
    sums = CheckSums(table, tally, pa.concat_tables(part.evidence for part in parts))
    of_sums = (
        (check.name, check.find(sums))
        for check in checks(request.checks)
        if check.scope is Scope.SUMS and check.needs.isdisjoint(store.unmet)
    )
    found = combine_named([*(part.found for part in parts), name_findings(of_sums)])
    counted_codes = pc.value_counts(found.column("code").combine_chunks()).to_pylist()
    counts = dict(sorted((one["values"], one["counts"]) for one in counted_codes))
    impossible = request.impossible(store.unmet)
    skipped: dict[str, str] = {}
    if nothing_selected(tally, facts.reading):
        listed = ((part.facts.listed, part.facts.explained) for part in parts)
        skipped["everything"] = explain_parts(listed)
    else:
        for name, why in _gaps(
            facts,
            tally,
            table,
            store,
            request,
            impossible,
            sums.evidence,
            changed="values-changed" in counts,
        ):
            skipped[name] = f"{skipped[name]}; {why}" if name in skipped else why
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
    profile = request.real_profile
    same = msgspec.structs.asdict(facts) | msgspec.structs.asdict(facts.reading)
    document = VerifyDocument(
        store=store.url,
        profile="inferred" if profile is None else profile.model,
        objects=int(tally.objects.sum()),
        pages=tally.pages,
        bytes=facts.nbytes,
        seconds=round(facts.seconds, 3),
        stopped_by=None if facts.reading.complete else DEADLINE,
        device=",".join(facts.devices) or "cpu",
        checks=ran,
        skipped_checks=list(skipped),
        counts=counts,
        **{name: same[name] for name in _COUNTS},
    )
    reasons = {
        check: why if check == "everything" else f"{check}: {why}" for check, why in skipped.items()
    }
    remarks = (*facts.remarks, *facts.repairs, *reasons.values())
    if 0 < facts.in_flight < tally.groups:
        remarks += (
            f"Not checked: {counted(facts.in_flight, 'page')} in flight, which servers may still "
            "be writing; run again later or, if no server writes, give --grace 0s",
        )
    return VerifyReport(
        document=msgspec.to_builtins(document),
        placed=found,
        remarks=remarks,
        undone=tuple(why for check, why in reasons.items() if check in _UNDONE),
        repairs=facts.repairs,
        unrepaired=facts.unrepaired,
        misleading=facts.misleading,
        misleading_ns=facts.misleading_ns,
        refused=facts.refused,
        doubted=facts.doubted,
    )


def nothing_selected(tally: Tally, reading: ReadCounts) -> bool:
    """Return whether no object was selected, so that nothing was checked."""
    return not (tally.groups or reading.objects_read)


def _gaps(
    facts: VerifyFacts,
    tally: Tally,
    table: AffixTable,
    store: StoreDescription,
    request: VerifyRequest,
    impossible: Mapping[str, str],
    evidence: pa.Table,
    *,
    changed: bool,
) -> Iterator[tuple[str, str]]:
    """Yield each check, or kind of object, that was not judged, with the reason.

    evidence: facts about the objects that were compared with objects of another age.
    changed: whether pages of two dtypes or layouts were found.
    """
    yield from impossible.items()
    planned = {check: n for check, n in facts.planned.items() if check not in impossible}
    yield from _unread(planned, facts, tally.groups, sampled=request.sample is not None)
    digests = DIGESTS.name in request.checks
    if digests:
        yield from _uncompared(facts.reading, store, request)
    # An identity states the dtype, so after its comparison the dtype is in no doubt.
    stated = digests and store.marked and store.identified and not facts.reading.undigested
    if facts.planned.get(VALUES.name) and not stated:
        for name, why in _indistinct_dtypes(known_specs(table).values(), request.real_profile):
            told = "; values-changed shows two settings, but not which of them the servers have"
            yield name, why + told * changed
    if facts.planned.get(VALUES.name) and request.sample is not None and not changed:
        yield from _uncompared_ages(evidence)
    yield from _unjudged(table, tally, request)


def _unread(
    planned: Mapping[str, int], facts: VerifyFacts, groups: int, *, sampled: bool
) -> Iterator[tuple[str, str]]:
    """Yield each check that judged nothing, and the unread objects, with the reasons.

    planned: number of objects to read, by check. One object can serve several checks.
    groups: number of page groups.
    """
    in_flight = groups and facts.in_flight == groups
    if in_flight:
        yield (
            "in-flight",
            f"every page group ({groups}) is younger than --grace; run again later, or give a "
            "shorter --grace",
        )
    reached = facts.reading.objects_read
    for check, count in planned.items():
        if count:
            if not reached:
                yield check, "no object was read before --time-limit"
            continue
        if in_flight:
            why = "every page group is in flight"
        elif sampled:
            why = "the slice of --sample has no page to read for it; give another --sample-slice"
        elif check in value_groups():
            why = "the profile describes none of the selected objects"
        else:
            why = "no selected object has a known size"
        yield check, f"no object was read: {why}"
    if reached < facts.to_read:
        yield (
            "unread-objects",
            f"not read before --time-limit: {facts.to_read - reached} of "
            f"{counted(facts.to_read, 'object')}; give a longer --time-limit",
        )


def _uncompared(
    counts: ReadCounts, store: StoreDescription, request: VerifyRequest
) -> Iterator[tuple[str, str]]:
    """Yield which digests, identities or ranks the store could not compare, with the reasons."""
    if Need.DIGESTS not in store.unmet:
        if store.marked and store.unknown:
            yield "identities", f"not compared: {store.unknown}"
        if counts.undigested and not request.compares_catalog:
            yield (
                "undigested-objects" if counts.compared else DIGESTS.name,
                f"{counted(counts.undigested, 'object')} without a digest in the store, so the "
                "bytes were not compared; to compare them in later runs, give --catalog FILE and "
                "--update-catalog",
            )
    if counts.unranked:
        yield (
            "ranks",
            f"{counted(counts.unranked, 'object')} with a trailer that names no rank, so bytes of "
            "another rank would go unnoticed; hicachectl migrate --trailers write names the rank",
        )


def _uncompared_ages(evidence: pa.Table) -> Iterator[tuple[str, str]]:
    """Yield one gap if the sample has too few objects to show a change of dtype, else nothing."""
    told = evidence.filter(pc.greater(evidence.column("width"), 0)).column("affix")
    counts = pc.value_counts(told.combine_chunks()).field("counts")
    fewest = pc.min(counts).as_py()
    if fewest is not None and fewest < ENOUGH_OBJECTS:
        yield (
            "changes",
            f"the sample has only {counted(fewest, 'object')} of one kind, too few to show whether "
            "servers changed their dtype; give a larger --sample, or leave out --sample",
        )


def _indistinct_dtypes(
    specs: Iterable[ObjectSpec], profile: Profile | None
) -> Iterator[tuple[str, str]]:
    """Yield one gap if checked values may have another dtype of equal width, else nothing.

    Random bits are finite numbers in most dtypes. Of dtypes of equal width, only bfloat16 and
    float16 can be told apart, and only in objects that are not tiny.
    specs: specs of the objects whose values were checked.
    """
    assumed: dict[str, set[str]] = {}
    distinct = {(spec.pool, spec.tensors): spec for spec in specs}
    for spec in distinct.values():
        if profile is not None and dtype_check(spec, profile) is not None:
            continue
        for tensor in spec.tensors:
            if any(tensor.dtype in alike for alike in _ALIKE):
                assumed.setdefault(spec.pool, set()).add(tensor.dtype)
    if assumed:
        texts = [f"{pool}: {', '.join(sorted(found))}" for pool, found in sorted(assumed.items())]
        yield (
            "dtypes",
            f"values do not prove the dtypes of the profile ({'; '.join(texts)}), because dtypes "
            "of one width look alike; compare the profile with the servers' --kv-cache-dtype",
        )


def _unjudged(table: AffixTable, tally: Tally, request: VerifyRequest) -> Iterator[tuple[str, str]]:
    """Yield the kinds of objects that the requested checks cannot judge, with the reasons."""
    chosen = request.checks
    if request.real_profile is None and tally.groups:
        yield (
            "absent-pools",
            f"without a given profile, {PAGES_COMPARED}",
        )
    ambiguous = int(tally.states[:, UNKNOWN].sum())
    if ambiguous and GROUPS.name in chosen:
        why = ambiguity_remark(table, tally.objects)
        yield "ambiguous-groups", f"{counted(ambiguous, 'page group')} with ambiguous keys: {why}"
    profiled = bool(table.deployments) and table.deployments[0].profile is not None
    if profiled and tally.states[1:-1].any():
        others = (
            deployment_text(deployment_document(deployment))
            for deployment, states in zip(table.deployments[1:], tally.states[1:-1], strict=True)
            if states.any()
        )
        why = f"objects of {first_of(others)} that the profile does not describe: "
        yield "other-deployments", why + "they were compared with each other only"
    unlisted = {s.pool for d in table.deployments for s in d.specs if not s.listed}
    if unlisted:
        yield (
            "unlisted-pools",
            f"{', '.join(sorted(unlisted))}: in the store, but not in the profile; add the pools "
            "to the profile if servers use them",
        )
    if SIZES.name in chosen:
        if sizeless := _pools_without_size(table, tally.objects):
            yield SIZES.name, f"{', '.join(sizeless)}: no size is common to most objects"
        if known := int(tally.unsized[:-1].sum()):
            yield SIZES.name, f"the store lists no size for {counted(known, 'object')}"
    unreadable = int(tally.unsized[table.expected_sizes == UNKNOWN_SIZE].sum())
    if unreadable and not reading_groups().isdisjoint(chosen):
        yield (
            "unread-objects",
            f"not read, because the store lists no size: {counted(unreadable, 'object')}; give "
            "--profile or --allow-leases",
        )


def _pools_without_size(table: AffixTable, objects: IntArray) -> list[str]:
    mixed = {affix for mix in table.mixes for affix in mix.affix_ids}
    specs = [
        spec for affix, spec in enumerate(table.specs) if objects[affix] and affix not in mixed
    ]
    return sorted({spec.pool for spec in specs if spec and spec.nbytes == UNKNOWN_SIZE})
