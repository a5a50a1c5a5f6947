"""`hicachectl quarantine`: list the runs in a quarantine, and delete old ones."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from hicachectl.cli.command import Group
from hicachectl.cli.commands.purges import purge_runs, write_list
from hicachectl.cli.options import changing_options, jobs_option, output_options, store_names
from hicachectl.cli.parameters import argument, own_option
from hicachectl.cli.session import quarantine_directory
from hicachectl.cli.values import TIME


@click.group("quarantine", cls=Group)
def command() -> None:
    """List the runs in a quarantine, and delete old ones.

    A repair (verify --repair quarantine) that removes pages makes one run: a folder that ls, show,
    verify and migrate read as a store. hicachectl restore puts pages back. QUARANTINE is a
    directory that verify --repair filled, one run in it, or a store with a quarantine of its own.

    Examples:
      hicachectl quarantine list prod:
      hicachectl quarantine purge /var/quarantine --before 30d --dry-run
      hicachectl quarantine purge /var/quarantine --before 30d --yes
    """


@command.command("list")
@argument("quarantine", metavar="QUARANTINE", shell_complete=store_names)
@jobs_option
@output_options
@click.pass_context
def list_(ctx: click.Context, /, quarantine: str, **options: Any) -> None:
    """List the runs in a quarantine, oldest first.

    The column STATE has one of these words:

    \b
    kept          the run can be restored
    half-purged   a purge was interrupted; the next purge completes it
    busy          another process works on the run
    earlier-form  an earlier release made the run, so it is left alone
    unreadable    a file is damaged or not trusted
    """  # noqa: D301 - \b is click's mark, not ours
    from hicachectl.cli.text_tables import runs_for_people
    from hicachectl.move.quarantine import RunsDocument, list_runs

    directory = quarantine_directory(ctx, quarantine)
    make = partial(RunsDocument, quarantine=str(directory))
    write_list(
        ctx, list_runs(directory, jobs=options["jobs"]), make, runs_for_people, "in quarantine"
    )


@command.command("purge")
@argument("quarantine", metavar="QUARANTINE", shell_complete=store_names)
@own_option(
    "--before",
    type=TIME,
    required=True,
    help="Delete runs that began before TIME (ISO 8601, or an age such as 30d).",
)
@changing_options("deleted", "deleting")
@jobs_option
@output_options
@click.pass_context
def purge(ctx: click.Context, /, quarantine: str, **options: Any) -> None:
    """Delete old runs of a quarantine for good.

    To complete an interrupted purge, run the same command again; until then, nothing of the half
    purged run can be restored. Busy runs, and runs of an earlier form, stay. The exit status is 4
    if a run could not be deleted.
    """
    from hicachectl.cli.text_tables import runs_for_people
    from hicachectl.move.quarantine import RUNS, PurgeDocument
    from hicachectl.move.quarantine import purge_runs as purge_quarantine

    directory = quarantine_directory(ctx, quarantine)
    delete = partial(purge_quarantine, directory, options["before"], jobs=options["jobs"])
    make = partial(PurgeDocument, quarantine=str(directory))
    purge_runs(ctx, directory, delete, RUNS, make, runs_for_people)
