"""`hicachectl profile`: the profile that the other commands would use."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import click

from hicachectl.options import profile_options
from hicachectl.session import opened, progress, remark


@click.command(
    "profile",
    epilog="""\b
Examples:
  hicachectl profile --model-config config.json --tp 2 --page-size 64 -o prod.toml
  hicachectl profile --server http://127.0.0.1:30000 -o prod.toml
  hicachectl profile /tmp/hicache
""",
)
@click.argument("store", metavar="[STORE]", required=False)
@click.option("--model", metavar="NAME", help="Which model of STORE, where it has several.")
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["toml", "json"]),
    default="toml",
    show_default=True,
    help="How to write the profile.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the profile to FILE instead of stdout.",
)
@profile_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    store: str | None,
    model: str | None,
    output_format: str,
    output: Path | None,
    **options: Any,
) -> None:
    """Print the profile of a deployment: what was served, how it was sharded, its pools.

    From --profile, --model-config with flags, or --server; else inferred from STORE. An inferred
    profile states only shards, pools and sizes that were seen: it serves ls and the checks names,
    groups and sizes, and is refused where bytes must be understood.
    """
    from hicachectl.formats.profile import dump_profile, profile_to_mapping
    from hicachectl.output import write_text
    from hicachectl.profiles import profile_from_options

    profile = profile_from_options(options, warn=partial(remark, ctx))
    if profile is None:
        if store is None:
            raise click.UsageError("give --profile, --model-config, --server or a STORE to look at")
        from hicachectl.inference import infer_profile
        from hicachectl.inventory import take_inventory

        with opened(ctx, store) as source, progress(ctx, "listing", " objects") as advance:
            profile = infer_profile(take_inventory(source, on_batch=advance), model or "")
        remark(ctx, f"inferred from {store}: only shards, pools and sizes that were seen")
    text = (
        dump_profile(profile)
        if output_format == "toml"
        else json.dumps(profile_to_mapping(profile), indent=2) + "\n"
    )
    write_text(text, output)
