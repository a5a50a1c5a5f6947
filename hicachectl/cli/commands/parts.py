"""The options --shard, --run, --wait, --ray and --workers of commands that can be divided."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from hicachectl.cli.environment import long_name
from hicachectl.cli.exit_codes import FINDINGS
from hicachectl.cli.mending import with_value
from hicachectl.cli.precedence import on_command_line
from hicachectl.cli.session import bytes_progress, opened_store, progress, remark
from hicachectl.formats.errors import EmptyStore, StoreUnavailable, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from hicachectl.backends.base import Store
    from hicachectl.backends.disk.permissions import Permissions
    from hicachectl.formats.profile import Profile
    from hicachectl.parts.job import Job, Merged
    from hicachectl.parts.records import RecordForm
    from hicachectl.parts.shards import Shard

_AGAIN = "to complete the work, run all parts with another --run"
# Next step for parameters that a part cannot have; for all others, the option of `merge`.
_INSTEAD = {
    "dry_run": "leave out --shard",
    "lock": "leave it out, since two processes may do the same part at once",
}


def chosen_shard(
    ctx: click.Context, options: Mapping[str, Any], *, whole_only: Collection[str]
) -> Shard | None:
    """Return the part that --shard names; None if the command runs as a whole.

    whole_only: parameters that a part cannot have. Raises click.UsageError, UsageError.
    """
    from hicachectl.parts.shards import parse_shard

    text, directory = options["shard"], options["run_directory"]
    if text is None:
        if on_command_line(ctx, "wait"):
            raise click.UsageError("--wait needs --shard")
        if directory is not None and options["ray"] is None:
            raise click.UsageError("--run needs --shard or --ray")
        return None
    if options["ray"] is not None:
        raise click.UsageError("--shard cannot be combined with --ray, which divides by itself")
    if directory is None:
        raise click.UsageError("--shard needs --run DIR, a directory that all parts share")
    for parameter, name in _given(ctx, whole_only):
        instead = _INSTEAD.get(parameter, f"give {name} to hicachectl merge")
        raise click.UsageError(f"{name} cannot be combined with --shard; {instead}")
    return parse_shard(text)


def is_on_cluster(
    ctx: click.Context, options: Mapping[str, Any], *, undivided: Collection[str]
) -> bool:
    """Return whether --ray is given.

    undivided: parameters that a run on a cluster cannot have. Raises click.UsageError, UsageError.
    """
    if options["ray"] is None:
        if options["workers"] is not None:
            raise click.UsageError("--workers needs --ray")
        return False
    from hicachectl.parts.cluster import parse_address

    parse_address(options["ray"])
    for _, name in _given(ctx, undivided):
        raise click.UsageError(f"{name} cannot be combined with --ray; leave out one of them")
    return True


def _given(ctx: click.Context, names: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the parameters of these names on the command line, each with its option.

    Settings from elsewhere have no effect, and are not refused.
    """
    for param in ctx.command.params:
        name = param.name
        if name in names and on_command_line(ctx, name):
            yield name, long_name(param)


def refuse_inside(run: Path | None, files: Mapping[str, Path | None]) -> None:
    """Raise UsageError if a file to write is in a run directory.

    run: None for a temporary one. files: the files with their options; None for an option that is
    not given.
    """
    for option, path in files.items():
        if run is not None and path is not None and run.resolve() in path.resolve().parents:
            raise UsageError(
                f"{option} {path}: is in the run directory {run}, where it could replace a file of "
                "the run; give another directory"
            )


def say_divided(ctx: click.Context, count: int, options: Mapping[str, Any], *limits: str) -> None:
    """Say which given limits of the whole run each part gets an equal share of.

    count: number of parts at once. limits: names of parameters.
    """
    given = [f"--{name.replace('_', '-')}" for name in limits if options[name] is not None]
    if given and count > 1:
        remark(ctx, f"Of {' and '.join(given)}, each of the {count} parts takes an equal share")


def do_part(ctx: click.Context, options: Mapping[str, Any], shard: Shard, job: Job) -> RecordForm:
    """Do a part of a run, and say on stderr how it ended; its findings are those of `merge`."""
    from hicachectl.parts.directory import RunDirectory
    from hicachectl.parts.running import begin, join, run_part
    from hicachectl.text.units import minute

    say, path = partial(remark, ctx), options["run_directory"]
    with RunDirectory.create(path, job.permissions, job.trust) as run:
        if shard.number == 0:
            with progress(ctx, "listing", " objects") as on_listed:
                begun = begin(run, job, shard.count, on_listed=on_listed)
        else:
            lister = with_value(ctx, "--shard", f"0/{shard.count}")
            wait = options["wait"]
            begun = join(run, job, shard.count, wait_seconds=wait, lister=lister, say=say)
        with bytes_progress(ctx, f"part {shard.number}") as on_progress:
            outcome = run_part(run, job, begun, shard.number, on_progress=on_progress)
    name, record = f"Part {shard.number} of {shard.count}", outcome.record
    if outcome.earlier:
        name = f"{name} was done at {minute(record.ended_ns)} UTC, on {record.host}"
        if record.settled:
            say(name)
        else:
            remark(ctx, f"{name}, and is not complete; {_AGAIN}", failure=True)
    elif record.settled:
        say(f"{name} is done; when all are, join them with: hicachectl merge {quote(str(path))}")
    else:
        remark(ctx, f"{name} is not complete; {_AGAIN}", failure=True)
    return record


