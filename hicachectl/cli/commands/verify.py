"""`hicachectl verify`: check a store and repair it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hicachectl.checks.registry import DIGESTS, group_names, groups_help
from hicachectl.cli.asked import asked_checks, mending_of, selection_of
from hicachectl.cli.command import Command
from hicachectl.cli.commands.parts import check_division, is_divided, opened_source, run_divided
from hicachectl.cli.metrics import metrics_if_empty
from hicachectl.cli.options import (
    allow_shrink_option,
    checking_options,
    filter_options,
    findings_options,
    healthcheck_option,
    lease_wait_option,
    lock_option,
    metrics_option,
    output_options,
    parts_options,
    profile_options,
    refuse_without_table,
    sample_options,
    store_argument,
)
from hicachectl.cli.parameters import (
    OWN,
    OWN_VALUE,
    RECORDS,
    REPAIR,
    RESOURCES,
    SAME,
    CommaList,
    Entry,
    Section,
    long_name,
    on_command_line,
    options_of,
    own_setting,
    removed_option,
    stack,
)
from hicachectl.cli.session import (
    agreed,
    opened,
    progress,
    remark,
    remark_wait,
    reopening,
    require_consent,
    stages,
    store_name,
)
from hicachectl.cli.values import FILE, REPAIR_CODES, SIZE, NameList
from hicachectl.formats.errors import UsageError
from hicachectl.formats.wording import inferred_refused
from hicachectl.text.units import counted, human_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicachectl.backends.base import Store
    from hicachectl.move.repair import RepairOptions
    from hicachectl.parts.job import Job
    from hicachectl.results import Result
    from hicachectl.verification.report_text import Mending
    from hicachectl.verification.request import VerifyRequest
    from hicachectl.verification.verify import PartCheck


_SAMPLE = Section(OWN.title, repeats=True, divided=SAME)
_repair_options = stack(
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
        type=REPAIR_CODES,
        multiple=True,
        callback=lambda ctx, option, lists: tuple(chain.from_iterable(lists)),
        metavar="CODE,...",
        help="Also repair findings with these codes, even if they are warnings. Can be repeated.",
    ),
    REPAIR.option(
        "--quarantine",
        metavar="DIR",
        help="Quarantine directory.  [default: .hicachectl/quarantine/ in a file store; else "
        "quarantine/ in the directory that side_directory= in the URL names]",
    ),
    removed_option("--token-ids", "pages behind removed ones age out; leave it out"),
    REPAIR.option(
        "--writers-stopped",
        is_flag=True,
        help="3FS: confirm that no server writes. --repair then also releases leaked pages, which "
        "are neither free nor under a key.",
    ),
    REPAIR.option(
        "--despite-profile",
        is_flag=True,
        help="Repair although the newest pages suggest that the profile is wrong.",
    ),
    REPAIR.option("--yes", is_flag=True, divided=OWN_VALUE, help="Do not ask before a repair."),
    REPAIR.option("--dry-run", is_flag=True, help="Show what a repair would do; change nothing."),
)


class _Command(Command):
    """The verify command; in its help, the registered checks replace the word CHECKS."""

    @property
    def help(self) -> str | None:
        return self._help.replace("CHECKS", groups_help())

    @help.setter
    def help(self, text: str | None) -> None:
        self._help = text or ""


@click.command("verify", cls=_Command)
@store_argument
@_SAMPLE.option(
    "--checks",
    type=NameList(group_names),
    default=group_names,
    help="Run only these checks.  [default: all checks that apply]",
)
@sample_options(_SAMPLE, "the day number, so each night reads another share")
@RECORDS.option(
    "--catalog",
    variable=True,
    type=FILE,
    entry=Entry("catalog", ("store",)),
    repeats=True,
    help="Compare objects with the digests recorded in FILE.",
)
@RECORDS.option(
    "--update-catalog",
    is_flag=True,
    needs="--catalog FILE",
    writes=True,
    repeats=False,
    help="Record digests in the catalog; create a missing catalog.",
)
@allow_shrink_option("--update-catalog")
@RECORDS.option(
    "--identity",
    type=NameList(),
    repeats=True,
    help="Count an object as rewritten by a server if one of these fields, such as inode,mtime, "
    "differs from the catalog. If the store does not have a field, the error message lists the "
    "fields that it has. "
    " [default: all fields]",
)
@RECORDS.option(
    "--stamp",
    is_flag=True,
    writes=True,
    repeats=False,
    help="Record the profile and the weights version beside the store.",
)
@RECORDS.option(
    "--weights-version",
    metavar="TEXT",
    repeats=True,
    help="Weights version to record with --stamp, or to compare with the stamp.",
)
@metrics_option
@healthcheck_option
@own_setting(
    "--device",
    type=CommaList(),
    default="cpu",
    repeats=True,
    divided=SAME,
    show_default=True,
    metavar="cpu|cuda|auto",
    help="Check and digest objects on this device. With cuda:0,cuda:1, two devices share the work.",
)
@RESOURCES.option(
    "--device-bytes",
    type=SIZE,
    default="2GiB",
    show_default=True,
    help="Memory to use on each device, in addition to the memory that CUDA itself uses.",
)
@_repair_options
@lock_option
@checking_options
@lease_wait_option
@parts_options
@filter_options(beside_flags=True)
@findings_options
@output_options
@profile_options
@click.pass_context
def command(ctx: click.Context, /, store: str, **options: Any) -> None:
    """Check a store for missing or damaged objects, and repair it if asked.

    verify reads STORE and reports findings. An error means that servers could read wrong data, or
    that their reads fail; a warning costs hits or space; an info needs no action. The exit status
    is 4 if there are findings at --fail-on or above.

    \b
    CHECKS

    If --checks names a check that cannot run, the exit status is 2. Without --checks, stderr and
    skipped_checks list the checks that did not run. Without a profile, objects are compared with
    each other, so verify does not notice a pool that no page has.

    A table groups findings by code, deployment and age, with three examples of each group. Below it
    are the commands that mend the findings. --all-findings and the other formats have every
    finding.

    Only --repair changes objects. It removes all objects of each page that has an error, the kv
    objects first, so that servers compute the page again. --repair quarantine keeps the objects,
    and hicachectl-restore(1) puts them back.

    Reading objects of a Mooncake store grants leases. --checks names,groups,sizes reads no object;
    --bwlimit and --sample reduce the load of the other checks.

    hicachectl-verify(1) explains the value checks, catalogs, stamps, repairs, parts of a run, Ray
    clusters and --device cuda.

    Examples:
      hicachectl verify /tmp/hicache --profile prod.toml
      hicachectl verify prod: --checks names,groups,sizes --format json
      hicachectl verify /tmp/hicache --model-config config.json --tp 2 --page-size 64
      hicachectl verify prod: --profile prod.toml --sample 5% --time-limit 1h
      hicachectl verify prod: --catalog prod.parquet --update-catalog
      hicachectl verify prod: --profile prod.toml --repair quarantine --dry-run
      hicachectl verify prod: --profile prod.toml --device cuda
      hicachectl verify prod: --fail-on error --metrics-file /var/lib/node/hicache.prom
      hicachectl verify prod: --profile prod.toml --shard 0/8 --run /shared/$(date +%F)
      hicachectl verify prod: --profile prod.toml --ray auto
    """  # noqa: D301 - \b is click's mark, not ours
    from hicachectl.cli.output import write_run
    from hicachectl.verification.report import VerifyReport

    _refuse_contradictions(ctx, options)
    refuse_without_table(ctx, options["output_format"])
    check_division(ctx, options)
    _refuse_early(ctx, options)

    def run() -> Result | None:
        """Open the store, check it, and repair it if asked. Return None for a part of a run."""
        with (
            opened(ctx, store) as source,
            metrics_if_empty(ctx, lambda: VerifyReport.empty(source.url).document),
        ):
            request = _request(ctx, source, options)
            _refuse_what_is_lacking(source, request, options)
            _refuse_repair(source, request, divided=is_divided(options))
            mending = mending_of(
                ctx, store, source, request=request, quarantine=options["quarantine"]
            )
            if not is_divided(options):
                return _at_once(ctx, source, request, mending, options)
            make = _divided(request, options, mending)
            looks = _looks_only(options)
            again = reopening(ctx, store)
            reopened = partial(opened_source, again, request.profile, looks_only=looks)
            return run_divided(ctx, options, make(source), make, [reopened])

    def nothing() -> Result:
        return VerifyReport.empty(store_name(ctx, store)).result(dry_run=_dry_run(options))

    write_run(ctx, run, nothing)


def _dry_run(options: dict[str, Any]) -> bool | None:
    """Return whether the repair is a dry run; None without a repair."""
    return options["dry_run"] if options["repair"] != "none" else None


def _at_once(
    ctx: click.Context,
    store: Store,
    request: VerifyRequest,
    mending: Mending,
    options: dict[str, Any],
) -> Result:
    """Check a store in this process, and repair it if asked."""
    from hicachectl.verification.report import describe_store, report_of
    from hicachectl.verification.verify import check_store

    with stages(ctx, "reading") as (on_listed, on_read):
        checked = check_store(
            store, request, on_listed=on_listed, on_read=on_read, on_wait=partial(remark_wait, ctx)
        )
    if len(checked.findings):  # a run without findings imports nothing of `move`
        from hicachectl.move.repair import doubted_repairs

        checked.result.facts.doubted = doubted_repairs(checked)
    kept = _keep_records(ctx, store, request, checked, options)
    described = describe_store(store, request)
    if request.repairs:
        _repair(ctx, store, request, checked, options)
    report = report_of([checked.result], described, checked.groups.inventory.table, request)
    result = report.result(fail_on=options["fail_on"], dry_run=_dry_run(options), mending=mending)
    return replace(result, failed=result.failed or not kept)


def _divided(
    request: VerifyRequest, options: dict[str, Any], mending: Mending
) -> Callable[[Store], Job]:
    """Return a function that makes the job of a divided run from its open store."""
    from hicachectl.parts.verify import VerifyJob

    if options["quarantine"]:  # the processes of the run have different current directories
        options = {**options, "quarantine": str(Path(options["quarantine"]).absolute())}
    return partial(
        VerifyJob,
        request=request,
        catalog=options["catalog"],
        fail_on=options["fail_on"],
        sample_slice=options["sample_slice"],
        stamp=options["stamp"],
        repair=_options_of_repair(options) if request.repairs else None,
        mending=mending,
    )


def _refuse_contradictions(ctx: click.Context, options: dict[str, Any]) -> None:
    from hicachectl.device.devices import parse_devices

    parse_devices(options["device"])
    path = options["catalog"]
    asked = on_command_line(ctx, "catalog") or options["update_catalog"]
    if path and DIGESTS.name not in options["checks"]:
        if asked:
            raise click.UsageError("--catalog needs the check digests; add digests to --checks")
        options["catalog"] = None
    elif path and not (asked or path.exists()):
        remark(ctx, f"{path}: the catalog does not exist yet; record it with --update-catalog")
        options["catalog"] = None


def _refuse_what_is_lacking(store: Any, request: VerifyRequest, options: dict[str, Any]) -> None:
    unknown = sorted(set(request.identity) - set(store.traits.version_fields))
    if unknown:
        known = ", ".join(store.traits.version_fields) or "none"
        raise click.UsageError(f"--identity: {store.url} has no field {unknown[0]}; it has {known}")
    if not (options["stamp"] or options["weights_version"]):
        return
    from hicachectl.profiles.stamps import check_stamp_place, require_stamp_place

    require_stamp_place(store)
    if options["stamp"]:
        if request.real_profile is None:
            raise click.UsageError(inferred_refused("--stamp"))
        check_stamp_place(store, request.real_profile.key_model)


def _looks_only(options: dict[str, Any]) -> bool:
    keeps = options["update_catalog"] or options["stamp"]
    return options["repair"] == "none" and not keeps


def _request(ctx: click.Context, store: Any, options: dict[str, Any]) -> VerifyRequest:
    from hicachectl.checks.catalogs import load_catalog, of_another_store
    from hicachectl.device.devices import parse_devices
    from hicachectl.formats.catalog import NO_ENTRIES
    from hicachectl.profiles.sources import profile_to_look

    changes = options["repair"] != "none" and not options["dry_run"]
    path, catalog = options["catalog"], None
    if path is not None and is_divided(options):
        catalog = NO_ENTRIES
    elif path is not None and (path.exists() or not options["update_catalog"]):
        catalog = load_catalog(path)
        if text := of_another_store(path, catalog.store, store.url):
            remark(ctx, text)
    selection = selection_of(ctx, store, options, changes=changes)
    profile = profile_to_look(
        options, store, looks_only=_looks_only(options), warn=partial(remark, ctx)
    )
    return asked_checks(
        ctx,
        store,
        options,
        profile,
        selection=selection,
        catalog=catalog,
        update_catalog=options["update_catalog"],
        identity=options["identity"] or (),
        weights_version=options["weights_version"] or "",
        repairs=options["repair"] != "none",
        changes=changes,
        devices=parse_devices(options["device"]),
        device_bytes=options["device_bytes"],
        jobs=options["jobs"],
    )


def _keep_records(
    ctx: click.Context,
    store: Any,
    request: VerifyRequest,
    checked: PartCheck,
    options: dict[str, Any],
) -> bool:
    """Write the catalog and the stamp, if requested; return False if the catalog was refused."""
    why = ""
    if checked.catalog is not None:
        from hicachectl.backends.capabilities import permissions_of
        from hicachectl.checks.catalogs import save_catalog

        why = save_catalog(
            [checked.catalog.entries],
            options["catalog"],
            store=checked.catalog.store,
            identity_fields=checked.catalog.identity_fields,
            readable_by=permissions_of(store, listing=True),
            allow_shrink=options["allow_shrink"],
        )
    if why:
        remark(ctx, why, failure=True)
    if options["stamp"]:
        from hicachectl.profiles.stamps import Stamp, write_stamp

        assert request.profile is not None  # `_refuse_what_is_lacking` has required a profile
        path = write_stamp(store, Stamp(request.profile, request.weights_version))
        remark(ctx, f"Stamped the store: {path}")
    return not why


def _refuse_early(ctx: click.Context, options: dict[str, Any]) -> None:
    """Raise UsageError for contradicting options, before the store is opened."""
    if options["repair"] == "none":
        for option in options_of(ctx.command):
            if option.section is REPAIR and not option.writes and options[str(option.name)]:
                raise click.UsageError(f"{long_name(option)} needs --repair")
        return
    if options["repair"] == "delete" and options["quarantine"]:
        raise click.UsageError("--repair delete uses no quarantine; leave out --quarantine")
    if is_divided(options) and not (options["yes"] or options["dry_run"]):
        raise click.UsageError("A part cannot ask before a repair; give --yes or --dry-run")
    require_consent(options)


def _refuse_repair(store: Store, request: VerifyRequest, *, divided: bool) -> None:
    """Raise UsageError for a repair that is impossible, or that parts of a run cannot do.

    An inferred profile is not enough for a repair. Raises UntrustedError for a store with an
    untrusted side directory, because sound objects can look damaged without its side files.
    """
    from hicachectl.backends.capabilities import SideFiles
    from hicachectl.move.table_repair import has_snapshot_only

    if not request.repairs:
        return
    if not store.traits.deletes:
        raise UsageError(
            f"--repair: objects cannot be deleted from {store.url}; copy its whole pages to "
            "another store with hicachectl migrate"
        )
    if request.real_profile is None:
        raise UsageError(inferred_refused("--repair"))
    if isinstance(store, SideFiles):
        side = store.open_side_directory(writes=False)
        if side is not None:
            side.close()
    if divided and has_snapshot_only(store):
        raise UsageError(
            f"{store.url}: without server=, a repair writes one new snapshot, so parts of a run "
            "cannot do it; use one process"
        )


def _repair(
    ctx: click.Context,
    store: Store,
    request: VerifyRequest,
    checked: PartCheck,
    options: dict[str, Any],
) -> None:
    """Repair the checked groups, and add the counts to the facts of the result.

    A refused repair changes nothing and asks nothing. The facts then have the reason.
    """
    from hicachectl.move.removal_plan import newest_taken
    from hicachectl.move.repair import left_remarks, plan_of, repair
    from hicachectl.pages.census import SEVERAL

    chosen = _options_of_repair(options)
    plan = plan_of(checked, checked.findings, chosen)
    remark(ctx, *left_remarks(plan, stamps=options["stamp"]), failure=True)
    if plan.refused is not None:
        checked.result.facts.refused = (plan.refused,)
        return
    newest = newest_taken(checked.groups, plan)
    if newest >= SEVERAL:
        remark(
            ctx,
            f"The repair takes the {newest} newest pages and leaves older pages; if servers wrote "
            "the newest pages lately, the profile describes earlier servers, so compare it with "
            "hicachectl profile --server or --launch",
        )
    pages = counted(len(plan.groups), "page")
    size = human_size(checked.groups.total_bytes(plan.groups))
    question = f"{options['repair'].capitalize()} {pages} ({size}) of {store.url}?"
    if len(plan.groups) and not agreed(ctx, question, "repaired"):
        return
    with progress(ctx, "repairing", " pages") as advance:
        repair(
            store,
            checked,
            plan,
            chosen,
            buffer_bytes=options["buffer_bytes"],
            # Print this with --quiet, too: the next steps depend on what was moved, and where to.
            say=partial(remark, ctx, failure=True),
            on_progress=advance,
        )


def _options_of_repair(options: dict[str, Any]) -> RepairOptions:
    """Return the options of the repair."""
    from hicachectl.move.repair import RepairOptions

    return RepairOptions(
        mode=options["repair"],
        codes=tuple(options["repair_codes"]),
        quarantine=options["quarantine"],
        writers_stopped=options["writers_stopped"],
        despite_profile=options["despite_profile"],
        dry_run=options["dry_run"],
    )
