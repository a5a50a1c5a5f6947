"""The options --shard and --run of commands that can be divided."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from hicachectl.cli.session import bytes_progress, progress, remark

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from hicachectl.parts.job import Job
    from hicachectl.parts.records import RecordForm
    from hicachectl.parts.shards import Shard

_DEFAULTS = (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)


def chosen_shard(
    ctx: click.Context, options: Mapping[str, Any], *, whole_only: Collection[str]
) -> Shard | None:
    """Return the part that --shard names; None if the command runs as a whole.

    whole_only: parameters that a part cannot have. Raises click.UsageError, UsageError.
    """
    from hicachectl.parts.shards import parse_shard

    text, directory = options["shard"], options["run_directory"]
    if text is None:
        if directory is not None:
            raise click.UsageError("--run needs --shard")
        return None
    if directory is None:
        raise click.UsageError("--shard needs --run DIR, a directory that all parts share")
    for param in ctx.command.params:
        if param.name in whole_only and ctx.get_parameter_source(param.name) not in _DEFAULTS:
            raise click.UsageError(
                f"{max(param.opts, key=len)} cannot be combined with --shard, since it concerns "
                "the whole run; see hicachectl merge"
            )
    return parse_shard(text)


def say_divided(ctx: click.Context, shard: Shard, options: Mapping[str, Any], *limits: str) -> None:
    """Say which given limits of the whole run each part gets an equal share of.

    limits: names of parameters.
    """
    given = [f"--{name.replace('_', '-')}" for name in limits if options[name] is not None]
    if given and shard.count > 1:
        remark(ctx, f"Of {' and '.join(given)}, each of the {shard.count} parts takes an equal "
                    "share")  # fmt: skip


def do_part(ctx: click.Context, path: Path, shard: Shard, job: Job) -> RecordForm:
    """Do a part of a run, and say on stderr how it ended; its findings are those of `merge`."""
    from hicachectl.parts.directory import RunDirectory
    from hicachectl.parts.running import begin, run_part

    say = partial(remark, ctx)
    with RunDirectory.create(path, job.permissions) as run:
        with progress(ctx, "listing", " objects") as on_listed:
            begun = begin(run, job, shard.count, on_listed=on_listed, say=say)
        with bytes_progress(ctx, f"part {shard.number}") as on_progress:
            outcome = run_part(run, job, begun, shard.number, on_progress=on_progress, say=say)
    name = f"Part {shard.number} of {shard.count}"
    if outcome.earlier:
        say(f"{name} was done before, on {outcome.record.host}")
    elif outcome.record.settled:
        say(f"{name} is done; when all are, join them with: hicachectl merge {path}")
    else:
        say(f"{name} is not complete; run it again")
    return outcome.record
