"""The command group."""

from __future__ import annotations

from importlib import import_module

import click

from hicachectl import __version__
from hicachectl.cli.command import Group

# The module of each command, and its line in `--help`, which imports no command.
COMMANDS = {
    "doctor": "Show why a store gives servers no hits, or wrong data.",
    "ls": "List the pages of a store, or its objects.",
    "show": "Show the objects of one page, and the findings about them.",
    "verify": "Check a store for missing or damaged objects; repair it.",
    "report": "Show a store in pictures, in one HTML file.",
    "explain": "Explain what a finding or a reason means, and what to do.",
    "hits": "Show how much of each request a store can serve.",
    "simulate": "Show what share of the prompt tokens a cache of each size serves.",
    "bench": "Measure whether reading from a store is faster than computing.",
    "restore": "Put quarantined pages back into a store.",
    "quarantine": "List the runs in a quarantine; delete old ones.",
    "prewarm": "Copy the most valuable pages into a store.",
    "pin": "Protect pages of a Mooncake cluster from eviction.",
    "unpin": "Let a Mooncake cluster evict pinned pages.",
    "migrate": "Copy or move pages to another store, layout, TP or PP size.",
    "diff": "Show how two stores differ; exit with 4 if they do.",
    "merge": "Join the parts of a run.",
    "runs": "List run directories, show one; delete old ones.",
    "rm": "Remove pages from a store.",
    "pack": "Describe pack files, and repair truncated ones.",
    "profile": "Print the profile of a deployment.",
    "demo": "Write a small sample store.",
    "completion": "Print a shell completion script.",
    "help": "Show the help of a command.",
    "version": "Show the version.",
}

# Names that other programs use for what a command does, and the answer for each.
_OTHER_NAMES = {
    "du df size space stat stats info": "ls --summary shows bytes and the free space",
    "list dir find keys pages": "ls lists the pages of a store",
    "cat get page inspect": "show shows the objects of one page",
    "check fsck scrub validate audit": "verify checks a store",
    "repair fix heal": "verify --repair repairs a store",
    "health healthcheck status ping probe diagnose": "doctor examines a store and its servers",
    "sync cp copy mv move clone export import backup convert": "migrate copies or moves pages",
    "del delete remove clean clear evict expire gc": "rm removes pages",
    "purge prune": "quarantine purge and hicachectl runs purge delete old runs",
    "lock protect keep soft_pin": "pin protects pages of a Mooncake cluster from eviction",
    "release soft_unpin": "unpin lets a Mooncake cluster evict pinned pages",
    "warm warmup preload prefetch": "prewarm copies the most valuable pages",
    "wait gate ready": "prewarm --min-usable --open-after waits until a store is warm",
    "undo undelete unquarantine": "restore puts quarantined pages back",
    "hitrate lookup miss misses": "hits shows how much of each request a store can serve",
    "estimate capacity": "simulate shows what caches of each size serve",
    "speed benchmark perf throughput latency fio": "bench measures whether a store is fast enough",
    "html dashboard graph chart plot": "report shows a store in one HTML file",
    "join combine": "merge joins the parts of a run",
    "compare cmp": "diff shows how two stores differ",
}


class ClosedPipeError(Exception):
    """The reader of our output closed the pipe."""


class LazyGroup(Group):
    """The program: a group that imports a command only when it needs the command."""

    is_program = True

    def invoke(self, ctx: click.Context) -> object:
        """Run the command. Raise ClosedPipeError for a closed pipe, for which click would exit."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise ClosedPipeError from None

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order of `COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command; None if the name is unknown."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"hicachectl.cli.commands.{cmd_name}").command
        return command

    def other_name(self, name: str) -> str:
        """Return which command does what other programs call `name`; "" for an unknown name."""
        found = (text for names, text in _OTHER_NAMES.items() if name in names.split())
        return next((f"hicachectl {text}" for text in found), "")

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the command list from `COMMANDS`."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="STORE is a directory, a URL (see hicachectl(1)), or the name of a store in the config "
    "file with a colon, such as prod:.\n\nGarbled answers, no hits, full disk, new cluster: "
    "hicachectl-runbooks(7). Rights, ports and secrets: hicachectl-security(7).",
)
@click.version_option(__version__, prog_name="hicachectl", message="%(prog)s %(version)s")
def cli(**_options: object) -> None:
    """Inspect, verify, migrate and prewarm SGLang's HiCache L3 stores."""
