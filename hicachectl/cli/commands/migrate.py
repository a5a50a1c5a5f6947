"""`hicachectl migrate`: copy or move pages to another store, key grammar, layout or topology."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from hicachectl.cli.command import Command
from hicachectl.cli.commands.parts import chosen_division, reopened_stores, run_divided
from hicachectl.cli.filters import filter_options, selection_of
from hicachectl.cli.options import (
    allow_empty_option,
    buffer_option,
    bwlimit_option,
    grace_option,
    jobs_option,
    lease_wait_option,
    lock_option,
    output_options,
    parts_options,
    profile_options,
    store_names,
    transform_options,
)
from hicachectl.cli.parameters import FILTERS, OWN_VALUE, SAME, Divided, argument, own_option
from hicachectl.cli.session import (
    agreed,
    bytes_progress,
    opened,
    progress,
    remark,
    remark_wait,
    require_consent,
    store_name,
)
from hicachectl.cli.values import FILE
from hicachectl.io.interrupts import raised_once

if TYPE_CHECKING:
    from hicachectl.backends.base import Store
    from hicachectl.cli.commands.parts import Division
    from hicachectl.move.migration import MigrationRequest
    from hicachectl.results import Result


_equal_option = partial(own_option, divided=SAME)


@click.command(
    "migrate",
    cls=Command,
    epilog="""\b
Examples:
  hicachectl migrate /mnt/hicache /backup/monday.hcpack --profile prod.toml
  hicachectl migrate /backup/monday.hcpack mooncake://master:50051
  hicachectl migrate /mnt/hicache /mnt/new --profile prod.toml --to-tp 8
  hicachectl migrate prod: new: --profile prod.toml --to-model Qwen/Qwen3-32B-v2 --dry-run
  hicachectl migrate prod: new: --profile prod.toml --move --yes --bwlimit 200MiB
  hicachectl migrate prod: new: --profile prod.toml --shard 0/8 --run /shared/$(date +%F)
  hicachectl migrate prod: new: --profile prod.toml --ray auto --run /var/lib/copy
