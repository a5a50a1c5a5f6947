"""`hicachectl doctor`: show why a store gives servers no hits, or wrong data."""

from __future__ import annotations

import shlex
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import replace

from hicachectl.cli.command import Command
from hicachectl.cli.options import (
    allow_leases_option,
    jobs_option,
    output_options,
    prefetch_threshold_option,
    profile_options_beside_servers,
    request_options,
    store_argument,
)
from hicachectl.cli.parameters import own_option
from hicachectl.cli.session import opened, remark
from hicachectl.cli.values import DURATION, Count
from hicachectl.formats.errors import HicacheError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hicachectl.doctor.request import DoctorRequest
    from hicachectl.requests.chains import Hashing, Requests

_SOURCES = ("prompts", "token_ids", "pages", "trace")
_READING = ("trace_format", "block_size", "tokenizer")


@click.command("doctor", cls=Command)
@store_argument
@own_option(
    "--server",
    "servers",
    multiple=True,
    variable=True,
    metavar="URL",
    help="Ask this live SGLang server, and build the profile from its answers. Can be given "
    "several times.",
)
@request_options
@own_option(
    "--watch",
    "watch_seconds",
    type=DURATION,
    default="10s",
    show_default=True,
    help="With --server: time between the two readings of the server's counters.",
)
@own_option(
    "--sample",
    "sample_pages",
    type=Count(0),
    default=256,
    show_default=True,
    metavar="PAGES",
    help="Number of pages to read and check.",
)
@own_option(
    "--write-probe",
    is_flag=True,
    help="Send each server one random prompt, and look for the pages of the prompt in STORE. The "
    "server keeps these pages in its memory and its store.",
)
@prefetch_threshold_option
@jobs_option
@allow_leases_option
@output_options
@profile_options_beside_servers
@click.pass_context
def command(ctx: click.Context, /, store: str, **options: Any) -> None:
    """Show why a store gives servers no hits, or wrong data.

    Give the servers with --server. With --trace, --prompts or --token-ids, give requests that
    should have hits. Each server is asked for its settings, and twice for its counters (--watch).
    The store is listed, and a sample of its pages is read and checked.

    Each check is a line with its status (ok, unknown, warn or fail), what was seen, and the next
    command. The worst check comes first, and the last line names the first cause. The exit status
    is 4 if a check fails. It is also 4 if a server or STORE cannot be reached.

    Without --server, doctor checks only the store.

    Only --write-probe changes anything. Keys, launch commands and secrets are never shown.

    hicachectl-doctor(1) describes the checks.

    Examples:
      hicachectl doctor prod: --server http://localhost:30000
      hicachectl doctor prod: --server http://localhost:30000 --trace requests.log
      hicachectl doctor prod: --server http://a:30000 --server http://b:30000 --watch 60s
      hicachectl -q doctor prod: --sample 0
    """
    from hicachectl.cli.output import write_result
    from hicachectl.doctor.examine import examine

    def on_wait(seconds: float) -> None:
        remark(ctx, f"Watching the servers' counters for {seconds:.0f} s (--watch)")

    request = _request(ctx, store, options)
    with ExitStack() as held:
        try:
            source = held.enter_context(opened(ctx, store))
        except UsageError:
            raise
        except HicacheError as error:
            result = examine(request, None, on_wait=on_wait, problem=str(error))
        else:
            result = examine(request, source, on_wait=on_wait)
    write_result(ctx, result)


def _request(ctx: click.Context, store: str, options: dict[str, Any]) -> DoctorRequest:
    from hicachectl.cli.asked import (
        asked_hashing,
        asked_requests,
        mending_without_options,
        next_words,
        refuse_other_sources,
        without_request_flags,
    )
    from hicachectl.doctor.request import DoctorRequest
    from hicachectl.profiles.sources import given_flags, profile_from_options, states_source

    def read(hashing: Hashing | None) -> Requests:
        return asked_requests(ctx, options, hashing or asked_hashing(None, options))

    if asks := any(options[name] for name in _SOURCES):
        refuse_other_sources(options, _SOURCES)
    of_file = options
    # With --server, the other options override the replies of the servers (`overrides`).
    if options["servers"]:
        of_file = {name: options[name] for name in ("profile_file", "prefetch_threshold")}
    source = without_request_flags(of_file) if states_source(of_file) else {}
    return DoctorRequest(
        servers=options["servers"],
        profile=profile_from_options(source, warn=partial(remark, ctx)),
        model_config=options["model_config"],
        draft_model_config=options["draft_model_config"],
        overrides=given_flags(options),
        weights=options,
        read=read if asks else None,
        threshold=options["prefetch_threshold"],
        watch_seconds=options["watch_seconds"],
        sample_pages=options["sample_pages"],
        write_probe=options["write_probe"],
        mending=replace(
            mending_without_options(ctx, store), options=tuple(_described(ctx, options))
        ),
        request_words=shlex.join(next_words(ctx, only=(*_SOURCES, *_READING))),
    )


def _described(ctx: click.Context, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the options that describe the servers in suggested commands."""
    from hicachectl.cli.asked import next_words
    from hicachectl.profiles.server import checked_url

    yield from next_words(ctx, without=("servers", *_READING))
    if options["servers"] and options["profile_file"] is None:
        yield from ("--server", checked_url(options["servers"][0]))
