"""`hicachectl ls`: list the pages or objects of a store."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from hicachectl.cli.options import (
    NameList,
    allow_leases_option,
    filter_options,
    output_options,
    profile_options,
    store_argument,
)
from hicachectl.cli.session import opened, progress, remark
from hicachectl.text.vocabulary import STATES

if TYPE_CHECKING:
    from pathlib import Path

    from hicachectl.pages.inventory import Inventory


@click.command(
    "ls",
    epilog="""\b
Examples:
  hicachectl ls /tmp/hicache
  hicachectl ls prod: --state partial,orphan --format json
  hicachectl ls /tmp/hicache --summary
  hicachectl ls /tmp/hicache --objects --format parquet -o objects.parquet
""",
)
@store_argument
@click.option("--objects", is_flag=True, help="List objects instead of pages.")
@click.option("--summary", is_flag=True, help="List only totals per model and pool.")
@click.option(
    "--state",
    type=NameList(STATES),
    help="Only pages in these states; see PAGE STATES in hicachectl(1).",
)
@allow_leases_option
@filter_options
@output_options
@profile_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    store: str,
    objects: bool,
    summary: bool,
    state: tuple[str, ...] | None,
    output_format: str,
    output: Path | None,
    **options: Any,
) -> None:
    """List the pages of a store, or its objects.

    Each line shows a page's hash, model, parallel sizes (such as tp 8), pools (objects
    present/expected), bytes, age and state. ls reads the listing of STORE, never an object, and
    changes nothing. With --objects, --pool lists only the objects of the pool. Objects from before
    a server's clear belong to no page.

    Without a profile, pages of a model are compared with each other, so a pool missing everywhere
    goes unnoticed.
    """
    if objects and summary:
        raise click.UsageError("--objects cannot be combined with --summary; leave out one of them")
    from hicachectl.cli import text_tables
    from hicachectl.cli.output import write_rows
    from hicachectl.pages import listing
    from hicachectl.pages.groups import PageGroups
    from hicachectl.pages.inventory import take_inventory
    from hicachectl.pages.selection import Selection, select
    from hicachectl.pages.unmatched import explain_selection
    from hicachectl.profiles.sources import profile_to_look

    selection = Selection(
        model=options["model"] or "",
        pool=options["pool"] or "",
        page=options["page"] or "",
        since=options["since"],
        states=state or (),
    )
    with (
        opened(ctx, store, allow_leases=options["allow_leases"]) as source,
        progress(ctx, "listing", " objects") as advance,
    ):
        profile, collision = profile_to_look(options, source, warn=partial(remark, ctx))
        columns = [
            name for name in ("replicas", "locator") if objects and name in source.traits.columns
        ]
        listed = take_inventory(source, profile, columns=columns, on_batch=advance)
        inventory = select(listed, selection)
        for text in (*filter(None, [collision]), *source.remarks):
            remark(ctx, text)
        if inventory.is_foreign.all():
            remark(ctx, explain_selection(source, listed, selection))
    if objects:
        name, human = "objects", text_tables.objects_for_people
        rows = listing.object_rows(inventory, pool=selection.pool)
    elif summary:
        name, human = "summary", text_tables.summary_for_people
        rows = listing.summary_rows(inventory, pool=selection.pool)
    else:
        name, human = "pages", text_tables.pages_for_people
        rows = listing.page_rows(PageGroups(inventory))
    _say_what_is_odd(ctx, inventory, judged=name != "pages" or profile is not None)
    write_rows(rows, name=name, human=human, output_format=output_format, output=output)


def _say_what_is_odd(ctx: click.Context, inventory: Inventory, *, judged: bool) -> None:
    if inventory.is_foreign.all():
        return
    from hicachectl.formats.wording import PAGES_COMPARED
    from hicachectl.pages.ambiguity import ambiguity_remark, split_remarks
    from hicachectl.pages.tally import object_counts

    counted = inventory.table, object_counts(inventory)
    said = [*split_remarks(*counted), *filter(None, [ambiguity_remark(*counted)])]
    for text in said:
        remark(ctx, text)
    if not said and not judged:
        remark(ctx, f"No --profile: {PAGES_COMPARED}")
