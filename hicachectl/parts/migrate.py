"""`migrate` in parts. Each part copies the page groups of its share of the source's listing.

The lister scans the source, and the parts share this listing. The lister scans the destination only
to refuse it if servers of other sizes or dtypes use its keys. The destination changes while parts
write, so each part looks up its own keys there.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from hicachectl.checks.findings import RUN_SCHEMA as FOUND_SCHEMA
from hicachectl.checks.page_tables import check_tables, saved_tables
from hicachectl.formats.arrays import Count  # noqa: TC001 - msgspec reads it
from hicachectl.formats.forms import convert
from hicachectl.io.table_files import named_table, read_share, read_table, write_table
from hicachectl.move.migration import Migration, carry_out, plan_groups, rehearse
from hicachectl.move.migration_outcome import MigrationFacts, result_of
from hicachectl.move.run_mark import RunMark
from hicachectl.pages.published import inventory_of, publish_listing, refuse_unmounted
from hicachectl.pages.selection import Selection  # noqa: TC001 - msgspec reads it
from hicachectl.parts.job import (
    CopyJob,
    Kind,
    StageResult,
    published_selection,
    selection_identity,
    urls_of,
)
from hicachectl.parts.manifest import LIST_AGAIN, MANIFEST, Manifest, Published
from hicachectl.results import Shown
from hicachectl.text.tables import NO_SCREEN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from hicachectl.backends.base import Store
    from hicachectl.backends.disk.directory import Directory
    from hicachectl.move.migration import MigrationRequest
    from hicachectl.parts.job import PartCount, PartInput, Record, RecordForm, Tables
    from hicachectl.results import Result

_OBJECTS = "objects"
_FOUND = "found"
_FOUND_FILE = "found.parquet"


class _Options(msgspec.Struct, kw_only=True):
    """Options of the lister.

    labelled: number of rows of the page list that have a group; 0 without a list.
    """

    selection: Selection
    dry_run: bool
    labelled: Count


def merge(manifest: Manifest, results: Mapping[int, Record], finish: Record | None) -> Result:
    """Return the sum of the parts."""
    facts = [MigrationFacts(seconds=manifest.spent_seconds)]
    for _, record in sorted(results.items()):
        facts.append(convert(record.facts, MigrationFacts, f"{record.path}: facts"))
    return _result(manifest, facts, convert(manifest.options, _Options, MANIFEST).labelled)


def undone(manifest: Manifest, record: RecordForm) -> Iterator[str]:
    """Yield the remarks and the sums of a part if its work is incomplete or has failures."""
    if not record.settled:
        facts = convert(record.facts, MigrationFacts, "The result")
        result = _result(manifest, [facts], facts.matched)
        yield from result.remarks
        yield from result.lines(result.document, NO_SCREEN, Shown())


def _result(manifest: Manifest, facts: Sequence[MigrationFacts], labelled: int) -> Result:
    return result_of(
        facts,
        *urls_of(manifest),
        labelled=labelled,
        dry_run=convert(manifest.options, _Options, MANIFEST).dry_run,
    )


KIND = Kind("migrate", {}, merge, undone)


class MigrateJob(CopyJob):
    """A migration between two open stores, in parts."""

    kind = KIND

    def __init__(self, source: Store, destination: Store, request: MigrationRequest) -> None:
        """Check the request.

        Raises UsageError if the destination is a pack. Raises the errors of `Migration`.
        """
        options = _Options(
            selection=published_selection(request.selection),
            dry_run=request.dry_run,
            labelled=request.labelled,
        )
        super().__init__(source, destination, request, options, _identity(request))
        self._request = request
        self._migration = Migration(source, destination, request)

    def publish(
        self, folder: Directory, parts: PartCount, on_listed: Callable[[int], None]
    ) -> Published:
        """See `Job`."""
        source, migration = self._source, self._migration
        listing = migration.listing_time()
        listed = publish_listing(
            source,
            self._request.profile,
            folder,
            parts,
            columns=migration.columns,
            needs_pages=self._request.needs_pages,
            on_batch=on_listed,
        )
        listing = listing.ended()
        migration.refuse_destination(listed.listing.table, on_batch=on_listed)
        found, _ = check_tables(source, saved_tables(source), grace_seconds=0)
        return Published(
            listing_ns=listing.start_ns,
            duration_ns=listing.duration_ns,
            table=listed.listing.to_mapping(),
            files=[*listed.files, write_table(folder, _FOUND_FILE, found, FOUND_SCHEMA)],
            shares=listed.shares,
        )

    def tables(self, folder: Directory, manifest: Manifest, part: int) -> Tables:
        """See `Job`. All parts read all findings about the source's page tables."""
        schema = self._listing(manifest).schema
        files, share = manifest.published.files, manifest.published.shares[part]
        found = named_table(folder, files, _FOUND_FILE, LIST_AGAIN)
        return {
            _OBJECTS: lambda: read_share(folder, files, share, schema, LIST_AGAIN),
            _FOUND: lambda: read_table(folder, found, FOUND_SCHEMA, LIST_AGAIN),
        }

    def work(
        self, given: PartInput, tables: Tables, on_progress: Callable[[int, int], None]
    ) -> StageResult:
        """See `Job`."""
        began = time.monotonic()
        manifest, source = given.manifest, self._source
        selection = convert(manifest.options, _Options, MANIFEST).selection
        selection = replace(selection, pages=self._request.selection.pages)
        options = self._request.options
        read = [source, *([self._destination] if options.verify else [])]
        options = given.options(options, *read)
        request = replace(self._request, selection=selection, options=options)
        inventory = inventory_of(tables[_OBJECTS](), self._listing(manifest).table)
        if request.needs_pages:
            refuse_unmounted(source, inventory)
        if options.move:
            # An earlier attempt may have removed objects since the listing.
            present = source.exists(inventory.take(np.arange(len(inventory.objects)), ["key"]))
            inventory = inventory.only(np.flatnonzero(present))
        migration = Migration(source, self._destination, request)
        plan = plan_groups(
            migration,
            inventory,
            [tables[_FOUND]()],
            given.listing_time,
            asks=True,
        )
        if request.dry_run:
            facts = rehearse(migration, plan)
        else:
            facts = carry_out(migration, plan, RunMark(given.owner), on_moved=on_progress)
            given.sweep_attempts(self._destination, *([source] if options.move else []))
        facts.seconds = time.monotonic() - began
        return StageResult(msgspec.to_builtins(facts), settled=facts.settled)


def _identity(request: MigrationRequest) -> dict[str, Any]:
    """Return the options that all parts of a run must have in common."""
    options = request.options
    return {
        **selection_identity(request.selection),
        "--dry-run": request.dry_run,
        "--if-exists": request.if_exists,
        "--verify": options.verify,
        "--move": options.move,
        "--include-partial": request.partial,
        "--include-damaged": request.damaged,
        "--grace": request.grace_seconds,
        "--no-space-check": not request.space_check,
        "--trailers": options.trailers,
        "--bwlimit": options.bytes_per_second,
    }
