"""Options that several commands share, and the values they parse to."""

from __future__ import annotations

import os
import re
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hicachectl.checks.codes import SEVERITIES
from hicachectl.checks.registry import page_codes, remedies
from hicachectl.cli.completions import store_names
from hicachectl.cli.kept_files import head_of, kept_kind
from hicachectl.cli.parameters import (
    AT_MERGE,
    MOONCAKE,
    OUTPUT,
    OWN_VALUE,
    PARTS,
    PROFILE,
    RECORDS,
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
    on_command_line,
    own_option,
    stack,
)
from hicachectl.formats.errors import UsageError
from hicachectl.formats.models.flag_table import OPTIONS
from hicachectl.formats.sizes import parse_size
from hicachectl.text.vocabulary import DEFAULT_GRACE_SECONDS, NEVER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from click.shell_completion import CompletionItem

    from hicachectl.formats.models.flag_table import Flag

FORMATS = ("table", "json", "jsonl", "csv", "parquet", "arrow")

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_LONGEST_S = 100 * 365.25 * 86400
_LATEST_S = 2**63 // 10**9 - 1  # stores keep times as nanoseconds in 64 bits


def _shown(value: str) -> str:
    return repr(value) if len(value) <= 40 else f"{value[:37]!r}..."


class Duration(click.ParamType[Any]):
    """A duration such as 90s, 10m, 2h or 7d, in seconds."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Parse a text; pass a number through."""
        if isinstance(value, (int, float)):
            return float(value)
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", value)
        if match is None:
            self.fail(f"{_shown(value)} is not a duration; write 90s, 10m, 2h or 7d", param, ctx)
        seconds = float(match[1]) * _SECONDS[match[2]]
        if seconds > _LONGEST_S:
            self.fail(f"{_shown(value)} is longer than 100 years", param, ctx)
        return seconds


class Share(click.ParamType[Any]):
    """A share from 0 to 1, such as 0.9 or 90%."""

    name = "share"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Parse a text; pass a number through."""
        if isinstance(value, (int, float)):
            return float(value)
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(%?)", value)
        share = -1.0 if match is None else float(match[1]) / (100 if match[2] else 1)
        if not 0 <= share <= 1:
            self.fail(f"{_shown(value)} is not a share; write 0.9 or 90%", param, ctx)
        return share


class PointInTime(click.ParamType[Any]):
    """A time in ISO 8601, or an age such as 7d, in Unix seconds; an `Ago` for an age."""

    name = "time"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Parse a text; pass a number through."""
        if isinstance(value, float):
            return value
        if re.fullmatch(r"[0-9]+(?:\.[0-9]+)?[smhd]", value):
            from hicachectl.text.units import Ago

            return Ago(Duration().convert(value, param, ctx))
        try:
            seconds = datetime.fromisoformat(value).timestamp()
        except (ValueError, OverflowError):
            self.fail(f"{_shown(value)} is neither ISO 8601 nor an age such as 7d", param, ctx)
        if abs(seconds) > _LATEST_S:
            self.fail(f"{_shown(value)} is not between the years 1678 and 2262", param, ctx)
        return seconds


class Size(click.ParamType[Any]):
    """A size such as 200GiB or 1.5TB, or a number of bytes; in bytes."""

    name = "size"

    def __init__(self, least: int = 0) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse a text; pass a number through."""
        if isinstance(value, int):
            return value
        try:
            return parse_size(value, self.least)
        except UsageError as error:
            self.fail(str(error), param, ctx)


class NameList(CommaList):
    """A comma-separated list of names, each one of the choices if there are choices."""

    def __init__(self, choices: tuple[str, ...] | Callable[[], tuple[str, ...]] = ()) -> None:
        self._choices = choices

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the allowed names; empty if any name is allowed."""
        return self._choices() if callable(self._choices) else self._choices

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Return the choices, or NAME,... without choices."""
        return ",".join(self.choices) or "NAME,..."

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        """Offer the choices that the list lacks."""
        from click.shell_completion import CompletionItem

        given, comma, name = incomplete.rpartition(",")
        left = [choice for choice in self.choices if choice not in given.split(",")]
        return [CompletionItem(f"{given}{comma}{c}") for c in left if c.startswith(name)]

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        """Split and check the text; pass a tuple through."""
        names = value if isinstance(value, tuple) else tuple(value.split(","))
        choices = self.choices
        for name in names:
            if choices and name not in choices:
                self.fail(f"{name!r} is not one of {', '.join(choices)}", param, ctx)
        return names


class RepairCode(click.Choice[str]):
    """A finding code that `verify --repair` can act on."""

    def __init__(self) -> None:
        super().__init__(page_codes())

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Return CODE; the list of choices would be too long."""
        return "CODE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check the code; for a code without a page, fail and name the remedy."""
        if instead := remedies().get(value):
            self.fail(f"{value} does not concern a page, so --repair cannot act; {instead}", param,
                      ctx)  # fmt: skip
        self.choices = page_codes()  # a check may have been registered in the meantime
        return super().convert(value, param, ctx)


