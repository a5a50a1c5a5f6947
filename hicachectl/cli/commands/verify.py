"""`hicachectl verify`: what is wrong with a store."""

from __future__ import annotations

import re
from contextlib import ExitStack
from functools import partial
from inspect import cleandoc
from typing import TYPE_CHECKING, Any

import click

from hicachectl.checks.registry import DIGESTS, SEVERITIES, group_names, groups_help
from hicachectl.cli.commands.verify_repair import (
    earlier_runs,
    refuse_early,
    refuse_without_profile,
    repair_options,
    repaired,
)
from hicachectl.cli.consent import locked
from hicachectl.cli.exit_codes import FINDINGS
from hicachectl.cli.options import (
    FILE,
    Duration,
    NameList,
    Size,
    allow_leases_option,
    buffer_option,
    bwlimit_option,
    filter_options,
    lease_wait_option,
    lock_option,
    output_options,
    profile_options,
    store_argument,
)
from hicachectl.cli.session import bytes_progress, opened, progress, remark, store_name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hicachectl.backends.base import Store
    from hicachectl.verify.sampling import Sample
    from hicachectl.verify.verify import VerifyReport, VerifyRequest


class _Command(click.Command):
    """Lists the registered checks in its help, in the place of CHECKS."""

    @property
    def help(self) -> str | None:
        return self._help.replace("CHECKS", groups_help())

    @help.setter
    def help(self, text: str | None) -> None:
        self._help = cleandoc(text or "")


@click.command(
    "verify",
    cls=_Command,
    epilog="""\b
Examples:
  hicachectl verify /tmp/hicache --profile prod.toml
  hicachectl verify prod: --checks names,groups,sizes --format json
  hicachectl verify /tmp/hicache --model-config config.json --tp 2 --page-size 64
  hicachectl verify prod: --profile prod.toml --sample 5% --time-limit 1h
  hicachectl verify prod: --catalog prod.parquet --update-catalog
  hicachectl verify prod: --profile prod.toml --repair quarantine --dry-run
  hicachectl verify prod: --profile prod.toml --device cuda
  hicachectl verify prod: --fail-on error --metrics-file /var/lib/node/hicache.prom
""",
)
@store_argument
@click.option(
    "--checks",
    type=NameList(group_names),
    default=group_names,
    help="Which checks to run.  [default: all that apply]",
)
@click.option("--sample", metavar="PERCENT", help="Read only this share of the pages, such as 5%.")
@click.option(
    "--sample-slice",
    type=click.IntRange(0),
    metavar="K",
    help="Which share.  [default: the day, so that nightly runs take turns]",
)
@click.option("--time-limit", type=Duration(), help="Begin no further read after this.")
@click.option(
    "--grace",
    type=Duration(),
    default="60s",
    show_default=True,
    help="Younger page groups are being written and are not judged.",
)
@click.option("--catalog", type=FILE, help="Compare with the digests recorded in FILE.")
@click.option(
    "--update-catalog", is_flag=True, help="Record digests in the catalog; begin one if need be."
)
@click.option(
    "--identity",
    type=NameList(),
    help="Fields that tell whether an object was rewritten since it was recorded, such as "
    "inode,mtime; a field that the store lacks is refused with a list of those that it has.  "
    "[default: all that the store has]",
)
@click.option("--stamp", is_flag=True, help="Record the profile and weights version of the store.")
@click.option(
    "--weights-version",
    metavar="TEXT",
    help="Version of the weights, for the stamp and against it.",
)
@click.option(
    "--fail-on",
    type=click.Choice([*reversed(SEVERITIES[1:]), "never"]),
    default="warning",
    show_default=True,
    help="Exit with 4 on findings at least this severe.",
)
@click.option("--metrics-file", type=FILE, help="Write Prometheus textfile metrics.")
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    metavar="cpu|cuda|auto",
    help="Where to check and digest; cuda:0,cuda:1 share the work.",
)
@click.option(
    "--device-bytes",
    type=Size(),
    default="2GiB",
    show_default=True,
    help="Memory to use on each device, beside what CUDA itself takes.",
)
@repair_options
@lock_option
@click.option(
    "--jobs",
    type=click.IntRange(1, 256),
    metavar="N",
    help="How many threads read; processes, where there are many small files.",
)
@buffer_option
@bwlimit_option
@allow_leases_option
@lease_wait_option
@filter_options
@output_options
@profile_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    store: str,
    output_format: str,
    output: Path | None,
    **options: Any,
) -> None:
    """Check STORE and report what is wrong with it.

    \b
    CHECKS

    A check that --checks names and that cannot run is refused. Of the default set each check that
    did not run, and what else was not checked, is in skipped_checks and said on stderr. Values do
    not show whether another dtype of the same width was written (e4m3 or e5m2, bfloat16 or
    float16): that is said as dtypes.

    Without a profile objects are compared with each other. Where at least 3 pages, and 5%, have
    another size than the rest, all these sizes are taken for good, and one mixed-sizes warning for
    each kind of object has their counts, dates and the likely reason: servers of two settings have
    written to the store. Rarer sizes are reported object by object. A mix is never repaired.

    An error is what a server could read as wrong data; a warning costs hits or space. The exit
    status is 4 when there are findings at --fail-on or above. Nothing in the store is changed
    without --repair, which takes every object of a page that has an error out of the store, the kv
    objects first, so that a server recomputes the page; hicachectl-restore(1) puts it back.

    Reading objects of a Mooncake store grants each a lease: it is not evicted, and cannot be
    removed, for the next seconds, and moves back in the order of eviction. --checks
    names,groups,sizes reads none; --bwlimit and --sample make the others gentler.

    With --device cuda objects are loaded into GPU memory as a server loads them, layer by layer,
    checked there, gathered back into the order of the store and digested. Objects whose form no
    profile gives are digested as they came into GPU memory. The findings are the same as without;
    a GPU that is missing or fails ends the run, with --device auto the CPU goes on.
    """  # noqa: D301 - \b is click's mark, not ours
    from hicachectl.cli.output import write_document
    from hicachectl.verify.verify import verify_store

    _refuse_contradictions(options)
    refuse_early(options)
    leases = {name: options[name] for name in ("allow_leases", "lease_wait")}
    with ExitStack() as stack:
        if not stack.enter_context(locked(options["lock"])):
            remark(ctx, f"another process holds {options['lock']}; nothing was done")
            _write_lock_held(store_name(ctx, store), options, output_format, output)
            return
        source = stack.enter_context(opened(ctx, store, **leases))
        request = _request(ctx, source, options)
        _refuse_impossible_checks(ctx, source, request)
        _refuse_what_is_lacking(source, request, options)
        refuse_without_profile(request)
        earlier = earlier_runs(ctx, source, options)
        with (
            progress(ctx, "listing", " objects") as on_listed,
            bytes_progress(ctx, "reading") as on_read,
        ):
            report = verify_store(
                source,
                request,
                on_listed=on_listed,
                on_read=on_read,
                on_wait=partial(_say_wait, ctx),
            )
        _keep_records(ctx, source, request, report, options)
        report, all_well = repaired(ctx, source, request, report, options, earlier)
    for text in report.remarks:
        remark(ctx, text)
    failed = options["fail_on"] != "never" and report.reaches(options["fail_on"])
    failed = failed or not all_well
    if options["metrics_file"]:
        from hicachectl.cli.metrics import write_metrics

        write_metrics(options["metrics_file"], report.document, succeeded=not failed)
    write_document(
        report.document,
        rows=report.findings,
        name="findings",
        output_format=output_format,
        output=output,
        text=lambda colour: _lines(report, colour),
    )
    if failed:
        ctx.exit(FINDINGS)


