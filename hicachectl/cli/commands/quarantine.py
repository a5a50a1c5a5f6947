"""`hicachectl quarantine`: list the runs in a quarantine, and delete old ones."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click
from msgspec import to_builtins

from hicachectl.cli.command import Group
from hicachectl.cli.options import changing_options, output_options, store_names
from hicachectl.cli.parameters import argument, own_option
from hicachectl.cli.session import agreed, quarantine_directory, remark, require_consent
from hicachectl.cli.values import TIME
from hicachectl.results import Result
from hicachectl.text.units import counted, human_size

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pyarrow as pa

    from hicachectl.move.quarantine import PurgeReport
    from hicachectl.text.tables import Screen


@click.group("quarantine", cls=Group)
def command() -> None:
    """List the runs in a quarantine, and delete old ones.

    Each verify --repair quarantine that removes pages is one run: a folder that is itself a store,
    so that ls, show, verify and migrate read it. hicachectl restore puts pages back. QUARANTINE is
    a directory that verify --repair filled, one run in it, or a store with a quarantine of its
    own.

    Examples:
      hicachectl quarantine list prod:
      hicachectl quarantine purge /var/quarantine --before 30d --dry-run
      hicachectl quarantine purge /var/quarantine --before 30d --yes
    """


@command.command("list")
@argument("quarantine", metavar="QUARANTINE", shell_complete=store_names)
@output_options
@click.pass_context
def list_(ctx: click.Context, /, quarantine: str, **options: Any) -> None:
    """List the runs in a quarantine, oldest first.

    A run is kept (it can be restored), half-purged (the next purge completes it), busy (another
    process works on it), earlier-form (of an earlier release, left alone) or unreadable (a file is
    damaged or not trusted).
    """
    from hicachectl.cli.output import write_report
    from hicachectl.move.quarantine import RunsDocument, list_runs

    directory = quarantine_directory(ctx, quarantine)
    report = list_runs(directory)
    document = to_builtins(RunsDocument(quarantine=str(directory), **_sums(report.rows)))
    remark(ctx, *report.left)
    lines = partial(_lines, document, report, "in quarantine")
    write_report(ctx, document, report.rows, "runs", lines)


@command.command("purge")
@argument("quarantine", metavar="QUARANTINE", shell_complete=store_names)
@own_option(
    "--before",
    type=TIME,
    required=True,
    help="Delete runs that began before TIME (ISO 8601, or an age such as 30d).",
)
@changing_options("deleted", "deleting")
@output_options
@click.pass_context
def purge(ctx: click.Context, /, quarantine: str, **options: Any) -> None:
    """Delete old runs of a quarantine for good.

    To complete an interrupted purge, run the same command again; until then, nothing of the half
    purged run can be restored. Busy runs, and runs of an earlier form, stay. The exit status is 4
    if a run could not be deleted.
    """
    from hicachectl.cli.output import write_run
    from hicachectl.move.quarantine import RUNS, WOULD_PURGE, PurgeReport, purge_runs

    require_consent(options)
    directory = quarantine_directory(ctx, quarantine)
    before, dry_run = options["before"], options["dry_run"]

    def run() -> Result | None:
        """Delete old runs; None if the operator declined."""
        if not (options["yes"] or dry_run):
            found = _sums(_of_state(purge_runs(directory, before, dry_run=True), WOULD_PURGE))
            runs, pages = counted(found["count"], "run"), counted(found["pages"], "page")
            size = human_size(found["bytes"])
            question = f"Delete {runs} with {pages} ({size}) from {directory} for good?"
            if found["count"] and not agreed(ctx, question, "deleted"):
                return None
        return _result(directory, purge_runs(directory, before, dry_run=dry_run), dry_run=dry_run)

    def nothing() -> Result:
        return _result(directory, PurgeReport(RUNS.empty_table()), dry_run=dry_run)

    write_run(ctx, run, nothing)


def _result(directory: Path, report: PurgeReport, *, dry_run: bool) -> Result:
    from hicachectl.move.quarantine import PURGED_RUN, WOULD_PURGE, PurgeDocument

    document = PurgeDocument(
        quarantine=str(directory),
        **_sums(_of_state(report, WOULD_PURGE if dry_run else PURGED_RUN)),
        failed=len(report.failures),
        dry_run=dry_run,
    )
    return Result(
        document=to_builtins(document),
        rows=report.rows,
        rows_name="runs",
        lines=lambda document, screen, shown: _lines(document, report, "deleted", screen),
        undone=[*report.left, *(f"{run}: {why}" for run, why in report.failures)],
        failed=bool(report.failures),
        dry_run=dry_run,
    )


def _of_state(report: PurgeReport, state: str) -> pa.Table:
    import pyarrow.compute as pc

    return report.rows.filter(pc.equal(report.rows.column("state"), state))


def _sums(rows: pa.Table) -> dict[str, Any]:
    import pyarrow.compute as pc

    members = {"pages": "groups", "objects": "objects", "bytes": "nbytes"}
    sums = {name: pc.sum(rows.column(column)).as_py() or 0 for name, column in members.items()}
    return {"count": len(rows), **sums}


def _lines(
    document: dict[str, Any], report: PurgeReport, what: str, screen: Screen
) -> Iterator[str]:
    from hicachectl.cli.text_tables import last_line, runs_for_people
    from hicachectl.text.tables import table_lines

    if len(report.rows):
        yield from table_lines(runs_for_people(report.rows), screen)
    counts = {"run": document["count"], "page": document["pages"], "object": document["objects"]}
    yield last_line(document, counts, what)