class RunPath(click.Path):
    """A run directory: a path, never a URL."""

    def __init__(self) -> None:
        super().__init__(file_okay=False, path_type=Path)

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Path:
        """Check the text."""
        text = os.fspath(value)
        if "://" in text:
            self.fail(f"{text} is a URL; give the path of a directory", param, ctx)
        super().convert(value, param, ctx)
        return Path(text)


class OutputFile(click.Path):
    """A file to write, or - for stdout.

    A bare word that is a format is refused, and a file that another command may need.

    replaces: what the file may be that is replaced, as `kept_kind` returns it.
    """

    def __init__(self, formats: tuple[str, ...] = FORMATS, *, replaces: str = "") -> None:
        super().__init__(dir_okay=False, readable=False, path_type=Path)
        self.formats = formats
        self.replaces = replaces

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Path:
        """Check the text."""
        name = os.fspath(value)
        if name in self.formats:
            raise UsageError(
                f"-o {name}: is a format, not a file; use --format {name}, or -o ./{name} for a "
                "file of that name"
            )
        if name == "-":
            return Path("/dev/stdout")  # the name by which `whole_file` knows it
        super().convert(value, param, ctx)
        if (kind := kept_kind(Path(name))) and kind != self.replaces:
            raise UsageError(f"-o {name}: is {kind}, and is not replaced; give another file")
        return Path(name)


