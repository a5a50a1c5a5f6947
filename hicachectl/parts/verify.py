"""`verify` in parts. Each part checks the page groups of its share of the listing."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import pyarrow as pa

from hicachectl.backends.capabilities import permissions_of, trust_of
from hicachectl.backends.urls import without_secrets
from hicachectl.checks.catalogs import of_another_store, save_catalog, streamed_catalog
from hicachectl.checks.codes import SEVERITIES
from hicachectl.checks.evidence import EVIDENCE_SCHEMA, LEAST_OBJECTS, is_evidence
from hicachectl.checks.findings import LOCATED_SCHEMA, NAMED_SCHEMA, combine, located, packed
from hicachectl.checks.page_tables import check_tables, saved_tables
from hicachectl.checks.registry import GROUPS
from hicachectl.formats.catalog import NO_ENTRIES
from hicachectl.formats.catalog import SCHEMA as CATALOG_SCHEMA
from hicachectl.formats.errors import FormatError
from hicachectl.formats.forms import convert
from hicachectl.formats.profile import profile_from_mapping, profile_to_mapping
from hicachectl.io.table_files import read_share
from hicachectl.move.repair import doubted_repairs, left_remarks, plan_of, repair
from hicachectl.pages.published import (
    inventory_of,
    publish_listing,
    publish_rows,
    refuse_unmounted,
)
from hicachectl.pages.selection import Selection  # noqa: TC001 - msgspec reads it
from hicachectl.pages.tally import Tally
from hicachectl.parts.job import (
    Job,
    Kind,
    PartInput,
    Record,
    StageResult,
    listing_of,
    profile_identity,
    published_selection,
    selection_identity,
)
from hicachectl.parts.manifest import LIST_AGAIN, MANIFEST, Manifest, Published
from hicachectl.profiles.stamps import Stamp, write_stamp
from hicachectl.verification.part_result import PartResult, VerifyFacts
from hicachectl.verification.report import (
    StoreDescription,
    describe_store,
    doubted,
    report_of,
)
from hicachectl.verification.report_text import Mending
from hicachectl.verification.request import (
    Sample,
    VerifyRequest,
)
from hicachectl.verification.verify import (
    check_part,
    lister_findings,
    lister_remarks,
    start_run,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from hicachectl.backends.base import Store
    from hicachectl.backends.disk.directory import Directory
    from hicachectl.backends.disk.permissions import Permissions
    from hicachectl.formats.catalog import Catalog
    from hicachectl.io.table_files import Share, TableFile
    from hicachectl.move.repair import RepairOptions
    from hicachectl.pages.deployments import AffixTable
    from hicachectl.pages.published import Listing
    from hicachectl.parts.job import PartCount, RecordForm, Tables
    from hicachectl.results import Result
    from hicachectl.verification.part_result import Refusal
    from hicachectl.verification.verify import PartCheck

_OBJECTS = "objects"
_FOUND = "found"
_EVIDENCE = "evidence"
_CATALOG = "catalog"
_CATALOG_PREFIX = "catalog-"


class _Options(msgspec.Struct, kw_only=True):
    """Options of the lister that the report needs.

    dry_run: whether the repair changes nothing; None without a repair.
    """

    profile: dict[str, Any] | None
    checks: tuple[str, ...]
    selection: Selection
    sample: Sample | None
    has_catalog: bool
    fail_on: Literal["warning", "error", "never"]
    dry_run: bool | None
    mending: Mending = Mending()

    def request(self) -> VerifyRequest:
        """Return the request of the whole run, for its report."""
        profile = None
        if self.profile is not None:
            profile = profile_from_mapping(self.profile, source=f"{MANIFEST}: profile")
        return VerifyRequest(
            profile=profile,
            checks=self.checks,
            selection=self.selection,
            sample=self.sample,
            catalog=NO_ENTRIES if self.has_catalog else None,
        )


class _Facts(msgspec.Struct, kw_only=True):
    """Facts that the lister publishes.

    catalog: store and identity fields of the compared catalog.
    records: identity fields of the catalog that the run records; None if it records none.
    found: findings about the listing, as rows of NAMED_SCHEMA.
    """

    grammar: str
    store: StoreDescription
    catalog: tuple[str, tuple[str, ...]] | None
    records: tuple[str, ...] | None
    remarks: tuple[str, ...]
    found: list[dict[str, str | None]]


class _ResultForm(msgspec.Struct, kw_only=True):
    """Result of a part, without its tables."""

    facts: VerifyFacts
    tally: dict[str, Any]


def merge(manifest: Manifest, results: Mapping[int, Record], finish: Record | None) -> Result:
    """Return the report of the parts."""
    options = convert(manifest.options, _Options, MANIFEST)
    facts = convert(manifest.published.facts, _Facts, MANIFEST)
    request = options.request()
    table = listing_of(manifest, facts.grammar, request.profile).table
    of_lister = VerifyFacts(
        nbytes=0,
        seconds=manifest.spent_seconds,
        remarks=facts.remarks,
        explained="" if results else "no part of the run has a result",
    )
    parts = [
        PartResult(
            of_lister,
            Tally.nothing(table),
            _known(pa.Table.from_pylist(facts.found, schema=NAMED_SCHEMA), MANIFEST),
            EVIDENCE_SCHEMA.empty_table(),
        ),
        *(_part_result(record, table) for _, record in sorted(results.items())),
    ]
    report = report_of(parts, facts.store, table, request)
    result = report.result(
        fail_on=options.fail_on, dry_run=options.dry_run, mending=options.mending
    )
    if facts.records is None:
        return result

    def write(path: Path, readable_by: Permissions, allow_shrink: bool) -> str:
        return save_catalog(
            (record.table(_CATALOG) for _, record in sorted(results.items())),
            path,
            store=facts.store.url,
            identity_fields=facts.records or (),
            readable_by=readable_by,
            allow_shrink=allow_shrink,
        )

    return replace(result, write_catalog=write)


def undone(manifest: Manifest, record: RecordForm) -> Iterator[str]:
    """Yield why the repair of a part was refused.

    Only `merge` ends with the exit status of the refusal.
    """
    form = convert(record.facts, _ResultForm, "result: facts")
    for refusal in form.facts.refused:
        yield f"Part {refusal.part}: {_refused(refusal)}"


def _refused(refusal: Refusal) -> str:
    return f"nothing was repaired: {doubted(refusal)}"


_SCHEMAS = {_FOUND: NAMED_SCHEMA, _EVIDENCE: EVIDENCE_SCHEMA, _CATALOG: CATALOG_SCHEMA}
KIND = Kind("verify", _SCHEMAS, merge, undone, parts_fail=False)


class VerifyJob(Job):
    """A verification of an open store, in parts."""

    kind = KIND

    def __init__(
        self,
        store: Store,
        request: VerifyRequest,
        *,
        catalog: Path | None = None,
        fail_on: str = "warning",
        sample_slice: int | None = None,
        stamp: bool = False,
        repair: RepairOptions | None = None,
        mending: Mending | None = None,
    ) -> None:
        """Take the options of the command.

        request: request with `NO_ENTRIES` in place of a catalog.
        catalog: file of the catalog, which only the lister reads.
        sample_slice: value of --sample-slice.
        stamp: whether part 0 stamps the store.
        mending: words of the commands that `merge` suggests.
        """
        self._store = store
        self._request = request
        self._catalog = catalog
        self._stamp = stamp
        self._repair = repair
        self.trust = trust_of(store)
        self.permissions = permissions_of(store, listing=True)
        options = _Options(
            profile=None if request.profile is None else profile_to_mapping(request.profile),
            checks=request.checks,
            selection=published_selection(request.selection),
            sample=request.sample,
            has_catalog=request.has_catalog,
            fail_on=fail_on,  # type: ignore[arg-type]
            dry_run=None if repair is None else repair.dry_run,
            mending=mending or Mending(),
        )
        self.options: dict[str, Any] = msgspec.to_builtins(options)
        self.identity = {
            **_identity(store, request),
            "--sample-slice": sample_slice,
            "--fail-on": fail_on,
            "--stamp": stamp,
            **_repair_identity(repair),
        }

    def publish(
        self, folder: Directory, parts: PartCount, on_listed: Callable[[int], None]
    ) -> Published:
        """See `Job`."""
        store, request = self._store, self._request
        remarks: list[str] = []
        start = start_run(store, request, first=False)
        listed = publish_listing(
            store,
            request.profile,
            folder,
            parts,
            columns=request.columns(store),
            needs_pages=not request.allow_empty,
            on_batch=on_listed,
        )
        listing = start.listing.ended()
        catalog, files = self._publish_catalog(folder, listed.shares, on_listed)
        if catalog is not None and self._catalog is not None:
            remark = of_another_store(self._catalog, catalog[0], store.url)
            remarks += [] if remark is None else [remark]
        facts = _Facts(
            grammar=store.grammar,
            store=describe_store(store, request),
            catalog=catalog,
            records=store.traits.version_fields if request.update_catalog else None,
            remarks=(*remarks, *lister_remarks(store, request, listing.start_ns)),
            found=lister_findings(store, request, listing.start_ns)
            .select(NAMED_SCHEMA.names)
            .to_pylist(),
        )
        return Published(
            listing_ns=listing.start_ns,
            duration_ns=listing.duration_ns,
            table=listed.listing.to_mapping(),
            files=[*listed.files, *files],
            shares=listed.shares,
            facts=msgspec.to_builtins(facts),
        )

    def _publish_catalog(
        self, folder: Directory, shares: list[Share], on_listed: Callable[[int], None]
    ) -> tuple[tuple[str, tuple[str, ...]] | None, list[TableFile]]:
        """Copy the catalog to the listing's folder, divided among the parts as the listing is.

        Return the catalog's store and identity fields, and the files. Without a catalog, return
        None and no files.
        """
        path = self._catalog
        if path is None or (self._request.update_catalog and not path.exists()):
            return None, []
        with streamed_catalog(path) as (catalog, batches):
            files = publish_rows(
                batches,
                CATALOG_SCHEMA,
                folder,
                shares,
                _CATALOG_PREFIX,
                on_batch=lambda rows: on_listed(0),
            )
        return (catalog.store, catalog.identity_fields), files

    def tables(self, folder: Directory, manifest: Manifest, part: int) -> Tables:
        """See `Job`."""
        schema = self._listing(manifest).schema
        share = manifest.published.shares[part]
        files: dict[bool, list[TableFile]] = {False: [], True: []}
        for file in manifest.published.files:
            files[file.name.startswith(_CATALOG_PREFIX)].append(file)
        return {
            _OBJECTS: lambda: read_share(folder, files[False], share, schema, LIST_AGAIN),
            _CATALOG: lambda: read_share(folder, files[True], share, CATALOG_SCHEMA, LIST_AGAIN),
        }

    def work(
        self, given: PartInput, tables: Tables, on_progress: Callable[[int, int], None]
    ) -> StageResult:
        """Check a part, and repair it if requested."""
        checked = self._check(given, tables, on_progress)
        checked.result.facts.doubted = doubted_repairs(checked)
        if self._repair is not None:
            self._repair_part(given, checked, self._repair)
        result = checked.result
        form = _ResultForm(facts=result.facts, tally=result.tally.to_mapping())
        found = {
            _FOUND: result.found.select(NAMED_SCHEMA.names),
            _EVIDENCE: result.evidence,
        }
        if checked.catalog is not None:
            found[_CATALOG] = checked.catalog.entries
        settled = result.facts.reading.complete and not result.facts.unrepaired
        return StageResult(msgspec.to_builtins(form), found, settled=settled)

    def _check(
        self, given: PartInput, tables: Tables, on_read: Callable[[int, int], None]
    ) -> PartCheck:
        store, manifest = self._store, given.manifest
        facts = convert(manifest.published.facts, _Facts, MANIFEST)
        request = replace(self._part_request(given), catalog=_catalog(facts, tables))
        first = given.part == 0
        start = replace(start_run(store, request, first=first), listing=given.listing_time)
        listed = inventory_of(tables[_OBJECTS](), self._listing(manifest).table)
        if not request.allow_empty:
            refuse_unmounted(store, listed)
        checked = check_part(store, request, listed, start, first=first, on_read=on_read)
        if not len(listed.objects) and listed.table.affixes:  # other parts have the pages
            checked.result.facts.explained = "no part with a result has a page"
        if first and self._stamp and request.profile is not None:
            path = write_stamp(store, Stamp(request.profile, request.weights_version))
            checked.result.facts.remarks += (f"Stamped the store: {path}",)
        return checked

    def _listing(self, manifest: Manifest) -> Listing:
        return listing_of(manifest, self._store.grammar, self._request.profile)

    def _repair_part(self, given: PartInput, checked: PartCheck, options: RepairOptions) -> None:
        """Repair a checked part, and add the counts and remarks to its facts."""
        began = time.monotonic()
        store, request, facts = self._store, self._request, checked.result.facts
        tables: list[pa.Table] = []
        # Only part 0 reports findings about the page tables of a 3FS store. To repair their own
        # pages, the other parts check the tables again.
        if given.part and GROUPS.name in request.checks:
            saved = saved_tables(store)
            tables, _ = check_tables(store, saved, grace_seconds=request.grace_seconds)
        about = (located(table, checked.groups) for table in tables)
        found = combine([checked.findings, *about], LOCATED_SCHEMA)
        plan = plan_of(checked, found, options)
        said = list(left_remarks(plan, stamps=self._stamp))
        if plan.refused is not None:
            facts.refused = (msgspec.structs.replace(plan.refused, part=given.part),)
            said.append(_refused(plan.refused))
        else:
            repair(
                store,
                checked,
                plan,
                options,
                first=given.part == 0,
                buffer_bytes=request.buffer_bytes,
                say=said.append,
            )
            facts.seconds += time.monotonic() - began
        facts.repairs += tuple(f"Part {given.part}: {text}" for text in said)

    def _part_request(self, given: PartInput) -> VerifyRequest:
        """Return the request with the lister's decisions and the part's share of the limits."""
        decided = convert(given.manifest.options, _Options, MANIFEST)
        request = self._request
        store, limit = self._store, request.time_limit_seconds
        usual = store.limits.parallel_reads
        return replace(
            request,
            jobs=given.jobs(request.jobs, usual, store),
            selection=replace(decided.selection, pages=request.selection.pages),
            sample=decided.sample,
            noted_objects=max(LEAST_OBJECTS, request.noted_objects // given.divided),
            bytes_per_second=given.share_of(request.bytes_per_second),
            time_limit_seconds=None if limit is None else given.seconds_of(limit),
        )


def _repair_identity(repair: RepairOptions | None) -> dict[str, Any]:
    if repair is None:
        return {"--repair": None}
    return {
        "--repair": repair.mode,
        "--repair-code": ",".join(sorted(repair.codes)) or None,
        "--quarantine": repair.quarantine,
        "--writers-stopped": repair.writers_stopped,
        "--despite-profile": repair.despite_profile,
        "--dry-run": repair.dry_run,
    }


def _identity(store: Store, request: VerifyRequest) -> dict[str, Any]:
    """Return the options that all parts of a run must have in common."""
    sample = request.sample
    return {
        "store": without_secrets(store.url),
        "--checks": ",".join(request.checks),
        **selection_identity(request.selection),
        "--sample": None if sample is None else f"1/{sample.slices}",
        "--grace": request.grace_seconds,
        "--time-limit": request.time_limit_seconds,
        "--catalog": "given" if request.has_catalog else None,
        "--update-catalog": request.update_catalog,
        "--identity": ",".join(request.identity) or None,
        "--weights-version": request.weights_version or None,
        "--device": ",".join(sorted({name.partition(":")[0] for name in request.devices})),
        "--profile": request.collision or None,
        **profile_identity("profile", request.profile),
    }


def _catalog(facts: _Facts, tables: Tables) -> Catalog | None:
    """Return a part's share of the compared catalog."""
    if facts.catalog is None:
        return None
    store, identity_fields = facts.catalog
    described = replace(NO_ENTRIES, store=store, identity_fields=identity_fields)
    return described.with_entries(tables[_CATALOG](), "--catalog")


def _part_result(record: Record, table: AffixTable) -> PartResult:
    source = f"{record.path}: facts"
    try:
        form = convert(record.facts, _ResultForm, source)
        tally = Tally.from_mapping(form.tally, table, source)
    except FormatError as error:
        raise FormatError(f"{error}; {record.next_step}") from error
    found = _known(record.table(_FOUND), record.path, record.next_step)
    # Pack the findings, because the findings of all parts are in memory at once.
    return PartResult(form.facts, tally, packed(found), _evidence(record, table))


def _evidence(record: Record, table: AffixTable) -> pa.Table:
    seen = record.table(_EVIDENCE)
    if not is_evidence(seen, len(table.affixes)):
        raise FormatError(f"{record.path}: has evidence about unknown objects; {record.next_step}")
    return seen


def _known(found: pa.Table, path: str, next_step: str = LIST_AGAIN) -> pa.Table:
    """Return findings that were read from a run directory.

    Raises FormatError if a finding has no code, or no known severity.
    """
    severities = set(found.column("severity").unique().to_pylist())
    if found.column("code").null_count or not severities <= set(SEVERITIES):
        raise FormatError(f"{path}: has findings without a known severity or a code; {next_step}")
    return found
