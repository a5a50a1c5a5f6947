"""`hicachectl prewarm`: fill a store with the pages that are worth having, before the traffic."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from hicachectl.cli.commands.prewarm_report import is_failed, write_outcome, write_report
from hicachectl.cli.consent import locked
from hicachectl.cli.exit_codes import FINDINGS
from hicachectl.cli.options import (
    FILE,
    Duration,
    Size,
    buffer_option,
    bwlimit_option,
    jobs_option,
    lease_wait_option,
    lock_option,
    output_options,
    profile_options,
    request_options,
    transform_options,
)
from hicachectl.cli.session import bytes_progress, opened, progress, remark, store_name
from hicachectl.formats.errors import ProfileError, StoreUnavailable
from hicachectl.io.interrupts import raised_once
from hicachectl.prewarm.inputs import read_wanted, requests_for_servers
from hicachectl.requests.chain_options import refuse_other_sources

if TYPE_CHECKING:
    from pathlib import Path

    from hicachectl.backends.base import Store
    from hicachectl.formats.profile import Profile
    from hicachectl.prewarm.inputs import WarmingInputs
    from hicachectl.prewarm.page_plan import PrewarmRequest
    from hicachectl.prewarm.prewarm import PrewarmOutcome
    from hicachectl.prewarm.pulling import LiveServer

_TOKEN_SOURCES = ("prompts", "token_ids", "trace")
_SOURCES = ("prompts", "token_ids", "pages", "trace", "plan", "all_")
_SHOWN_PROBLEMS = 20


@click.command(
    "prewarm",
    epilog="""\b
Examples:
  hicachectl prewarm mooncake: --from pack:///backup/monday.hcpack --trace requests.jsonl \\
      --budget 200GiB --deadline 10m --min-usable 0.9
  hicachectl prewarm prod: --from /mnt/archive --profile prod.toml --prompts system.jsonl --pin
  hicachectl prewarm --trace conversation_trace.jsonl --dry-run -o plan.jsonl
  hicachectl prewarm prod: --from /mnt/archive --profile prod.toml --plan plan.jsonl
  hicachectl prewarm prod: --profile prod.toml --token-ids hot.jsonl \\
      --through-server http://127.0.0.1:30000

\b
crontab:
  40 5 * * 1-5  hicachectl -q prewarm prod: --from archive: --trace /var/log/sglang/day.jsonl \\
      --budget 200GiB --deadline 20m --lock /run/prewarm.lock \\
      --metrics-file /var/lib/node_exporter/prewarm.prom -o /var/log/prewarm.json
