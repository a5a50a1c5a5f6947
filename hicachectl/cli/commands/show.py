"""`hicachectl show`: show one page, for an incident."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from hicachectl.cli.command import Command
from hicachectl.cli.options import (
    allow_leases_option,
    grace_option,
    jobs_option,
    output_options,
    profile_options,
    store_argument,
)
from hicachectl.cli.parameters import argument
from hicachectl.cli.session import opened, progress, remark
from hicachectl.cli.settings import contradiction_remark
from hicachectl.formats.wording import PAGES_COMPARED
from hicachectl.text.terminal import escape_controls

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.text.tables import Screen
    from hicachectl.verification.inspection import PageReport


@click.command("show", cls=Command)
@store_argument
@argument("page", metavar="PAGE")
@grace_option("Show no findings about page groups younger than this")
@jobs_option
@allow_leases_option
@output_options
@profile_options
@click.pass_context
def command(ctx: click.Context, /, store: str, page: str, **options: Any) -> None:
    """Show the objects of one page, and the findings about them.

    PAGE is a page hash, or the first digits of a hash, if no other page of STORE has them. The page
    is read; nothing is changed. The result has the objects with their digests, the missing objects
    and the findings. With a profile, it also has statistics of the values of each layer, and the
    quartiles of the magnitudes, read in each dtype that the numbers may have. For an object with a
    trailer, it has the identity and the digest in the trailer, and the weights, dtype and layout of
    the identity as far as they are known.

    Examples:
      hicachectl show /tmp/hicache 4ebfa8a1f3c3
      hicachectl show prod: 4ebfa8a1f3c3 --profile prod.toml --format json
    """
    from hicachectl.cli.output import write_report
    from hicachectl.profiles.sources import profile_to_look
    from hicachectl.verification.inspection import inspect_page

    with opened(ctx, store) as source, progress(ctx, "listing", " objects") as advance:
        profile, collision = profile_to_look(options, source, warn=partial(remark, ctx))
        report = inspect_page(
            source,
            profile,
            page,
            grace_seconds=options["grace"],
            on_contradiction=contradiction_remark(ctx),
            on_batch=advance,
        )
        remark(ctx, *source.remarks)
    if profile is None:
        values = "show prints statistics and quartiles of values only with a profile"
        remark(ctx, f"{collision or 'No --profile'}: {values}; {PAGES_COMPARED}")
    write_report(ctx, report.document, report.objects, "objects", partial(_lines, report))


def _lines(report: PageReport, screen: Screen) -> Iterator[str]:
    from hicachectl.cli.text_tables import (
        contents_for_people,
        objects_for_people,
        readings_for_people,
    )
    from hicachectl.text.tables import table_lines

    yield f"page {report.document['page']}"
    for group in report.document["groups"]:
        pools = " ".join(f"{p} {n['present']}/{n['expected']}" for p, n in group["pools"].items())
        model = escape_controls(group["model"] or "-")
        yield f"model {model}: {', '.join(filter(None, (group['state'], pools)))}"
        yield from (f"  missing {escape_controls(key)}" for key in group["missing"])
    yield ""
    yield from table_lines(objects_for_people(report.objects), screen)
    if identities := report.document.get("identities"):
        yield ""
        yield from map(_identity_line, identities.items())
    if contents := report.document["contents"]:
        yield ""
        yield from table_lines(contents_for_people(contents), screen)
    if readings := report.document["readings"]:
        yield ""
        yield from table_lines(readings_for_people(readings), screen)
    if len(report.findings):
        yield ""
        columns = report.findings.select(["severity", "code", "key", "detail"])
        yield from table_lines(columns, screen)


def _identity_line(named: tuple[str, dict[str, Any]]) -> str:
    name, facts = named
    known = ", ".join(
        f"{fact.replace('_', ' ')} {escape_controls(str(value))}"
        for fact, value in facts.items()
        if value not in ("", None)
    )
    return f"identity {name}: {known}"
