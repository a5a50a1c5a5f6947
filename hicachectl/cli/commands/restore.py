"""`hicachectl restore`: put quarantined pages back."""

from __future__ import annotations

import re
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from hicachectl.cli.command import Command, argument, own_option, own_setting
from hicachectl.cli.completions import store_names
from hicachectl.cli.consent import agreed, locked, require_consent
from hicachectl.cli.exit_codes import FINDINGS
from hicachectl.cli.filters import filter_options, given_filters, selection_of
from hicachectl.cli.options import FILE, lock_option, output_options, store_argument
from hicachectl.cli.session import opened, progress, quarantine_directory, remark, store_name
from hicachectl.formats.wording import lock_held
from hicachectl.text.vocabulary import LOCK

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hicachectl.move.reports import GroupReport
    from hicachectl.text.tables import Screen

_SHOWN = 20  # pages in a table


@click.command(
    "restore",
    cls=Command,
    epilog="""\b
Examples:
  hicachectl restore /tmp/hicache/.hicachectl/quarantine /tmp/hicache --dry-run
  hicachectl restore /var/quarantine prod: --page 4ebfa8a1f3c3 --yes
  hicachectl restore /var/quarantine hf3fs:///mnt/3fs/hicache --profile prod.toml
""",
)
@argument("quarantine", metavar="QUARANTINE", shell_complete=store_names)
@store_argument
@own_setting(
    "--profile",
    "profile_file",
    type=FILE,
    help="Read the deployment's profile from FILE (TOML or JSON); needed for 3FS stores. See "
    "hicachectl-profile(1).",
)
@own_option("--dry-run", is_flag=True, help="Show what would be restored; change nothing.")
@own_option("--yes", is_flag=True, help="Do not ask before restoring.")
@filter_options()
@lock_option
@output_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    quarantine: str,
    store: str,
    dry_run: bool,
    yes: bool,
    lock: Path | None,
    output_format: str,
    output: Path | None,
    **options: Any,
) -> None:
    """Put quarantined pages back into a store.

    QUARANTINE is a directory that verify --repair filled, one run in it, or a store with a
    quarantine of its own. The table shows at most 20 pages, the failed ones first; other formats
    have all. Each page returns to STORE with all its objects and their times, the kv objects last,
    and leaves the quarantine. If STORE has another object under a key of a page, the page is a
    conflict: it stays in the quarantine, and the exit status is 4. An object that STORE has with
    the same bytes counts as put back.

    Restoring does not repair: the page has the same fault as before. If a server has cleared STORE
    since the repair, its pages stay in the quarantine. For pages of another store, the question
    names both stores.
    """
    from hicachectl.cli.output import write_result
    from hicachectl.move.reports import GroupReport
    from hicachectl.move.restore import restore_groups
    from hicachectl.profiles.sources import profile_from_options
    from hicachectl.text.units import counted

    require_consent(yes=yes, dry_run=dry_run)
    _refuse_prefix(options["pages"])
    filters = given_filters(options)
    directory = quarantine_directory(ctx, quarantine)
    undone = []
    with locked(lock) as is_ours:
        if not is_ours:
            undone.append(lock_held(lock))
            outcome, name, seconds = GroupReport(), store_name(ctx, store), 0.0
        else:
            with opened(ctx, store) as source:
                started, name = time.monotonic(), source.url
                profile = profile_from_options({"profile_file": options["profile_file"]}, source)
                restore = partial(
                    restore_groups,
                    source,
                    directory,
                    profile=profile,
                    selection=selection_of(ctx, source, options, changes=not dry_run),
                )
                if not (yes or dry_run):
                    found = restore(dry_run=True)
                    asks = len(found.rows) > 0
                    if asks and not agreed(_question(found, name), yes=yes, dry_run=dry_run):
                        remark(ctx, "Nothing was restored", failure=True)
                        return
                with progress(ctx, "restoring", " pages") as advance:
                    outcome = restore(dry_run=dry_run, on_progress=advance)
                seconds = time.monotonic() - started
    blocked = not is_ours or outcome.busy > 0
    document = {
        "store": name,
        "quarantine": str(directory),
        "pages": outcome.groups,
        "objects": outcome.moved,
        "bytes": outcome.nbytes,
        "gone": outcome.gone,
        "conflicts": outcome.conflicts,
        "failed": outcome.failed,
        "seconds": round(seconds, 3),
        "complete": not blocked,
        "stopped_by": LOCK if blocked else None,
        "dry_run": dry_run,
        "groups": None,
    }
    for origin in outcome.origins:
        remark(ctx, f"The pages were taken from {origin}, not from {name}")
    if is_ours and not len(outcome.rows) and not outcome.busy:
        if filters:
            undone.append(f"{directory}: no page that matches the filters")
        else:
            remark(ctx, f"{directory}: no quarantined page")
    if outcome.busy:
        busy = counted(outcome.busy, "quarantined run")
        undone.append(
            f"{directory}: another process is working on {busy}; run again after it has ended"
        )
    undone += outcome.left
    failed = outcome.conflicts > 0 or outcome.failed > 0
    write_result(
        ctx,
        document,
        undone=undone,
        failed=failed,
        dry_run=dry_run,
        rows=outcome.rows,
        name="groups",
        output_format=output_format,
        output=output,
        text=lambda screen: _lines(document, outcome, screen),
    )
    if dry_run:
        remark(ctx, "Dry run: nothing was restored")
    if failed:
        ctx.exit(FINDINGS)


def _refuse_prefix(pages: Path | None) -> None:
    """Raise UsageError for a prefix of page hashes, which --pages took in earlier releases."""
    if pages is not None and re.fullmatch(r"[0-9a-fA-F]{1,64}", str(pages)) and not pages.exists():
        raise click.UsageError(f"--pages {pages}: there is no such file; give --page {pages}")


def _question(found: GroupReport, store: str) -> str:
    from hicachectl.text.units import counted, human_size

    whose = f", taken from {' and '.join(found.origins)}," if found.origins else ""
    pages = f"{counted(found.groups, 'page')} ({human_size(found.nbytes)})"
    return f"Put {pages}{whose} back into {store}?"


def _lines(document: dict[str, Any], outcome: GroupReport, screen: Screen) -> Iterator[str]:
    from hicachectl.cli.text_tables import restored_for_people, worst_first
    from hicachectl.text.tables import table_lines
    from hicachectl.text.units import counted, human_size

    if len(outcome.rows):
        shown = worst_first(outcome.rows).slice(0, _SHOWN)
        yield from table_lines(restored_for_people(shown), screen)
        if more := len(outcome.rows) - len(shown):
            yield f"and {counted(more, 'page')} more; --format csv has all"
    conflicts = f", {counted(document['conflicts'], 'conflict')}" if document["conflicts"] else ""
    failed = f", {document['failed']} failed" if document["failed"] else ""
    would = "would be " if document["dry_run"] else ""
    stopped = f"; stopped: {document['stopped_by']}" if document["stopped_by"] else ""
    yield (
        f"{counted(document['pages'], 'page')}, {counted(document['objects'], 'object')}, "
        f"{human_size(document['bytes'])} {would}restored{conflicts}{failed}{stopped}"
    )
