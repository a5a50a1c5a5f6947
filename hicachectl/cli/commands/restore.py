"""`hicachectl restore`: put quarantined pages back."""

from __future__ import annotations

import re
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from msgspec import to_builtins

from hicachectl.cli.asked import given_filters, selection_of
from hicachectl.cli.command import Command
from hicachectl.cli.options import (
    changing_options,
    filter_options,
    jobs_option,
    output_options,
    profile_option,
    store_argument,
    store_names,
)
from hicachectl.cli.parameters import argument
from hicachectl.cli.session import (
    agreed,
    opened,
    progress,
    quarantine_directory,
    remark,
    require_consent,
    store_name,
)
from hicachectl.results import Result, Shown
from hicachectl.text.units import counted, human_size
from hicachectl.text.vocabulary import LOCK

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pyarrow as pa

    from hicachectl.move.results import GroupReport
    from hicachectl.text.tables import Screen

_SHOWN = 20  # pages in a table


@click.command("restore", cls=Command)
@argument("quarantine", metavar="QUARANTINE", shell_complete=store_names)
@store_argument
@filter_options()
@changing_options("restored", "restoring")
@jobs_option
@output_options
@profile_option
@click.pass_context
def command(ctx: click.Context, /, quarantine: str, store: str, **options: Any) -> None:
    """Put quarantined pages back into a store.

    QUARANTINE is a directory that verify --repair filled, one run in it, or a store with a
    quarantine of its own. The table shows at most 20 pages, the failed pages first; other formats
    have all pages. Each page returns to STORE with all its objects and their times, the kv objects
    last, and leaves the quarantine. If STORE has another object under a key of a page, the page is
    a conflict: it stays in the quarantine, and the exit status is 4. If STORE already has an object
    with the same bytes, the object counts as put back. A 3FS store needs --profile.

    Restoring does not repair a page, which has the same fault as before its removal. If a server
    has cleared STORE since the repair, the pages of that repair stay in the quarantine. If the
    pages come from another store, the question names both stores.

    Examples:
      hicachectl restore prod: prod: --dry-run
      hicachectl restore /tmp/hicache/.hicachectl/quarantine /tmp/hicache --dry-run
      hicachectl restore /var/quarantine prod: --page 4ebfa8a1f3c3 --yes
      hicachectl restore /var/quarantine hf3fs:///mnt/3fs/hicache --profile prod.toml
    """
    from hicachectl.cli.output import write_run
    from hicachectl.move.restore import restore_groups
    from hicachectl.move.results import GroupReport
    from hicachectl.profiles.sources import profile_from_options

    require_consent(options)
    _refuse_prefix(options["pages"])
    directory, filtered = quarantine_directory(ctx, quarantine), bool(given_filters(options))
    dry_run: bool = options["dry_run"]

    def run() -> Result | None:
        """Put pages back. Return None if the operator declines."""
        with opened(ctx, store) as source:
            started, name = time.monotonic(), source.url
            profile = profile_from_options({"profile_file": options["profile_file"]}, source)
            selection = selection_of(ctx, source, options, changes=not dry_run)
            restore = partial(
                restore_groups, source, directory, profile=profile, selection=selection
            )
            if not (options["yes"] or dry_run):
                found = restore(dry_run=True)
                if len(found.rows) and not agreed(ctx, _question(found, name), "restored"):
                    return None
            with progress(ctx, "restoring", " pages") as advance:
                report = restore(dry_run=dry_run, on_progress=advance)
        result = _result(name, directory, report, time.monotonic() - started, dry_run=dry_run)
        if len(report.rows) or report.busy:
            return result
        if filtered:
            return result.with_undone(f"{directory}: no page that matches the filters")
        remark(ctx, f"{directory}: no quarantined page")
        return result

    def nothing() -> Result:
        named = store_name(ctx, store)
        return _result(named, directory, GroupReport(), 0.0, dry_run=dry_run)

    write_run(ctx, run, nothing)


def _result(
    store: str, quarantine: Path, report: GroupReport, seconds: float, *, dry_run: bool
) -> Result:
    from hicachectl.move.results import RestoreDocument

    busy = ""
    if report.busy:
        runs = counted(report.busy, "quarantined run")
        busy = f"{quarantine}: another process is working on {runs}; run again after it has ended"
    document = RestoreDocument(
        store=store,
        quarantine=str(quarantine),
        pages=report.groups,
        objects=report.moved,
        bytes=report.nbytes,
        gone=report.gone,
        conflicts=report.conflicts,
        failed=report.failed,
        seconds=round(seconds, 3),
        complete=not busy,
        stopped_by=LOCK if busy else None,
        dry_run=dry_run,
    )
    return Result(
        document=to_builtins(document),
        rows=report.rows,
        rows_name="groups",
        lines=partial(_lines, report.rows),
        remarks=[
            f"The pages were taken from {origin}, not from {store}" for origin in report.origins
        ],
        undone=[*filter(None, [busy]), *report.left],
        failed=report.conflicts > 0 or report.failed > 0,
        dry_run=dry_run,
    )


def _refuse_prefix(pages: Path | None) -> None:
    """Raise UsageError for a page prefix in --pages, which takes a file; --page takes a prefix."""
    if pages is not None and re.fullmatch(r"[0-9a-fA-F]{1,64}", str(pages)) and not pages.exists():
        raise click.UsageError(f"--pages {pages}: there is no such file; give --page {pages}")


def _question(found: GroupReport, store: str) -> str:
    whose = f", taken from {' and '.join(found.origins)}," if found.origins else ""
    pages = f"{counted(found.groups, 'page')} ({human_size(found.nbytes)})"
    return f"Put {pages}{whose} back into {store}?"


def _lines(
    rows: pa.Table, document: dict[str, Any], screen: Screen, _shown: Shown
) -> Iterator[str]:
    from hicachectl.cli.text_tables import last_line, restored_for_people, worst_first
    from hicachectl.text.tables import table_lines

    if len(rows):
        shown = worst_first(rows).slice(0, _SHOWN)
        yield from table_lines(restored_for_people(shown), screen)
        if more := len(rows) - len(shown):
            yield f"and {counted(more, 'page')} more; --format csv has all"
    conflicts = f", {counted(document['conflicts'], 'conflict')}" if document["conflicts"] else ""
    failed = f", {document['failed']} failed" if document["failed"] else ""
    counts = {"page": document["pages"], "object": document["objects"]}
    yield last_line(document, counts, f"restored{conflicts}{failed}")
