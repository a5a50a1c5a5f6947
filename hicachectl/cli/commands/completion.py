"""`hicachectl completion`: print a completion script."""

from __future__ import annotations

import click

from hicachectl.cli.command import Command
from hicachectl.cli.completions import VARIABLE
from hicachectl.cli.parameters import argument


@click.command(
    "completion",
    cls=Command,
    epilog="""\b
Examples:
  mkdir -p ~/.local/share/bash-completion/completions
  hicachectl completion bash > ~/.local/share/bash-completion/completions/hicachectl
  mkdir -p ~/.zfunc        # and fpath+=~/.zfunc before compinit in ~/.zshrc
  hicachectl completion zsh > ~/.zfunc/_hicachectl
  mkdir -p ~/.config/fish/completions
  hicachectl completion fish > ~/.config/fish/completions/hicachectl.fish
""",
)
@argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, /, shell: str) -> None:
    """Print a script that adds tab completion of hicachectl to a shell.

    It completes commands, options and their values, the stores of the config file, and finding
    codes.
    """
    from click.shell_completion import get_completion_class

    from hicachectl.cli.shells import add_shells

    add_shells()
    completion_class = get_completion_class(shell)
    assert completion_class is not None
    completion = completion_class(ctx.find_root().command, {}, "hicachectl", VARIABLE)
    # click's `source()` would run the installed bash to ask for its version.
    click.echo(completion.source_template % completion.source_vars())
