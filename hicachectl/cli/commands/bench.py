"""`hicachectl bench`: whether reading from a store is faster than computing."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from hicachectl.cli.command import Command
from hicachectl.cli.options import (
    allow_leases_option,
    lease_wait_option,
    lock_option,
    output_options,
    prefetch_threshold_option,
    profile_options,
    store_argument,
)
from hicachectl.cli.parameters import own_option
from hicachectl.cli.session import opened, progress, remark
from hicachectl.cli.values import POSITIVE_DURATION, POSITIVE_NUMBER, POSITIVE_SIZE, Count

if TYPE_CHECKING:
    from hicachectl.results import Result


@click.command("bench", cls=Command)
@store_argument
@own_option(
    "--write",
    is_flag=True,
    repeats=False,
    writes=True,
    help="Also write pages under a model name that no server has, and remove them.",
)
@own_option(
    "--compare", metavar="STORE2", help="Measure another store in the same way, after STORE."
)
@own_option(
    "--ranks",
    type=Count(1, 64),
    metavar="N",
    help="Read as N ranks at once.  [default: as many as the keys name, at most 16]",
)
@own_option(
    "--threads",
    type=Count(1, 64),
    default=1,
    show_default=True,
    metavar="N",
    help="Read with N threads in each rank.",
)
@own_option(
    "--prefill",
    type=POSITIVE_NUMBER,
    metavar="TOKENS/s",
    help="Prompt tokens that a server computes per second.  [default: from the metrics of "
    "--server]",
)
@own_option(
    "--most",
    "most_bytes",
    type=POSITIVE_SIZE,
    default="1GiB",
    show_default=True,
    help="Read at most SIZE of pages, all ranks together.",
)
@own_option(
    "--time-limit",
    type=POSITIVE_DURATION,
    default="30s",
    show_default=True,
    help="Read each store for at most this long; the same limit holds for writes. A batch that has "
    "begun is completed.",
)
@own_option(
    "--drop-cache",
    is_flag=True,
    repeats=False,
    help="Before bench reads files, drop them from the page cache of this host.",
)
@own_option(
    "--probe-server",
    needs="--server URL",
    is_flag=True,
    repeats=False,
    writes=True,
    help="Also time random prompts that the server computes and restores. The server must have "
    "STORE attached; bench removes the pages of the prompts from STORE.",
)
@own_option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    help="Also time value checks and digests on this device. On cuda, also time copies and the "
    "sparse loader, which reads selected tokens.",
)
@lock_option
@prefetch_threshold_option
@allow_leases_option
@lease_wait_option
@output_options
@profile_options
@click.pass_context
def command(
    ctx: click.Context, /, store: str, compare: str | None, write: bool, **options: Any
) -> None:
    """Measure whether reading from a store is faster than computing.

    bench reads pages as servers do for their prefetch: all ranks at once, in batches of 128 pages.
    It shows pages and bytes per second, the latency of a batch, and the time to restore a prompt.
    With the prefill rate of a server, it says which prompts are faster to read than to compute.

    Files are read first as bench finds them, on the disk or in the page cache, and then again.
    Reads from the page cache have rows of their own, because they show the speed of memory and not
    of the disk. These reads are compared with a bare loop of preadv over the same files.

    bench reads only the listing and a random sample of whole pages, within --most and --time-limit.
    Only --write, --probe-server and --drop-cache change anything.

    Examples:
      hicachectl bench prod: --profile prod.toml --prefill 20000
      hicachectl bench prod: --server http://localhost:30000 --probe-server
      hicachectl bench prod: --profile prod.toml --compare file:///local/hicache --threads 4
      hicachectl bench prod: --profile prod.toml --write --most 4GiB
      hicachectl bench prod: --profile prod.toml --device cuda
    """
    from hicachectl.bench.bench import BenchRequest, bench, nothing_measured
    from hicachectl.cli.output import write_run
    from hicachectl.profiles.sources import profile_from_options

    request = BenchRequest(
        most_bytes=options["most_bytes"],
        seconds=options["time_limit"],
        ranks=options["ranks"],
        threads=options["threads"],
        prefill=options["prefill"],
        server=options["server"] or "",
        device=options["device"] or "",
        writes=write,
        drop_cache=options["drop_cache"],
        probe_server=options["probe_server"],
    )

    def run() -> Result:
        with ExitStack() as held, progress(ctx, "listing", " objects") as on_listed:
            source = held.enter_context(opened(ctx, store))
            profile = profile_from_options(options, source, warn=partial(remark, ctx))
            others = [] if compare is None else [held.enter_context(opened(ctx, compare))]
            asked = replace(request, profile=profile)
            return bench([source, *others], asked, on_listed=on_listed)

    write_run(ctx, run, lambda: nothing_measured(request))
