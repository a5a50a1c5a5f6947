"""Options that several commands share."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hicachectl.backends.concurrency import MOST_CALLS
from hicachectl.checks.codes import SEVERITIES
from hicachectl.cli.parameters import (
    AT_MERGE,
    FILTERS,
    MOONCAKE,
    OUTPUT,
    OWN,
    OWN_VALUE,
    PARTS,
    PROFILE,
    RECORDS,
    REQUESTS,
    RESOURCES,
    SAME,
    SERVERS,
    SHARED,
    TRANSFORM,
    CommaList,
    Divided,
    Entry,
    F,
    Section,
    argument,
    equal_option,
    on_command_line,
    own_option,
    stack,
)
from hicachectl.cli.values import (
    DURATION,
    FILE,
    FORMATS,
    HEALTHCHECK_URL,
    INPUT,
    POSITIVE_DURATION,
    POSITIVE_SIZE,
    SHARE,
    TIME,
    Count,
    MetricsFile,
    NameList,
    OutputFile,
    RunPath,
)
from hicachectl.formats.errors import HicacheError
from hicachectl.formats.models.flag_table import OPTIONS
from hicachectl.formats.objects import AXES
from hicachectl.text.vocabulary import DEFAULT_GRACE_SECONDS, NEVER, STATES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from click.shell_completion import CompletionItem

    from hicachectl.formats.models.flag_table import Flag

# A shell puts an offered name into the command line unquoted, so a name with `$(…)` would run.
_OFFERED = re.compile(r"(?![-=])[\w@%+=:,./-]+")


def store_names(
    ctx: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Offer directories and the stores of the config file, for shell completion."""
    from click.shell_completion import CompletionItem

    from hicachectl.backends.urls import load_config

    def is_offered(name: str) -> bool:
        """Return whether a name continues the word and has no character special to a shell."""
        return name.startswith(incomplete) and _OFFERED.fullmatch(name) is not None

    names: list[str] = []
    with suppress(HicacheError):  # with a bad config file, directories are still offered
        config = ctx.find_root().params.get("config")
        names = sorted(
            f"{name}:" for name in load_config(None if config is None else str(config)).stores
        )
    # The directories come first, because bash drops all candidates that stand before directories.
    return [
        CompletionItem(incomplete, type="dir"),
        *(CompletionItem(name) for name in names if is_offered(name)),
    ]


store_argument = argument("store", metavar="STORE", shell_complete=store_names)


def _server_flag(flag: Flag) -> Callable[[F], F]:
    """Return the decorator of the option that stands for a flag of SGLang servers."""
    name = "--" + flag.parameter.replace("_", "-")
    if flag.kind == "switch":
        return SERVERS.option(name, is_flag=True, help=flag.help)
    types = {"count": Count(1), "layers": CommaList()}
    return SERVERS.option(name, type=types.get(flag.kind), metavar=flag.metavar, help=flag.help)


output_option = OUTPUT.option(
    "-o",
    "--output",
    variable=False,
    type=OutputFile(),
    help="Write the result to FILE instead of stdout.",
)
findings_options = stack(
    OUTPUT.option(
        "--limit",
        type=Count(1),
        metavar="N",
        help="In a table, show at most N groups of findings.  [default: 20]",
    ),
    OUTPUT.option(
        "--all-findings", is_flag=True, help="In a table, show one line for each finding."
    ),
)


def refuse_without_table(ctx: click.Context, output_format: str, row: str = "finding") -> None:
    """Raise click.UsageError if an option for tables is given with another format.

    row: word of the message for a row.
    """
    for parameter, name in (("limit", "--limit"), ("all_findings", "--all-findings")):
        if output_format != "table" and on_command_line(ctx, parameter):
            raise click.UsageError(
                f"{name}: --format {output_format} always has every {row}; leave out {name}"
            )


def format_option(
    formats: tuple[str, ...], section: Section = OWN, pointer: str = ""
) -> Callable[[F], F]:
    """Return the option --format. The first of the formats is the default."""
    return section.option(
        "--format",
        "output_format",
        type=click.Choice(formats),
        default=formats[0],
        show_default=True,
        help=f"Format of the result{pointer}.",
    )


output_options = stack(
    format_option(FORMATS, OUTPUT, "; see OUTPUT in hicachectl(1)"), output_option
)


metrics_option = OUTPUT.option(
    "--metrics-file",
    variable=False,
    type=MetricsFile(),
    help="Write Prometheus textfile metrics to FILE.",
)
healthcheck_option = OUTPUT.option(
    "--healthcheck-url",
    type=HEALTHCHECK_URL,
    metavar="URL",
    hide_input=True,
    help="Report the run as healthchecks.io expects. URL/start is requested at the start of the "
    "run, and URL or URL/fail at its end.",
)
allow_leases_option = MOONCAKE.option(
    "--allow-leases",
    is_flag=True,
    help="Mooncake: also query objects whose keys have a comma. Such queries grant leases, which "
    "delay eviction by some seconds.",
)