""",
)
@argument("source", metavar="SRC", shell_complete=store_names)
@argument("destination", metavar="DST", shell_complete=store_names)
@FILTERS.option("--match", "page", metavar="PREFIX", help="Same as --page.")
@FILTERS.option("--pages-from", "pages", type=FILE, metavar="FILE", help="Same as --pages.")
@_equal_option("--dry-run", is_flag=True, help="Show what would be copied; change nothing.")
@own_option(
    "--resume",
    is_flag=True,
    hidden=True,
    expose_value=False,
    divided=OWN_VALUE,
    help="Has no effect.",
)
@_equal_option(
    "--if-exists",
    type=click.Choice(["skip", "verify", "overwrite"]),
    default="skip",
    show_default=True,
    help="Keep pages that DST already has whole, compare them, or overwrite them.",
)
@_equal_option(
    "--verify",
    is_flag=True,
    help="Read back and compare the written objects, and compare pages that DST already has.",
)
@own_option(
    "--move",
    is_flag=True,
    divided=Divided(same=True, on_cluster=False),
    help="Delete pages from SRC after they were verified in DST.",
)
@own_option("--yes", is_flag=True, divided=OWN_VALUE, help="Do not ask before --move.")
@_equal_option("--include-partial", is_flag=True, help="Also copy pages that are not whole.")
@_equal_option("--include-damaged", is_flag=True, help="Also copy pages that have errors.")
@grace_option("Skip pages younger than this that are not whole")
@allow_empty_option
@_equal_option("--no-space-check", is_flag=True, help="Start even if DST seems to lack space.")
@transform_options
@lock_option
@jobs_option
@buffer_option
@bwlimit_option
@lease_wait_option
@filter_options(beside_flags=True)
@parts_options
@output_options
@profile_options
@click.pass_context
def command(ctx: click.Context, /, source: str, destination: str, **options: Any) -> None:
    """Copy or move pages to another store, layout or topology.

    SRC and DST can be stores of any kind; a missing directory or pack is created. SRC changes only
    with --move.

    Without a profile, objects keep their keys and bytes. With a profile, keys get the
    form that SGLang uses on DST's kind of store, and the --to options change model name, layout
    and topology.

    Only whole page groups are copied, the kv objects last, so no server sees half a page. Pages
    with errors and pages that are still being written are not copied. Pages that DST already has
    whole are skipped (see --if-exists). A different object under the same key is a conflict. With
    another layout, keys and sizes stay equal, so pages that DST has are compared unless trailers
    prove their layout.

    After an interruption at any point, the same command completes the work. Without --verify, it
    reads only the objects that did not arrive.

    --shard divides the work among processes, also on several hosts: each copies the pages of its
    part. After a kill, run the part again with the same options. After exit status 4, another run
    (--run) copies the rest. DST cannot be a pack then. Nothing is printed on stdout; see
    hicachectl-merge(1).

    --ray divides the work among the nodes of a Ray cluster, and prints the result; see CLUSTERS in
    hicachectl-verify(1). --move needs one process, or --shard.
    """
    from hicachectl.cli.output import write_run

    division = chosen_division(ctx, options)
    if options["move"]:
        require_consent(options)
    run = partial(_migrated, ctx, source, destination, options, division)
    with raised_once():
        write_run(ctx, run, partial(_nothing, ctx, source, destination))


def _nothing(ctx: click.Context, source: str, destination: str) -> Result:
    """Return the result of a run that copied nothing."""
    from hicachectl.move.migration_outcome import MigrationFacts, result_of

    return result_of([MigrationFacts()], store_name(ctx, source), store_name(ctx, destination))


def _migrated(
    ctx: click.Context,
    source: str,
    destination: str,
    options: dict[str, Any],
    division: Division | None,
) -> Result | None:
    """Open both stores and migrate; None if the operator declined --move, or for a part."""
    wait = options["lease_wait"]
    with (
        opened(ctx, source, lease_wait=wait) as origin,
        opened(ctx, destination, lease_wait=wait, create=True) as target,
    ):
        request = _request(ctx, origin, options)
        if division is None:
            return (
                _at_once(ctx, origin, target, request) if _agreed(origin, target, options) else None
            )
        from hicachectl.parts.migrate import MigrateJob

        make = partial(MigrateJob, request=request)
        job = make(origin, target)
        if not _agreed(origin, target, options):
            return None
        reopened = reopened_stores(ctx, source, destination, request.profile, wait)
        return run_divided(ctx, options, division, job, make, reopened)


def _agreed(source: Store, target: Store, options: dict[str, Any]) -> bool:
    """Return whether pages may be deleted, if --move is given."""
    return not options["move"] or agreed(
        options, f"Delete pages from {source.url} after they are verified in {target.url}?"
    )


def _at_once(ctx: click.Context, source: Store, target: Store, request: MigrationRequest) -> Result:
    """Migrate in this process."""
    from hicachectl.formats.errors import StoreUnavailable
    from hicachectl.move.migration import migrate

    begun: list[bool] = []
    try:
        with (
            progress(ctx, "listing", " objects") as on_listed,
            bytes_progress(ctx, "copying") as on_moved,
        ):
            return migrate(
                source,
                target,
                request,
                on_listed=on_listed,
                on_begun=lambda: begun.append(True),
                on_moved=on_moved,
                on_wait=partial(remark_wait, ctx),
            )
    except BaseException as error:
        # Only after a signal or a lost store can a new run get further.
        if begun and (not isinstance(error, Exception) or isinstance(error, StoreUnavailable)):
            remark(ctx, "Work in progress was finished; continue with the same command")
        raise


def _request(ctx: click.Context, source: Store, options: dict[str, Any]) -> MigrationRequest:
    from hicachectl.move.migration import MigrationRequest
    from hicachectl.move.store_pair import CopyOptions
    from hicachectl.profiles.destination import destination_profile
    from hicachectl.profiles.sources import profile_from_options

    changes = options["move"] and not options["dry_run"]
    selection = selection_of(ctx, source, options, changes=changes)
    profile = profile_from_options(options, source, warn=partial(remark, ctx))
    return MigrationRequest(
        profile=profile,
        destination_profile=destination_profile(profile, options),
        selection=selection,
        grace_seconds=options["grace"],
        if_exists=options["if_exists"],
        partial=options["include_partial"],
        damaged=options["include_damaged"],
        allow_empty=options["allow_empty"],
        dry_run=options["dry_run"],
        space_check=not options["no_space_check"],
        options=CopyOptions(
            buffer_bytes=options["buffer_bytes"],
            jobs=options["jobs"],
            bytes_per_second=options["bwlimit"],
            verify=options["verify"],
            move=options["move"],
            trailers=options["trailers"],
        ),
    )