def _write_lock_held(
    store: str, options: dict[str, Any], output_format: str, output: Path | None
) -> None:
    """Write the document of a run that did nothing because another process held the lock."""
    from hicachectl.checks.findings import SCHEMA
    from hicachectl.cli.output import write_document
    from hicachectl.verify.verify import not_begun

    document = not_begun(store)
    if options["repair"] != "none":
        document["dry_run"] = options["dry_run"]
    write_document(
        document,
        rows=SCHEMA.empty_table(),
        name="findings",
        output_format=output_format,
        output=output,
        text=lambda colour: iter(["0 objects, 0 pages: stopped: lock"]),
    )


def _refuse_contradictions(options: dict[str, Any]) -> None:
    """Fail on options that make no sense together, before the store is opened."""
    from hicachectl.device.devices import parse_devices

    parse_devices(options["device"])
    if options["update_catalog"] and not options["catalog"]:
        raise click.UsageError("--update-catalog needs --catalog FILE")
    if options["catalog"] and DIGESTS.name not in options["checks"]:
        raise click.UsageError("--catalog needs the check digests")
    if options["sample_slice"] is not None and not options["sample"]:
        raise click.UsageError("--sample-slice needs --sample")


def _refuse_impossible_checks(ctx: click.Context, store: Store, request: VerifyRequest) -> None:
    """Fail on a check that was named and cannot run."""
    if ctx.get_parameter_source("checks") is click.core.ParameterSource.DEFAULT:
        return
    for check, why in request.impossible(store).items():
        raise click.UsageError(f"--checks {check}: {why}; or leave out {check}")


def _refuse_what_is_lacking(store: Any, request: VerifyRequest, options: dict[str, Any]) -> None:
    """Fail on options that make no sense for the store, before it is read."""
    unknown = sorted(set(request.identity) - set(store.traits.version_fields))
    if unknown:
        known = ", ".join(store.traits.version_fields) or "none"
        raise click.UsageError(f"--identity: {store.url} has no {unknown[0]}; it has: {known}")
    if options["repair"] != "none" and not store.traits.deletes:
        raise click.UsageError(
            f"--repair: objects of {store.url} cannot be deleted; hicachectl migrate copies its "
            "sound pages to another store"
        )
    if not (options["stamp"] or options["weights_version"]):
        return
    from hicachectl.backends.capabilities import SideFiles

    if not isinstance(store, SideFiles):
        raise click.UsageError(f"--stamp, --weights-version: no place beside {store.url} for one")
    if options["stamp"]:
        from hicachectl.profiles.stamps import check_stamp_place

        if request.real_profile is None:
            raise click.UsageError("--stamp needs a profile: --profile, --model-config or --server")
        check_stamp_place(store, request.real_profile.key_model)


