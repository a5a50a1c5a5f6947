"""The command group: global options, and commands imported only when they run."""

from __future__ import annotations

import logging
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import click

from hicachectl import __version__
from hicachectl.cli.session import Settings
from hicachectl.text.terminal import MessageFormatter


class CommandEntry(NamedTuple):
    """Where a command is and its line in `--help`, so that help imports no command."""

    module: str
    summary: str


COMMANDS = {
    "ls": CommandEntry("ls", "List the pages of a store, or its objects."),
    "show": CommandEntry("show", "Show one page: its objects and what is wrong with them."),
    "verify": CommandEntry("verify", "Check a store and report what is wrong."),
    "hits": CommandEntry("hits", "Say how far requests can be restored, and what stops them."),
    "restore": CommandEntry("restore", "Put quarantined pages back into a store."),
    "prewarm": CommandEntry("prewarm", "Fill a store with the pages worth having."),
    "migrate": CommandEntry("migrate", "Copy pages to another store, transformed if need be."),
    "rm": CommandEntry("rm", "Remove pages from a store."),
    "pack": CommandEntry("pack", "Look into packs, and repair those that were cut off."),
    "profile": CommandEntry("profile", "Print the profile that would be used."),
    "demo": CommandEntry("demo", "Write a small sample store."),
    "completion": CommandEntry("completion", "Print a shell completion script."),
}


class ClosedPipeError(Exception):
    """Nobody reads our output any more."""


class LazyGroup(click.Group):
    """A group that knows its commands by name and imports one when it is called."""

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; click would end a closed pipe with status 1 were it an OSError."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise ClosedPipeError from None

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of `COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command; None when there is none of that name."""
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        command: click.Command = import_module(f"hicachectl.cli.commands.{entry.module}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the command list from the table alone."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in COMMANDS.items()])


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="STORE is a directory, a URL (see hicachectl(1)), or NAME: of the config file.",
)
@click.version_option(__version__, prog_name="hicachectl", message="%(prog)s %(version)s")
@click.option("-v", "--verbose", count=True, help="Say more on stderr; twice for debugging.")
@click.option("-q", "--quiet", is_flag=True, help="No progress and no remarks on stderr.")
@click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Config file with named stores.  [default: ~/.config/hicachectl/config.toml]",
)
@click.pass_context
def cli(ctx: click.Context, verbose: int, quiet: bool, config: Path | None) -> None:
    """Look into SGLang's HiCache L3 store: inspect, verify, migrate and prewarm its pages."""
    level = logging.WARNING - 10 * min(verbose, 2) if not quiet else logging.ERROR
    logging.basicConfig(level=level, force=True)
    for handler in logging.root.handlers:
        handler.setFormatter(MessageFormatter("hicachectl: %(message)s"))
    ctx.obj = Settings(config, quiet, bool(verbose))
