"""`hicachectl verify`: what is wrong with a store."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from hicachectl.errors import FINDINGS
from hicachectl.options import (
    Duration,
    NameList,
    filter_options,
    output_options,
    profile_options,
    store_argument,
)
from hicachectl.session import opened, progress, remark

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hicachectl.verify import Report

CHECKS = ("names", "groups", "sizes")


@click.command(
    "verify",
    epilog="""\b
Examples:
  hicachectl verify /tmp/hicache --profile prod.toml
  hicachectl verify prod: --checks groups,sizes --format json
  hicachectl verify /tmp/hicache --model-config config.json --tp 2 --page-size 64
  hicachectl verify prod: --fail-on error
""",
)
@store_argument
@click.option(
    "--checks", type=NameList(CHECKS), default=CHECKS, help="Which checks to run.  [default: all]"
)
@click.option(
    "--grace",
    type=Duration(),
    default="60s",
    show_default=True,
    metavar="DURATION",
    help="Younger page groups are being written and are not judged.",
)
@click.option(
    "--fail-on",
    type=click.Choice(["error", "warning", "never"]),
    default="warning",
    show_default=True,
    help="Exit with 4 on findings at least this severe.",
)
@filter_options
@output_options
@profile_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    store: str,
    checks: tuple[str, ...],
    grace: float,
    fail_on: str,
    output_format: str,
    output: Path | None,
    **options: Any,
) -> None:
    """Check STORE and report what is wrong with it.

    \b
    names   keys that SGLang did not write, or that can be read in several ways
    groups  pages of which an object is missing
    sizes   objects that are shorter or longer than their deployment writes them

    An error is what a server could read as wrong data; a warning costs hits or space. The exit
    status is 4 when there are findings at --fail-on or above. Nothing in the store is changed.
    """  # noqa: D301 - \b is click's mark, not ours
    from hicachectl.output import write_document
    from hicachectl.profiles import profile_from_options
    from hicachectl.selection import Selection
    from hicachectl.verify import verify_store

    selection = Selection(
        model=options["model"] or "",
        pool=options["pool"] or "",
        page=options["page"] or "",
        since=options["since"],
    )
    with opened(ctx, store) as source, progress(ctx, "listing", " objects") as advance:
        report = verify_store(
            source,
            profile_from_options(options, source, warn=partial(remark, ctx)),
            checks=checks,
            selection=selection,
            grace_seconds=grace,
            on_batch=advance,
        )
    for text in report.remarks:
        remark(ctx, text)
    write_document(
        report.document,
        rows=report.findings,
        name="findings",
        output_format=output_format,
        output=output,
        text=lambda colour: _lines(report, colour),
    )
    if fail_on != "never" and report.reaches(fail_on):
        ctx.exit(FINDINGS)


def _lines(report: Report, colour: bool) -> Iterator[str]:
    from hicachectl.output import human_size, table_lines

    document = report.document
    if len(report.findings):
        yield from table_lines(
            report.findings.select(["severity", "code", "key", "detail"]), colour=colour
        )
    in_flight = f", {document['in_flight']} in flight" if document["in_flight"] else ""
    yield (
        f"{document['objects']} objects, {document['pages']} pages{in_flight}, "
        f"{human_size(document['bytes'])}: {_verdict(document['counts'])}"
    )


def _verdict(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {code}" for code, count in counts.items()) or "no findings"
