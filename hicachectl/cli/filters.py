"""The filters that every command that chooses pages has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from hicachectl.cli.parameters import FILTERS, on_command_line, options_of, stack
from hicachectl.cli.session import moment_of, remark
from hicachectl.cli.values import FILE, NameList, PointInTime
from hicachectl.formats.objects import AXES
from hicachectl.text.vocabulary import STATES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from hicachectl.backends.base import Store
    from hicachectl.cli.parameters import F
    from hicachectl.pages.groups import PageGroups
    from hicachectl.pages.selection import Selection

_filter = FILTERS.option
_FLAGS = ("tag", *AXES)  # options of these names also describe a profile
_OPTIONS: Mapping[str, Callable[[Any], Any]] = {
    "model": _filter("--model", metavar="NAME", help="Only this model, as org/name or org-name."),
    "tag": _filter(
        "--tag",
        absence="--no-tag",
        metavar="TAG",
        help="Only pages with this Mooncake extra_backend_tag.",
    ),
    "no_tag": _filter("--no-tag", is_flag=True, help="Only pages without a tag."),
    **{
        axis: _filter(
            f"--{axis}",
            type=click.IntRange(1),
            metavar="N",
            help=f"Only pages of this {axis.upper()} size, as shown by ls.",
        )
        for axis in AXES
    },
    "pool": _filter("--pool", metavar="POOL", help="Only pages that have this pool."),
    "page": _filter("--page", metavar="PREFIX", help="Only pages whose hash starts with PREFIX."),
    "state": _filter(
        "--state",
        type=NameList(STATES),
        help="Only pages in these states; see PAGE STATES in hicachectl(1).",
    ),
    "since": _filter(
        "--since",
        type=PointInTime(),
        help="Only pages written since TIME (ISO 8601, or an age such as 2h).",
    ),
    "before": _filter(
        "--before",
        type=PointInTime(),
        help="Only pages last written before TIME (ISO 8601, or an age such as 7d).",
    ),
    "pages": _filter(
        "--pages",
        type=FILE,
        help="Only pages in FILE. A line is a page hash, or a row of ls --format jsonl, which "
        "stands for one group of the page.",
    ),
}
_NO_TAG_BESIDE_FLAGS = _filter(
    "--no-tag",
    is_flag=True,
    help="Only pages without a tag. --tag, --tp, --pp, --cp and --dcp are filters too, unless they "
    "describe servers beside --model-config or --server.",
)
FILTER_NAMES = tuple(_OPTIONS)
OF_PAGES = ("pool", "page", "state", "since", "before", "pages")  # filters that name no deployment


def filter_options(
    *, beside_flags: bool = False, without: Collection[str] = ()
) -> Callable[[F], F]:
    """Return the options of the filters.

    beside_flags: whether the command has `profile_options`, some of which are filters too.
    without: filters that the command does not have.
    """
    left_out = {*without, *(_FLAGS if beside_flags else ())}
    options = {**_OPTIONS, **({"no_tag": _NO_TAG_BESIDE_FLAGS} if beside_flags else {})}
    return stack(*(option for name, option in options.items() if name not in left_out))


def given_filters(options: Mapping[str, Any]) -> list[str]:
    """Return the options of a command without server flags that are filters, as parameters."""
    return [name for name in FILTER_NAMES if options.get(name) not in (None, False)]


def selection_of(
    ctx: click.Context, store: Store, options: dict[str, Any], *, changes: bool = False
) -> Selection:
    """Return the filters of a command.

    options: loses the flags that are filters, and then describes the profile. A flag is a filter
    unless it describes servers beside --model-config or --server.
    changes: whether the command changes the store; see `present_ns`.
    Raises UsageError for --tag beside --no-tag, and as reading of --pages does.
    """
    from hicachectl.pages.selection import Selection, no_times
    from hicachectl.requests.reading import read_page_list

    own = {option.name for option in options_of(ctx.command) if option.section is FILTERS}
    describes = bool(options.get("model_config") or options.get("server"))
    filters = {name: options[name] for name in FILTER_NAMES if name in own}
    for name in _FLAGS:
        if name not in own and not describes and on_command_line(ctx, name):
            filters[name], options[name] = options[name], None
    if filters.pop("no_tag", False):
        if filters.get("tag") is not None:
            raise click.UsageError("--tag cannot be combined with --no-tag; leave out one of them")
        filters["tag"] = ""
    for name in ("since", "before"):
        filters[name] = moment_of(store, filters.get(name), changes=changes)
        if filters[name] is not None and "mtime_ns" not in store.traits.columns:
            raise no_times(f"--{name}")
    states, pages = filters.pop("state", None), filters.pop("pages", None)
    listed = None if pages is None else read_page_list(pages)
    return Selection(**filters, states=states or (), pages=listed)


def say_unjudged(ctx: click.Context, selection: Selection, groups: PageGroups) -> None:
    """Say how many groups may be partial, but are not selected: the profile is of others."""
    from hicachectl.text.units import counted

    if unjudged := selection.unjudged(groups):
        remark(
            ctx,
            f"{counted(unjudged, 'page')} of other deployments than the profile's left out: they "
            "may be partial; give the profile of their servers",
            failure=True,
        )
