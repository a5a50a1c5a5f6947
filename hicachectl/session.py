"""What every command does around its work: open the store, show progress, say remarks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from hicachectl.backends.base import Store
    from hicachectl.cli import Settings

PROGRESS_DELAY_S = 1.0


@contextmanager
def opened(ctx: click.Context, text: str) -> Iterator[Store]:
    """Open the store that a STORE argument names, with the config of the command line."""
    from hicachectl.backends.urls import load_config, open_store

    settings: Settings = ctx.obj
    with open_store(text, config=load_config(settings.config)) as store:
        yield store


@contextmanager
def progress(ctx: click.Context, what: str, unit: str) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, on a terminal only, for what takes longer than a second."""
    settings: Settings = ctx.obj
    if settings.quiet or not sys.stderr.isatty():
        yield lambda amount: None
        return
    from tqdm import tqdm

    with tqdm(desc=what, unit=unit, unit_scale=True, delay=PROGRESS_DELAY_S, leave=False) as bar:
        yield bar.update


def remark(ctx: click.Context, text: str) -> None:
    """Say something on stderr that is not the result."""
    settings: Settings = ctx.obj
    if not settings.quiet:
        click.echo(f"hicachectl: {text}", err=True)
