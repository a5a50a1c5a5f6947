"""`hicachectl runs`: list run directories, describe one, and delete old ones."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click
from msgspec import to_builtins

from hicachectl.cli.command import Group
from hicachectl.cli.commands.purges import purge_runs, write_list
from hicachectl.cli.options import changing_options, output_options
from hicachectl.cli.parameters import argument, own_option
from hicachectl.cli.session import remark
from hicachectl.cli.values import TIME, RunPath

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hicachectl.parts.runs import RunStatus
    from hicachectl.text.tables import Screen

_run = argument("run", metavar="RUN", type=RunPath())
_runs = argument("runs", metavar="DIRECTORY", type=RunPath())


@click.group("runs", cls=Group)
def command() -> None:
    """List run directories, show one, and delete old ones.

    When verify, migrate or prewarm runs in parts, the run directory (--run) holds the listing and
    the results. DIRECTORY is a run directory, or contains several run directories, such as one for
    each night.

    Examples:
      hicachectl runs list /shared
      hicachectl runs status /shared/2026-11-23
      hicachectl runs purge /shared --before 7d --dry-run
      hicachectl runs purge /shared --before 7d --yes
    """


@command.command("list")
@_runs
@output_options
@click.pass_context
def list_(ctx: click.Context, /, runs: Path, **options: Any) -> None:
    """List the run directories in a directory.

    The column STATE has one of these words:

    \b
    listing      part 0 has not published the listing
    unfinished   parts have no result, or no part has finished the run
    finished     all parts have results, but nobody has merged them
    merged       the parts are merged
    half-purged  a purge was interrupted; the next purge completes it
    unreadable   a file is damaged or not trusted

    CHANGED is the time of the last write to a file of the run. The list does not show whether a
    process still works on a run.
    """  # noqa: D301 - \b is click's mark, not ours
    from hicachectl.cli.text_tables import run_directories_for_people
    from hicachectl.parts.runs import RunDirectoriesDocument, list_runs

    make = partial(RunDirectoriesDocument, directory=str(runs))
    write_list(ctx, list_runs(runs), make, run_directories_for_people, "in runs")


@command.command("status")
@_run
@output_options
@click.pass_context
def status(ctx: click.Context, /, run: Path, **options: Any) -> None:
    """Show the parts of a run, their hosts, and the next step."""
    from hicachectl.cli.output import write_report
    from hicachectl.parts.runs import run_status

    shown = run_status(run)
    remark(ctx, *shown.remarks)
    document = to_builtins(shown.document)
    write_report(ctx, document, shown.rows, "results", partial(_status_lines, shown))


@command.command("purge")
@_runs
@own_option(
    "--before",
    type=TIME,
    required=True,
    help="Delete runs in which nothing has changed since TIME (ISO 8601, or an age such as 7d).",
)
@own_option(
    "--unmerged",
    is_flag=True,
    help="Delete runs that were not merged, too. Make sure that no process works on them.",
)
@changing_options("deleted", "deleting")
@output_options
@click.pass_context
def purge(ctx: click.Context, /, runs: Path, before: float, unmerged: bool, **options: Any) -> None:
    """Delete old run directories that were merged.

    Only files of a run are deleted. If a run directory has other files, it stays as it is. To
    complete an interrupted purge, run the same command again. The exit status is 4 if a run could
    not be deleted.
    """
    from hicachectl.cli.text_tables import run_directories_for_people
    from hicachectl.parts.runs import RUN_DIRECTORIES, RunDirectoryPurge
    from hicachectl.parts.runs import purge_runs as purge_directories

    delete = partial(purge_directories, runs, before, unmerged=unmerged)
    make = partial(RunDirectoryPurge, directory=str(runs))
    purge_runs(ctx, runs, delete, RUN_DIRECTORIES, make, run_directories_for_people)


def _status_lines(status: RunStatus, screen: Screen) -> Iterator[str]:
    from hicachectl.cli.text_tables import parts_for_people
    from hicachectl.text.tables import table_lines
    from hicachectl.text.terminal import message_text

    run = status.document
    if len(status.rows):
        yield from table_lines(parts_for_people(status.rows), screen)
    done = "" if run.parts is None else f", {run.done} of {run.parts} parts have a result"
    of_stores = f" of {run.command} {' '.join(run.stores)}" if run.command else ""
    yield message_text(f"{run.run}: {run.state} run{of_stores}{done}")
    yield message_text(f"Next: {run.next}")
