"""`hicachectl prewarm`: copy the most valuable pages into a store, before the traffic."""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from hicachectl.cli.asked import asked_in, asked_trace, refuse_other_sources
from hicachectl.cli.command import Command
from hicachectl.cli.commands.parts import check_division, is_divided, reopened_stores, run_divided
from hicachectl.cli.metrics import metrics_if_empty
from hicachectl.cli.options import (
    allow_empty_option,
    copy_options,
    healthcheck_option,
    metrics_option,
    min_usable_option,
    output_option,
    pin_ttl_option,
    prefetch_threshold_option,
    profile_options,
    request_options,
    store_names,
)
from hicachectl.cli.parameters import (
    MOONCAKE,
    OUTPUT,
    OWN_VALUE,
    SAME,
    Divided,
    argument,
    equal_option,
    on_command_line,
    own_option,
)
from hicachectl.cli.session import locked, opened, progress, remark, stages, store_name
from hicachectl.cli.values import DURATION, FILE, FORMATS, SIZE, Count
from hicachectl.formats.errors import ProfileError, StoreUnavailable, UsageError
from hicachectl.formats.wording import inferred_refused, lock_held
from hicachectl.io.interrupts import raised_once
from hicachectl.text.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.backends.base import Store
    from hicachectl.prewarming.outcome import PrewarmOutcome
    from hicachectl.prewarming.page_plan import PrewarmRequest
    from hicachectl.prewarming.prewarm import LiveServer
    from hicachectl.prewarming.through_server import ThroughServer
    from hicachectl.requests.reading import Trace
    from hicachectl.results import Result

_TOKEN_SOURCES = ("prompts", "token_ids", "trace")
_SOURCES = ("prompts", "token_ids", "pages", "trace", "plan", "all_")


