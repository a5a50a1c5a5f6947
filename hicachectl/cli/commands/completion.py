"""`hicachectl completion`: print a completion script, and answer the shells that run it.

click completes in bash, zsh and fish. This module corrects its completion in each of these shells.
Errors are not printed, because they would appear in the line that the user types.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import (
    BashComplete,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
    get_completion_class,
    shell_complete,
    split_arg_string,
)

from hicachectl.cli.command import Command
from hicachectl.cli.parameters import argument

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_VARIABLE = "_HICACHECTL_COMPLETE"  # the scripts set it
_BREAKS = ":=@"  # bash divides words at these characters


@click.command("completion", cls=Command)
@argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, /, shell: str) -> None:
    """Print a script that adds tab completion of hicachectl to a shell.

    The script completes commands, options and their values, the stores of the config file, and
    finding codes.

    Examples:
      mkdir -p ~/.local/share/bash-completion/completions
      hicachectl completion bash > ~/.local/share/bash-completion/completions/hicachectl
      mkdir -p ~/.zfunc        # and fpath+=~/.zfunc before compinit in ~/.zshrc
      hicachectl completion zsh > ~/.zfunc/_hicachectl
      mkdir -p ~/.config/fish/completions
      hicachectl completion fish > ~/.config/fish/completions/hicachectl.fish
    """
    add_shells()
    completion_class = get_completion_class(shell)
    assert completion_class is not None
    completion = completion_class(ctx.find_root().command, {}, "hicachectl", _VARIABLE)
    # click's `source()` would run the installed bash to ask for its version.
    click.echo(completion.source_template % completion.source_vars())


def complete(instruction: str) -> None:
    """Print the completions that a script asked for, and end the process."""
    with suppress(BaseException):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        from hicachectl.cli.group import cli

        add_shells()
        shell_complete(cli, {}, "hicachectl", _VARIABLE, instruction)
        sys.stdout.flush()
    os._exit(0)


class _WholeValues(ShellComplete):
    """A shell in which a candidate replaces the whole word, including --option=value."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[str]]:
        """Return the candidates. Candidates for --option=value begin with the option."""
        items = super().get_completions(args, incomplete)
        option, equals, _ = incomplete.partition("=")
        if equals and option.startswith("-"):
            for item in items:
                item.value = f"{option}={item.value}"
        return items


class Bash(_WholeValues, BashComplete):
    """Completion of bash, which divides words at `_BREAKS` and replaces only the last piece."""

    # COMP_LINE has the words as the user wrote them; COMP_WORDS has them divided at `_BREAKS`.
    source_template = BashComplete.source_template.replace(
        'COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD',
        'COMP_WORDS="${COMP_LINE:0:COMP_POINT}"',
    )
    _done = 0  # number of characters before the last piece of the word

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the incomplete word, and the incomplete word."""
        line = os.environ["COMP_WORDS"]
        words = split_arg_string(line)[1:]
        incomplete = words.pop() if words and not line[-1].isspace() else ""
        self._done = max(map(incomplete.rfind, _BREAKS)) + 1
        return words, incomplete

    def format_completion(self, item: CompletionItem[Any]) -> str:
        """Return the line of a candidate, without the pieces that bash keeps."""
        return f"{item.type},{item.value[self._done :]}"


class Zsh(_WholeValues, ZshComplete):
    """Completion of zsh."""

    # (F) puts each word on a line of its own, so words with spaces stay whole.
    source_template = ZshComplete.source_template.replace("${words[*]}", "${(F)words}")

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the incomplete word, and the incomplete word.

        The script gives each word on a line of its own.
        """
        words = [" ".join(split_arg_string(word)) for word in os.environ["COMP_WORDS"].split("\n")]
        number = int(os.environ["COMP_CWORD"])
        return words[1:number], words[number] if number < len(words) else ""


class Fish(_WholeValues, FishComplete):
    """Completion of fish, with candidates and descriptions that contain commas."""

    source_template = FishComplete.source_template.replace(
        'string split ","', 'string split --max 1 ","'
    )


def add_shells() -> None:
    """Make click use these classes."""
    for name, shell in (("bash", Bash), ("zsh", Zsh), ("fish", Fish)):
        add_completion_class(shell, name)
