"""`hicachectl ls`: list the pages or objects of a store."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

import click

from hicachectl.cli.asked import say_unjudged, selection_of
from hicachectl.cli.command import Command
from hicachectl.cli.options import (
    allow_leases_option,
    filter_options,
    jobs_option,
    output_options,
    profile_options,
    store_argument,
)
from hicachectl.cli.parameters import own_option
from hicachectl.cli.session import opened, progress, remark
from hicachectl.cli.settings import contradiction_remark
from hicachectl.cli.values import Count
from hicachectl.formats.wording import PAGES_COMPARED
from hicachectl.text.units import human_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pyarrow as pa

    from hicachectl.formats.marker import Marker
    from hicachectl.pages.inventory import Inventory
    from hicachectl.text.tables import Screen


@click.command("ls", cls=Command)
@store_argument
@own_option("--objects", is_flag=True, help="List objects instead of pages.")
@own_option(
    "--summary",
    is_flag=True,
    help="List only totals, by deployment, pool and object size, and the free space.",
)
@own_option(
    "--sort-by",
    metavar="COLUMN",
    help="Sort by a column of --format json, or by size or age. -COLUMN sorts in descending order.",
)
@own_option("--limit", type=Count(1), metavar="N", help="List only the first N lines.")
@jobs_option
@allow_leases_option
@filter_options(beside_flags=True)
@output_options
@profile_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    store: str,
    objects: bool,
    summary: bool,
    sort_by: str | None,
    limit: int | None,
    **options: Any,
) -> None:
    """List the pages of a store, or its objects.

    Each line shows a page's hash, model, parallel sizes (such as tp 8), pools (objects
    present/expected), bytes, age and state. ls reads the listing of STORE, never an object, and
    changes nothing. With --objects, --pool lists only the objects of the pool. Objects from before
    a server's clear belong to no page.

    --summary shows the object sizes, the first write and the last write of each deployment, and the
    total and the free space of the store.

    Without a profile, pages of a model are compared with each other, so ls does not notice a pool
    that no page has.

    Examples:
      hicachectl ls /tmp/hicache
      hicachectl ls prod: --state partial,orphan --format json
      hicachectl ls /tmp/hicache --summary
      hicachectl ls prod: --sort-by -size --limit 20 --before 7d
      hicachectl ls /tmp/hicache --objects --format parquet -o objects.parquet
    """
    if objects and summary:
        raise click.UsageError("--objects cannot be combined with --summary; leave out one of them")
    name = "objects" if objects else "summary" if summary else "pages"
    column = _sort_column(sort_by, name)
    from hicachectl.cli.output import write_report
    from hicachectl.pages.groups import PageGroups
    from hicachectl.pages.listing import in_order
    from hicachectl.pages.scanning import take_inventory
    from hicachectl.pages.selection import explain_selection, select
    from hicachectl.profiles.identities import markers_of
    from hicachectl.profiles.sources import profile_to_look
    from hicachectl.text.tables import table_lines

    with opened(ctx, store) as source, progress(ctx, "listing", " objects") as advance:
        selection = selection_of(ctx, source, options)
        profile, collision = profile_to_look(options, source, warn=partial(remark, ctx))
        columns = [
            name for name in ("replicas", "locator") if objects and name in source.traits.columns
        ]
        listed = take_inventory(
            source,
            profile,
            columns=columns,
            on_contradiction=contradiction_remark(ctx),
            on_batch=advance,
        )
        inventory = select(listed, selection)
        if selection.states:
            say_unjudged(ctx, selection, PageGroups(listed))
        markers = markers_of(source) if summary else []
        free = source.free_bytes() if summary else None
        remark(ctx, *filter(None, [collision]), *source.remarks)
        if inventory.is_foreign.all():
            remark(ctx, explain_selection(source, listed, selection))
    rows, human, document = _listed(name, inventory, markers, selection.pool, free)
    if column:
        rows = in_order(rows, column, asked=sort_by or column)
    if limit is not None and limit < len(rows):
        remark(ctx, f"Only the first {limit} of {len(rows)} lines; a larger --limit shows more")
        rows = rows.slice(0, limit)
    _say_what_is_odd(ctx, inventory, judged=name != "pages" or profile is not None)

    def lines(screen: Screen) -> Iterator[str]:
        yield from table_lines(human(rows), screen)
        if free is not None:
            yield f"{human_size(free)} free in the store"

    write_report(ctx, document, rows, name, lines)


def _listed(
    name: str, inventory: Inventory, markers: list[Marker], pool: str | None, free: int | None
) -> tuple[pa.Table, Callable[[pa.Table], pa.Table], dict[str, Any]]:
    """Return the rows, the function for their text columns, and the document.

    free: free bytes of the store; None if the store does not tell.
    """
    from msgspec import to_builtins

    from hicachectl.cli import text_tables
    from hicachectl.pages import listing
    from hicachectl.pages.groups import PageGroups
    from hicachectl.pages.listing import SummaryDocument, summarise

    document: dict[str, Any] = {name: None}
    if name == "objects":
        rows = listing.object_rows(inventory, pool=pool)
        return rows, text_tables.objects_for_people, document
    if name == "pages":
        return listing.page_rows(PageGroups(inventory)), text_tables.pages_for_people, document
    rows, total = summarise(inventory, markers, pool=pool)
    document = to_builtins(SummaryDocument(total=total, free_bytes=free))
    return rows, partial(text_tables.summary_for_people, total=total), document


def _sort_column(asked: str | None, listed: str) -> str | None:
    """Return the column to sort by, with its name in JSON. Raises click.UsageError."""
    if asked is None:
        return None
    from hicachectl.pages.listing import ObjectRow, PageRow, SummaryRow

    name, down = asked.removeprefix("-"), asked.startswith("-")
    if name == "age":
        name, down = "mtime", not down
    name = {"size": "nbytes"}.get(name, name)
    hints = get_type_hints({"pages": PageRow, "objects": ObjectRow, "summary": SummaryRow}[listed])
    known = [column for column, hint in hints.items() if not _is_nested(hint)]
    if name not in known:
        raise click.UsageError(
            f"--sort-by: {asked!r} is not a column of {listed}; give one of {', '.join(known)}"
        )
    return f"-{name}" if down else name


def _is_nested(hint: Any) -> bool:
    return any(get_origin(one) in (list, dict) for one in (hint, *get_args(hint)))


def _say_what_is_odd(ctx: click.Context, inventory: Inventory, *, judged: bool) -> None:
    if inventory.is_foreign.all():
        return
    from hicachectl.pages.naming import ambiguity_remark
    from hicachectl.pages.tally import object_counts

    said = ambiguity_remark(inventory.table, object_counts(inventory))
    if said:
        remark(ctx, said)
    elif not judged:
        remark(ctx, f"No --profile: {PAGES_COMPARED}")
