"""`hicachectl profile`: print the profile that the other commands would use."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from hicachectl.cli.command import Command
from hicachectl.cli.options import (
    format_option,
    jobs_option,
    model_option,
    prefetch_threshold_option,
    profile_options,
    store_names,
)
from hicachectl.cli.parameters import PROFILE, argument, on_command_line, own_option
from hicachectl.cli.session import opened, progress, remark, store_name
from hicachectl.cli.values import OutputFile

if TYPE_CHECKING:
    from pathlib import Path

    from hicachectl.formats.profile import Profile

_FORMATS = ("toml", "json")


@click.command("profile", cls=Command)
@argument("store", metavar="[STORE]", required=False, shell_complete=store_names)
@model_option
@PROFILE.option(
    "--launch",
    variable=False,
    metavar="COMMAND",
    help="Build the profile from the command that launches a server, a file with that command "
    "(@FILE), or a running server (pid:N).",
)
@format_option(_FORMATS)
@own_option(
    "--print-probe",
    is_flag=True,
    help="Print a Python script that prints the profile in SGLang's own environment.",
)
@own_option(
    "-o",
    "--output",
    type=OutputFile(_FORMATS, replaces="a profile"),
    help="Write the profile to FILE instead of stdout.",
)
@prefetch_threshold_option
@jobs_option
@profile_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    store: str | None,
    model: str | None,
    output_format: str,
    print_probe: bool,
    output: Path | None,
    **options: Any,
) -> None:
    r"""Print the profile of a deployment: its model, shards and pools.

    Write the profile once with -o, then give it to other commands with --profile. The profile
    comes from --model-config and flags, from --server, from --launch, or from --profile. Without
    these options, the profile that a pack records is printed, or a profile is inferred from STORE.

    --launch takes python -m sglang.launch_server … or sglang serve …, also in a script, the YAML of
    a container, a running process, or a server's log. --launch executes nothing, and refuses flags
    whose values only running the command would show. The command is read with the flags of the
    newest supported release, whatever --sglang says. Flags given beside --launch replace the same
    flags of the command.

    An inferred profile states only the shards, pools and sizes seen in STORE. If the SGLang plug-in
    of hicachectl wrote STORE, the profile also states weights, layout, page size and dtypes. If
    STORE has several deployments, --model, --tp, --pp, --cp and --dcp choose one of them. An
    inferred profile is enough for ls and the checks names, groups and sizes; commands that must
    interpret bytes refuse it.

    For a model that hicachectl does not know, --print-probe prints a script. Run the script in the
    server's environment, with the server's flags and environment variables, on a machine with the
    same GPU: python probe.py --model-path … --tp 8 > prod.toml. The script asks SGLang's own
    classes for the pools, loads no weights, and needs nothing of hicachectl.

    Examples:
      hicachectl profile --model-config config.json --tp 2 --page-size 64 -o prod.toml
      hicachectl profile --server http://127.0.0.1:30000 -o prod.toml
      hicachectl profile --launch 'sglang serve --model-path /models/m --tp 8 --page-size 64 \
          --enable-hierarchical-cache'
      hicachectl profile --launch @serve.sh --model-config config.json -o prod.toml
      hicachectl profile /tmp/hicache --model Qwen/Qwen3-32B --tp 2
      hicachectl profile --print-probe > probe.py
    """
    from hicachectl.cli.output import write_text
    from hicachectl.formats.profile import dump_profile, profile_to_mapping
    from hicachectl.profiles.sources import profile_from_options, states_source, with_threshold

    if print_probe:
        given = [name for name in ctx.params if on_command_line(ctx, name)]
        if set(given) - {"print_probe", "output"}:
            raise click.UsageError("--print-probe takes no STORE and no other option than -o")
        write_text(_probe_script(), output)
        return
    warn = partial(remark, ctx)
    if store is None or states_source(options):
        if model is not None:
            raise click.UsageError(
                "--model chooses a model from the contents of STORE; give STORE, and leave out "
                "--profile, --model-config, --server and --launch"
            )
        with nullcontext() if store is None else opened(ctx, store) as source:
            profile = profile_from_options(options, source, warn=warn)
    else:
        profile = _inferred(ctx, store, model, options)
    if profile is None:
        raise click.UsageError("No source for a profile; give --profile, --model-config, --server, "
                               "--launch or a STORE")  # fmt: skip
    profile = with_threshold(profile, options)  # also for an inferred profile
    text = (
        dump_profile(profile)
        if output_format == "toml"
        else json.dumps(profile_to_mapping(profile), indent=2) + "\n"
    )
    write_text(text, output)


def _probe_script() -> str:
    from importlib.resources import files

    return files("hicachectl.profiles").joinpath("probe.py").read_text(encoding="utf-8")


def _inferred(
    ctx: click.Context, store: str, model: str | None, options: dict[str, Any]
) -> Profile:
    from hicachectl.backends.capabilities import Archive
    from hicachectl.formats.objects import AXES
    from hicachectl.pages.scanning import take_inventory
    from hicachectl.pages.selection import Selection
    from hicachectl.profiles.identities import markers_of
    from hicachectl.profiles.inference import infer_profile, with_marked_facts
    from hicachectl.profiles.sources import profile_from_options

    sizes = {axis: options.pop(axis) for axis in AXES}
    profile_from_options(options)  # refuses flags that cannot choose a deployment
    with opened(ctx, store) as source, progress(ctx, "listing", " objects") as advance:
        recorded = source.recorded_profile() if isinstance(source, Archive) else None
        if recorded is not None and model is None and not any(sizes.values()):
            return recorded
        inventory = take_inventory(source, on_batch=advance)
        profile = infer_profile(inventory, source.grammar, Selection(model=model, **sizes))
        profile, facts = with_marked_facts(profile, markers_of(source), source.grammar)
    marked = f", and what the markers state: {', '.join(facts)}" if facts else ""
    remark(
        ctx,
        f"{store_name(ctx, store)}: the profile is inferred from the objects; it states only their "
        f"shards, pools and sizes{marked}",
    )
    return profile