""",
)
@click.argument("destination", metavar="[DST]", required=False)
@click.option("--from", "source", metavar="SRC", help="The store to copy from.")
@request_options
@click.option(
    "--trace",
    type=FILE,
    help="Requests with their times, in JSON, one a line: token ids, or hash_ids (--dry-run).",
)
@click.option("--plan", type=FILE, help="What an earlier --dry-run has written; its order is kept.")
@click.option(
    "--all",
    "all_",
    is_flag=True,
    help="Every whole page of SRC, the newest minute first; nothing is known of prefixes then.",
)
@click.option("--budget", type=Size(), help="Copy at most so many bytes.")
@click.option(
    "--budget-pages", type=click.IntRange(0), metavar="N", help="Copy at most so many pages."
)
@click.option("--deadline", type=Duration(), help="Begin no further copy after this.")
@click.option(
    "--min-usable",
    type=click.FloatRange(0, 1),
    metavar="SHARE",
    help="Exit with 4 when servers could restore less of the tokens asked for, such as 0.9.",
)
@click.option(
    "--pin",
    is_flag=True,
    help="Mooncake: protect what is written from eviction, by soft pins; what was there gets none.",
)
@click.option(
    "--pin-ttl",
    type=Duration(),
    help="How long pins last, 24h at most unless the master's --max_kv_soft_pin_ttl is another.  "
    "[default: the master's --default_kv_soft_pin_ttl, 30m unless set]",
)
@click.option("--dry-run", is_flag=True, help="Print the plan, best page first; do nothing.")
@click.option(
    "--through-server",
    "servers",
    multiple=True,
    metavar="URL",
    help="Have this live SGLang server pull the prefixes from DST into its memory.",
)
@click.option("--metrics-file", type=FILE, help="Write Prometheus textfile metrics.")
@transform_options
@lock_option
@jobs_option
@buffer_option
@bwlimit_option
@lease_wait_option
@output_options
@profile_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    destination: str | None,
    source: str | None,
    output_format: str,
    output: Path | None,
    **options: Any,
) -> None:
    """Copy from SRC to DST what requests like those of a file can be expected to hit.

    Requests are texts or chats (--prompts), token ids (--token-ids), page hashes (--pages), or a
    trace with times (--trace). Of each the longest prefix is taken that servers could restore from
    SRC, by the rules of every pool; of trailing pools (Mamba, windows) only what ends a prefix.
    What DST has already is left out. A page with an object whose size is not the profile's stays
    behind, is named, and counts as failed (exit code 4).

    Pages are put in order by what warming them saves: how often and how lately requests used
    them, measured on the trace itself; a page never before its prefix. So whatever ends the
    run, what was copied is of use; but for --all, which knows no prefixes and copies what was
    written in the same minute in that order, newer minutes first.

    In the end the pages are touched, the least valuable first, so that the best are evicted last;
    after a deadline, or a signal while it copies, for 10 s at most, and then the best ones only.
    SIGTERM and Ctrl-C let what was begun be finished, and the result is written after them too.
    A destination that evicts meanwhile ends the run, which says what it holds. The rows of
    --dry-run are the plan, and --plan executes one; a trace of hash_ids alone gives a plan, but
    none that can be executed. The transforms are those of migrate: an archive of TP 4 warms a
    cluster of TP 8.

    A line of the trace is {"timestamp": 27482, "token_ids": [...]}, and where the request had them
    its extra_key and cache_salt; input_length and output_length (tokens) improve the plan. To
    record one, start SGLang with --log-requests --log-requests-level 3 --log-requests-format json
    (level 2 cuts long prompts) and take from its log:

    \b
      jq -cR 'fromjson? | select(.event == "request.finished" and .obj.input_ids) |
        {timestamp, token_ids: .obj.input_ids, extra_key: .obj.extra_key,
         cache_salt: .obj.cache_salt,
         output_length: .out.meta_info.completion_tokens}' server.log > trace.jsonl

    Mooncake gives up soft pins when their time is over, and, unless its master runs with
    --allow_evict_soft_pinned_objects=false, when it has nothing else to evict.

    With --through-server the servers themselves then pull the prefixes that DST holds, by requests
    for one token, once at each of their DP ranks; without --from that is all that is done. Of a
    trace each prefix is asked for once, the most valuable first. The API key is that of
    HICACHECTL_API_KEY.

    usable_tokens, and with it --min-usable, is counted for one deployment, which the result names:
    that of the servers of --through-server, where these are given, else the one that the pages are
    written for (--to-profile, the other --to- options, else the profile of SRC). Pages of another
    topology than a server's are not usable: the server never asks for them. A stamp of DST that
    names another deployment is said on stderr.

    A summary goes to stderr, and the result to stdout as JSON unless --format says otherwise.
    """  # noqa: D301 - \b is click's mark, not ours
    output_format = _format(ctx, output_format)
    refuse_other_sources(options, _SOURCES)
    if options["trace"] and destination is None and source is None:
        _plan_trace(ctx, options, output_format, output)
        return
    if destination is None or not (source or options["servers"]):
        raise click.UsageError(
            "give DST and --from SRC; or --trace FILE --dry-run, for a plan without stores"
        )
    if options["pin_ttl"] is not None and not options["pin"]:
        raise click.UsageError("--pin-ttl is for --pin")
    if options["servers"] and not any(options[name] for name in _TOKEN_SOURCES):
        raise click.UsageError(
            "--through-server sends tokens: it needs --prompts, --token-ids or --trace"
        )
    with raised_once(), locked(options["lock"]) as is_ours:
        if not is_ours:
            _write_lock_held(ctx, source, destination, output_format, output)
            return
        with opened(
            ctx, destination, lease_wait=options["lease_wait"], create=source is not None
        ) as target:
            outcome = _worked(ctx, source, target, options)
        write_report(ctx, outcome, options, output_format, output)
    if outcome.interruption is not None:
        raise outcome.interruption
    lost = [server["error"] for server in outcome.document.get("pulled", ()) if server["error"]]
    if lost:
        raise StoreUnavailable("; ".join(lost))
    if is_failed(outcome, options):
        ctx.exit(FINDINGS)


def _write_lock_held(
    ctx: click.Context,
    source: str | None,
    destination: str,
    output_format: str,
    output: Path | None,
) -> None:
    """Write the document of a run that did nothing because another process held the lock."""
    from hicachectl.prewarm.prewarm import not_begun

    remark(ctx, f"another process holds {ctx.params['lock']}; nothing was done")
    origin = None if source is None else store_name(ctx, source)
    write_outcome(not_begun(origin, store_name(ctx, destination)), output_format, output)


def _format(ctx: click.Context, output_format: str) -> str:
    """JSON unless another format was asked for; JSON lines for a plan."""
    given = ctx.get_parameter_source("output_format")
    if given is not click.core.ParameterSource.DEFAULT:
        return output_format
    return "jsonl" if ctx.params["dry_run"] else "json"


def _plan_trace(
    ctx: click.Context, options: dict[str, Any], output_format: str, output: Path | None
) -> None:
    """Plan from a trace alone, without any store."""
    from hicachectl.cli.output import write_json_lines
    from hicachectl.prewarm.plan import pages_within, plan_order
    from hicachectl.prewarm.plan_file import plan_rows
    from hicachectl.prewarm.trace import read_trace
    from hicachectl.profiles.sources import profile_from_options

    if not options["dry_run"]:
        raise click.UsageError("--trace without stores is for --dry-run; or give DST and --from")
    if output_format != "jsonl":
        raise click.UsageError("--format: a plan without stores is JSON lines")
    profile = profile_from_options(options, None, warn=partial(remark, ctx))
    trace = read_trace(options["trace"], profile)
    most = options["budget_pages"]
    if options["budget"] is not None:
        hashed = trace.forest.hashed
        fitting = pages_within(options["budget"], profile, hashed=hashed)
        most = fitting if most is None else min(most, fitting)
    plan = plan_order(trace, budget=most)
    remark(ctx, f"planned {len(plan)} pages of {len(trace.forest)}, from {len(trace)} requests")
    if not trace.forest.hashed:
        remark(
            ctx,
            "the trace has block ids only: the plan cannot be executed; one with token ids can",
        )
    write_json_lines(plan_rows(plan), output)


def _worked(
    ctx: click.Context, source: str | None, target: Store, options: dict[str, Any]
) -> PrewarmOutcome:
    """Copy, and have servers pull."""
    from hicachectl.prewarm.prewarm import prewarm, usable_from

    started = time.monotonic()
    servers = _servers(options)
    if source is None:
        request, wanted = _request(ctx, target, options)
        outcome = usable_from(target, _served(ctx, request, servers))
        for text in outcome.remarks:
            remark(ctx, text)
    else:
        with opened(ctx, source, lease_wait=options["lease_wait"]) as origin:
            request, wanted = _request(ctx, origin, options)
            request = _served(ctx, request, servers)
            with (
                progress(ctx, "listing", " objects") as on_listed,
                bytes_progress(ctx, "copying") as on_copied,
            ):
                outcome = prewarm(origin, target, request, on_listed=on_listed, on_copied=on_copied)
            for text in (*outcome.remarks, *origin.remarks):
                remark(ctx, text)
    for problem in outcome.problems[:_SHOWN_PROBLEMS]:
        remark(ctx, f"{problem.key or problem.page}: {problem.detail}")
    if servers and outcome.interruption is None:
        _pull(ctx, servers, request.target, wanted, outcome, options, started)
    return outcome


def _request(
    ctx: click.Context, store: Store, options: dict[str, Any]
) -> tuple[PrewarmRequest, WarmingInputs]:
    from hicachectl.move.batches import CopyOptions
    from hicachectl.prewarm.page_plan import PrewarmRequest
    from hicachectl.profiles.destination import destination_profile
    from hicachectl.profiles.sources import profile_from_options

    profile = profile_from_options(options, store, warn=partial(remark, ctx))
    if profile is None or profile.inferred:
        raise click.UsageError(
            "what a prefix needs only a profile tells: give --profile, --model-config or --server"
        )
    wanted = read_wanted(profile, store.grammar, options)
    if wanted.in_others is not None and len(wanted.in_others):
        remark(
            ctx,
            f"{len(wanted.in_others)} rows of {options['pages']} name groups of other deployments "
            "than the profile's, and are not copied",
        )
    request = PrewarmRequest(
        profile=profile,
        destination_profile=destination_profile(profile, options),
        chains=wanted.chains,
        rank=wanted.rank,
        pages=wanted.pages,
        in_others=wanted.in_others,
        budget_bytes=options["budget"],
        budget_pages=options["budget_pages"],
        deadline_seconds=options["deadline"],
        dry_run=options["dry_run"],
        options=CopyOptions(
            buffer_bytes=options["buffer_bytes"],
            jobs=options["jobs"],
            bytes_per_second=options["bwlimit"],
            pin=options["pin"],
            pin_seconds=options["pin_ttl"],
        ),
    )
    return request, wanted


def _servers(options: dict[str, Any]) -> dict[str, LiveServer]:
    """Ask the servers that are to pull for their deployments, before anything is copied."""
    from hicachectl.prewarm.pulling import live_servers

    return {} if options["dry_run"] else live_servers(options["servers"])


def _served(
    ctx: click.Context, request: PrewarmRequest, servers: dict[str, LiveServer]
) -> PrewarmRequest:
    """Let what is usable be counted for the servers that pull, as far as they are understood."""
    from hicachectl.formats.models.server_info import served_profile

    served = {}
    for url, live in servers.items():
        try:
            served[url] = served_profile(request.target, live.info)
        except ProfileError as error:
            remark(ctx, f"{url}: its deployment was not compared with the pages: {error}")
    return replace(request, served=served)


def _pull(
    ctx: click.Context,
    servers: dict[str, LiveServer],
    profile: Profile,
    wanted: WarmingInputs,
    outcome: PrewarmOutcome,
    options: dict[str, Any],
    started: float,
) -> None:
    """Have servers pull what DST has of each request, and note what each answered."""
    from hicachectl.prewarm.pulling import PullReport, pull

    limit = options["deadline"]
    document = outcome.document
    reports: list[PullReport] = []
    try:
        with progress(ctx, "pulling", " requests") as advance:
            pull(
                servers,
                requests_for_servers(wanted, outcome.usable_pages, profile, options),
                outcome.usable_pages,
                profile,
                jobs=options["jobs"],
                deadline=None if limit is None else started + limit,
                reports=reports,
                on_done=advance,
            )
    except BaseException as error:
        if isinstance(error, Exception):
            raise
        outcome.interrupt(error)
    document["pulled"] = [report.document(profile.page_size) for report in reports]
    document["seconds"] = round(time.monotonic() - started, 3)
    if any(not server["complete"] and not server["error"] for server in document["pulled"]):
        document["stopped_by"] = document["stopped_by"] or "deadline"
    document["complete"] &= all(server["complete"] for server in document["pulled"])
