"""`hicachectl help`: print the help of a command."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hicachectl.cli.command import Command
from hicachectl.cli.parameters import argument

if TYPE_CHECKING:
    from collections.abc import Iterable

    from click.shell_completion import CompletionItem


def _named(ctx: click.Context, words: Iterable[str]) -> click.Context:
    """Return a context of the command that words name, to ask it for its help.

    Raises UsageError for an unknown name.
    """
    named = ctx.find_root()
    for word in words:
        if not isinstance(named.command, click.Group):
            raise click.UsageError(f"{named.command_path} has no commands of its own", named)
        name, command, _ = named.command.resolve_command(named, [word])
        assert command is not None  # an unknown name was refused
        named = click.Context(command, info_name=name, parent=named)
    return named


def _names(
    ctx: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Offer the commands of the group that the words before the incomplete word name."""
    from click.shell_completion import CompletionItem

    group = _named(ctx, ctx.params.get("words") or ()).command
    names = group.list_commands(ctx) if isinstance(group, click.Group) else ()
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


@click.command("help", cls=Command)
@argument("words", metavar="[COMMAND]...", nargs=-1, shell_complete=_names)
@click.pass_context
def command(ctx: click.Context, /, words: tuple[str, ...]) -> None:
    """Show the help of a command.

    Print what COMMAND --help prints. Without COMMAND, help lists all commands.

    Examples:
      hicachectl help
      hicachectl help verify
      hicachectl help quarantine purge
    """
    click.echo(_named(ctx, words).get_help(), color=ctx.color)
