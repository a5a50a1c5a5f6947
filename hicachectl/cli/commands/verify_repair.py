"""The `--repair` part of `verify`: options, questions and the repair of a report."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from hicachectl.cli.parameters import (
    OWN_VALUE,
    REPAIR,
    long_name,
    options_of,
    removed_option,
    stack,
)
from hicachectl.cli.session import agreed, progress, remark, require_consent
from hicachectl.cli.values import RepairCode
from hicachectl.formats.errors import UsageError
from hicachectl.formats.wording import inferred_refused

if TYPE_CHECKING:
    from hicachectl.backends.base import Store
    from hicachectl.move.removal_plan import RepairPlan
    from hicachectl.move.repair import RepairOptions
    from hicachectl.verification.part_result import PartResult
    from hicachectl.verification.request import VerifyRequest
    from hicachectl.verification.verify import PartCheck

repair_options = stack(
    REPAIR.option(
        "--repair",
        type=click.Choice(["none", "quarantine", "delete"]),
        default="none",
        show_default=True,
        writes=True,
        help="Move page groups with an error to the quarantine, or delete them.",
    ),
    REPAIR.option(
        "--repair-code",
        "repair_codes",
        type=RepairCode(),
        multiple=True,
        help="Also repair findings of this code, such as a warning. Can be repeated.",
    ),
    REPAIR.option(
        "--quarantine",
        metavar="DIR",
        help="Quarantine directory.  [default: .hicachectl/quarantine/ in a file store, "
        "quarantine/ in a side_directory]",
    ),
    removed_option("--token-ids", "pages behind removed ones age out; leave it out"),
    REPAIR.option(
        "--writers-stopped",
        is_flag=True,
        help="3FS: confirm that no engine writes; --repair then releases leaked pages.",
    ),
    REPAIR.option(
        "--despite-profile",
        is_flag=True,
        help="Repair although the newest pages suggest that the profile is wrong.",
    ),
    REPAIR.option("--yes", is_flag=True, divided=OWN_VALUE, help="Do not ask before a repair."),
    REPAIR.option("--dry-run", is_flag=True, help="Show what a repair would do; change nothing."),
)


def refuse_early(ctx: click.Context, options: dict[str, Any]) -> None:
    """Raise UsageError for contradicting options, before the store is opened."""
    if options["repair"] == "none":
        for option in options_of(ctx.command):
            if option.section is REPAIR and not option.writes and options[str(option.name)]:
                raise click.UsageError(f"{long_name(option)} needs --repair")
        return
    if options["repair"] == "delete" and options["quarantine"]:
        raise click.UsageError("--repair delete uses no quarantine; leave out --quarantine")
    if (options["shard"] or options["ray"]) is not None and not (
        options["yes"] or options["dry_run"]
    ):
        raise click.UsageError("A part cannot ask before a repair; give --yes or --dry-run")
    require_consent(options)


def refuse_without_profile(request: VerifyRequest) -> None:
    """Raise UsageError for a repair without a given profile; an inferred one is not enough."""
    if request.repairs and request.real_profile is None:
        raise UsageError(inferred_refused("--repair"))


def refuse_untrusted(store: Store, options: dict[str, Any]) -> None:
    """Raise UntrustedError for a repair of a store whose side directory is not trusted.

    Without its side files, whole objects can look damaged.
    """
    from hicachectl.backends.capabilities import SideFiles

    if options["repair"] != "none" and isinstance(store, SideFiles):
        side = store.open_side_directory(writes=False)
        if side is not None:
            side.close()


def refuse_in_parts(store: Store, options: dict[str, Any]) -> None:
    """Raise UsageError for a repair that cannot be divided into parts."""
    from hicachectl.move.table_repair import has_snapshot_only

    if options["repair"] != "none" and has_snapshot_only(store):
        raise UsageError(
            f"{store.url}: without server=, a repair writes one new snapshot; use one process"
        )


def repaired(
    ctx: click.Context,
    store: Store,
    request: VerifyRequest,
    checked: PartCheck,
    options: dict[str, Any],
) -> PartResult:
    """Repair the checked groups if --repair asks for it; return the result with its counts.

    A refused repair changes nothing, and asks nothing; the result says why.
    """
    from hicachectl.move.removal_plan import newest_taken
    from hicachectl.move.repair import left_remarks, plan_of, repair
    from hicachectl.pages.census import SEVERAL

    if options["repair"] == "none":
        return checked.result
    chosen = options_of_repair(options)
    plan = plan_of(checked, checked.findings, chosen)
    remark(ctx, *left_remarks(plan, stamps=options["stamp"]), failure=True)
    if plan.refused is not None:
        return checked.result.refused(plan.refused)
    newest = newest_taken(checked.groups, plan)
    if newest >= SEVERAL:
        remark(
            ctx,
            f"The repair takes the {newest} newest pages and leaves older ones; if servers wrote "
            "them lately, the profile is of earlier servers: compare it with hicachectl profile "
            "--server or --launch",
        )
    question = _question(store, checked, plan, options)
    if len(plan.groups) and not agreed(options, question):
        remark(ctx, "Nothing was repaired")
        return checked.result
    with progress(ctx, "repairing", " pages") as advance:
        done = repair(
            store,
            checked.inventory,
            checked.groups,
            plan,
            chosen,
            buffer_bytes=options["buffer_bytes"],
            say=partial(remark, ctx),
            say_left=partial(remark, ctx, failure=True),
            on_progress=advance,
        )
    return checked.result.repaired(
        groups=done.groups, quarantined=done.quarantined, failed=done.failed
    )


def options_of_repair(options: dict[str, Any]) -> RepairOptions:
    """Return the options of a repair, which --repair requests."""
    from hicachectl.move.repair import RepairOptions

    return RepairOptions(
        mode=options["repair"],
        codes=tuple(options["repair_codes"]),
        quarantine=options["quarantine"],
        writers_stopped=options["writers_stopped"],
        despite_profile=options["despite_profile"],
        dry_run=options["dry_run"],
    )


def _question(store: Store, checked: PartCheck, plan: RepairPlan, options: dict[str, Any]) -> str:
    from hicachectl.text.units import counted, human_size

    nbytes = human_size(checked.groups.total_bytes(plan.groups))
    verb = options["repair"].capitalize()
    return f"{verb} {counted(len(plan.groups), 'page')} ({nbytes}) of {store.url}?"
