"""What a shell offers for STORE. Imports nothing heavy.

Completion prints no error and ends within about a second: offering nothing is better.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import click
    from click.shell_completion import CompletionItem

    from hicachectl.backends.urls import Config

VARIABLE = "_HICACHECTL_COMPLETE"  # set by the scripts of `hicachectl completion`
_LIMIT_S = 1.0
# Shells put a name into the command line as it is, where `$(…)` would be executed.
_OFFERED = re.compile(r"(?![-=])[\w@%+=:,./-]+")


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
        from click.shell_completion import shell_complete

        from hicachectl.cli.group import cli
        from hicachectl.cli.shells import add_shells

        add_shells()
        shell_complete(cli, {}, "hicachectl", VARIABLE, instruction)
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


def store_names(
    ctx: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Offer the stores of the config file, and directories."""
    from click.shell_completion import CompletionItem

    from hicachectl.formats.errors import HicacheError

    names: list[str] = []
    with suppress(HicacheError):  # a bad config hides no directory
        names = sorted(f"{name}:" for name in _config(ctx).stores)
    # bash forgets what comes before the directories.
    return [
        CompletionItem(incomplete, type="dir"),
        *(CompletionItem(name) for name in _offered(names, incomplete)),
    ]


def _offered(names: Iterable[str], incomplete: str) -> Iterator[str]:
    """Yield the names that continue a word and mean nothing else to a shell."""
    return (name for name in names if name.startswith(incomplete) and _OFFERED.fullmatch(name))


def _config(ctx: click.Context) -> Config:
    from hicachectl.backends.urls import load_config

    path = ctx.find_root().params.get("config")
    return load_config(None if path is None else str(path))
