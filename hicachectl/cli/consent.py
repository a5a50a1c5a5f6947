"""Consent and lock of commands that change a store."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import click

from hicachectl.backends.disk.directory import Directory
from hicachectl.backends.disk.durable import lock
from hicachectl.formats.errors import UsageError
from hicachectl.formats.wording import failed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def require_consent(*, yes: bool, dry_run: bool) -> None:
    """Raise UsageError if a question is needed but stdin is not a terminal."""
    if not (yes or dry_run or sys.stdin.isatty()):
        raise UsageError("Cannot ask: standard input is not a terminal; give --yes or --dry-run")


def agreed(question: str, *, yes: bool, dry_run: bool) -> bool:
    """Return whether to go on; ask on the terminal unless --yes or --dry-run is given."""
    return yes or dry_run or click.confirm(question, err=True)


@contextmanager
def locked(path: Path | None) -> Iterator[bool]:
    """Hold the flock(2) lock of a file during the block; yield False if another process holds it.

    Without a path, nothing is locked. A missing file is created, and never removed. Raises
    UsageError if the file cannot be opened or locked, UntrustedError if it is a link, a special
    file, or owned by an untrusted user.
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
            next_step = "give a file in a directory that exists and that you can write to"
            raise UsageError(failed(f"--lock {path}", "lock the file", error, next_step)) from error
        yield is_ours