def pin_ttl_option(name: str, section: Section, *, needs: str = "") -> Callable[[F], F]:
    """Return the option for the duration of pins. needs: see `Option`."""
    return section.option(
        name,
        "pin_seconds",
        needs=needs,
        variable=False,
        type=POSITIVE_DURATION,
        divided=SAME,
        help="Keep pins for this duration. The longest duration is the master's "
        "--max_kv_soft_pin_ttl, which is a week by default, or a day before Mooncake 0.3.14.  "
        "[default: 30m]",
    )


lease_wait_option = MOONCAKE.option(
    "--lease-wait",
    type=DURATION,
    help="Mooncake: wait at most this long for leases to end before a removal fails.  [default: "
    "20s]",
)


profile_option = PROFILE.option(
    "--profile",
    "profile_file",
    type=FILE,
    describes=False,
    entry=Entry("profile", ("store", "source", "destination")),
    help="Read the deployment's profile from FILE (TOML or JSON); see hicachectl-profile(1).",
)


def _profile_options(*server: Callable[[F], F]) -> Callable[[F], F]:
    """Return the options that describe servers.

    server: the option --server; none for a command that declares a --server of its own.
    """
    return stack(
        profile_option,
        PROFILE.option(
            "--model-config",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Build the profile from the server flags and a Hugging Face config.json. FILE is "
            "config.json or its directory.",
        ),
        *server,
        PROFILE.option(
            "--weights",
            describes=False,
            metavar="DIR|TEXT",
            help="Record the model's weights in the profile: the fingerprint of the checkpoint in "
            "DIR, or the TEXT that hicachectl profile printed.  [default: the weights of "
            "--server, if its model path is on this machine]",
        ),
        PROFILE.option(
            "--draft-weights",
            describes=False,
            metavar="DIR|TEXT",
            help="Record the weights of a separate draft model, given as for --weights.",
        ),
        *map(_server_flag, OPTIONS),
        SERVERS.option(
            "--draft-model-config",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="config.json of the draft model, or the directory with it.",
        ),
    )


profile_options = _profile_options(
    PROFILE.option(
        "--server",
        metavar="URL",
        help="Build the profile from the settings of a live SGLang server.",
    )
)
profile_options_beside_servers: Callable[[Any], Any] = _profile_options()

_to = TRANSFORM.option
_transform_options = stack(
    _to("--to-profile", type=FILE, help="Write pages for the deployment of this profile."),
    _to("--to-model", metavar="NAME", help="Model name to write, as the servers state it."),
    _to(
        "--to-tag",
        absence="--to-no-tag",
        metavar="TAG",
        help="Mooncake: extra_backend_tag to write.",
    ),
    _to("--to-no-tag", is_flag=True, help="Mooncake: write keys without a tag."),
    _to("--to-tp", type=Count(1), metavar="N", help="Attention TP size to write."),
    _to("--to-pp", type=Count(1), metavar="N", help="Number of pipeline stages to write."),
    _to(
        "--to-pp-partition",
        type=CommaList(),
        metavar="N,N,…",
        help="Layers of each pipeline stage to write.",
    ),
    _to(
        "--to-tp-lcm-size",
        type=Count(1),
        metavar="N",
        help="Mooncake with split heads: tp_lcm_size to write.",
    ),
    _to("--to-layout", metavar="LAYOUT", help="Memory layout to write."),
    _to(
        "--to-sglang",
        metavar="VERSION",
        help="Write the keys and bytes that this SGLang release reads.",
    ),
    _to(
        "--trailers",
        type=click.Choice(["auto", "write", "drop"]),
        default="auto",
        show_default=True,
        help="Give objects in a file store trailers if needed (auto), always (write) or never "
        "(drop); see TRAILERS in hicachectl-migrate(1).",
    ),
)

lock_option = RESOURCES.option(
    "--lock",
    type=FILE,
    entry=Entry("lock", ("store", "destination", "quarantine")),
    divided=Divided(instead="leave it out, since two processes may do the same part at once"),
    help="Lock FILE during the run; do nothing if another process holds the lock. See LOCKS in "
    "hicachectl(1).",
)
jobs_option = RESOURCES.option(
    "--jobs",
    type=Count(1, MOST_CALLS),
    metavar="N",
    help="Make N calls at once to each store; see CALLS in hicachectl(1).  [default: found during "
    "the run]",
)
_buffer_option = RESOURCES.option(
    "--buffer-bytes",
    type=POSITIVE_SIZE,
    default="1GiB",
    show_default=True,
    help="Memory for the bytes of objects.",
)
_bwlimit_option = RESOURCES.option(
    "--bwlimit", type=POSITIVE_SIZE, divided=SHARED, help="Read at most this many bytes per second."
)

