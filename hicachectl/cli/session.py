"""Steps that commands share: open the store, ask, lock, show progress, print remarks."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from hicachectl.formats.errors import UsageError
from hicachectl.formats.wording import failed
from hicachectl.text.terminal import message_text, mute_native_logs
from hicachectl.text.units import Ago, counted, human_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from hicachectl.backends.base import Store
    from hicachectl.backends.disk.directory import Directory
    from hicachectl.backends.urls import Config

    Opening = Callable[..., AbstractContextManager[Store]]

Used = TypeVar("Used")

PROGRESS_DELAY_S = 1.0
_CONFIG = "hicachectl.config"  # key in a context's meta
SUCCEEDED = "hicachectl.succeeded"
"""Key in a context's meta: whether the run succeeded; absent if the run has no result."""
_log = logging.getLogger(__name__)
_OPENING = ("allow_leases", "lease_wait", "jobs")  # options that `open_store` takes


class Settings(NamedTuple):
    """Options of the command group; the context object of every command."""

    config: Path | None
    quiet: bool
    verbose: bool = False


def opened(ctx: click.Context, text: str, *, create: bool = False) -> AbstractContextManager[Store]:
    """Open the store that a STORE argument names, and close it after the block.

    create: whether to make a missing directory or pack.
    """
    verbose = ctx.obj.verbose
    return opened_store(text, config_of(ctx), create=create, verbose=verbose, **_opening(ctx))


def reopening(ctx: click.Context, text: str) -> Opening:
    """Return a picklable function that opens the store of a STORE argument in another process."""
    from hicachectl.backends.urls import parse_url

    return partial(opened_store, str(parse_url(text, config_of(ctx))), **_opening(ctx))


def _opening(ctx: click.Context) -> dict[str, Any]:
    """Return the command's options that `open_store` takes."""
    return {name: ctx.params[name] for name in _OPENING if name in ctx.params}


@contextmanager
def opened_store(
    text: str,
    config: Config | None = None,
    *,
    allow_leases: bool = False,
    lease_wait: float | None = None,
    jobs: int | None = None,
    create: bool = False,
    verbose: bool = False,
) -> Iterator[Store]:
    """Open a store without a command's context, for example on another node.

    `open_store` describes the other arguments.

    verbose: whether to show the messages of native libraries.
    """
    from hicachectl.io.opening import open_store

    with open_store(
        text,
        config=config,
        create=create,
        allow_leases=allow_leases,
        lease_wait=lease_wait,
        jobs=jobs,
    ) as store:
        if store.traits.logs_natively and not (verbose and _has_no_secret(store.url)):
            mute_native_logs()
        yield store


def _has_no_secret(url: str) -> bool:
    """Return whether a store's URL has no secret. The store's library would log a secret."""
    from hicachectl.backends.urls import MASK

    if MASK in url:
        _log.info("%s: the log of the store's library is left out, as it shows the password", url)
    return MASK not in url


def moment_of(store: Store, moment: float | None, *, changes: bool) -> float | None:
    """Return the time of an option in Unix seconds. An age counts back from `present_ns`.

    moment: a result of `values.moment`.
    changes: see `present_ns`.
    """
    from hicachectl.backends.capabilities import present_ns

    return moment.by(present_ns(store, changes=changes)) if isinstance(moment, Ago) else moment


def config_of(ctx: click.Context) -> Config:
    """Return the config. Its file is read only once, because it may be a pipe."""
    from hicachectl.backends.urls import load_config

    if _CONFIG not in ctx.meta:
        path = None if ctx.obj is None else ctx.obj.config
        ctx.meta[_CONFIG] = load_config(None if path is None else str(path))
    config: Config = ctx.meta[_CONFIG]
    return config


def store_name(ctx: click.Context, text: str) -> str:
    """Return the URL of a STORE argument, without opening the store and without a password."""
    from hicachectl.backends.urls import parse_url, without_secrets

    return without_secrets(str(parse_url(text, config_of(ctx))))


def quarantine_directory(ctx: click.Context, text: str) -> Path:
    """Return the directory of a QUARANTINE argument; for a store, its quarantine if it has one."""
    from hicachectl.backends.disk.names import OWN_PREFIX
    from hicachectl.backends.urls import SIDE_PARAMETER, parse_url

    url = parse_url(text, config_of(ctx))
    if SIDE_PARAMETER in url.params:
        directory = side = Path(url.params[SIDE_PARAMETER])
    elif url.kind.directory:
        directory = Path(url.path)
        side = directory / OWN_PREFIX.decode()
    else:
        raise click.UsageError(f"{text}: not a directory; give the path of a quarantine")
    own = side / "quarantine"
    links = own.is_symlink() or (side != directory and side.is_symlink())
    return own if own.is_dir() and not links else directory


