"""`hicachectl diff`: show how two stores differ."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from hicachectl.cli.asked import closers_of, selection_of
from hicachectl.cli.command import Command
from hicachectl.cli.options import (
    allow_empty_option,
    comparing_options,
    filter_options,
    grace_option,
    output_options,
    profile_options,
    store_names,
)
from hicachectl.cli.parameters import argument, own_option
from hicachectl.cli.session import opened, remark, remark_wait, stages

if TYPE_CHECKING:
    from hicachectl.backends.base import Store
    from hicachectl.move.difference import DiffRequest


@click.command("diff", cls=Command)
@argument("source", metavar="A", shell_complete=store_names)
@argument("destination", metavar="B", shell_complete=store_names)
@own_option(
    "--verify",
    is_flag=True,
    repeats=False,
    help="Read pages that look equal in both stores, and compare their bytes.",
)
@grace_option("Count differing pages as in flight if they are younger than this")
@allow_empty_option
@comparing_options
@filter_options(beside_flags=True)
@output_options
@profile_options
@click.pass_context
def command(ctx: click.Context, /, source: str, destination: str, **options: Any) -> None:
    """Show how two stores differ; exit with 4 if they do.

    A and B can be stores of any kind. diff compares the names and sizes of their objects, page by
    page, and changes nothing. --verify also reads the pages that look equal, and compares their
    bytes.

    The table shows, for each deployment, how many pages are equal, only in one store, or different.
    Below it are the commands that close the differences. Other formats have a row for each page
    that differs; --pages of other commands takes these rows.

    Without a profile, objects with the same key are compared. With a profile, diff looks in B for
    the keys that SGLang uses on B's kind of store. If B's pages are for another deployment,
    describe that deployment with the --to options, as for migrate.

    The exit status is 0 if all pages are equal, and 4 if pages differ or no page was compared. If a
    page differs and is younger than --grace, it is in flight, and diff does not judge it.

    Examples:
      hicachectl diff /mnt/hicache /backup/monday.hcpack
      hicachectl diff prod: copy: --verify --bwlimit 200MiB
      hicachectl diff prod: mooncake://master:50051 --profile prod.toml
      hicachectl diff prod: new: --profile prod.toml --to-tp 8
      hicachectl diff prod: copy: --format jsonl -o differences.jsonl
    """
    from hicachectl.cli.output import write_result
    from hicachectl.move.difference import compare_stores

    with opened(ctx, source) as a, opened(ctx, destination) as b:
        request = _request(ctx, a, b, options)
        with stages(ctx, "reading") as (on_listed, on_read):
            result = compare_stores(
                a,
                b,
                request,
                closers=closers_of(ctx, (source, destination)),
                on_listed=on_listed,
                on_read=on_read,
                on_wait=partial(remark_wait, ctx),
            )
    write_result(ctx, result)


def _request(ctx: click.Context, a: Store, b: Store, options: dict[str, Any]) -> DiffRequest:
    from hicachectl.move.difference import DiffRequest
    from hicachectl.move.store_pair import CopyOptions
    from hicachectl.profiles.sources import (
        agree_on_profile,
        destination_profile,
        profile_from_options,
    )

    selection = selection_of(ctx, a, options)
    profile = profile_from_options(options, a, warn=partial(remark, ctx))
    profile = profile or agree_on_profile(b, None)
    return DiffRequest(
        profile=profile,
        other_profile=destination_profile(profile, options),
        selection=selection,
        grace_seconds=options["grace"],
        allow_empty=options["allow_empty"],
        options=CopyOptions(
            buffer_bytes=options["buffer_bytes"],
            jobs=options["jobs"],
            bytes_per_second=options["bwlimit"],
            verify=options["verify"],
            trailers=options["trailers"],
        ),
    )
