"""`hicachectl version`: print the version."""

from __future__ import annotations

import click

from hicachectl import __version__
from hicachectl.cli.command import Command


@click.command("version", cls=Command)
def command() -> None:
    """Show the version, as --version does.

    Examples:
      hicachectl version
    """
    click.echo(f"hicachectl {__version__}")