class MetricsFile(click.Path):
    """A file for metrics; one with other content is refused."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Path:
        """Check the file."""
        super().convert(value, param, ctx)
        path = Path(value)
        head = head_of(path)
        if head.strip() and b"# HELP hicachectl_" not in head:
            raise UsageError(
                f"--metrics-file {path}: exists and has no metrics of hicachectl; give another file"
            )
        return path


FILE = click.Path(dir_okay=False, path_type=Path)

store_argument = argument("store", metavar="STORE", shell_complete=store_names)


def _server_flag(flag: Flag) -> Callable[[F], F]:
    """Return the decorator of the option for a flag of servers."""
    name = "--" + flag.parameter.replace("_", "-")
    if flag.kind == "switch":
        return SERVERS.option(name, is_flag=True, help=flag.help)
    types = {"count": click.IntRange(1), "layers": CommaList()}
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
        type=click.IntRange(1),
        metavar="N",
        help="In a table, show N groups of findings.  [default: 20]",
    ),
    OUTPUT.option(
        "--all-findings", is_flag=True, help="In a table, show every finding in a line of its own."
    ),
)


def refuse_without_table(ctx: click.Context, output_format: str) -> None:
    """Raise click.UsageError for `findings_options` of another format than table."""
    for parameter, name in (("limit", "--limit"), ("all_findings", "--all-findings")):
        if output_format != "table" and on_command_line(ctx, parameter):
            raise click.UsageError(
                f"{name}: --format {output_format} has every finding; leave out {name}"
            )


output_options = stack(
    OUTPUT.option(
        "--format",
        "output_format",
        type=click.Choice(FORMATS),
        default="table",
        show_default=True,
        help="Format of the result; see OUTPUT in hicachectl(1).",
    ),
    output_option,
)


def metrics_option(section: Section) -> Callable[[F], F]:
    """Return the option --metrics-file of a section."""
    return section.option(
        "--metrics-file",
        variable=False,
        type=MetricsFile(),
        help="Write Prometheus textfile metrics to FILE.",
    )


allow_leases_option = MOONCAKE.option(
    "--allow-leases",
    is_flag=True,
    help="Mooncake: also use queries that grant leases, which delay eviction by some seconds.",
)
lease_wait_option = MOONCAKE.option(
    "--lease-wait",
    type=Duration(),
    help="Mooncake: wait this long for leases to end before a removal fails.  [default: 20s]",
)


def profile_option(section: Section, why: str = "see") -> Callable[[F], F]:
    """Return the option --profile of a section."""
    return section.option(
        "--profile",
        "profile_file",
        type=FILE,
        variable=True,
        describes=False,
        entry=Entry("profile", ("store", "source", "destination")),
        help="Read the deployment's profile from FILE (TOML or JSON); "
        f"{why} hicachectl-profile(1).",
    )


profile_options = stack(
    profile_option(PROFILE),
    PROFILE.option(
        "--model-config",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Build the profile from a Hugging Face config.json (or its directory) and the "
        "options below.",
    ),
    PROFILE.option(
        "--server",
        metavar="URL",
        help="Build the profile from the answers of a live SGLang server.",
    ),
    PROFILE.option(
        "--weights",
        describes=False,
        metavar="DIR|TEXT",
        help="Name the model's weights in the profile: read them from DIR, or TEXT as printed by "
        "hicachectl profile.  [default: those of --server, if its model path is on this machine]",
    ),
    PROFILE.option(
        "--draft-weights",
        describes=False,
        metavar="DIR|TEXT",
        help="Name the weights of a separate draft model.",
    ),
    *map(_server_flag, OPTIONS),
    SERVERS.option(
        "--draft-model-config",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="config.json of the draft model, or its directory.",
    ),
)

transform_options = stack(
    TRANSFORM.option(
        "--to-profile", type=FILE, help="Write the pages for the deployment of this profile."
    ),
    TRANSFORM.option("--to-model", metavar="NAME", help="Served model name to write."),
    TRANSFORM.option(
        "--to-tag",
        absence="--to-no-tag",
        metavar="TAG",
        help="Mooncake: extra_backend_tag to write.",
    ),
    TRANSFORM.option("--to-no-tag", is_flag=True, help="Mooncake: write keys without a tag."),
    TRANSFORM.option(
        "--to-tp", type=click.IntRange(1), metavar="N", help="Attention TP size to write."
    ),
    TRANSFORM.option(
        "--to-pp", type=click.IntRange(1), metavar="N", help="Pipeline stages to write."
    ),
    TRANSFORM.option(
        "--to-pp-partition",
        type=CommaList(),
        metavar="N,N,…",
        help="Layers of each pipeline stage to write.",
    ),
    TRANSFORM.option(
        "--to-tp-lcm-size",
        type=click.IntRange(1),
        metavar="N",
        help="Mooncake with split heads: tp_lcm_size to write.",
    ),
    TRANSFORM.option("--to-layout", metavar="LAYOUT", help="Memory layout to write."),
    TRANSFORM.option(
        "--to-sglang", metavar="VERSION", help="Write what this SGLang release reads."
    ),
    TRANSFORM.option(
        "--trailers",
        type=click.Choice(["auto", "write", "drop"]),
        default="auto",
        show_default=True,
        help="Trailers of objects written to a file store: as needed, always, or never; see "
        "TRAILERS in hicachectl-migrate(1).",
    ),
)

lock_option = RESOURCES.option(
    "--lock",
    type=FILE,
    entry=Entry("lock", ("store", "destination", "quarantine")),
    divided=Divided(instead="leave it out, since two processes may do the same part at once"),
    help="Lock FILE (flock) during the run, or do nothing if another process holds the lock. See "
    "LOCKS in hicachectl(1).",
)
jobs_option = RESOURCES.option(
    "--jobs", type=click.IntRange(1, 256), metavar="N", help="Read and write with N threads."
)
buffer_option = RESOURCES.option(
    "--buffer-bytes",
    type=Size(least=1),
    default="1GiB",
    show_default=True,
    help="Memory to read objects into.",
)
bwlimit_option = RESOURCES.option(
    "--bwlimit",
    type=Size(least=1),
    divided=SHARED,
    help="Read at most this many bytes per second.",
)

parts_options = stack(
    PARTS.option(
        "--shard",
        metavar="I/N",
        help="Do part I (from 0) of N of the run in --run; part 0 lists for all, and hicachectl "
        "merge joins the parts. /N takes I from Kubernetes (JOB_COMPLETION_INDEX) or Slurm "
        "(SLURM_ARRAY_TASK_ID).",
    ),
    PARTS.option(
        "--run",
        "run_directory",
        type=RunPath(),
        metavar="DIR",
        help="Directory of one run with --shard or --ray, such as /shared/$(date +%F); created if "
        "it is missing. All parts of --shard share it. With --ray, only this host uses it, to "
        "continue an interrupted run.",
    ),
    PARTS.option(
        "--wait",
        type=Duration(),
        default="1h",
        show_default=True,
        help="With --shard: wait so long for the listing of part 0.",
    ),
    PARTS.option(
        "--ray",
        metavar="ADDRESS",
        help="Divide the run among the nodes of a Ray cluster: auto (the cluster of this host), "
        "HOST:PORT, or local (this host).",
    ),
    PARTS.option(
        "--workers",
        type=click.IntRange(1, 10_000),
        metavar="N",
        help="Parts that --ray does at once, on all nodes together.  [default: one on each node]",
    ),
)

request_options = stack(
    own_option(
        "--prompts",
        type=FILE,
        repeats=False,
        divided=SAME,
        help="Requests as text or chat messages, one JSON value per line; needs a tokenizer.",
    ),
    own_option(
        "--token-ids",
        type=FILE,
        repeats=False,
        divided=SAME,
        help="Requests as token ids, one JSON list per line.",
    ),
    own_option(
        "--pages",
        type=FILE,
        repeats=False,
        divided=SAME,
        help="Pages; a line is a hash, a JSON list of hashes (a chain) or a row of "
        "ls --format jsonl.",
    ),
    own_option(
        "--tokenizer",
        type=click.Path(file_okay=False, path_type=Path),
        repeats=False,
        divided=OWN_VALUE,
        metavar="DIR",
        help="Directory with tokenizer.json.  [default: the directory of --model-config or "
        "--profile]",
    ),
)

model_option = PROFILE.option(
    "--model",
    variable=False,
    metavar="NAME",
    help="Choose one of several models in STORE.",
)

prefetch_threshold_option = SERVERS.option(
    "--prefetch-threshold",
    type=click.IntRange(0),
    repeats=False,
    metavar="TOKENS",
    help="SGLang's prefetch_threshold: servers fetch nothing if fewer tokens of a request are "
    "usable.  [default: as the profile states, else 256]",
)


def grace_option(text: str) -> Callable[[F], F]:
    """Return the option --grace, whose help says what a command does with young groups."""
    return own_option(
        "--grace",
        type=Duration(),
        default=f"{DEFAULT_GRACE_SECONDS:g}s",
        show_default=True,
        repeats=True,
        divided=SAME,
        help=f"{text}; servers may still be writing them.",
    )


judging_grace_option = grace_option("Do not judge page groups younger than this")


def sample_options(section: Section, day: str, *, repeats: bool) -> Callable[[F], F]:
    """Return the options of a section that limit what checks read.

    day: text that names the default of --sample-slice.
    repeats: see `Option`.
    """
    return stack(
        section.option(
            "--sample",
            metavar="PERCENT",
            repeats=repeats,
            divided=SAME,
            help="Read only this share of the pages, such as 5%.",
        ),
        section.option(
            "--sample-slice",
            type=click.IntRange(0),
            metavar="K",
            repeats=repeats,
            divided=SAME,
            help=f"Read share number K.  [default: {day}]",
        ),
        section.option(
            "--time-limit",
            type=Duration(),
            repeats=repeats,
            divided=Divided(same=True, shared_by=("--shard",)),
            help="Start no further read after this duration.",
        ),
    )


def refuse_slice_alone(options: Mapping[str, Any]) -> None:
    """Raise click.UsageError for --sample-slice without --sample."""
    if options["sample_slice"] is not None and not options["sample"]:
        raise click.UsageError("--sample-slice needs --sample")


fail_on_option = own_option(
    "--fail-on",
    repeats=False,
    divided=SAME,
    type=click.Choice([*reversed(SEVERITIES[1:]), NEVER]),
    default="warning",
    show_default=True,
    help="Exit with 4 if there are findings at least this severe.",
)

allow_empty_option = own_option(
    "--allow-empty",
    is_flag=True,
    repeats=False,
    divided=OWN_VALUE,
    help="Accept a store without any page, which is refused else: it may not be mounted.",
)

allow_shrink_option = RECORDS.option(
    "--allow-shrink",
    is_flag=True,
    repeats=False,
    divided=AT_MERGE,
    help="Write a catalog with fewer than half as many entries as before.",
)

min_usable_option = own_option(
    "--min-usable",
    type=Share(),
    divided=SAME,
    metavar="SHARE",
    help="Exit with 4 if servers would fetch less than this share of the requested tokens, such "
    "as 0.9.",
)
