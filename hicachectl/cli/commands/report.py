"""`hicachectl report`: a store in pictures, as one HTML file."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hicachectl.checks.registry import group_names, reading_groups
from hicachectl.cli.asked import (
    asked_checks,
    asked_hits,
    mending_of,
    refuse_choice,
    refuse_other_sources,
    request_flags,
    selection_of,
    without_request_flags,
)
from hicachectl.cli.command import Command
from hicachectl.cli.exit_codes import FINDINGS
from hicachectl.cli.options import (
    checking_options,
    filter_options,
    prefetch_threshold_option,
    profile_options,
    request_options,
    sample_options,
    store_argument,
)
from hicachectl.cli.parameters import CHECKS, Parsed, own_option
from hicachectl.cli.session import config_of, opened, remark, remark_wait, stages
from hicachectl.cli.values import NameList, OutputFile, head_of, moment
from hicachectl.formats.errors import UsageError
from hicachectl.text.terminal import message_text

if TYPE_CHECKING:
    from hicachectl.backends.base import Store
    from hicachectl.report.charts import Mark
    from hicachectl.report.picture import PictureRequest

_HEAD = b"<!DOCTYPE html>"
_REQUESTS = ("prompts", "token_ids", "pages", "trace")


def _mark(text: str) -> tuple[float, str]:
    """Return the Unix seconds and the label of TIME or TEXT=TIME."""
    label, equals, time = text.rpartition("=")
    if equals and not label.strip():
        raise ValueError(f"{text!r} has no text before =; write TIME or TEXT=TIME")
    return moment(time), label or "deploy"


def _listed_checks() -> tuple[str, ...]:
    """Return the checks that read no object."""
    reading = reading_groups()
    return tuple(name for name in group_names() if name not in reading)


@click.command("report", cls=Command)
@store_argument
@own_option(
    "-o",
    "--output",
    type=OutputFile(),
    required=True,
    repeats=False,
    help="Write the page to FILE; - is stdout.",
)
@own_option(
    "--mark",
    "marks",
    type=Parsed("time", _mark),
    multiple=True,
    repeats=False,
    metavar="[TEXT=]TIME",
    help="Mark TIME in the chart of writes. TIME, such as the time of a deploy, is ISO 8601 or an "
    "age such as 2h. Can be given several times.",
)
@own_option(
    "--title",
    metavar="TEXT",
    default="",
    repeats=False,
    help="Title of the page.  [default: the URL of STORE]",
)
@own_option(
    "--page",
    metavar="PREFIX",
    repeats=False,
    help="Show this page in full.  [default: a page with a finding, or the newest]",
)
@request_options
@prefetch_threshold_option
@CHECKS.option(
    "--checks",
    type=NameList(group_names),
    default=_listed_checks,
    help="Checks of verify to run.  [default: the checks that read no object]",
)
@sample_options(CHECKS, "the day number")
@checking_options
@filter_options(beside_flags=True, without=("page", "pages"))
@profile_options
@click.pass_context
def command(ctx: click.Context, /, store: str, output: Path, **options: Any) -> None:
    """Show a store in pictures, in one HTML file.

    The file needs no network and runs no script, so you can send it or print it. It shows:

    \b
    - the findings, with the commands that mend them
    - bytes by deployment, pool and object size
    - writes over time, growth, and days until the store is full
    - the last use of pages
    - the completeness of pools and ranks
    - one page in full

    With requests (--prompts, --token-ids, --pages, --trace), the file also shows:

    \b
    - how much of the requests STORE can serve, and which objects stop them
    - what a smaller or larger store would serve
    - the bytes that the requests of each salt and each adapter reach

    report changes nothing. Without --checks, it reads the listing of STORE and one page, and runs
    only the checks names, groups and sizes. The file names the checks that did not run. From a
    Mooncake store, report reads a page only with --page, since reads grant leases. With filters,
    the file shows only the pages that match. Without a profile, the filters also choose the
    deployment that serves the requests.

    The exit status is 4 if there are findings at --fail-on or above, in the store or in the page
    shown in full. The file is written also in that case.

    report needs the Python packages Jinja2 and vl-convert-python.

    Examples:
      hicachectl report prod: --title Week-48 -o store.html
      hicachectl report prod: --profile prod.toml --mark 2026-11-20T14:00Z -o store.html
      hicachectl report prod: --profile prod.toml --checks values --sample 5% -o store.html
      hicachectl report prod: --token-ids requests.jsonl --profile prod.toml -o store.html
      hicachectl report /tmp/hicache --page 4ebfa8a1 -o page.html
    """  # noqa: D301 - \b is click's mark, not ours
    from hicachectl.backends.capabilities import permissions_of
    from hicachectl.backends.disk.durable import STDOUT, whole_file
    from hicachectl.report.charts import Mark, refuse_missing
    from hicachectl.report.picture import take_picture
    from hicachectl.report.view import html_of

    refuse_missing()
    if any(options[name] for name in _REQUESTS):
        refuse_other_sources(options, _REQUESTS)
    _refuse_place(ctx, store, output)
    with opened(ctx, store) as source:
        request = _request(ctx, source, options)
        with stages(ctx, "reading") as (on_listed, on_read):
            picture = take_picture(
                source,
                request,
                on_listed=on_listed,
                on_read=on_read,
                on_wait=partial(remark_wait, ctx),
            )
        readable_by = permissions_of(source, listing=True)
        mending = mending_of(
            ctx, store, source, request=request.verify, without=request_flags(options)
        )
    marks: list[Mark] = [Mark(at, text) for at, text in options["marks"]]
    page = html_of(picture, mending, marks)
    with whole_file(output, "w", readable_by=readable_by) as stream:
        stream.write(page)
    remark(ctx, *picture.remarks)
    summary = f"{output}: {picture.line}"
    if output == STDOUT:
        remark(ctx, summary)
    else:
        click.echo(message_text(summary))
    if picture.fails(options["fail_on"]):
        ctx.exit(FINDINGS)


def _refuse_place(ctx: click.Context, store: str, output: Path) -> None:
    """Raise UsageError for an output file in the store, or an existing file that is not HTML."""
    from hicachectl.backends.disk.durable import STDOUT
    from hicachectl.backends.urls import parse_url

    url = parse_url(store, config_of(ctx))
    place = Path(os.path.realpath(output))
    if any(path and place.is_relative_to(os.path.realpath(path)) for path in url.paths):
        raise UsageError(f"{output}: lies in the store; name a file in another directory")
    head = head_of(place)
    if output != STDOUT and head and not head.startswith(_HEAD):
        raise UsageError(f"{output}: exists and is not an HTML page; name another file")


def _request(ctx: click.Context, store: Store, options: dict[str, Any]) -> PictureRequest:
    from hicachectl.profiles.sources import profile_to_look
    from hicachectl.report.picture import PictureRequest

    selection = selection_of(ctx, store, options)
    measures = any(options[name] for name in _REQUESTS)
    if measures:
        refuse_choice(selection, options)
    stated = without_request_flags(options) if measures else options
    profile = profile_to_look(stated, store, warn=partial(remark, ctx))
    verify = asked_checks(ctx, store, options, profile, selection=selection)
    hits = None
    if measures:  # the simulation of caches needs generated tokens, and block ids are enough for it
        reading: dict[str, Any] = {"outputs": True, "remedy": None}
        hits = asked_hits(ctx, options, verify.real_profile, selection, **reading)
    return PictureRequest(verify=verify, hits=hits, page=options["page"], title=options["title"])
