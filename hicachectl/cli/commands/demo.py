"""`hicachectl demo`: a small sample store."""

from __future__ import annotations

from pathlib import Path

import click

from hicachectl.cli.session import remark


@click.command(
    "demo",
    epilog="""\b
Examples:
  hicachectl demo /tmp/demo-store
  hicachectl ls /tmp/demo-store
  hicachectl verify /tmp/demo-store --profile /tmp/demo-store/.hicachectl/demo.toml
""",
)
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--pages", type=click.IntRange(1, 4096), default=24, show_default=True, help="Pages to write."
)
@click.pass_context
def command(ctx: click.Context, /, directory: Path, pages: int) -> None:
    """Write a small sample store to DIR, as SGLang's file backend would.

    The store is of a hybrid model (attention and Mamba states) served at TP 2; its profile lies
    in DIR/.hicachectl/demo.toml. DIR must be new or empty.
    """
    from hicachectl.cli.demo_store import write_demo

    profile_path = write_demo(directory, pages)
    remark(ctx, f"wrote {pages} pages to {directory}; their profile is {profile_path}")
