"""Runs in parts, by the options --shard, --run, --wait, --ray and --workers."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from hicachectl.cli.asked import with_value
from hicachectl.cli.exit_codes import FINDINGS
from hicachectl.cli.parameters import long_name, on_command_line, options_of
from hicachectl.cli.session import bytes_progress, progress, remark, reopening
from hicachectl.formats.errors import EmptyStore, StoreUnavailable, UsageError
from hicachectl.text.units import minute

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from hicachectl.backends.base import Store
    from hicachectl.backends.disk.permissions import Permissions
    from hicachectl.cli.parameters import Divided
    from hicachectl.cli.session import Opening
    from hicachectl.formats.profile import Profile
    from hicachectl.parts.job import Job
    from hicachectl.parts.manifest import Shard
    from hicachectl.results import Result

_AGAIN = "to complete the work, run all parts with another --run"


def is_divided(options: Mapping[str, Any]) -> bool:
    """Return whether --shard or --ray divides the run."""
    return options["shard"] is not None or options["ray"] is not None


def check_division(ctx: click.Context, options: Mapping[str, Any]) -> None:
    """Raise click.UsageError, or UsageError, for an option that a divided run cannot have."""
    shard, address = options["shard"], options["ray"]
    if shard is None and on_command_line(ctx, "wait"):
        raise click.UsageError("--wait needs --shard")
    if shard is None and address is None:
        if options["run_directory"] is not None:
            raise click.UsageError("--run needs --shard or --ray")
        return
    if shard is not None and address is not None:
        raise click.UsageError("--shard cannot be combined with --ray, which divides by itself")
    if shard is not None and options["run_directory"] is None:
        raise click.UsageError("--shard needs --run DIR, a directory that all parts share")
    for name, divided in _given(ctx):
        if address is not None and not divided.on_cluster:
            raise click.UsageError(f"{name} cannot be combined with --ray; leave out one of them")
        if shard is not None and divided.instead:
            instead = divided.instead.format(name)
            raise click.UsageError(f"{name} cannot be combined with --shard; {instead}")
    if shard is None:
        from hicachectl.parts.cluster import parse_address

        parse_address(address)
    else:
        from hicachectl.parts.manifest import parse_shard

        parse_shard(shard)


def _given(ctx: click.Context) -> Iterator[tuple[str, Divided]]:
    """Yield the options on the command line, each with what a run in parts does with it.

    Settings from other sources have no effect in such a run, so they are not refused.
    """
    for option in options_of(ctx.command):
        if option.divided is not None and on_command_line(ctx, str(option.name)):
            yield long_name(option), option.divided


def refuse_inside(run: Path | None, files: Mapping[str, Path | None]) -> None:
    """Raise UsageError if a file to write is in a run directory.

    run: the run directory; None for a temporary one.
    files: the file of each option; None for an option that is not given.
    """
    for option, path in files.items():
        if run is not None and path is not None and run.resolve() in path.resolve().parents:
            raise UsageError(
                f"{option} {path}: is in the run directory {run}, where it could replace a file of "
                "the run; give another directory"
            )


def say_divided(ctx: click.Context, count: int, divider: str) -> None:
    """Say which limits are for the whole run, so that each part takes an equal share.

    count: number of parts at once.
    divider: option that divides the run.
    """
    given = sorted(
        long_name(option)
        for option in options_of(ctx.command)
        if option.divided is not None
        and divider in option.divided.shared_by
        and ctx.params[str(option.name)] is not None
    )
    if given and count > 1:
        remark(ctx, f"Each of the {count} parts takes an equal share of {' and '.join(given)}")


def run_divided(
    ctx: click.Context,
    options: Mapping[str, Any],
    job: Job,
    make: Callable[..., Job],
    reopened: Sequence[Opening],
    created: Sequence[str] = (),
) -> Result | None:
    """Do a part of a run, or do all parts on a cluster and return their result.

    job: the job of this process.
    make: function that returns an equal job on a node, from its stores.
    reopened: functions that open these stores on a node. These functions and `make` are picklable.
    created: see `bytes_progress`.
    """
    from hicachectl.parts.manifest import parse_shard

    if options["shard"] is None:
        return _on_cluster(ctx, options, job, partial(opened_job, make, reopened), created)
    shard = parse_shard(options["shard"])
    say_divided(ctx, shard.count, "--shard")
    _do_part(ctx, options, shard, job, created)
    return None


def _do_part(
    ctx: click.Context,
    options: Mapping[str, Any],
    shard: Shard,
    job: Job,
    created: Sequence[str],
) -> None:
    """Do a part of a run, and say on stderr how it ended. `merge` reports the part's findings."""
    from hicachectl.parts.directory import RunDirectory
    from hicachectl.parts.running import begin, join, run_part

    say, path = partial(remark, ctx), options["run_directory"]
    with RunDirectory.create(path, job.permissions, job.trust) as run:
        if shard.number == 0:
            with progress(ctx, "listing", " objects") as on_listed:
                manifest = begin(run, job, shard.count, on_listed=on_listed)
        else:
            lister = with_value(ctx, "--shard", f"0/{shard.count}")
            wait = options["wait"]
            manifest = join(run, job, shard.count, wait_seconds=wait, lister=lister, say=say)
        with bytes_progress(ctx, f"part {shard.number}", created) as on_progress:
            outcome = run_part(run, job, manifest, shard.number, on_progress=on_progress)
    name, record = f"Part {shard.number} of {shard.count}", outcome.record
    if outcome.earlier:
        name = f"{name} was done at {minute(record.ended_ns)} UTC, on {record.host}"
        if record.settled:
            say(name)
        else:
            remark(ctx, f"{name}, and is not complete; {_AGAIN}", failure=True)
    elif record.settled:
        merge = f"hicachectl merge {quote(str(path))}"
        say(f"{name} is done; when all parts are done, join them with: {merge}")
    else:
        remark(ctx, f"{name} is not complete; {_AGAIN}", failure=True)
    remark(ctx, *job.kind.undone(manifest, record), failure=True)
    if job.kind.parts_fail and not record.settled:
        ctx.exit(FINDINGS)