def _request(ctx: click.Context, store: Any, options: dict[str, Any]) -> VerifyRequest:
    from hicachectl.checks.catalogs import load_catalog
    from hicachectl.device.devices import parse_devices
    from hicachectl.pages.selection import Selection
    from hicachectl.profiles.sources import profile_from_options
    from hicachectl.verify.verify import VerifyRequest

    path = options["catalog"]
    begins = options["update_catalog"] and path is not None and not path.exists()
    catalog = None if path is None or begins else load_catalog(path)
    if catalog is not None and catalog.store != store.url:
        remark(ctx, f"{path} records {catalog.store}, not {store.url}; compared by key")
    keeps = options["update_catalog"] or options["stamp"]
    profile = profile_from_options(
        options,
        store,
        looks_only=options["repair"] == "none" and not keeps,
        warn=partial(remark, ctx),
    )
    return VerifyRequest(
        profile=profile,
        checks=options["checks"],
        selection=Selection(
            model=options["model"] or "",
            pool=options["pool"] or "",
            page=options["page"] or "",
            since=options["since"],
        ),
        grace_seconds=options["grace"],
        sample=_sample(options["sample"], options["sample_slice"]),
        time_limit_seconds=options["time_limit"],
        catalog=catalog,
        update_catalog=options["update_catalog"],
        identity=options["identity"] or (),
        weights_version=options["weights_version"] or "",
        repairs=options["repair"] != "none",
        devices=parse_devices(options["device"]),
        device_bytes=options["device_bytes"],
        buffer_bytes=options["buffer_bytes"],
        bytes_per_second=options["bwlimit"],
        jobs=options["jobs"],
    )


def _say_wait(ctx: click.Context, seconds: float, groups: int) -> None:
    remark(
        ctx,
        f"{groups} pages are not whole; the store keeps no times, so they are looked at again in "
        f"{seconds:.0f}s (--grace)",
    )


def _sample(text: str | None, number: int | None) -> Sample | None:
    from hicachectl.verify.sampling import Sample

    if text is None:
        return None
    if not re.fullmatch(r"\d+(\.\d+)?%", text):
        raise click.UsageError(f"--sample {text!r}: write a share in percent, such as 5%")
    return Sample.of(float(text[:-1]), number)


def _keep_records(
    ctx: click.Context,
    store: Any,
    request: VerifyRequest,
    report: VerifyReport,
    options: dict[str, Any],
) -> None:
    """Write the catalog and the stamp, where asked for."""
    if report.catalog is not None:
        from hicachectl.backends.capabilities import permissions_of
        from hicachectl.checks.catalogs import save_catalog

        save_catalog(report.catalog, options["catalog"], permissions_of(store, listing=True))
    if options["stamp"]:
        from hicachectl.profiles.stamps import Stamp, write_stamp

        assert request.profile is not None  # or it would have been refused
        path = write_stamp(store, Stamp(request.profile, request.weights_version))
        remark(ctx, f"stamped: {path}")


def _lines(report: VerifyReport, colour: bool) -> Iterator[str]:
    from hicachectl.cli.output import table_lines
    from hicachectl.text.units import human_size

    document = report.document
    if len(report.findings):
        columns = report.findings.select(["severity", "code", "key", "detail"])
        yield from table_lines(columns, colour=colour)
    in_flight = f", {document['in_flight']} in flight" if document["in_flight"] else ""
    gone = f", {document['gone']} gone meanwhile" if document["gone"] else ""
    read = ""
    if document["bytes_read"]:
        part = document["sampled"] < document["pages"]
        share = f" of {document['sampled']} of the pages" if part else ""
        read = f", {human_size(document['bytes_read'])} read{share}"
    cut = "" if document["complete"] else ", time limit reached"
    fixed = f"; {document['repaired']} pages repaired" if document["repaired"] else ""
    yield (
        f"{document['objects']} objects, {document['pages']} pages{in_flight}{gone}, "
        f"{human_size(document['bytes'])}{read}{cut}: {_verdict(document)}{fixed}"
    )


def _verdict(document: dict[str, Any]) -> str:
    """Sum up the findings, and name what was not checked."""
    found = ", ".join(f"{count} {code}" for code, count in document["counts"].items())
    skipped = document["skipped_checks"]
    if skipped == ["everything"]:
        return found or "nothing was checked"
    left_out = f"; not checked: {', '.join(skipped)}" if skipped else ""
    return (found or "no findings") + left_out