def do_on_cluster(
    ctx: click.Context,
    options: Mapping[str, Any],
    job: Job,
    make: Callable[..., Job],
    reopened: Sequence[Callable[[], AbstractContextManager[Store]]],
    *,
    limits: Sequence[str],
    output_format: str,
    output: Path | None,
) -> None:
    """Divide a run among the nodes of a cluster; write the document and exit as one process does.

    make: returns an equal job on a node, from its stores, which `reopened` open; all picklable.
    limits: see `say_divided`.
    """
    from hicachectl.parts.driver import Driver

    say = partial(remark, ctx)
    path = options["run_directory"]
    catalog = options.get("catalog") if options.get("update_catalog") else None
    metrics = options.get("metrics_file")
    refuse_inside(path, {"--catalog": catalog, "--metrics-file": metrics, "--output": output})
    opened_again = partial(opened_job, make, reopened)
    with Driver(
        options["ray"], job, opened_again, workers=options["workers"], path=path, say=say
    ) as driver:
        say_divided(ctx, driver.workers, options, *limits)
        try:
            with progress(ctx, "listing", " objects") as on_listed:
                driver.begin(on_listed)
            with bytes_progress(ctx, "parts") as on_progress:
                driver.work(on_progress)
        except BaseException as error:
            lost = isinstance(error, StoreUnavailable) and not isinstance(error, EmptyStore)
            if lost or not isinstance(error, Exception):
                say("Continue with the same command" if path else
                    "The next run starts over; give --run DIR to continue one")  # fmt: skip
            raise
        merged = driver.merged()
        if options.get("update_catalog") and not write_catalog(
            ctx,
            merged,
            options["catalog"],
            job.permissions,
            allow_shrink=options["allow_shrink"],
        ):
            merged = replace(merged, failed=True)
        else:
            driver.mark_merged()
        write_merged(
            ctx,
            merged,
            options.get("metrics_file"),
            output_format,
            output,
            limit=options.get("limit"),
            all_findings=options.get("all_findings", False),
        )


@contextmanager
def opened_source(
    url: str, profile: Profile | None, *, looks_only: bool = False, **options: Any
) -> Iterator[Store]:
    """Open a source on a node, and pass it the profile of the command.

    looks_only: see `Profiled.use_profile`. options: see `opened_store`.
    """
    from hicachectl.profiles.sources import agree_on_profile

    with opened_store(url, **options) as store:
        agree_on_profile(store, profile, looks_only=looks_only)
        yield store


@contextmanager
def opened_destination(url: str, **options: Any) -> Iterator[Store]:
    """Open a destination on a node. options: see `opened_store`.

    Raises StoreUnavailable if it did not exist there. The driver has created it, so this node lacks
    its file system, and copies would be lost.
    """
    with opened_store(url, create=True, **options) as store:
        if store.created:
            raise StoreUnavailable(f"{store.url}: does not exist on this node; mount it there")
        yield store


@contextmanager
def opened_job(
    make: Callable[..., Job], reopened: Sequence[Callable[[], AbstractContextManager[Store]]]
) -> Iterator[Job]:
    """Open the stores of a job on a node."""
    with ExitStack() as stack:
        yield make(*(stack.enter_context(opened()) for opened in reopened))


def write_merged(
    ctx: click.Context,
    merged: Merged,
    metrics_file: Path | None,
    output_format: str,
    output: Path | None,
    *,
    limit: int | None = None,
    all_findings: bool = False,
) -> None:
    """Write the metrics and the document of a divided run; exit with its status if it failed.

    limit, all_findings: see `findings_options`. Raises UsageError if parts of the run refused their
    work.
    """
    from hicachectl.cli.metrics import write_metrics_of
    from hicachectl.cli.output import write_result
    from hicachectl.verification.report_text import DEFAULT_LIMIT, Shown

    shown = Shown(limit or DEFAULT_LIMIT, all_findings)
    if metrics_file is not None:
        succeeded = not (merged.failed or merged.refused)
        write_metrics_of(merged.command, metrics_file, merged.document, succeeded=succeeded)
    write_result(
        ctx,
        merged.document,
        remarks=merged.remarks,
        undone=merged.undone,
        failed=merged.failed or bool(merged.refused),
        dry_run=merged.dry_run,
        rows=merged.rows,
        name=merged.rows_name,
        output_format=output_format,
        output=output,
        text=lambda screen: merged.lines(screen, shown),
    )
    if merged.refused:
        raise UsageError(merged.refused)
    if merged.failed:
        ctx.exit(FINDINGS)


def write_catalog(
    ctx: click.Context,
    merged: Merged,
    path: Path,
    readable_by: Permissions,
    *,
    allow_shrink: bool,
) -> bool:
    """Write the catalog of a divided run, unless a part is missing; return whether it was written.

    allow_shrink: see `save_catalog`, which may refuse. Raises UsageError if the run recorded no
    digests.
    """
    if merged.write_catalog is None:
        raise UsageError(
            "--catalog: the run recorded no digests; give its parts --catalog and --update-catalog"
        )
    if merged.document["missing_parts"]:
        why = f"{path}: not written, because parts of the run are missing"
    else:
        why = merged.write_catalog(path, readable_by, allow_shrink)
    if why:
        remark(ctx, why, failure=True)
    return not why