@click.command("prewarm", cls=Command)
@argument("destination", metavar="[DST]", required=False, shell_complete=store_names)
@equal_option(
    "--from",
    "source",
    metavar="SRC",
    shell_complete=store_names,
    help="Copy pages from this store.",
)
@request_options
@equal_option(
    "--plan",
    type=FILE,
    help="Copy the pages of a plan that --dry-run wrote, in the order of the plan.",
)
@equal_option(
    "--all",
    "all_",
    is_flag=True,
    help="Copy every whole page, newest first. The prefixes of pages are unknown, so a partial run "
    "may be of little use.",
)
@equal_option("--budget", type=SIZE, help="Copy at most this many bytes.")
@equal_option("--budget-pages", type=Count(0), metavar="N", help="Copy at most N pages.")
@equal_option("--deadline", type=DURATION, help="Begin no further copy after this duration.")
@min_usable_option
@own_option(
    "--open-after",
    type=DURATION,
    needs="--min-usable SHARE",
    divided=Divided(instead="leave out --shard", on_cluster=False),
    help="Repeat the run until it succeeds, and exit with 0 after this duration in any case. A "
    "server that waits for prewarm then starts, even on a cold store.",
)
@own_option(
    "--open-since",
    type=FILE,
    needs="--open-after DURATION",
    divided=Divided(instead="leave out --shard", on_cluster=False),
    help="Count --open-after from the modification time of FILE, so that a process that is killed "
    "and started again continues the count. A missing FILE is created. FILE is removed when the "
    "gate opens.",
)
@prefetch_threshold_option
@MOONCAKE.option(
    "--pin",
    variable=False,
    is_flag=True,
    divided=SAME,
    help="Mooncake: protect the requested pages from eviction by soft pins. A master before "
    "Mooncake 0.3.14 pins only the pages that are copied.",
)
@pin_ttl_option("--pin-ttl", MOONCAKE, needs="--pin")
@own_option(
    "--dry-run",
    is_flag=True,
    divided=Divided(instead="leave out --shard", on_cluster=False),
    help="Print the plan, best page first; copy nothing.",
)
@allow_empty_option
@own_option(
    "--through-server",
    "servers",
    multiple=True,
    divided=OWN_VALUE,
    metavar="URL",
    help="Make this live SGLang server load the prefixes from DST into its memory. Can be "
    "repeated.",
)
@metrics_option
@healthcheck_option
@copy_options
@OUTPUT.option(
    "--format",
    "output_format",
    type=click.Choice(FORMATS),
    help="Format of the result; see OUTPUT in hicachectl(1).  [default: json; jsonl with "
    "--dry-run]",
)
@output_option
@profile_options
@click.pass_context
def command(
    ctx: click.Context, /, destination: str | None, source: str | None, **options: Any
) -> None:
    r"""Copy the most valuable pages into a store, before the traffic arrives.

    Give the expected requests: texts or chats (--prompts), token ids (--token-ids), page hashes
    (--pages), or a trace with times (--trace). For each request, prewarm takes the longest prefix
    that servers could restore from SRC, and copies the pages that DST lacks. --all copies every
    whole page instead.

    The most valuable pages are copied first, and no page before its prefix. So a run that is cut
    short is still useful, except with --all. --dry-run prints the plan, and --plan executes it.

    The --to options transform pages as in migrate. For example, an archive of TP 4 can warm a
    cluster of TP 8. If the size of an object differs from the profile, its page is not copied and
    counts as failed (exit status 4); a remark names the page.

    With --through-server, live servers then load the prefixes that DST has. Without --from, prewarm
    copies nothing, and only makes the servers load prefixes.

    The result goes to stdout, a summary to stderr.

    hicachectl-prewarm(1) explains the order of pages, the end of a run, traces and how to record
    them, pins, live servers, parts of a run, and usable tokens.

    hicachectl-scheduling(7) has jobs for cron and systemd.

    hicachectl-kubernetes(7) has a gate that servers wait at.

    Examples:
      hicachectl prewarm mooncake: --from /backup/monday.hcpack --trace day.jsonl \
          --budget 200GiB --deadline 10m --min-usable 0.9
      hicachectl prewarm prod: --from /mnt/archive --profile prod.toml --prompts system.jsonl --pin
      hicachectl prewarm --trace day.jsonl --profile prod.toml --dry-run -o plan.jsonl
      hicachectl prewarm prod: --from /mnt/archive --profile prod.toml --plan plan.jsonl
      hicachectl prewarm prod: --profile prod.toml --token-ids hot.jsonl \
          --through-server http://127.0.0.1:30000
      hicachectl prewarm mooncake: --from /backup/monday.hcpack --trace day.jsonl \
          --min-usable 0.9 --open-after 20m --open-since /gate/since
      hicachectl prewarm prod: --from /mnt/archive --profile prod.toml --trace day.jsonl \
          --deadline 10m --shard /64 --run /shared/$(date +%F)
    """
    from hicachectl.cli.output import write_run
    from hicachectl.prewarming.outcome import nothing_copied

    if options["output_format"] is None:
        ctx.params["output_format"] = "jsonl" if options["dry_run"] else "json"
    refuse_other_sources(options, _SOURCES)
    _refuse_once(options)
    if options["trace"] and destination is None and source is None:
        _plan_trace(ctx, options)
        return
    if destination is None or not (source or options["servers"]):
        raise click.UsageError(
            "Give DST with --from SRC or --through-server URL; for a plan without stores, give "
            "--trace FILE --dry-run"
        )
    if options["servers"] and not any(options[name] for name in _TOKEN_SOURCES):
        raise click.UsageError(
            "--through-server needs tokens; give --prompts, --token-ids or --trace"
        )
    check_division(ctx, options)
    if is_divided(options) and (source is None or options["servers"]):
        raise click.UsageError(
            "--through-server cannot be combined with --shard or --ray, since servers load "
            "prefixes that are whole in DST; run it after the last part, without --from"
        )

    def run() -> Result | None:
        """Open the stores and prewarm. Return None for a part of a run."""
        if not is_divided(options):
            return _at_once(ctx, source, destination, options)
        with _target(ctx, destination) as target, opened(ctx, str(source)) as origin:
            return _in_parts(ctx, (str(source), destination), (origin, target), options)

    def nothing() -> Result:
        origin = None if source is None else store_name(ctx, source)
        return nothing_copied(origin, store_name(ctx, destination)).result()

    with raised_once():
        if options["open_after"] is None:
            write_run(ctx, run, nothing)
        else:
            _gated(ctx, source, destination, options, nothing())


def _refuse_once(options: dict[str, Any]) -> None:
    """Raise click.UsageError for options that the repeated attempts of --open-after cannot use."""
    if options["open_after"] is None:
        return
    if options["dry_run"]:
        raise click.UsageError("--open-after cannot be combined with --dry-run; leave out one")
    if "-" in (options["prompts"], options["token_ids"], *(options["trace"] or ())):
        raise click.UsageError(
            "--open-after reads the requests again at each attempt; give a file instead of -"
        )


