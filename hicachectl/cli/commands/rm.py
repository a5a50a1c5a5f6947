"""`hicachectl rm`: remove pages from a store for good."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from msgspec import structs, to_builtins

from hicachectl.cli.asked import (
    asked_trace,
    given_filters,
    mending_without_options,
    say_unjudged,
    selection_of,
)
from hicachectl.cli.command import Command
from hicachectl.cli.metrics import metrics_if_empty
from hicachectl.cli.options import (
    changing_options,
    filter_options,
    grace_option,
    healthcheck_option,
    jobs_option,
    lease_wait_option,
    metrics_option,
    output_options,
    profile_option,
    store_argument,
    trace_options,
)
from hicachectl.cli.parameters import on_command_line, own_option, removed_option
from hicachectl.cli.session import (
    agreed,
    moment_of,
    opened,
    progress,
    remark,
    remark_wait,
    require_consent,
    store_name,
)
from hicachectl.cli.settings import contradiction_remark
from hicachectl.cli.values import FILE, POSITIVE_SIZE, ROOM
from hicachectl.formats.errors import UsageError
from hicachectl.results import Result, Shown
from hicachectl.text.units import counted, human_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import pyarrow as pa

    from hicachectl.backends.base import Store
    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.formats.profile import Profile
    from hicachectl.move.removal_plan import RepairPlan
    from hicachectl.move.results import GroupReport, Taken
    from hicachectl.pages.groups import PageGroups
    from hicachectl.pages.in_flight import ListingTime
    from hicachectl.pages.selection import Selection
    from hicachectl.prewarming.freeing import Freeing, Worth
    from hicachectl.prewarming.targets import Target
    from hicachectl.text.tables import Screen
    from hicachectl.verification.part_result import Refusal


class _Removal(NamedTuple):
    """A planned removal.

    question: question to ask before the removal; None if there is nothing to remove.
    remove: function that carries out the removal.
    freeing: the choice of pages for a target; None without a target.
    in_flight: number of matching groups that stay, because servers may still be writing them.
    steps: messages on what to do about servers, in case they have read wrong pages.
    """

    question: str | None
    remove: Callable[[], GroupReport]
    freeing: Freeing | None = None
    in_flight: int = 0
    steps: tuple[str, ...] = ()


_TARGETS = ("free", "keep_free", "max_size")
_ANY_TARGET = "--free SIZE, --keep-free SIZE or --max-size SIZE"
_OF_PAGES = (
    *_TARGETS, "trace", "keep_plan", "all_deployments", "profile_file", "grace", "and_unnamed",
    "allow_empty",
)  # fmt: skip


@click.command("rm", cls=Command)
@store_argument
@own_option(
    "--all-deployments",
    needs="--pages",
    is_flag=True,
    help="Remove a page from all deployments if its line in the --pages file has only a page hash.",
)
@own_option(
    "--free",
    type=POSITIVE_SIZE,
    metavar="SIZE",
    help="Remove the least useful pages until SIZE is freed. Without --trace and --keep-plan, "
    "these are the pages that were unused for the longest time.",
)
@own_option(
    "--keep-free",
    type=ROOM,
    metavar="SIZE|PERCENT",
    help="Remove the least useful pages until the file system or the Mooncake cluster has SIZE or "
    "PERCENT free. Remove nothing if that much is free already.",
)
@own_option(
    "--max-size",
    type=POSITIVE_SIZE,
    metavar="SIZE",
    help="Remove the least useful pages until the store has at most SIZE. Remove nothing if the "
    "store has at most SIZE already.",
)
@trace_options(
    "Keep the pages that requests use. Targets such as --free first remove other pages, then the "
    "pages of least value. Needs --profile.",
    needs=_ANY_TARGET,
)
@own_option(
    "--keep-plan",
    needs=_ANY_TARGET,
    type=FILE,
    help="Keep the pages of a prewarm plan. Targets such as --free first remove other pages, then "
    "the pages of the plan, the last page first.",
)
@own_option(
    "--and-unnamed",
    is_flag=True,
    help="Also remove whole pages of deployments other than the profile's, before those of the "
    "profile's deployment. Needs --profile, and --trace or --keep-plan.",
)
@own_option(
    "--temporaries",
    is_flag=True,
    help="Instead of pages, remove files of unfinished writes, and objects that a server's clear "
    "left behind. Files and objects younger than a minute stay.",
)
@removed_option(
    "--token-ids",
    "pages behind removed ones age out, or --free SIZE --trace FILE removes them before others",
)
@own_option(
    "--allow-empty",
    is_flag=True,
    help="Accept a store without any page. Without this option, --keep-free and --max-size refuse "
    "such a store, because its file system is perhaps not mounted.",
)
@grace_option("Keep incomplete pages that are younger than this")
@own_option(
    "--despite-profile",
    is_flag=True,
    help="Remove partial pages even if the profile looks wrong. It looks wrong if most of the "
    "newest pages lack the same pool. Without this option, --state partial is refused for such a "
    "profile, and --free, --keep-free and --max-size do not remove partial pages first.",
)
@filter_options()
@changing_options("removed", "removing")
@jobs_option
@lease_wait_option
@output_options
@metrics_option
@healthcheck_option
@profile_option
@click.pass_context
def command(ctx: click.Context, /, store: str, **options: Any) -> None:
    """Remove pages from a store for good.

    Give at least one filter, or a target such as --free. rm removes the pages that match all
    filters, each with all its objects, the kv objects first, so servers never see half a page.
    hicachectl ls with the same filters lists the pages. Some matching pages stay: pages that
    servers may still be writing (--grace), pages that servers write to during the run, and pages
    with ambiguous keys. Only --state unknown and --pages remove pages with ambiguous keys. --state
    partial needs --profile. The exit status is 4 if something could not be removed, or if a target
    was not reached.

    --free, --keep-free and --max-size are targets. A target removes the least useful pages, and no
    more pages than it needs. If --keep-free or --max-size is reached already, nothing is removed,
    so cron can run such commands often. Pages that are not whole are removed first. With --trace or
    --keep-plan, a page is removed only after the pages that follow it. --dry-run shows what would
    be lost.

    One page can have objects of several deployments. A row of ls in --pages removes the group of
    one deployment. If several deployments have a page, its page hash alone is refused;
    --all-deployments accepts it.

    --temporaries removes no pages. It removes the files that verify reports as stale-temporary:
    temporary files that are older than a minute, and objects that a server cleared more than a
    minute ago. With --before, these files and objects must also be older than TIME.

    Examples:
      hicachectl rm /tmp/hicache --model Qwen/Qwen3-32B --dry-run
      hicachectl rm prod: --before 7d --yes --lock /run/hicachectl.lock
      hicachectl rm prod: --state orphan
      hicachectl rm prod: --free 200GiB --trace day.jsonl --profile prod.toml --dry-run
      hicachectl rm prod: --keep-free 20% --profile prod.toml --yes
      hicachectl rm prod: --max-size 2TiB --profile prod.toml --dry-run
      hicachectl rm prod: --temporaries --before 1d
      hicachectl rm prod: --pages bad-pages.txt
    """
    from hicachectl.cli.output import write_run
    from hicachectl.move.results import GroupReport

    _refuse_contradictions(ctx, options)
    require_consent(options)
    dry_run: bool = options["dry_run"]

    def run() -> Result | None:
        """Remove what the options choose. Return None if the operator declines."""
        with opened(ctx, store) as source, metrics_if_empty(ctx, lambda: nothing().document):
            plan = _plan_temporaries if options["temporaries"] else _plan_pages
            removal = plan(ctx, source, options)
            started = time.monotonic()
            if removal.question and not agreed(ctx, removal.question, "removed"):
                return None
            report = removal.remove()
        return _result(source.url, report, time.monotonic() - started, removal, dry_run=dry_run)

    def nothing() -> Result:
        removal = _Removal(None, GroupReport)
        return _result(store_name(ctx, store), GroupReport(), 0.0, removal, dry_run=dry_run)

    write_run(ctx, run, nothing)


def _result(
    store: str, report: GroupReport, seconds: float, removal: _Removal, *, dry_run: bool
) -> Result:
    from hicachectl.move.results import RemovalDocument

    freeing = removal.freeing
    lacking = None if freeing is None else freeing.lacking
    document = RemovalDocument(
        store=store,
        pages=report.groups,
        objects=report.deleted,
        bytes=report.nbytes,
        gone=report.gone,
        kept=report.kept,
        in_flight=removal.in_flight,
        failed=len(report.failures),
        remaining=report.remaining,
        lacking_bytes=lacking,
        free_bytes=None if freeing is None else freeing.gauge.free_bytes,
        seconds=round(seconds, 3),
        dry_run=dry_run,
        free=None if freeing is None else freeing.facts,
        failures=[{"key": key, "detail": detail} for key, detail in report.failures],
    )
    failed = bool(report.failures or report.remaining or lacking)
    steps = () if dry_run or not report.groups else removal.steps
    left = [*_left_alone(report, removal.in_flight, freeing)]
    return Result(
        document=to_builtins(document),
        rows=report.rows,
        rows_name="groups",
        lines=partial(_lines, report.rows),
        remarks=[*steps, *left],
        undone=[*(() if lacking == 0 else left), *(steps if failed else ())],
        failed=failed,
        dry_run=dry_run,
    )


def _refuse_contradictions(ctx: click.Context, options: dict[str, Any]) -> None:
    given = given_filters(options)
    if options["temporaries"]:
        others = [*given, *(name for name in _OF_PAGES if on_command_line(ctx, name))]
        others = [name for name in others if name != "before"]
        if others:
            name = others[0].removesuffix("_file").replace("_", "-")
            raise click.UsageError(
                f"--temporaries removes files that belong to no page; leave out --{name}"
            )
        return
    targets = [f"--{name.replace('_', '-')}" for name in _TARGETS if options[name] is not None]
    if len(targets) > 1:
        raise click.UsageError(
            f"{targets[0]} cannot be combined with {targets[1]}; leave out one of them"
        )
    if not given and not targets:
        raise click.UsageError(
            "Give a filter, such as --model, --before or --state, or give --free, --keep-free, "
            "--max-size or --temporaries; to wipe the whole store, use SGLang's "
            "clear_hicache_storage_backend"
        )
    if options["and_unnamed"] and not (
        (options["trace"] or options["keep_plan"]) and options["profile_file"]
    ):
        raise click.UsageError(
            "--and-unnamed needs --trace or --keep-plan, which state the pages to keep, and "
            "--profile, which states their deployment"
        )
    if options["trace"] and options["keep_plan"]:
        raise click.UsageError("--trace cannot be combined with --keep-plan; leave out one of them")
    if options["trace"] and not options["profile_file"]:
        raise click.UsageError("--trace needs --profile, which states the page size")
    if "partial" in (options["state"] or ()) and not options["profile_file"]:
        raise click.UsageError(
            "--state partial needs --profile, which states the objects of a page; without it, one "
            "stray object makes whole pages look partial"
        )
    judges = "partial" in (options["state"] or ()) or (targets and options["profile_file"])
    if options["despite_profile"] and not judges:
        raise click.UsageError(
            "--despite-profile needs --state partial, or --profile and a target such as --free"
        )


def _plan_temporaries(ctx: click.Context, store: Store, options: dict[str, Any]) -> _Removal:
    from hicachectl.move.temporaries import find_temporaries, remove_temporaries
    from hicachectl.pages.census import column_sum

    dry_run = options["dry_run"]
    before = moment_of(store, options["before"], changes=not dry_run)
    with progress(ctx, "listing", " objects") as advance:
        stale = find_temporaries(store, before=before, dry_run=dry_run, on_batch=advance)
    if not store.traits.lists_temporaries:
        remark(ctx, f"{store.url}: only file stores have temporary files")
    elif not len(stale):
        remark(ctx, f"{store.url}: no temporary file or cleared object is old enough to be removed")

    def remove() -> GroupReport:
        with progress(ctx, "removing", " files") as advance:
            return remove_temporaries(
                store,
                stale,
                dry_run=dry_run,
                on_progress=advance,
                on_end=lambda taken: _say_how_to_go_on(ctx, taken, taken.text(len(stale), "file")),
            )

    nbytes = human_size(column_sum(stale.column("nbytes")))
    cleared = len(stale) - stale.column("cleared_ns").null_count
    what = {"temporary file": len(stale) - cleared, "cleared object": cleared}
    named = " and ".join(counted(count, noun) for noun, count in what.items() if count)
    question = f"Remove {named} ({nbytes}) from {store.url}?"
    return _Removal(question if len(stale) else None, remove)


class _Pages(NamedTuple):
    """The page groups of a store, and what the options choose among them.

    worth: value of the pages to --trace or --keep-plan; None without these options.
    """

    ctx: click.Context
    store: Store
    groups: PageGroups
    selection: Selection
    profile: Profile | None
    target: Target | None
    worth: Worth | None


def _plan_pages(ctx: click.Context, store: Store, options: dict[str, Any]) -> _Removal:
    import numpy as np

    from hicachectl.pages.group_table import WHOLE
    from hicachectl.pages.in_flight import groups_in_flight, look_if_needed
    from hicachectl.verification.report import doubted

    pages, listing = _listed(ctx, store, options)
    groups, grace = pages.groups, options["grace"]
    matching = np.flatnonzero(_removable(pages))
    in_flight = groups_in_flight(store, groups, listing, grace) & (groups.states != WHOLE)
    plan, freeing = _choose(pages, matching, in_flight)
    if "partial" in pages.selection.states and not options["despite_profile"]:
        refused = _doubt(pages, in_flight)
        if refused is not None:
            why = doubted(refused, "removes")
            raise UsageError(f"{store.url}: nothing was removed: {why}")
    wait = partial(remark_wait, ctx)
    changed = look_if_needed(store, groups, listing, grace, plan.groups, on_wait=wait)
    if changed.any():
        in_flight |= changed
        plan, freeing = _choose(pages, matching, in_flight)
    _remark_choice(pages, plan, freeing)
    if freeing is not None and len(plan.groups):
        remark(ctx, *_of_other_sizes(pages, matching))

    named = f"{counted(len(plan.groups), 'page')} ({human_size(groups.total_bytes(plan.groups))})"
    more = ", and more if servers write meanwhile" if options["keep_free"] is not None else ""
    question = f"Remove {named} from {store.url}{more}?" if len(plan.groups) else None
    steps = _steps(pages, plan)
    remove = partial(_remove_pages, pages, plan, freeing)
    return _Removal(question, remove, freeing, int(in_flight[matching].sum()), steps)


def _listed(
    ctx: click.Context, store: Store, options: dict[str, Any]
) -> tuple[_Pages, ListingTime]:
    """List the store; return its page groups and the time of the listing."""
    from hicachectl.pages.groups import PageGroups
    from hicachectl.pages.in_flight import ListingTime
    from hicachectl.pages.scanning import take_inventory
    from hicachectl.profiles.sources import profile_from_options

    changes = not options["dry_run"]
    selection = selection_of(ctx, store, options, changes=changes)
    profile = profile_from_options({"profile_file": options["profile_file"]}, store)
    worth, target = _worth(ctx, options, profile), _target(options)
    wanted = {"version"} if target is None else {"version", "atime_ns"}
    # With --trace or --state, the profile decides what is removed, because its page size gives the
    # hashes of requests, and its specs give the states of pages. A profile that the store
    # contradicts then ends the command.
    decides = options["trace"] or options["state"]
    listing = ListingTime.now(store, changes=changes)
    with progress(ctx, "listing", " objects") as advance:
        inventory = take_inventory(
            store,
            profile,
            columns=tuple(wanted & store.traits.columns),
            needs_pages=target is not None and target.stands and not options["allow_empty"],
            on_contradiction=None if decides else contradiction_remark(ctx),
            on_batch=advance,
        )
    listing = listing.ended()
    remark(ctx, *store.remarks)
    groups = PageGroups(inventory)
    return _Pages(ctx, store, groups, selection, profile, target, worth), listing


def _choose(
    pages: _Pages, matching: IntArray, in_flight: BoolArray
) -> tuple[RepairPlan, Freeing | None]:
    """Choose the groups to remove.

    matching: numbers of the groups that match the filters and may be removed.
    in_flight: [groups] whether the group stays, because servers may still be writing it.
    """
    from hicachectl.move.removal_plan import plan_removal
    from hicachectl.prewarming.freeing import FreeRequest, choose_groups

    chosen = matching[~in_flight[matching]]
    if pages.target is None:
        return plan_removal(chosen), None
    incomplete, doubtful = _incomplete(pages, in_flight)
    options = pages.ctx.params
    request = FreeRequest(
        store=pages.store,
        groups=pages.groups,
        matching=chosen,
        target=pages.target,
        incomplete=incomplete,
        doubtful=doubtful,
        worth=pages.worth,
        profile=pages.profile,
        and_unnamed=options["and_unnamed"],
        never_all=not given_filters(options),
    )
    freeing = choose_groups(request)
    return plan_removal(freeing.groups), freeing


def _remove_pages(pages: _Pages, plan: RepairPlan, freeing: Freeing | None) -> GroupReport:
    """Remove the groups of a plan. With a target, remove as many groups as it still needs."""
    from hicachectl.move.removal_plan import plan_removal
    from hicachectl.move.withdrawal import remove_groups

    ctx, options, wanted = pages.ctx, pages.ctx.params, len(plan.groups)
    # If the plan has no groups, nobody was asked, so pages that servers write later must stay.
    goes_on = freeing if wanted and not options["dry_run"] else None
    if goes_on is not None:
        # Begin with an empty plan: `then` plans the groups by the bytes that are still lacking.
        plan = plan_removal(plan.groups[:0])
    with progress(ctx, "removing", " pages") as advance:
        report = remove_groups(
            pages.store,
            pages.groups,
            plan,
            mode="delete",
            dry_run=options["dry_run"],
            on_progress=advance,
            on_end=lambda taken: _say_how_to_go_on(ctx, taken, taken.text(wanted), options["free"]),
            then=goes_on.next if goes_on is not None else lambda statuses: None,
        )
    if freeing is not None:
        freeing.conclude(rehearsed=options["dry_run"])
    return report


def _steps(pages: _Pages, plan: RepairPlan) -> tuple[str, ...]:
    """Return what to do about servers, in case they have read wrong pages; () with a target."""
    ctx, options = pages.ctx, pages.ctx.params
    if pages.target is not None or not len(plan.groups):
        return ()
    model = options["model"] or ("" if pages.profile is None else pages.profile.key_model)
    mending = structs.replace(mending_without_options(ctx, options["store"]), model=model)
    steps = mending.next_steps(pages.groups.oldest_ns(plan.groups), doubtful=True)
    # The second step suggests a removal with --since, which this command already has.
    return steps[:1] if options["since"] is not None else steps


def _say_how_to_go_on(ctx: click.Context, taken: Taken, text: str, free: int | None = None) -> None:
    """Say how much a removal that ended early has removed, and how to continue.

    free: the value of --free. Each run counts from 0, so the suggested command has only the bytes
        that are left.
    """
    if free is None:
        remark(ctx, f"{text}; run the same command again to remove the rest")
        return
    left = max(1, free - (taken.nbytes or 0))
    remark(ctx, f"{text}; to free the rest, run the command again with --free {left}B")


def _doubt(pages: _Pages, in_flight: BoolArray) -> Refusal | None:
    """Return why the profile may be wrong about missing objects; None if it looks right."""
    from hicachectl.checks.registry import CheckInput
    from hicachectl.move.doubt import doubt_missing

    given = CheckInput(store=pages.store, groups=pages.groups, in_flight=in_flight)
    return doubt_missing(given)


def _incomplete(pages: _Pages, in_flight: BoolArray) -> tuple[BoolArray, int]:
    """Return which groups certainly no server can use, [groups], and the number of doubtful groups.

    Only a profile shows which groups are partial. If the profile may be wrong, all partial groups
    are doubtful, and do not count among the groups that no server can use.

    in_flight: [groups] whether the group stays in any case.
    """
    from hicachectl.move.removal_plan import described_groups
    from hicachectl.pages.group_table import ORPHAN, PARTIAL

    groups = pages.groups
    incomplete: BoolArray = groups.states == ORPHAN
    partial_ones = (groups.states == PARTIAL) & described_groups(groups) & ~in_flight
    believed = pages.ctx.params["despite_profile"] or not partial_ones.any()
    if not believed and _doubt(pages, in_flight) is not None:
        return incomplete, int(partial_ones.sum())
    return incomplete | partial_ones, 0


def _removable(pages: _Pages) -> BoolArray:
    """Return which selected groups may be removed: [groups].

    Groups with ambiguous keys stay unless the options name them. Raises UsageError if a bare page
    hash of --pages stands for groups of several deployments.
    """
    from dataclasses import replace

    from hicachectl.pages.deployments import UNRESOLVED
    from hicachectl.pages.selection import NamedGroups

    groups, selection = pages.groups, pages.selection
    chosen = selection.chosen(groups)
    if selection.pages is not None:
        if not pages.ctx.params["all_deployments"]:
            among = replace(selection, pages=None).chosen(groups)
            NamedGroups(selection.pages, groups).refuse_several(among, pages.store.url)
    elif "unknown" not in selection.states:
        chosen &= groups.deployment_ids != UNRESOLVED
    return chosen


def _remark_choice(pages: _Pages, plan: RepairPlan, freeing: Freeing | None) -> None:
    """Say which groups stay although the options may mean them, and which keys are ambiguous."""
    from hicachectl.pages.group_table import UNKNOWN
    from hicachectl.pages.naming import ambiguity_remark
    from hicachectl.pages.selection import NamedGroups, explain_selection
    from hicachectl.pages.tally import object_counts

    ctx, groups, selection = pages.ctx, pages.groups, pages.selection
    if freeing is not None:
        remark(ctx, *freeing.remarks)
    ambiguous = int((groups.states == UNKNOWN).sum())
    unclear = int((groups.states[plan.groups] == UNKNOWN).sum())
    if unclear or (ambiguous and not (selection.states or selection.pages)):
        verb, count = ("selected for removal", unclear) if unclear else ("left alone", ambiguous)
        inventory = groups.inventory
        text = ambiguity_remark(inventory.table, object_counts(inventory))
        remark(
            ctx,
            f"{counted(count, 'page group')} with ambiguous keys {verb}: {text}",
            failure=not unclear and (freeing is None or freeing.lacking > 0),
        )
    if selection.pages is not None:
        unmatched = selection.pages.labelled - NamedGroups(selection.pages, groups).matched
        if unmatched:
            rows = counted(unmatched, "row")
            remark(ctx, f"{selection.pages.source}: the store has no group for {rows}")
    say_unjudged(ctx, selection, groups)
    if not selection.chosen(groups).any():
        remark(ctx, explain_selection(pages.store, groups.inventory, selection))


def _of_other_sizes(pages: _Pages, matching: IntArray) -> Iterator[str]:
    """Yield a remark for each deployment that differs from the profile's in its sizes only.

    Without --trace and --keep-plan, whole pages of such a deployment are removed in the order of
    their last use. With one of these options, they stay or leave as `Freeing.remarks` says.

    matching: numbers of the groups that match the filters and may be removed.
    """
    import numpy as np

    from hicachectl.checks.registry import code_named
    from hicachectl.formats.objects import AXES
    from hicachectl.pages.group_table import WHOLE
    from hicachectl.pages.naming import place_text

    ctx, groups, profile = pages.ctx, pages.groups, pages.profile
    if profile is None or pages.worth is not None:
        return
    mending = structs.replace(
        mending_without_options(ctx, ctx.params["store"]),
        model=profile.key_model,
        sizes={axis: getattr(profile, axis) for axis in AXES},
    )
    code = code_named("other-deployment")
    own, grammar = groups.deployments[0], groups.inventory.table.grammar
    whole = matching[groups.states[matching] == WHOLE]
    ids, counts = np.unique(groups.deployment_ids[whole], return_counts=True)
    for number, count in zip(ids.tolist(), counts.tolist(), strict=True):
        deployment = groups.deployments[number]
        if not number or deployment.names != own.names:
            continue
        nbytes = groups.total_bytes(whole[groups.deployment_ids[whole] == number])
        command = mending.command(code.command, deployment.label(grammar))
        yield (
            f"{counted(count, 'page')} ({human_size(nbytes)}) at {place_text(deployment, own)} may "
            "leave, too, because without --trace and --keep-plan only the last use decides; "
            f"{code.remedy.format(command=f'{command} --dry-run')}"
        )


def _target(options: Mapping[str, Any]) -> Target | None:
    """Return the target that the options give; None without a target."""
    from hicachectl.prewarming.targets import KINDS, Target

    for kind in KINDS:
        if (amount := options[kind.replace("-", "_")]) is not None:
            return Target(kind, amount)
    return None


def _worth(ctx: click.Context, options: dict[str, Any], profile: Profile | None) -> Worth | None:
    """Return the values that --trace or --keep-plan gives to pages; None without these options."""
    from hicachectl.prewarming.freeing import worth_of_plan, worth_of_trace
    from hicachectl.requests.chains import Hashing

    if options["trace"]:
        assert profile is not None  # `_refuse_contradictions` refuses --trace without --profile
        with asked_trace(options) as trace:
            requests = trace.requests(Hashing.of(profile))
            remark(ctx, *trace.remarks)
        return worth_of_trace(requests)
    return worth_of_plan(options["keep_plan"]) if options["keep_plan"] else None


def _left_alone(report: GroupReport, in_flight: int, freeing: Freeing | None) -> Iterator[str]:
    """Yield messages on pages that stay and on a target that was missed.

    in_flight: number of pages that servers may still be writing.
    """

    noun = "file" if _are_files(report.rows) else "page"
    if freeing is not None and freeing.lacking:
        if freeing.gauge.target.kind == "free" and report.kept:
            kept = f"{counted(report.kept, 'page')} ({human_size(report.kept_bytes)})"
            yield (
                f"--free: servers rewrote {kept}, so rm left them alone; run again with --free "
                f"{freeing.lacking}B"
            )
        else:
            yield freeing.why_short(in_flight)
    if in_flight:
        yield (
            f"{counted(in_flight, 'page')} in flight left alone, because servers may still be "
            "writing to incomplete pages (--grace); run again later"
        )
    if report.kept:
        yield f"{counted(report.kept, noun)} left alone, because of writes after the listing"


def _are_files(rows: pa.Table) -> bool:
    """Return whether the rows of a report are files that belong to no page."""
    return "key" in rows.column_names


def _lines(
    rows: pa.Table, document: dict[str, Any], screen: Screen, _shown: Shown
) -> Iterator[str]:
    from hicachectl.cli.text_tables import last_line, removals_for_people
    from hicachectl.prewarming.freeing import freeing_lines
    from hicachectl.text.tables import table_lines

    if len(rows):
        yield from table_lines(removals_for_people(rows), screen)
    yield from (f"{failure['key']}: {failure['detail']}" for failure in document["failures"])
    noun, counts = "page", {"page": document["pages"], "object": document["objects"]}
    if _are_files(rows):
        noun, counts = "file", {"file": document["objects"]}
    if document["free"] is not None:
        yield from freeing_lines(document, time.time())
    left = document["remaining"]
    remaining = f", {counted(left, noun)} not removed" if left else ""
    yield last_line(document, counts, f"removed{remaining}")
