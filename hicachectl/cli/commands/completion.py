"""`hicachectl completion`: print a completion script, and answer the shells that run it.

Completion in bash, zsh and fish is click's, with corrections for each shell. It prints no error and
ends within about a second: offering nothing is better.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
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
_LIMIT_S = 1.0
_BREAKS = ":=@"  # where bash divides words, and store URLs have a character


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
    add_shells()
    completion_class = get_completion_class(shell)
    assert completion_class is not None
    completion = completion_class(ctx.find_root().command, {}, "hicachectl", _VARIABLE)
    # click's `source()` would run the installed bash to ask for its version.
    click.echo(completion.source_template % completion.source_vars())


def complete(instruction: str) -> None:
    """Print the completions that a script asked for, and end the process.

    A child finds them: a process that a file system hangs may not even die, and the shell waits
    until its output is closed.
    """
    with suppress(OSError):
        ours, its = os.pipe()
        if not (child := os.fork()):
            _answer(instruction, its)
        os.close(its)
        if (answer := _all_of(ours)) is None:
            os.kill(child, signal.SIGKILL)
        else:
            os.write(1, answer)
    os._exit(0)


def _answer(instruction: str, output: int) -> None:
    """Write the completions to a descriptor, and end the process."""
    with suppress(BaseException):
        os.dup2(output, 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.close(output)
        from hicachectl.cli.group import cli

        add_shells()
        shell_complete(cli, {}, "hicachectl", _VARIABLE, instruction)
        sys.stdout.flush()
    os._exit(0)


def _all_of(pipe: int) -> bytes | None:
    """Return what comes from a pipe until its end; None if that takes too long."""
    end = time.monotonic() + _LIMIT_S
    pieces: list[bytes] = []
    while select.select([pipe], [], [], max(0.0, end - time.monotonic()))[0]:
        if not (piece := os.read(pipe, 1 << 16)):
            return b"".join(pieces)
        pieces.append(piece)
    return None


class _WholeValues(ShellComplete):
    """A shell whose candidates replace the whole word, also that of --option=value."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[str]]:
        """Return the candidates; for --option=value with the option."""
        items = super().get_completions(args, incomplete)
        option, equals, _ = incomplete.partition("=")
        if equals and option.startswith("-"):
            for item in items:
                item.value = f"{option}={item.value}"
        return items


class Bash(_WholeValues, BashComplete):
    """Completion of bash, which divides words, and replaces only the last piece of one."""

    _done = 0  # characters of the word before its last piece

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the incomplete one, and that, each as it was written."""
        words, number = _words(), int(os.environ["COMP_CWORD"])
        *args, incomplete = joined_words([*words[1:number], *words[number : number + 1]])
        last = words[number] if number < len(words) else ""
        self._done = len(incomplete) - len(last.lstrip(_BREAKS))
        return args, incomplete

    def format_completion(self, item: CompletionItem[Any]) -> str:
        """Return the line of a candidate, without what comes before the last piece."""
        return f"{item.type},{item.value[self._done :]}"


class Zsh(_WholeValues, ZshComplete):
    """Completion of zsh."""

    source_template = ZshComplete.source_template.replace("${words[*]}", "${(F)words}")

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the incomplete one, and that."""
        words, number = _words(), int(os.environ["COMP_CWORD"])
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


def joined_words(words: list[str]) -> list[str]:
    """Return words that bash has divided: `prod`, `:` as `prod:`, and URLs and --x=y as a whole."""
    from hicachectl.backends.urls import SCHEMES

    joined: list[str] = []
    for word in words:
        before = joined[-1] if joined else ""
        is_url = before.removesuffix(":") in SCHEMES or "://" in before
        starts = word in (":", "=") or (is_url and word == "@")
        goes_on = word[:1] != "-" and (
            before.endswith("=") or (is_url and before.endswith((":", "@")))
        )
        if before and (starts or goes_on):
            joined[-1] += word
        else:
            joined.append(word)
    return joined


def _words() -> list[str]:
    """Return the words of the line without quotes. The variable has one word on each line."""
    return [" ".join(split_arg_string(word)) for word in os.environ["COMP_WORDS"].split("\n")]
