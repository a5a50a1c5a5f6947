"""What stands between a command and a store that it would change: consent, and a lock."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import click

from hicachectl.backends.disk.directory import Directory
from hicachectl.backends.disk.durable import lock
from hicachectl.formats.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def require_consent(*, yes: bool, dry_run: bool) -> None:
    """Refuse early what would have to ask nobody: UsageError without --yes and a terminal."""
    if not (yes or dry_run or sys.stdin.isatty()):
        raise UsageError("standard input is no terminal to ask on: give --yes, or --dry-run")


def agreed(question: str, *, yes: bool, dry_run: bool) -> bool:
    """Ask on the terminal whether to go on, unless that was said on the command line."""
    return yes or dry_run or click.confirm(question, err=True)


@contextmanager
def locked(path: Path | None) -> Iterator[bool]:
    """Hold the lock of a file while in the block; False where another process has it.

    Without a path nothing is locked. The lock is flock(2)'s. The file is made where there is
    none, and stays. Raises UsageError when it cannot be opened or locked, UntrustedError when it is
    a link, a special file or of an owner who is not trusted.
    """
    if path is None:
        yield True
        return
    parent, name = os.path.split(os.path.abspath(path))  # noqa: PTH100 - as in FileStore
    with ExitStack() as held:
        try:
            directory = held.enter_context(Directory.named(parent, writes=True))
            descriptor = directory.open_lock(name)
            held.callback(os.close, descriptor)
            is_ours = lock(descriptor)
        except OSError as error:
            raise UsageError(f"--lock {path}: {error.strerror}") from error
        yield is_ours
