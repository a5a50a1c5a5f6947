"""Migrate page groups to another store, unchanged or transformed for another deployment."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from hicachectl.checks.page_tables import check_tables, saved_tables
from hicachectl.formats.errors import StoreUnavailable
from hicachectl.move.batches import COMPARING, WRITING, Action
from hicachectl.move.migration import MOVE, OVERWRITE, Migration, plan_groups
from hicachectl.move.migration_outcome import MigrationFacts, lack_of_room, result_of
from hicachectl.move.results import GroupStatus, RunResult
from hicachectl.move.run_mark import RequestHeldError, held_mark
from hicachectl.move.runs import CopyRun
from hicachectl.pages.inventory import take_inventory
from hicachectl.text.vocabulary import FULL

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicachectl.backends.base import Store
    from hicachectl.move.migration import MigrationPlan, MigrationRequest
    from hicachectl.move.results import MoveResult
    from hicachectl.move.run_mark import RunMark
    from hicachectl.move.work import PageBatch
    from hicachectl.results import Result


def migrate(
    source: Store,
    destination: Store,
    request: MigrationRequest,
    *,
    on_listed: Callable[[int], None] = lambda objects: None,
    on_begun: Callable[[], None] = lambda: None,
    on_moved: Callable[[int, int], None] = lambda nbytes, total: None,
    on_wait: Callable[[float, int], None] = lambda seconds, pages: None,
) -> Result:
    """Copy page groups from one store to another.

    on_begun: called before the first write.
    on_moved: called with each batch's bytes written, and the bytes of the whole migration.
    on_wait: see `pages.in_flight.look_again`.

    Raises UsageError, ProfileError and UnsupportedByBackend before the first write,
    StoreUnavailable if a store is lost, or the source has no pages. An interrupt finishes or rolls
    back begun batches.
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
        facts = rehearse(migration, plan)
    else:
        try:
            with held_mark(migration.identity) as mark:
                facts = carry_out(migration, plan, mark, on_begun=on_begun, on_moved=on_moved)
        except RequestHeldError as held:
            nothing = result_of([MigrationFacts()], source.url, destination.url)
            return nothing.stopped_by_lock(str(held))
    facts.seconds = time.monotonic() - started
    result = result_of(
        [facts],
        source.url,
        destination.url,
        labelled=request.labelled,
        dry_run=request.dry_run,
    )
    if facts.settled:
        return result
    said = "Not complete; run the same command again"
    return replace(result, remarks=[*result.remarks, said], undone=[*result.undone, said])


def rehearse(migration: Migration, plan: MigrationPlan) -> MigrationFacts:
    """Return the facts of a planned migration, or of a part of one, as if all went well."""
    result = RunResult(objects=plan.objects, nbytes=plan.nbytes)
    result.counts[GroupStatus.DONE] = plan.count(*WRITING)
    result.counts[GroupStatus.SAME] = plan.count(*COMPARING)
    free = migration.destination.free_bytes()
    return msgspec.structs.replace(_facts(migration, plan, result), free_bytes=free)


def carry_out(
    migration: Migration,
    plan: MigrationPlan,
    mark: RunMark,
    *,
    on_begun: Callable[[], None] = lambda: None,
    on_moved: Callable[[int, int], None] = lambda nbytes, total: None,
) -> MigrationFacts:
    """Carry out a plan of the whole migration, or of a part of it; return what was done.

    mark: mark on the unfinished writes of this process.
    Other arguments and exceptions as in `migrate`. `seconds` is not set.
    """
    source, destination, options = migration.source, migration.destination, migration.options
    mark.put(destination)
    if options.move:
        mark.put(source)  # a killed run can leave its probe there
    free = destination.free_bytes()
    lack = "" if free is None else lack_of_room(destination.url, plan.nbytes, free)
    if lack and migration.request.space_check:
        raise StoreUnavailable(lack)
    if options.move:
        migration.stores.refuse_one_place(source, MOVE)
    if plan.count(Action.REPLACE):
        migration.stores.refuse_one_place(destination, OVERWRITE)
    migration.stores.claim()
    on_begun()
    total = max(plan.nbytes, 1)

    def on_done(batch: PageBatch, done: MoveResult) -> None:
        on_moved(done.nbytes, total)

    run = CopyRun(source, plan.inventory, plan.groups, destination, options)
    result = run.copy(plan.works(), on_done=on_done)
    if plan.count(Action.SKIP):
        destination.flush()  # the report counts skipped pages as copied, too
    facts = _facts(migration, plan, result)
    facts.remarks += filter(None, [mark.remark])
    if destination.traits.evicts and (lack or result.full):
        facts.remarks.append(
            f"{destination.url}: the pages need more room than is free, and this store "
            "evicts: the pages copied first may be evicted already; copy fewer pages (--page, "
            "--pages)"
        )
    return facts


def _facts(migration: Migration, plan: MigrationPlan, result: RunResult) -> MigrationFacts:
    """Return the facts of a run: those of the plan and its result."""
    facts = plan.facts
    return msgspec.structs.replace(
        facts,
        pages=result.count(GroupStatus.DONE),
        objects=result.objects,
        bytes=result.nbytes,
        skipped=facts.skipped + result.count(GroupStatus.SAME),
        gone=result.count(GroupStatus.GONE),
        conflicts=facts.conflicts + result.count(GroupStatus.CONFLICT),
        failed=facts.failed + result.count(GroupStatus.FAILED),
        moved=result.moved,
        left_in_source=facts.left_in_source + result.count(GroupStatus.KEPT),
        complete=result.complete,
        settled=result.complete and not result.count(GroupStatus.FAILED),
        stopped_by=FULL if result.full else "",
        remarks=[*migration.remarks, *migration.source.remarks],
        problems=[*facts.problems, *result.problems],
    )