@contextmanager
def _target(ctx: click.Context, destination: str) -> Iterator[Store]:
    """Open the destination. If the block raises EmptyStore, write metrics of a run without work."""
    from hicachectl.prewarming.outcome import nothing_copied

    with (
        opened(ctx, destination, create=ctx.params["source"] is not None) as target,
        metrics_if_empty(ctx, lambda: nothing_copied(None, target.url).document),
    ):
        yield target


def _gated(
    ctx: click.Context,
    source: str | None,
    destination: str,
    options: dict[str, Any],
    nothing: Result,
) -> None:
    """Prewarm until it succeeds or the time of --open-after is over; write the result.

    nothing: result of a run that did nothing.
    """
    from hicachectl.cli.gate import Gate, waited_since
    from hicachectl.cli.output import write_result

    lock, deadline = options["lock"], options["deadline"]

    def attempt(left: float) -> Result:
        with locked(lock) as is_ours:
            if not is_ours:
                raise StoreUnavailable(lock_held(lock))
            limit = left if deadline is None else min(left, deadline)
            return _at_once(ctx, source, destination, {**options, "deadline": limit})

    def write(result: Result) -> None:
        try:
            write_result(ctx, result)
        except UsageError as error:  # for example a full disk, for which no server shall wait
            said = f"{error}. The gate opens all the same"
            remark(ctx, *result.undone, said, failure=True)

    say = partial(remark, ctx, failure=True)
    gate = Gate(options["open_after"], nothing, say=say, write=write)
    with waited_since(options["open_since"]) as waited:
        write(gate.passed(attempt, waited=waited))


def _plan_trace(ctx: click.Context, options: dict[str, Any]) -> None:
    from hicachectl.cli.output import write_json_lines
    from hicachectl.prewarming.ranking import pages_within, plan_rows, rank_blocks
    from hicachectl.profiles.sources import profile_from_options
    from hicachectl.requests.chains import Hashing

    check_division(ctx, options)  # refuses --shard and --run
    if not options["dry_run"]:
        raise click.UsageError("--trace without stores needs --dry-run; or give DST and --from SRC")
    form = options["output_format"]
    if form not in (None, "jsonl") and on_command_line(ctx, "output_format"):
        raise click.UsageError(
            f"--format {form}: a plan without stores is always jsonl; leave out --format"
        )
    profile = profile_from_options(options, None, warn=partial(remark, ctx))
    hashing = None if profile is None else Hashing.of(profile)
    with asked_trace(options) as trace:
        requests = trace.requests(hashing)
        remark(ctx, *trace.remarks)
    most = options["budget_pages"]
    if options["budget"] is not None:
        fitting = pages_within(options["budget"], profile, hashed=requests.hashed)
        most = fitting if most is None else min(most, fitting)
    ranked = rank_blocks(requests, budget=most)
    pages, of = counted(len(requests.names), "page"), counted(len(requests), "request")
    remark(ctx, f"Planned {len(ranked)} of {pages}, from {of}")
    if not requests.hashed:
        remark(
            ctx,
            "The trace has only block ids, so the plan cannot be executed; use a trace with token "
            "ids",
        )
    write_json_lines(plan_rows(ranked), options["output"])


def _at_once(
    ctx: click.Context, source: str | None, destination: str, options: dict[str, Any]
) -> Result:
    """Copy pages in this process, if there is a source; then make servers load prefixes."""
    from hicachectl.prewarming.prewarm import live_servers, prewarm, usable_from

    started = time.monotonic()
    with ExitStack() as held:
        target = held.enter_context(_target(ctx, destination))
        origin = None if source is None else held.enter_context(opened(ctx, source))
        servers = {} if options["dry_run"] else live_servers(options["servers"])
        store = target if origin is None else origin
        trace = None
        if any(options[name] for name in _TOKEN_SOURCES):
            trace = held.enter_context(asked_trace(options, keeps=bool(servers)))
        request = _wanted(ctx, _request(ctx, store, options), store, options, trace)
        request = _served(ctx, request, servers)
        if origin is None:
            outcome = usable_from(target, request)
        else:
            with stages(ctx, "copying", target.created) as (on_listed, on_copied):
                outcome = prewarm(origin, target, request, on_listed=on_listed, on_copied=on_copied)
        _pull(ctx, servers, request, outcome, options, started, trace)
    return outcome.result(min_usable=options["min_usable"], dry_run=options["dry_run"])


