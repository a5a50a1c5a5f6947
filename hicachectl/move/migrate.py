"""Migrate page groups to another store, unchanged or transformed for another deployment."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from msgspec.structs import replace

from hicachectl.checks.live_tables import check_tables, saved_tables
from hicachectl.formats.errors import StoreUnavailable
from hicachectl.move.batches import WRITING, Action
from hicachectl.move.estimate import estimated_seconds
from hicachectl.move.journal import JournalHeld
from hicachectl.move.migration import MOVE, OVERWRITE, Migration
from hicachectl.move.migration_choice import plan_groups
from hicachectl.move.migration_outcome import FULL, lack_of_room, outcome_of
from hicachectl.move.results import GroupStatus, RunResult
from hicachectl.move.runs import CopyRun
from hicachectl.pages.inventory import take_inventory
from hicachectl.text.vocabulary import LOCK

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicachectl.backends.base import Store
    from hicachectl.move.journal import Journal
    from hicachectl.move.migration import MigrationRequest
    from hicachectl.move.migration_outcome import MigrationFacts, MigrationOutcome
    from hicachectl.move.migration_plan import MigrationPlan
    from hicachectl.move.results import MoveResult
    from hicachectl.move.work import PageBatch


def migrate(
    source: Store,
    destination: Store,
    request: MigrationRequest,
    *,
    on_listed: Callable[[int], None] = lambda objects: None,
    on_begun: Callable[[], None] = lambda: None,
    on_moved: Callable[[int, int], None] = lambda nbytes, total: None,
    on_wait: Callable[[float, int], None] = lambda seconds, pages: None,
) -> MigrationOutcome:
    """Copy page groups from one store to another.

    on_begun: called before the first write. on_moved: called with each batch's bytes written, and
    the bytes of the whole migration. on_wait: see `pages.in_flight.look_again`.

    Raises UsageError, ProfileError and UnsupportedByBackend before the first write,
    StoreUnavailable if a store is lost, or the source has no pages. An interrupt finishes or rolls
    back begun batches; the journal lists completed groups.
    """
    started = time.monotonic()
    migration = Migration(source, destination, request)
    listing = migration.listing_time()
    listed = take_inventory(
        source,
        request.profile,
        columns=migration.columns,
        needs_pages=request.needs_pages,
        on_batch=on_listed,
    )
    listing = listing.ended()
    tables, _ = check_tables(source, saved_tables(source), grace_seconds=0)
    plan = plan_groups(migration, listed, tables, listing, on_batch=on_listed, on_wait=on_wait)
    if request.dry_run:
        facts = rehearse_part(migration, plan)
    else:
        facts = migrate_part(migration, plan, on_begun=on_begun, on_moved=on_moved)
    facts.seconds = time.monotonic() - started
    outcome = outcome_of(
        [facts],
        source.url,
        destination.url,
        labelled=request.labelled,
        dry_run=request.dry_run,
    )
    if not request.dry_run and not facts.settled and facts.stopped_by != LOCK:
        outcome.journal = migration.journals.own
    return outcome


def rehearse_part(migration: Migration, plan: MigrationPlan) -> MigrationFacts:
    """Return the facts of a planned migration, or of a part of one, as if all went well."""
    result = RunResult()
    result.objects, result.nbytes = plan.demand()
    result.counts[GroupStatus.DONE] = plan.count(*WRITING)
    result.counts[GroupStatus.SAME] = plan.count(Action.COMPARE)
    options = migration.options
    return replace(
        _facts(migration, plan, result),
        estimated_seconds=estimated_seconds(migration.source, plan, options, result.nbytes),
        free_bytes=migration.destination.free_bytes(),
    )


def migrate_part(
    migration: Migration,
    plan: MigrationPlan,
    *,
    on_begun: Callable[[], None] = lambda: None,
    on_moved: Callable[[int, int], None] = lambda nbytes, total: None,
) -> MigrationFacts:
    """Carry out a plan of the whole migration, or of a part of it; return what was done.

    Facts of a plan that earlier runs began are those of one undisturbed run, except `resumed` and
    `seconds`. Arguments and exceptions as in `migrate`. `seconds` is not set.
    """
    try:
        begun = migration.begin()
    except JournalHeld as held:
        facts = _facts(migration, plan, RunResult(complete=False))
        facts.settled, facts.stopped_by = False, LOCK
        facts.remarks.append(str(held))
        return facts
    with begun as journal:
        free = migration.destination.free_bytes()
        url, demand = migration.destination.url, plan.demand()[1]
        lack = "" if free is None else lack_of_room(url, demand, free)
        if lack and migration.request.space_check:
            raise StoreUnavailable(lack)
        if migration.options.move:
            migration.stores.refuse_one_place(migration.source, MOVE)
        if plan.count(Action.REPLACE):
            migration.stores.refuse_one_place(migration.destination, OVERWRITE)
        migration.stores.claim()
        on_begun()
        result = _copied(migration, plan, journal, on_moved)
        facts = _facts(migration, plan, result)
        facts.settled = result.complete and not result.count(GroupStatus.FAILED)
        if facts.settled and not migration.journals.kept:
            journal.end()
    destination = migration.destination
    if destination.traits.evicts and (lack or result.full):
        facts.remarks.append(
            f"{destination.url}: the pages need more room than is free, and this store "
            "evicts: the pages copied first may be evicted already; copy fewer pages (--match, "
            "--pages-from)"
        )
    return facts


def _copied(
    migration: Migration,
    plan: MigrationPlan,
    journal: Journal,
    on_moved: Callable[[int, int], None],
) -> RunResult:
    source, destination, options = migration.source, migration.destination, migration.options
    total = max(plan.demand()[1], 1)
    run = CopyRun(source, plan.inventory, plan.groups, destination, options, journal)
    if options.move and migration.earlier is not None:
        for survey, items in plan.left_in_source(migration.earlier):
            run.remove(survey, items)

    def on_done(batch: PageBatch, done: MoveResult) -> None:
        plan.note(batch, done)
        on_moved(done.nbytes, total)

    result = run.copy(plan.works(), on_done=on_done)
    if plan.count(Action.SKIP):
        destination.flush()  # the report counts skipped pages as copied, too
    return result


def _facts(migration: Migration, plan: MigrationPlan, result: RunResult) -> MigrationFacts:
    """Return the facts of a run, with what earlier runs of a kept plan did."""
    pages, objects, nbytes = plan.written_before()
    earlier = migration.earlier
    return replace(
        plan.facts,
        refused=plan.refused,
        pages=result.count(GroupStatus.DONE) + pages,
        objects=result.objects + objects,
        bytes=result.nbytes + nbytes,
        skipped=plan.count(Action.SKIP) + result.count(GroupStatus.SAME) - pages,
        gone=result.count(GroupStatus.GONE),
        conflicts=result.count(GroupStatus.CONFLICT) + plan.count(Action.CONFLICT),
        failed=result.count(GroupStatus.FAILED) + plan.too_large,
        moved=result.moved + plan.removed_before(earlier),
        resumed=0 if earlier is None else earlier.pages,
        complete=result.complete,
        stopped_by=FULL if result.full else "",
        remarks=[*migration.remarks, *migration.source.remarks],
        problems=[*plan.problems, *result.problems],
    )
