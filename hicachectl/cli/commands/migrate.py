"""`hicachectl migrate`: copy or move pages to another store, layout, TP or PP size."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from hicachectl.cli.asked import selection_of
from hicachectl.cli.command import Command
from hicachectl.cli.commands.parts import check_division, is_divided, reopened_stores, run_divided
from hicachectl.cli.options import (
    allow_empty_option,
    copy_options,
    filter_options,
    grace_option,
    output_options,
    profile_options,
    store_names,
)
from hicachectl.cli.parameters import (
    FILTERS,
    OWN_VALUE,
    Divided,
    argument,
    equal_option,
    own_option,
)
from hicachectl.cli.session import (
    agreed,
    opened,
    remark,
    remark_wait,
    require_consent,
    stages,
    store_name,
)
from hicachectl.cli.values import FILE
from hicachectl.io.interrupts import raised_once

if TYPE_CHECKING:
    from hicachectl.backends.base import Store
    from hicachectl.move.migration import MigrationRequest
    from hicachectl.results import Result


@click.command("migrate", cls=Command)
@argument("source", metavar="SRC", shell_complete=store_names)
@argument("destination", metavar="DST", shell_complete=store_names)
@FILTERS.option("--match", "page", metavar="PREFIX", help="Another name of --page.")
@FILTERS.option("--pages-from", "pages", type=FILE, metavar="FILE", help="Another name of --pages.")
@equal_option("--dry-run", is_flag=True, help="Show what would be copied; change nothing.")
@own_option(
    "--resume",
    is_flag=True,
    hidden=True,
    expose_value=False,
    divided=OWN_VALUE,
    help="Has no effect.",
)
@equal_option(
    "--if-exists",
    type=click.Choice(["skip", "verify", "overwrite"]),
    default="skip",
    show_default=True,
    help="Skip the pages that DST already has whole, or verify that they are equal, or overwrite "
    "them.",
)
@equal_option(
    "--verify",
    is_flag=True,
    help="Read the written objects again and compare them with SRC. Also compare the pages that "
    "DST already has.",
)
@own_option(
    "--move",
    is_flag=True,
    divided=Divided(same=True, on_cluster=False),
    help="Delete pages from SRC after they were verified in DST.",
)
@own_option("--yes", is_flag=True, divided=OWN_VALUE, help="Do not ask before pages are moved.")
@equal_option("--include-partial", is_flag=True, help="Also copy pages that are not whole.")
@equal_option("--include-damaged", is_flag=True, help="Also copy pages that have errors.")
@grace_option("Skip incomplete pages that are younger than this")
@allow_empty_option
@equal_option("--no-space-check", is_flag=True, help="Start even if DST seems to lack space.")
@copy_options
@filter_options(beside_flags=True)
@output_options
@profile_options
@click.pass_context
def command(ctx: click.Context, /, source: str, destination: str, **options: Any) -> None:
    """Copy or move pages to another store, layout, TP or PP size.

    SRC and DST can be stores of any kind. If DST is a missing directory or pack, it is created. For
    a directory, stderr names the file system, so that a missing mount shows. SRC changes only with
    --move.

    Without a profile, objects keep their keys and bytes. With a profile, keys get the form that
    SGLang uses on DST's kind of store, and the --to options change model name, layout, TP size and
    PP size.

    Only whole page groups are copied, the kv objects last, so no server sees half a page. Pages
    with errors and pages that are still being written are not copied. With
    --include-partial and --include-damaged, incomplete pages and pages with errors are copied, too.
    Pages that DST already has whole are skipped (see --if-exists). A different object under the
    same key is a conflict. A change of layout leaves keys and sizes equal, so pages that DST
    already has are then compared, unless trailers prove their layout.

    After an interruption at any point, the same command completes the work. Without --verify, it
    then reads only the objects that DST lacks.

    If SRC and DST are the same directory, --trailers write adds the trailers of the SGLang plug-in
    to the files in it, without a second copy; see TRAILERS IN PLACE.

    --shard divides the work among processes, also on several hosts. Each process copies the pages
    of its part, and prints nothing on stdout; see hicachectl-merge(1). If a part is killed, run it
    again with the same options. After exit status 4, a new run with another directory in --run
    copies the rest. With --shard, DST cannot be a pack.

    --ray divides the work among the nodes of a Ray cluster, and prints the result; see CLUSTERS in
    hicachectl-verify(1). --move works in one process and with --shard, but not with --ray.

    Examples:
      hicachectl migrate /mnt/hicache /backup/monday.hcpack --profile prod.toml
      hicachectl migrate /backup/monday.hcpack mooncake://master:50051
      hicachectl migrate /mnt/hicache /mnt/new --profile prod.toml --to-tp 8
      hicachectl migrate /mnt/hicache /mnt/hicache --profile prod.toml --trailers write
      hicachectl migrate prod: new: --profile prod.toml --to-model Qwen/Qwen3-32B-v2 --dry-run
      hicachectl migrate prod: new: --profile prod.toml --move --yes --bwlimit 200MiB
      hicachectl migrate prod: new: --profile prod.toml --shard 0/8 --run /shared/$(date +%F)
      hicachectl migrate prod: new: --profile prod.toml --ray auto --run /var/lib/copy
    """
    from hicachectl.cli.output import write_run
    from hicachectl.move.migration_outcome import MigrationFacts, result_of
    from hicachectl.parts.migrate import MigrateJob

    check_division(ctx, options)
    if options["move"]:
        require_consent(options)

    def run() -> Result | None:
        """Open both stores and migrate.

        Return None if the operator declines --move, and for a part of a run.
        """
        with (
            opened(ctx, source) as origin,
            opened(ctx, destination, create=True) as target,
        ):
            request = _request(ctx, origin, options)
            make = partial(MigrateJob, request=request)
            job = make(origin, target) if is_divided(options) else None
            question = f"Delete pages from {origin.url} after they are verified in {target.url}?"
            if options["move"] and not agreed(ctx, question, "copied"):
                return None
            if job is None:
                return _at_once(ctx, origin, target, request)
            reopened = reopened_stores(ctx, source, destination, request.profile)
            return run_divided(ctx, options, job, make, reopened, target.created)

    def nothing() -> Result:
        names = store_name(ctx, source), store_name(ctx, destination)
        return result_of([MigrationFacts()], *names)

    with raised_once():
        write_run(ctx, run, nothing)


def _at_once(ctx: click.Context, source: Store, target: Store, request: MigrationRequest) -> Result:
    """Migrate in this process."""
    from hicachectl.formats.errors import StoreUnavailable
    from hicachectl.move.migration import migrate

    begun: list[bool] = []
    try:
        with stages(ctx, "copying", target.created) as (on_listed, on_moved):
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
        # A new run can get further only after a signal or a lost store.
        if begun and (not isinstance(error, Exception) or isinstance(error, StoreUnavailable)):
            remark(ctx, "Work in progress was finished; continue with the same command")
        raise


def _request(ctx: click.Context, source: Store, options: dict[str, Any]) -> MigrationRequest:
    from hicachectl.move.migration import MigrationRequest
    from hicachectl.move.store_pair import CopyOptions
    from hicachectl.profiles.sources import destination_profile, profile_from_options

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
