"""`hicachectl merge`: join the parts of a run."""

from __future__ import annotations

from pathlib import Path

import click

from hicachectl.cli.exit_codes import FINDINGS
from hicachectl.cli.options import output_options
from hicachectl.cli.session import remark


@click.command(
    "merge",
    epilog="""\b
Examples:
  hicachectl merge /runs/nightly
  hicachectl merge /runs/nightly --format json -o nightly.json
""",
)
@click.argument("run", metavar="RUN", type=click.Path(file_okay=False, path_type=Path))
@output_options
@click.pass_context
def command(ctx: click.Context, /, run: Path, output_format: str, output: Path | None) -> None:
    """Join the parts of a run.

    RUN is the directory of --run. The result is that of the command in one process. No store is
    opened. A part without a result is named, and the exit status is then 4.
    """
    from hicachectl.cli.output import write_document
    from hicachectl.parts.directory import RunDirectory
    from hicachectl.parts.results import merge_run

    with RunDirectory.existing(run) as opened:
        merged = merge_run(opened)
        for text in merged.remarks:
            remark(ctx, text)
        write_document(
            merged.document,
            rows=merged.rows,
            name=merged.rows_name,
            output_format=output_format,
            output=output,
            text=merged.lines,
        )
    if merged.failed:
        ctx.exit(FINDINGS)
