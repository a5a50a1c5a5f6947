"""`hicachectl merge`: join the parts of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hicachectl.cli.exit_codes import FINDINGS
from hicachectl.cli.options import FILE, output_options
from hicachectl.cli.session import remark
from hicachectl.formats.errors import UsageError

if TYPE_CHECKING:
    from hicachectl.parts.directory import RunDirectory
    from hicachectl.parts.job import Merged


@click.command(
    "merge",
    epilog="""\b
Examples:
  hicachectl merge /shared/nightly
  hicachectl merge /shared/nightly --format json -o nightly.json
  hicachectl merge /shared/nightly --catalog prod.parquet
  hicachectl merge /shared/nightly --metrics-file /var/lib/node/hicache.prom
""",
)
@click.argument("run", metavar="RUN", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--catalog", type=FILE, help="Write the digests that --update-catalog recorded to FILE."
)
@click.option("--metrics-file", type=FILE, help="Write Prometheus textfile metrics to FILE.")
@output_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    run: Path,
    catalog: Path | None,
    metrics_file: Path | None,
    output_format: str,
    output: Path | None,
) -> None:
    """Join the parts of a run.

    RUN is the directory of --run. The result and the exit status are those of the command in one
    process. No store is opened. If a part has no result, stderr names it, the document has complete
    false, and the exit status is 4.
    """
    from hicachectl.cli.metrics import write_metrics_of
    from hicachectl.cli.output import write_document
    from hicachectl.parts.directory import RunDirectory
    from hicachectl.parts.results import merge_run

    with RunDirectory.existing(run) as opened:
        merged = merge_run(opened)
        for text in merged.remarks:
            remark(ctx, text)
        _write_catalog(ctx, opened, merged, catalog)
        if metrics_file is not None:
            succeeded = not merged.failed
            write_metrics_of(merged.command, metrics_file, merged.document, succeeded=succeeded)
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


def _write_catalog(
    ctx: click.Context, run: RunDirectory, merged: Merged, path: Path | None
) -> None:
    if path is None:
        if merged.write_catalog is not None:
            remark(ctx, "The run recorded digests; write them with --catalog FILE")
    elif merged.write_catalog is None:
        raise UsageError(
            "--catalog: the run recorded no digests; give its parts --catalog and --update-catalog"
        )
    elif merged.document["missing_parts"]:
        remark(ctx, f"{path}: not written, because parts of the run are missing")
    else:
        merged.write_catalog(path, run.permissions())
