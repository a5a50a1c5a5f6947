"""What stands between a command and a store that it would change: consent, and a lock."""

from __future__ import annotations

import fcntl
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

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

    Without a path nothing is locked. The file is made where there is none, and stays. Raises
    UsageError when it cannot be opened.
    """
    if path is None:
        yield True
        return
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise UsageError(f"--lock {path}: {error.strerror}") from error
    try:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            yield False
            return
        yield True
    finally:
        os.close(descriptor)
