"""`hicachectl demo`: write a small sample store."""

from __future__ import annotations

from pathlib import Path

import click

from hicachectl.cli.command import Command
from hicachectl.cli.parameters import argument, own_option
from hicachectl.cli.session import remark
from hicachectl.cli.values import Count
from hicachectl.text.units import counted


@click.command("demo", cls=Command)
@argument("directory", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@own_option(
    "--pages",
    type=Count(1, 4096),
    default=24,
    show_default=True,
    metavar="N",
    help="Write N pages.",
)
@click.pass_context
def command(ctx: click.Context, /, directory: Path, pages: int) -> None:
    """Write a small sample store to DIR, to try the other commands on.

    DIR must be new or empty. The store has the files of SGLang's file backend for a hybrid model
    (attention and Mamba states) at TP 2. Its profile is DIR/.hicachectl/demo.toml.

    Examples:
      hicachectl demo /tmp/demo-store
      hicachectl ls /tmp/demo-store
      hicachectl verify /tmp/demo-store --profile /tmp/demo-store/.hicachectl/demo.toml
    """
    from hicachectl.cli.demo_store import write_demo

    profile_path = write_demo(directory, pages)
    remark(ctx, f"Wrote {counted(pages, 'page')} to {directory}; the profile is {profile_path}")
