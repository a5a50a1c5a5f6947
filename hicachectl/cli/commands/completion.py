"""`hicachectl completion`: tab completion for a shell."""

from __future__ import annotations

import click


@click.command(
    "completion",
    epilog="""\b
Examples:
  hicachectl completion bash > ~/.local/share/bash-completion/completions/hicachectl
  hicachectl completion zsh > ~/.zfunc/_hicachectl
  hicachectl completion fish > ~/.config/fish/completions/hicachectl.fish
""",
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, /, shell: str) -> None:
    """Print the completion script of SHELL."""
    from click.shell_completion import get_completion_class

    completion_class = get_completion_class(shell)
    assert completion_class is not None  # the three are click's own
    completion = completion_class(ctx.find_root().command, {}, "hicachectl", "_HICACHECTL_COMPLETE")
    # Not `source()`, which for bash asks the installed bash for its version.
    click.echo(completion.source_template % completion.source_vars())
