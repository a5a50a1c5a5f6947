"""`hicachectl migrate`: move a cache between stores, key schemes, layouts and topologies."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from hicachectl.cli.consent import agreed, locked, require_consent
from hicachectl.cli.exit_codes import FINDINGS
from hicachectl.cli.options import (
    FILE,
    Duration,
    buffer_option,
    bwlimit_option,
    filter_options,
    jobs_option,
    lease_wait_option,
    lock_option,
    output_options,
    profile_options,
    transform_options,
)
from hicachectl.cli.session import bytes_progress, opened, progress, remark, store_name
from hicachectl.io.interrupts import raised_once

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hicachectl.backends.base import Store
    from hicachectl.move.migrate import MigrationOutcome
    from hicachectl.move.migration_plan import MigrationRequest

_SHOWN_PROBLEMS = 20


@click.command(
    "migrate",
    epilog="""\b
Examples:
  hicachectl migrate /mnt/hicache pack:///backup/monday.hcpack --profile prod.toml
  hicachectl migrate pack:///backup/monday.hcpack mooncake://master:50051
  hicachectl migrate /mnt/hicache /mnt/new --profile prod.toml --to-tp 8
  hicachectl migrate prod: new: --profile prod.toml --to-model Qwen/Qwen3-32B-v2 --dry-run
  hicachectl migrate prod: new: --profile prod.toml --resume
  hicachectl migrate prod: new: --profile prod.toml --move --yes --bwlimit 200MiB