def _request(ctx: click.Context, store: Store, options: dict[str, Any]) -> PrewarmRequest:
    """Return the prewarm request of the options. It does not yet have requests or pages."""
    from hicachectl.move.pinning import PIN_SECONDS
    from hicachectl.move.store_pair import CopyOptions
    from hicachectl.prewarming.page_plan import PrewarmRequest
    from hicachectl.profiles.sources import destination_profile, profile_from_options

    profile = profile_from_options(options, store, warn=partial(remark, ctx))
    if profile is None or profile.inferred:
        raise UsageError(inferred_refused("prewarm"))
    return PrewarmRequest(
        profile=profile,
        destination_profile=destination_profile(profile, options),
        budget_bytes=options["budget"],
        budget_pages=options["budget_pages"],
        deadline_seconds=options["deadline"],
        dry_run=options["dry_run"],
        allow_empty=options["allow_empty"],
        options=CopyOptions(
            buffer_bytes=options["buffer_bytes"],
            jobs=options["jobs"],
            bytes_per_second=options["bwlimit"],
            pin=options["pin"],
            pin_seconds=options["pin_seconds"] or PIN_SECONDS,
            trailers=options["trailers"],
        ),
    )


def _wanted(
    ctx: click.Context,
    request: PrewarmRequest,
    store: Store,
    options: dict[str, Any],
    trace: Trace | None = None,
) -> PrewarmRequest:
    """Add the requests or pages of the options to a request. Say how many rows are left out."""

    wanted = asked_in(ctx, request, store.grammar, options, trace)
    if wanted.in_others is not None and len(wanted.in_others):
        remark(
            ctx,
            f"{options['pages']}: {counted(len(wanted.in_others), 'row')} not copied, because "
            "their groups belong to another deployment than the profile's",
        )
    return wanted


def _in_parts(
    ctx: click.Context,
    names: tuple[str, str],
    stores: tuple[Store, Store],
    options: dict[str, Any],
) -> Result | None:
    """Do one part of a divided run; with --ray, do all parts.

    names: the SRC and DST arguments.
    """
    from hicachectl.parts.prewarm import PrewarmJob

    request = _request(ctx, stores[0], options)
    make = partial(
        PrewarmJob,
        request=request,
        inputs={
            f"--{name.strip('_').replace('_', '-')}": _identity(options[name])
            for name in (*_SOURCES, "trace_format", "block_size")
        },
        min_usable=options["min_usable"],
    )
    job = make(*stores, asked=lambda: _wanted(ctx, request, stores[0], options))
    reopened = reopened_stores(ctx, *names, request.profile)
    made = partial(make, asked=None)
    return run_divided(ctx, options, job, made, reopened, stores[1].created)


def _identity(value: Any) -> str | None:
    """Return the value of an option as a text, to compare it between parts; None if not given."""
    if isinstance(value, tuple):
        return " ".join(value) or None
    return str(value or "") or None


def _served(
    ctx: click.Context, request: PrewarmRequest, servers: dict[str, LiveServer]
) -> PrewarmRequest:
    """Return the request with the profiles of the servers, to count usable tokens by server."""
    from hicachectl.formats.models.server_info import served_profile

    served = {}
    for url, live in servers.items():
        try:
            served[url] = served_profile(request.target, live.info)
        except ProfileError as error:
            remark(ctx, f"{url}: the server's deployment was not compared with the pages: {error}")
    return replace(request, served=served)


def _pull(
    ctx: click.Context,
    servers: dict[str, LiveServer],
    request: PrewarmRequest,
    outcome: PrewarmOutcome,
    options: dict[str, Any],
    started: float,
    trace: Trace | None,
) -> None:
    """Make servers pull the prefixes that DST has; add the pulls to the outcome."""
    from hicachectl.prewarming.prewarm import pull

    if not servers or outcome.interruption is not None or trace is None:
        return
    remark(ctx, *outcome.messages)
    limit = options["deadline"]
    pulling: list[ThroughServer] = []
    try:
        with progress(ctx, "pulling", " requests") as advance:
            pull(
                servers,
                request,
                outcome.usable_pages,
                trace.again,
                deadline=None if limit is None else started + limit,
                pulling=pulling,
                on_done=advance,
            )
    except BaseException as error:
        if isinstance(error, Exception):
            raise
        outcome.interrupt(error)
    outcome.add_pulls(pulling, time.monotonic() - started)
