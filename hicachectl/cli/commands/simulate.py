"""`hicachectl simulate`: what share of the prompt tokens a cache of each capacity serves."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from hicachectl.cli.command import Command
from hicachectl.cli.options import (
    allow_empty_option,
    allow_leases_option,
    jobs_option,
    output_options,
    prefetch_threshold_option,
    profile_options,
    store_names,
    trace_options,
)
from hicachectl.cli.parameters import MEMORY, START, CommaList, argument, own_option
from hicachectl.cli.session import opened, progress, remark
from hicachectl.cli.values import FILE, POSITIVE_SIZE, SHARE, Count, NameList
from hicachectl.formats.eviction import Policy
from hicachectl.formats.sizes import parse_size
from hicachectl.formats.wording import install_step
from hicachectl.results import Result, Shown
from hicachectl.text.vocabulary import GROUPINGS, WRITE_POLICIES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.backends.base import Store
    from hicachectl.requests.chains import Hashing, Requests
    from hicachectl.text.tables import Screen

_MANY = 5_000_000  # so many uses of pages take a minute or more without compiled loops


def _changes(text: str) -> dict[str, str]:
    from hicachectl.simulation.changes import parse_changes

    return parse_changes(text)


def _capacities(text: str) -> tuple[int, ...]:
    return tuple(parse_size(one, least=1) for one in text.split(","))


@click.command("simulate", cls=Command)
@argument("store", metavar="[STORE]", required=False, shell_complete=store_names)
@trace_options("Requests in any form.", required=True)
@own_option(
    "--capacity",
    type=CommaList(_capacities),
    metavar="SIZE,…",
    help="Capacities of the whole store, such as 1TiB,2TiB; without a profile, numbers of pages.  "
    "[default: powers of two]",
)
@own_option(
    "--policy",
    type=NameList(tuple(Policy)),
    help="Eviction policies.  [default: optimal, plus the policy of STORE, or lru without a STORE]",
)
@own_option(
    "--eviction-ratio",
    type=SHARE,
    default="0.9",
    show_default=True,
    metavar="SHARE",
    help="hicachefile: the eviction_ratio of the servers' storage backend.",
)
@own_option(
    "--by",
    type=NameList(GROUPINGS),
    help="Also show the result for each group of requests.",
)
@own_option(
    "--warm-up",
    type=SHARE,
    default="0",
    show_default=True,
    metavar="SHARE",
    help="Share of all requests, from the first on, that only fill the caches.",
)
@START.option("--plan", type=FILE, help="Begin with the pages of a prewarm plan in the caches.")
@own_option(
    "--what-if",
    "what_ifs",
    type=CommaList(_changes),
    multiple=True,
    metavar="NAME=VALUE,…",
    help="Also show the result for another tp, page_size, layout or kv_cache_dtype, such as "
    "tp=4,page_size=128. Can be given several times.",
)
@MEMORY.option(
    "--l1",
    type=POSITIVE_SIZE,
    needs="--l2 SIZE",
    help="Device memory for pages of one server, in front of the store.",
)
@MEMORY.option(
    "--l2",
    type=POSITIVE_SIZE,
    needs="--l1 SIZE",
    help="Host memory for pages of one server.",
)
@MEMORY.option(
    "--write-policy",
    needs="--l1 SIZE",
    type=click.Choice(WRITE_POLICIES),
    help="The servers' --hicache-write-policy.  [default: write_through]",
)
@MEMORY.option(
    "--servers",
    needs="--l1 SIZE",
    type=Count(1),
    metavar="N",
    help="Number of servers on the store. A request goes to the server that its record "
    "names. If it names none, the servers take turns.  [default: 1]",
)
@START.option("--cold", is_flag=True, help="Begin with empty caches, although STORE has pages.")
@prefetch_threshold_option
@allow_empty_option
@jobs_option
@allow_leases_option
@output_options
@profile_options
@click.pass_context
def command(ctx: click.Context, /, store: str | None, **options: Any) -> None:
    """Show what share of the prompt tokens a cache of each capacity serves.

    Give the requests with --trace. A request hits the leading pages that the cache holds. Hits of
    fewer tokens than the servers' prefetch threshold do not count.

    With a profile, capacities are bytes of the whole store, all ranks together. Without a profile,
    they are pages, or blocks of the trace. The policies are lru (like SGLang's trees, which evict
    the last pages of a prefix first), hicachefile (the limit of SGLang's file backend), 3fs, plugin
    (hicachectl's storage backend), mooncake, and optimal. The policy optimal knows all later
    requests, so no other policy serves more.

    With STORE, the caches begin with the pages that STORE holds today, unless --cold or --plan is
    given. Another table says why STORE does not serve the rest of the tokens, for example because
    of first use, eviction, damage, or another deployment. STORE is only read. The last line
    compares today's capacity with half of it and twice as much. The line before it says what STORE
    serves as it is.

    With --l1 and --l2, the memory of the servers serves tokens before the store does. --what-if
    compares other settings.

    hicachectl-simulate(1) describes policies, causes, and what the numbers refer to.

    Examples:
      hicachectl simulate --trace day.jsonl --profile prod.toml
      hicachectl simulate --trace day.jsonl --profile prod.toml prod:
      hicachectl simulate --trace day.jsonl --profile prod.toml --capacity 1TiB --what-if tp=4
      hicachectl simulate --trace day.jsonl --profile prod.toml --l1 40GiB --l2 200GiB --servers 8
      hicachectl simulate --trace day.jsonl --policy lru,hicachefile --warm-up 10% --format csv
    """
    from hicachectl.cli.output import write_report

    if store is None:
        result = _simulated(ctx, options, None)
    else:
        with opened(ctx, store) as source:
            result = _simulated(ctx, options, source)
    remark(ctx, *result.remarks)

    def lines(screen: Screen) -> Iterator[str]:
        return result.lines(result.document, screen, Shown())

    write_report(ctx, result.document, result.rows, result.rows_name, lines)


def _simulated(ctx: click.Context, options: dict[str, Any], store: Store | None) -> Result:
    from hicachectl.cli.asked import asked_hashing, asked_trace, without_request_flags
    from hicachectl.prewarming.ranking import read_plan
    from hicachectl.profiles.sources import profile_from_options
    from hicachectl.simulation.compiled import is_installed
    from hicachectl.simulation.simulate import SimulateRequest, simulate

    profile = profile_from_options(without_request_flags(options), store, warn=partial(remark, ctx))
    plan = None if options["plan"] is None else read_plan(options["plan"])
    trace = ctx.with_resource(asked_trace(options, keeps=bool(options["what_ifs"])))

    def read(hashing: Hashing | None) -> Requests:
        requests = trace.requests(hashing, outputs=True)
        remark(ctx, *trace.remarks)
        if len(requests.blocks) > _MANY and not is_installed():
            step = install_step("numba")
            remark(ctx, f"The loops are not compiled; to save minutes, {step}")
        return requests

    request = SimulateRequest(
        requests=read(asked_hashing(profile, options)),
        profile=profile,
        capacities=options["capacity"] or (),
        policies=options["policy"] or (),
        eviction_ratio=options["eviction_ratio"],
        warm_up=options["warm_up"],
        by=options["by"] or (),
        threshold=options["prefetch_threshold"],
        plan=plan,
        what_ifs=options["what_ifs"],
        reread=read,
        l1=options["l1"],
        l2=options["l2"],
        write_policy=options["write_policy"] or "write_through",
        servers=options["servers"] or 1,
        cold=options["cold"],
        allow_empty=options["allow_empty"],
    )
    with progress(ctx, "listing", " objects") as advance:
        return simulate(request, store, on_listed=advance)