parts_options = stack(
    PARTS.option(
        "--shard",
        metavar="I/N",
        help="Do part I of the N parts of the run in --run; the first part is 0. Part 0 lists the "
        "store for all parts, and hicachectl merge joins their results. With /N, Kubernetes "
        "(JOB_COMPLETION_INDEX) or Slurm (SLURM_ARRAY_TASK_ID) states I.",
    ),
    PARTS.option(
        "--run",
        "run_directory",
        type=RunPath(),
        metavar="DIR",
        help="Keep one run with --shard or --ray in DIR, such as /shared/$(date +%F). A missing "
        "DIR is created. All parts of --shard share DIR. With --ray, only this host uses DIR, to "
        "continue an interrupted run.",
    ),
    PARTS.option(
        "--wait",
        type=DURATION,
        default="1h",
        show_default=True,
        help="With --shard: wait at most this long for the listing of part 0.",
    ),
    PARTS.option(
        "--ray",
        metavar="ADDRESS",
        help="Divide the run among the nodes of a Ray cluster. ADDRESS is auto (the cluster of "
        "this host), HOST:PORT, or local (this host alone).",
    ),
    PARTS.option(
        "--workers",
        needs="--ray",
        type=Count(1, 10_000),
        metavar="N",
        help="With --ray: do N parts at once, on all nodes together.  [default: one on each node]",
    ),
)


# Options of a command that compares a store with its copy.
comparing_options = stack(_transform_options, jobs_option, _buffer_option, _bwlimit_option)
copy_options = stack(
    _transform_options,
    lock_option,
    jobs_option,
    _buffer_option,
    _bwlimit_option,
    lease_wait_option,
    parts_options,
)


def changing_options(done: str, doing: str) -> Callable[[F], F]:
    """Return the options of a command that asks before it changes something.

    done: past participle of the command's verb, such as "removed".
    doing: gerund of the command's verb, such as "removing".
    """
    return stack(
        own_option("--dry-run", is_flag=True, help=f"Show what would be {done}; change nothing."),
        own_option("--yes", is_flag=True, help=f"Do not ask before {doing}."),
        lock_option,
    )


def trace_options(
    text: str, *, needs: str = "", also: str = "", required: bool = False
) -> Callable[[F], F]:
    """Return the options for requests in any form.

    text: first sentence of the help of --trace.
    needs: option that --trace needs, with its value.
    also: name of another option for requests that need a tokenizer.
    """
    return stack(
        equal_option(
            "--trace",
            type=INPUT,
            multiple=True,
            needs=needs,
            required=required,
            repeats=False,
            metavar="FILE",
            help=f"{text} FILE is SGLang's request log, a trace or a data set, and can be "
            "compressed. FILE can also be a directory or a pattern of such files, or - for stdin. "
            "Can be given several times; see TRACES in hicachectl-prewarm(1).",
        ),
        REQUESTS.option(
            "--trace-format",
            needs="--trace",
            metavar="NAME",
            help="Form of the trace, such as sglang-log.  [default: recognised by its content]",
        ),
        REQUESTS.option(
            "--block-size",
            needs="--trace",
            type=Count(1),
            metavar="TOKENS",
            help="Number of tokens in a block of hash_ids.  [default: the size in the trace]",
        ),
        REQUESTS.option(
            "--tokenizer",
            type=click.Path(file_okay=False, path_type=Path),
            needs=f"{also} or --trace" if also else "--trace",
            divided=OWN_VALUE,
            metavar="DIR",
            help="Directory with the tokenizer.json for requests that are text.  [default: the "
            "directory of --model-config or --profile]",
        ),
    )


request_options = stack(
    equal_option(
        "--prompts",
        type=INPUT,
        repeats=False,
        metavar="FILE",
        help="Requests as texts or chat messages, one JSON value per line. Needs a tokenizer.",
    ),
    equal_option(
        "--token-ids",
        type=INPUT,
        repeats=False,
        metavar="FILE",
        help="Requests as token ids, one JSON list per line.",
    ),
    equal_option(
        "--pages",
        type=FILE,
        repeats=False,
        help="Requests as page hashes. Each line is a page hash, a JSON list of hashes (a chain) "
        "or a row of ls --format jsonl.",
    ),
    trace_options("Requests in any form.", also="--prompts"),
)

