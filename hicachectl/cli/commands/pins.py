"""What `hicachectl pin` and `hicachectl unpin` share."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from msgspec import to_builtins

from hicachectl.cli.asked import given_filters, say_unjudged, selection_of
from hicachectl.cli.session import opened, progress, remark
from hicachectl.cli.settings import contradiction_remark
from hicachectl.results import Result, Shown
from hicachectl.text.units import counted, minute

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.backends.base import Store
    from hicachectl.formats.arrays import BoolArray
    from hicachectl.move.pinning import PinReport
    from hicachectl.pages.groups import PageGroups
    from hicachectl.pages.selection import Selection
    from hicachectl.text.tables import Screen

# Before it removes pins, unpin asks the master whether it could set a pin of this duration.
_ANY_SECONDS = 1.0


def pin_pages(
    ctx: click.Context, name: str, options: dict[str, Any], seconds: float | None
) -> None:
    """Pin the pages that the options choose, and write the result.

    name: the STORE argument.
    seconds: duration of the pins; None removes them.
    """
    import numpy as np

    from hicachectl.cli.output import write_result
    from hicachectl.move.pinning import pin_groups, require_pins
    from hicachectl.pages.groups import PageGroups
    from hicachectl.pages.scanning import take_inventory
    from hicachectl.pages.selection import explain_selection
    from hicachectl.profiles.sources import profile_from_options

    if not given_filters(options):
        raise click.UsageError(
            "Give a filter, such as --pages, --model or --state whole, which means every whole page"
        )
    started, dry_run = time.monotonic(), options["dry_run"]
    with opened(ctx, name) as store:
        pins = require_pins(store, _ANY_SECONDS if seconds is None else seconds)
        selection = selection_of(ctx, store, options, changes=not dry_run)
        profile = profile_from_options({"profile_file": options["profile_file"]}, store)
        with progress(ctx, "listing", " objects") as advance:
            inventory = take_inventory(
                store, profile, on_contradiction=contradiction_remark(ctx), on_batch=advance
            )
        remark(ctx, *store.remarks)
        groups = PageGroups(inventory)
        matching = selection.chosen(groups)
        if not matching.any():
            remark(ctx, explain_selection(store, inventory, selection))
        say_unjudged(ctx, selection, groups)
        unfit = _unfit(groups, selection) & matching if seconds is not None else None
        chosen = np.flatnonzero(matching if unfit is None else matching & ~unfit)
        with progress(ctx, "pinning", " objects") as advance:
            report = pin_groups(pins, groups, chosen, seconds, dry_run=dry_run, on_progress=advance)
        not_whole = 0 if unfit is None else int(unfit.sum())
        result = _result(store, report, not_whole, time.monotonic() - started, dry_run=dry_run)
    write_result(ctx, result)


def _unfit(groups: PageGroups, selection: Selection) -> BoolArray:
    """Return which groups pins cannot help, because they are not whole: [groups].

    A filter by state chooses such groups on purpose, so then no group is unfit.
    """
    import numpy as np

    from hicachectl.pages.group_table import ORPHAN, PARTIAL

    if selection.states:
        return np.zeros(len(groups), dtype=np.bool_)
    unfit: BoolArray = np.isin(groups.states, (PARTIAL, ORPHAN))
    return unfit


def _result(
    store: Store, report: PinReport, not_whole: int, seconds: float, *, dry_run: bool
) -> Result:
    from hicachectl.move.pinning import failure_lines
    from hicachectl.move.results import PinDocument

    pages = int(report.fine.sum())
    failed = len(report.fine) - pages
    document = PinDocument(
        store=store.url,
        pages=pages,
        objects=report.objects,
        bytes=report.nbytes,
        failed=failed,
        not_whole=not_whole,
        until=round(report.until, 3) if report.until is not None and pages else None,
        seconds=round(seconds, 3),
        dry_run=dry_run,
    )
    undone = failure_lines(report.failures)
    if failed and not undone:
        undone.append(
            f"{store.url}: objects of {counted(failed, 'page')} vanished before they were pinned; "
            "run again"
        )
    if not_whole:
        undone.append(
            f"{store.url}: {counted(not_whole, 'page')} left out as not whole, because servers may "
            "be unable to use such pages; --state partial,orphan chooses them"
        )
    return Result(
        document=to_builtins(document),
        rows=report.rows,
        rows_name="groups",
        lines=partial(_lines, report, "unpinned" if report.until is None else "pinned"),
        undone=undone,
        failed=bool(failed),
        dry_run=dry_run,
    )


def _lines(
    report: PinReport, done: str, document: dict[str, Any], screen: Screen, _shown: Shown
) -> Iterator[str]:
    from hicachectl.cli.text_tables import last_line, removals_for_people
    from hicachectl.text.tables import table_lines

    if len(report.rows):
        yield from table_lines(removals_for_people(report.rows), screen)
    counts = {"page": document["pages"], "object": document["objects"]}
    until = document["until"]
    end = "" if until is None else f" until {minute(int(until * 1e9))} UTC"
    yield last_line(document, counts, f"{done}{end}")