def require_consent(options: Mapping[str, Any]) -> None:
    """Raise UsageError if a question is needed but stdin is not a terminal."""
    if not (options["yes"] or options["dry_run"] or sys.stdin.isatty()):
        raise UsageError("Cannot ask: standard input is not a terminal; give --yes or --dry-run")


def agreed(ctx: click.Context, question: str, done: str) -> bool:
    """Return whether to go on. Ask on the terminal unless --yes or --dry-run is given.

    done: past participle of the action, such as "removed", for the remark on a refusal.
    """
    options = ctx.params
    if options["yes"] or options["dry_run"] or click.confirm(question, err=True):
        return True
    remark(ctx, f"Nothing was {done}", failure=True)
    return False


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
    from hicachectl.backends.disk.durable import lock

    with held_file(f"--lock {path}", path, "lock the file", lock) as (_, is_ours):
        yield is_ours


@contextmanager
def held_file(
    option: str, path: Path, doing: str, use: Callable[[int], Used]
) -> Iterator[tuple[Directory, Used]]:
    """Hold a file open during the block; create it if it is missing.

    Yield its directory, and what `use` returns for its descriptor.
    option: option and value, for messages.
    doing: the action that failed, for messages.
    Raises UsageError for an OSError, and UntrustedError as `locked` does.
    """
    from hicachectl.backends.disk.directory import Directory

    parent, name = os.path.split(os.path.abspath(path))  # noqa: PTH100 - as in FileStore
    with ExitStack() as held:
        try:
            directory = held.enter_context(Directory.named(parent, writes=True))
            descriptor = directory.open_lock(name)
            held.callback(os.close, descriptor)
            used = use(descriptor)
        except OSError as error:
            next_step = "give a file in a directory that exists and that you can write to"
            raise UsageError(failed(option, doing, error, next_step)) from error
        yield directory, used


@contextmanager
def progress(ctx: click.Context, what: str, unit: str) -> Iterator[Callable[[int], None]]:
    """Show progress on stderr if stderr is a terminal and the work takes longer than a second."""
    with _bar(ctx, what, unit) as bar:
        yield (lambda amount: None) if bar is None else bar.update


@contextmanager
def bytes_progress(
    ctx: click.Context, what: str, created: Sequence[str] = ()
) -> Iterator[Callable[[int, int], None]]:
    """Show done and total bytes, throughput and remaining time, as `progress` does.

    created: directories that the copy has created. After the first bytes, a remark names the file
        system of each one, because the intended file system may not be mounted. A copy without
        bytes removes the directories again.
    """
    unsaid = list(created)
    with _bar(ctx, what, "B", unit_divisor=1024) as bar:

        def advance(amount: int, total: int) -> None:
            if amount and unsaid:
                remark(ctx, *map(_created, unsaid))
                unsaid.clear()
            if bar is not None:
                bar.total = total
                bar.update(amount)

        yield advance


def _created(directory: str) -> str:
    """Return the remark about a directory that a copy has created."""
    from hicachectl.backends.disk.io import mount_point

    space = os.statvfs(directory)
    free = human_size(space.f_bavail * space.f_frsize)
    return f"Created {directory} on the file system {mount_point(directory)}, which has {free} free"


@contextmanager
def stages(
    ctx: click.Context, what: str, created: Sequence[str] = ()
) -> Iterator[tuple[Callable[[int], None], Callable[[int, int], None]]]:
    """Show the progress of a listing, then of bytes.

    what: label such as "reading".
    created: see `bytes_progress`.
    """
    with (
        progress(ctx, "listing", " objects") as on_listed,
        bytes_progress(ctx, what, created) as on_bytes,
    ):
        yield on_listed, on_bytes


@contextmanager
def _bar(ctx: click.Context, what: str, unit: str, *, unit_divisor: int = 1000) -> Iterator[Any]:
    settings: Settings = ctx.obj
    if settings.quiet or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(
        desc=what,
        unit=unit,
        unit_scale=True,
        unit_divisor=unit_divisor,
        delay=PROGRESS_DELAY_S,
        leave=False,
    ) as bar:
        yield bar


def remark(ctx: click.Context, *texts: str, failure: bool = False) -> None:
    """Print remarks on stderr unless --quiet is given.

    failure: the texts say why the exit status is not 0, or what was not done, so they are printed
        in any case.
    """
    settings: Settings = ctx.obj
    if failure or not settings.quiet:
        for text in texts:
            click.echo(f"hicachectl: {message_text(text)}", err=True)


def remark_wait(ctx: click.Context, seconds: float, pages: int) -> None:
    """Print why a check of page groups waits, for the callback `on_wait` of `check_store`."""

    remark(
        ctx,
        f"Servers may still be writing {counted(pages, 'page')}. The store keeps no timestamps, so "
        f"{ctx.info_name} looks again in {seconds:.0f} s (--grace).",
    )