""",
)
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@click.option("--match", metavar="PREFIX", help="Only pages whose hash starts like this.")
@click.option(
    "--pages-from",
    type=FILE,
    help="Only the pages of FILE: a line is a page hash, or a row of ls --format jsonl, of which "
    "only its group is copied.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@click.option("--resume", is_flag=True, help="Go on with an earlier run that did not end.")
@click.option(
    "--if-exists",
    type=click.Choice(["skip", "verify", "overwrite"]),
    default="skip",
    show_default=True,
    help="Pages that DST has whole: leave them, compare them, or write them anew.",
)
@click.option("--verify", is_flag=True, help="Read back what was written, and compare.")
@click.option("--move", is_flag=True, help="Then delete from SRC what was verified in DST.")
@click.option("--yes", is_flag=True, help="Do not ask before --move.")
@click.option("--include-partial", is_flag=True, help="Also pages that are not whole.")
@click.option("--include-damaged", is_flag=True, help="Also pages that have errors.")
@click.option(
    "--grace",
    type=Duration(),
    default="60s",
    show_default=True,
    help="Younger pages that are not whole are being written, and are left out.",
)
@click.option("--no-space-check", is_flag=True, help="Begin even if DST seems to lack room.")
@transform_options
@lock_option
@jobs_option
@buffer_option
@bwlimit_option
@lease_wait_option
@filter_options
@output_options
@profile_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    source: str,
    destination: str,
    output_format: str,
    output: Path | None,
    **options: Any,
) -> None:
    """Copy the pages of SRC to DST, whole page groups only.

    Stores are of any kind and in any direction; a directory or a pack that is not there is made.
    Without a profile, objects keep their keys and bytes; with one, they become what the servers
    of DST expect: other keys for another kind of store, and what the --to options ask for.

    Of each page the sidecars are written first and the kv objects last, so that no server sees
    half of a page. What DST has already is left alone, another object under one of its keys is a
    conflict. Pages with errors stay behind, and so do those that are being written.

    Interrupted or killed at any point, the same command again completes the work, and reads again
    only what did not arrive; --resume also goes on with --verify and --move where they were.
    """
    from hicachectl.cli.output import write_document

    if options["move"]:
        require_consent(yes=options["yes"], dry_run=options["dry_run"])
    with raised_once(), locked(options["lock"]) as is_ours:
        if not is_ours:
            from hicachectl.move.migrate import not_begun

            remark(ctx, f"another process holds {options['lock']}; nothing was done")
            outcome: MigrationOutcome | None = not_begun(
                store_name(ctx, source), store_name(ctx, destination)
            )
        else:
            outcome = _between(ctx, source, destination, options)
    if outcome is None:
        return
    _say(ctx, outcome)
    write_document(
        outcome.document,
        rows=_rows(outcome),
        name="problems",
        output_format=output_format,
        output=output,
        text=lambda colour: _lines(outcome, dry_run=options["dry_run"]),
    )
    if not outcome.all_well:
        ctx.exit(FINDINGS)


def _between(
    ctx: click.Context, source: str, destination: str, options: dict[str, Any]
) -> MigrationOutcome | None:
    """Open both stores and migrate; None where somebody said no."""
    wait = options["lease_wait"]
    with (
        opened(ctx, source, lease_wait=wait) as origin,
        opened(ctx, destination, lease_wait=wait, create=True) as target,
    ):
        request = _request(ctx, origin, options)
        if options["move"] and not agreed(
            f"Delete from {origin.url} what arrives in {target.url}?",
            yes=options["yes"],
            dry_run=options["dry_run"],
        ):
            return None
        return _migrated(ctx, origin, target, request)


def _migrated(
    ctx: click.Context, source: Store, target: Store, request: MigrationRequest
) -> MigrationOutcome:
    from hicachectl.formats.errors import StoreUnavailable
    from hicachectl.move.migrate import migrate

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
            )
    except BaseException as error:
        # Interrupted, told to end, or a store was lost; else it would end the same way again.
        if begun and (not isinstance(error, Exception) or isinstance(error, StoreUnavailable)):
            remark(ctx, "what was begun is finished; the same command with --resume goes on")
        raise


def _request(ctx: click.Context, source: Store, options: dict[str, Any]) -> MigrationRequest:
    from hicachectl.move.batches import CopyOptions
    from hicachectl.move.migration_plan import MigrationRequest
    from hicachectl.pages.selection import Selection
    from hicachectl.profiles.destination import destination_profile
    from hicachectl.profiles.sources import profile_from_options
    from hicachectl.requests.files import read_page_list

    if options["match"] and options["page"]:
        raise click.UsageError("--match and --page say the same; give one of them")
    profile = profile_from_options(options, source, warn=partial(remark, ctx))
    return MigrationRequest(
        profile=profile,
        destination_profile=destination_profile(profile, options),
        selection=Selection(
            model=options["model"] or "",
            pool=options["pool"] or "",
            page=options["match"] or options["page"] or "",
            since=options["since"],
        ),
        pages=None if options["pages_from"] is None else read_page_list(options["pages_from"]),
        grace_seconds=options["grace"],
        if_exists=options["if_exists"],
        partial=options["include_partial"],
        damaged=options["include_damaged"],
        resume=options["resume"],
        dry_run=options["dry_run"],
        space_check=not options["no_space_check"],
        options=CopyOptions(
            buffer_bytes=options["buffer_bytes"],
            jobs=options["jobs"],
            bytes_per_second=options["bwlimit"],
            verify=options["verify"] or options["move"],
            move=options["move"],
        ),
    )


def _say(ctx: click.Context, outcome: MigrationOutcome) -> None:
    for text in outcome.remarks:
        remark(ctx, text)
    for problem in outcome.problems[:_SHOWN_PROBLEMS]:
        remark(ctx, f"{problem.key or problem.page}: {problem.detail}")
    more = len(outcome.problems) - _SHOWN_PROBLEMS
    if more > 0:
        remark(ctx, f"{more} more pages have problems; --format json lists them")
    if outcome.journal is not None:
        remark(ctx, f"not complete; the same command with --resume goes on ({outcome.journal})")


def _rows(outcome: MigrationOutcome) -> Any:
    import pyarrow as pa

    schema = pa.schema([(name, pa.string()) for name in ("page", "key", "detail")])
    return pa.Table.from_pylist(outcome.document["problems"], schema=schema)


def _lines(outcome: MigrationOutcome, *, dry_run: bool) -> Iterator[str]:
    from hicachectl.text.units import human_age, human_size

    document = outcome.document
    verb = "to copy" if dry_run else "copied"
    parts = [
        f"{document['pages']} pages {verb}, {document['objects']} objects, "
        f"{human_size(document['bytes'])}"
    ]
    for name, text in (
        ("skipped", "there already"),
        ("moved", "removed from the source"),
        ("gone", "gone meanwhile"),
        ("conflicts", "in conflict"),
        ("failed", "failed"),
    ):
        if document[name]:
            parts.append(f"{document[name]} {text}")
    seconds = document.get("estimated_seconds")
    if seconds is not None:
        parts.append(f"about {human_age(seconds)} at the speed of reading")
    if document["stopped_by"]:
        parts.append(f"stopped: {document['stopped_by']}")
    yield "; ".join(parts)