def _on_cluster(
    ctx: click.Context,
    options: Mapping[str, Any],
    job: Job,
    open_job: Callable[[], AbstractContextManager[Job]],
    created: Sequence[str],
) -> Result:
    """Divide a run among the nodes of a cluster; return the result of the whole run."""
    from hicachectl.parts.driver import Driver

    say, path = partial(remark, ctx), options["run_directory"]
    catalog = options.get("catalog") if options.get("update_catalog") else None
    metrics, output = ctx.params.get("metrics_file"), ctx.params.get("output")
    refuse_inside(path, {"--metrics-file": metrics, "--output": output, "--catalog": catalog})
    with Driver(
        options["ray"], job, open_job, workers=options["workers"], path=path, say=say
    ) as driver:
        say_divided(ctx, driver.workers, "--ray")
        try:
            with progress(ctx, "listing", " objects") as on_listed:
                driver.begin(on_listed)
            with bytes_progress(ctx, "parts", created) as on_progress:
                driver.work(on_progress)
        except BaseException as error:
            lost = isinstance(error, StoreUnavailable) and not isinstance(error, EmptyStore)
            if lost or not isinstance(error, Exception):
                say("Continue with the same command" if path else
                    "The next run starts over; to continue such a run, give --run DIR")  # fmt: skip
            raise
        result = driver.merged()
        if catalog is not None and not write_catalog(
            ctx, result, catalog, job.permissions, allow_shrink=options["allow_shrink"]
        ):
            return replace(result, failed=True)
        driver.mark_merged()
        return result


@contextmanager
def opened_source(
    reopened: Opening, profile: Profile | None, *, looks_only: bool = False
) -> Iterator[Store]:
    """Open a source on a node, and pass it the profile of the command.

    looks_only: see `Profiled.use_profile`.
    """
    from hicachectl.profiles.sources import agree_on_profile

    with reopened() as store:
        agree_on_profile(store, profile, looks_only=looks_only)
        yield store


@contextmanager
def opened_destination(reopened: Opening) -> Iterator[Store]:
    """Open a destination on a node.

    Raises StoreUnavailable if the destination did not exist on the node. The driver has created it,
    so the node lacks its file system, and copies would be lost.
    """
    with reopened(create=True) as store:
        if store.created:
            raise StoreUnavailable(f"{store.url}: does not exist on this node; mount it there")
        yield store


def reopened_stores(
    ctx: click.Context, source: str, destination: str, profile: Profile | None
) -> list[Opening]:
    """Return functions that open the source and the destination of a copy on a node."""
    return [
        partial(opened_source, reopening(ctx, source), profile),
        partial(opened_destination, reopening(ctx, destination)),
    ]


@contextmanager
def opened_job(make: Callable[..., Job], reopened: Sequence[Opening]) -> Iterator[Job]:
    """Open the stores of a job on a node."""
    with ExitStack() as stack:
        yield make(*(stack.enter_context(opened()) for opened in reopened))


def write_catalog(
    ctx: click.Context, result: Result, path: Path, readable_by: Permissions, *, allow_shrink: bool
) -> bool:
    """Write the catalog of a divided run, unless a part is missing. Return whether it was written.

    allow_shrink: see `save_catalog`, which can refuse to write.
    Raises UsageError if the run recorded no digests.
    """
    if result.write_catalog is None:
        raise UsageError(
            "--catalog: the run recorded no digests; give its parts --catalog and --update-catalog"
        )
    if result.document["missing_parts"]:
        why = f"{path}: not written, because parts of the run are missing"
    else:
        why = result.write_catalog(path, readable_by, allow_shrink)
    if why:
        remark(ctx, why, failure=True)
    return not why
