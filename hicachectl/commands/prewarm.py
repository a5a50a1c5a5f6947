"""`hicachectl prewarm`: fill a store before the traffic comes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hicachectl.options import Size, profile_options
from hicachectl.session import remark

if TYPE_CHECKING:
    from hicachectl.prewarming.plan import Plan


@click.command(
    "prewarm",
    epilog="""\b
Examples:
  hicachectl prewarm --trace yesterday.jsonl --dry-run -o plan.jsonl
  hicachectl prewarm --trace yesterday.jsonl --dry-run --budget-pages 30000 -o plan.jsonl
  hicachectl prewarm --trace tokens.jsonl --dry-run --profile prod.toml --budget 200GiB
  jq -cR 'fromjson? | select(.event == "request.finished" and .obj.input_ids) |
    {timestamp, token_ids: .obj.input_ids, extra_key: .obj.extra_key,
     cache_salt: .obj.cache_salt,
     output_length: .out.meta_info.completion_tokens}' server.log > tokens.jsonl
""",
)
@click.option(
    "--trace",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    required=True,
    help="Requests to learn from, a JSON object a line: timestamp, and token_ids or hash_ids.",
)
@click.option("--dry-run", is_flag=True, help="Only plan: what to warm, best first.")
@click.option("--budget", type=Size(1), metavar="SIZE", help="Plan no more bytes than this.")
@click.option(
    "--budget-pages", type=click.IntRange(1), metavar="N", help="Plan no more pages than this."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the plan to FILE instead of stdout.",
)
@profile_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    trace: Path,
    dry_run: bool,
    budget: int | None,
    budget_pages: int | None,
    output: Path | None,
    **options: Any,
) -> None:
    """Plan which pages are worth warming, and in what order.

    A line of the trace is one request, a JSON object: timestamp, and token_ids with the extra_key
    and cache_salt that it had, or hash_ids in their place as in the public traces of Mooncake.
    input_length and output_length, in tokens, improve the plan. Token ids are hashed as the profile
    says. Hash ids name blocks that only the trace knows: they can be planned from, and such a plan
    cannot be executed.

    Blocks are ordered by the chance that they are used again soon, as the trace itself shows it for
    blocks as old and as often used, of requests as long and so on; a page never stands before the
    pages of its prefix. Lines without timestamp are ordered by how many share a page.

    The plan is JSON lines, best first, of page, parent, depth, value, requests and last_seen. No
    store is needed for it.

    To record a trace, start SGLang with --log-requests, --log-requests-level 3 (2 cuts long
    prompts) and --log-requests-format json, and take token ids from its log as the last example
    does. Requests that came as text are logged without them.
    """
    if not dry_run:
        raise click.UsageError("add --dry-run: plans can be made, but not executed yet")
    from hicachectl.output import write_json_lines
    from hicachectl.prewarming.plan import plan_order
    from hicachectl.prewarming.plan_file import plan_rows
    from hicachectl.prewarming.sizes import pages_within
    from hicachectl.prewarming.trace import read_trace
    from hicachectl.profiles import profile_from_options

    profile = profile_from_options(options, warn=partial(remark, ctx))
    requests = read_trace(trace, profile)
    if budget is not None:
        fitting = pages_within(budget, profile, scheme="file", hashed=requests.forest.hashed)
        budget_pages = fitting if budget_pages is None else min(budget_pages, fitting)
    plan = plan_order(requests, budget=budget_pages)
    write_json_lines(plan_rows(plan), output)
    remark(ctx, _summary(plan, len(requests)))


def _summary(plan: Plan, requests: int) -> str:
    text = f"{len(plan)} of {len(plan.forest)} pages of {requests} requests planned"
    if plan.forest.hashed:
        return text
    return f"{text}; block ids of the trace, which cannot be executed"
