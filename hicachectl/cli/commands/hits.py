"""`hicachectl hits`: how much of each request a store can serve."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from hicachectl.cli.asked import (
    asked_hits,
    refuse_choice,
    refuse_other_sources,
    selection_of,
    without_request_flags,
)
from hicachectl.cli.command import Command
from hicachectl.cli.exit_codes import FINDINGS
from hicachectl.cli.options import (
    OF_PAGES,
    allow_leases_option,
    filter_options,
    jobs_option,
    min_usable_option,
    output_options,
    prefetch_threshold_option,
    profile_options,
    refuse_without_table,
    request_options,
    store_argument,
)
from hicachectl.cli.parameters import OUTPUT, own_option
from hicachectl.cli.session import opened, progress, remark
from hicachectl.cli.values import Count, NameList
from hicachectl.text.vocabulary import GROUPINGS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.text.tables import Screen

_SOURCES = ("prompts", "token_ids", "pages", "trace")


@click.command("hits", cls=Command)
@store_argument
@request_options
@own_option(
    "--summary",
    is_flag=True,
    help="In place of the requests, show the causes that stop them, the most lost tokens first.",
)
@own_option("--by", type=NameList(GROUPINGS), help="Also show sums by group of requests.")
@min_usable_option
@prefetch_threshold_option
@jobs_option
@allow_leases_option
@filter_options(beside_flags=True, without=OF_PAGES)
@output_options
@OUTPUT.option(
    "--limit",
    type=Count(1),
    metavar="N",
    help="In tables, show at most N lines, the worst first.  [default: 20 on a terminal, else all]",
)
@profile_options
@click.pass_context
def command(ctx: click.Context, /, store: str, **options: Any) -> None:
    """Show how much of each request a store can serve, and which object stops it.

    Give the requests with --prompts, --token-ids, --pages or --trace. STORE is only read.

    A page counts if all its objects of all ranks are present. Trailing pools (Mamba states, sliding
    windows) are needed only at the end of a prefix. If fewer tokens of a request are usable than
    the servers' prefetch threshold, servers fetch none of them. Served tokens are the tokens that
    servers fetch.

    The last line names the deployment that was measured. The share in this line refers to the
    tokens in full pages that servers look up. simulate and report count all prompt tokens, so their
    shares are smaller. "exists at tp 4" means that only another deployment has the page.
    Unreachable pages are whole, but stand behind the object that stops the request. With
    --min-usable, the exit status is 4 if a smaller share is served.

    Without a profile, --page-size (and --speculative-algorithm for EAGLE) decides how tokens are
    hashed, and the filters choose one of several deployments. Pages are then compared with each
    other, so hits does not notice a pool that no page has.

    hicachectl-hits(1) describes request files.

    Examples:
      hicachectl hits prod: --token-ids requests.jsonl --profile prod.toml
      hicachectl hits prod: --prompts chats.jsonl --model-config /models/qwen3 --tp 8 --page-size 64
      hicachectl hits prod: --token-ids requests.jsonl --profile prod.toml --min-usable 0.9
      hicachectl hits prod: --trace day.jsonl.gz --server http://host:30000 --summary --by salt
      hicachectl hits /tmp/hicache --pages chain.jsonl --format json
    """
    refuse_other_sources(options, _SOURCES)
    refuse_without_table(ctx, options["output_format"], "request")
    from hicachectl.cli.output import write_report
    from hicachectl.cli.text_tables import hits_lines
    from hicachectl.profiles.sources import profile_from_options
    from hicachectl.requests.measuring import failed_text, measure_hits, passes

    with opened(ctx, store) as source, progress(ctx, "listing", " objects") as advance:
        choice = selection_of(ctx, source, options)
        refuse_choice(choice, options)
        # If the options state no profile, the profile that a pack records is used.
        profile = profile_from_options(
            without_request_flags(options), source, warn=partial(remark, ctx)
        )
        request = asked_hits(ctx, options, profile, choice)
        report = measure_hits(source, request, on_listed=advance)
    remark(ctx, *report.remarks)

    summary, by = options["summary"], options["by"] or ()

    def lines(screen: Screen) -> Iterator[str]:
        return hits_lines(report, screen, summary=summary, by=by, limit=options["limit"])

    if summary:
        write_report(ctx, report.totals, report.causes, "causes", lines)
    else:
        write_report(ctx, {"chains": report.rows, **report.totals}, report.rows, "chains", lines)
    least = options["min_usable"]
    if least is not None and not passes(report.document, least):
        next_step = "copy pages with hicachectl prewarm, or give a lower share"
        if report.document["elsewhere"]:
            next_step = (
                "convert the pages that exist elsewhere with hicachectl migrate, copy other pages "
                "with hicachectl prewarm, or give a lower share"
            )
        remark(ctx, failed_text(report.document, least, next_step), failure=True)
        ctx.exit(FINDINGS)
