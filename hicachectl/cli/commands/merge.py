"""`hicachectl merge`: join the parts of a run."""

from __future__ import annotations

from dataclasses import replace
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from hicachectl.cli.command import Command
from hicachectl.cli.commands.parts import refuse_inside, write_catalog
from hicachectl.cli.options import (
    allow_shrink_option,
    findings_options,
    healthcheck_option,
    metrics_option,
    output_options,
    refuse_without_table,
)
from hicachectl.cli.parameters import argument, own_option
from hicachectl.cli.session import remark
from hicachectl.cli.values import FILE, RunPath

if TYPE_CHECKING:
    from pathlib import Path


@click.command("merge", cls=Command)
@argument("run", metavar="RUN", type=RunPath())
@own_option("--again", is_flag=True, help="Also join a run that was joined before.")
@own_option(
    "--if-complete",
    is_flag=True,
    help="Do nothing and exit with 0 while a part has no result, or if the run was joined before.",
)
@own_option(
    "--catalog", type=FILE, help="Write to FILE the digests that --update-catalog recorded."
)
@allow_shrink_option()
@metrics_option
@healthcheck_option
@findings_options
@output_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    run: Path,
    again: bool,
    if_complete: bool,
    catalog: Path | None,
    allow_shrink: bool,
    **options: Any,
) -> None:
    """Join the parts of a run.

    RUN is the directory of --run. merge prints the result, and has the exit status, that the run
    would have in one process. The metrics have the time of the listing. No store is opened. If a
    part has no result, stderr and the table name the part, the document and the metrics have
    complete false, and the exit status is 4.

    A whole run is joined once. A second merge ends with 2, because a schedule may have used a
    directory twice. --again joins the run again. With --if-complete, each process can call merge
    after its part; only the last call joins the run.

    Examples:
      hicachectl merge /shared/$(date +%F)
      hicachectl merge /shared/2026-11-23 --again --format json -o nightly.json
      hicachectl merge /shared/2026-11-23 --again --catalog prod.parquet
      hicachectl merge /shared/$(date +%F) --metrics-file /var/lib/node/hicache.prom
      hicachectl merge /shared/$(date +%F) --if-complete
    """
    from hicachectl.cli.output import write_result
    from hicachectl.parts.directory import RunDirectory
    from hicachectl.parts.results import mark_merged, merge_run, reason_to_wait, refuse_merged

    refuse_without_table(ctx, options["output_format"])
    files = {"--metrics-file": options["metrics_file"], "--output": options["output"]}
    refuse_inside(run, {"--catalog": catalog, **files})
    if if_complete and again:
        raise click.UsageError("--if-complete cannot be combined with --again; leave out one")
    with RunDirectory.existing(run) as opened:
        if if_complete and (why := reason_to_wait(opened)):
            remark(ctx, why)
            return
        if not again:
            refuse_merged(opened)
        result = merge_run(opened)
        written = True
        if catalog is not None:
            permissions = opened.permissions()
            written = write_catalog(ctx, result, catalog, permissions, allow_shrink=allow_shrink)
        elif result.write_catalog is not None:
            command = f"hicachectl merge {quote(str(run))} --again --catalog FILE"
            text = f"The run recorded digests, which are not written; write them with: {command}"
            remark(ctx, text, failure=True)
        if not written:
            result = replace(result, failed=True)
        elif not again:
            mark_merged(opened)
    write_result(ctx, result)