model_option = PROFILE.option(
    "--model", variable=False, metavar="NAME", help="Choose this model if STORE has several."
)

prefetch_threshold_option = SERVERS.option(
    "--prefetch-threshold",
    type=Count(0),
    repeats=False,
    metavar="TOKENS",
    help="SGLang's prefetch_threshold. If fewer tokens of a request than TOKENS are usable, "
    "servers fetch none of them.  [default: the profile's, else 256]",
)


def grace_option(text: str) -> Callable[[F], F]:
    """Return the option --grace. text: what the command does with page groups that are young."""
    return equal_option(
        "--grace",
        type=DURATION,
        default=f"{DEFAULT_GRACE_SECONDS:g}s",
        show_default=True,
        repeats=True,
        help=f"{text}. Servers may still be writing them.",
    )


judging_grace_option = grace_option("Leave out page groups younger than this")


def sample_options(section: Section, day: str) -> Callable[[F], F]:
    """Return the options that limit how many objects checks read.

    section: section of the options in the help.
    day: the default of --sample-slice in words.
    """
    return stack(
        section.option(
            "--sample",
            metavar="PERCENT",
            help="Read only this share of the pages, such as 5%.",
        ),
        section.option(
            "--sample-slice",
            needs="--sample",
            type=Count(0),
            metavar="K",
            help=f"Read share number K of the pages.  [default: {day}]",
        ),
        section.option(
            "--time-limit",
            type=DURATION,
            divided=Divided(same=True, shared_by=("--shard",)),
            help="Stop reading objects after this duration.",
        ),
    )


allow_empty_option = own_option(
    "--allow-empty",
    is_flag=True,
    repeats=False,
    divided=OWN_VALUE,
    help="Accept a store without any page. Without this option, such a store is refused, because "
    "its file system is perhaps not mounted.",
)

checking_options = stack(
    judging_grace_option,
    equal_option(
        "--fail-on",
        repeats=False,
        type=click.Choice([*reversed(SEVERITIES[1:]), NEVER]),
        default="warning",
        show_default=True,
        help="Exit with 4 if there are findings of this severity or above.",
    ),
    allow_empty_option,
    jobs_option,
    _buffer_option,
    _bwlimit_option,
    allow_leases_option,
)


def allow_shrink_option(needs: str = "") -> Callable[[F], F]:
    """Return the option --allow-shrink of a command. needs: see `Option`."""
    return RECORDS.option(
        "--allow-shrink",
        is_flag=True,
        needs=needs,
        repeats=False,
        divided=AT_MERGE,
        help="Write the catalog even if it has fewer than half as many entries as the old catalog.",
    )


min_usable_option = equal_option(
    "--min-usable",
    type=SHARE,
    metavar="SHARE",
    help="Exit with 4 if servers can fetch less than this share of the requested tokens, such as "
    "0.9.",
)

_filter = FILTERS.option
FLAG_FILTERS = ("tag", *AXES)  # server flags have these names, too
_FILTERS: Mapping[str, Callable[[Any], Any]] = {
    "model": _filter(
        "--model", metavar="NAME", help="Only pages of this model, written org/name or org-name."
    ),
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
            type=Count(1),
            metavar="N",
            help=f"Only pages of this {axis.upper()} size, as ls shows it.",
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
        type=TIME,
        help="Only pages last written at TIME or later (ISO 8601, or an age such as 2h).",
    ),
    "before": _filter(
        "--before",
        type=TIME,
        help="Only pages last written before TIME (ISO 8601, or an age such as 7d).",
    ),
    "pages": _filter(
        "--pages",
        type=FILE,
        help="Only the pages in FILE. Each line is a page hash, or a row of ls --format jsonl, "
        "which stands for one group of its page.",
    ),
}
_NO_TAG_BESIDE_FLAGS = _filter(
    "--no-tag",
    is_flag=True,
    help="Only pages without a tag. --tag, --tp, --pp, --cp and --dcp are filters, too, but they "
    "describe servers if --model-config or --server is given.",
)
FILTER_NAMES = tuple(_FILTERS)
# The filters that choose among the pages of one deployment.
OF_PAGES = ("pool", "page", "state", "since", "before", "pages")


def filter_options(
    *, beside_flags: bool = False, without: Collection[str] = ()
) -> Callable[[F], F]:
    """Return the options of the filters.

    beside_flags: whether to leave out the filters in FLAG_FILTERS, because server flags of the
        command take their place.
    without: further filters to leave out.
    """
    left_out = {*without, *(FLAG_FILTERS if beside_flags else ())}
    options = {**_FILTERS, **({"no_tag": _NO_TAG_BESIDE_FLAGS} if beside_flags else {})}
    return stack(*(option for name, option in options.items() if name not in left_out))
