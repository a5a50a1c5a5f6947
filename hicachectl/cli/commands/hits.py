"""`hicachectl hits`: how much of each request a store can serve."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from hicachectl.cli.command import PROFILE, Command, in_section
from hicachectl.cli.options import (
    allow_leases_option,
    output_options,
    profile_options,
    request_options,
    store_argument,
)
from hicachectl.cli.session import opened, progress, remark
from hicachectl.formats.objects import AXES
from hicachectl.requests.chain_options import asked_chains, asked_hashing, refuse_other_sources

if TYPE_CHECKING:
    from pathlib import Path

    from hicachectl.backends.base import Store
    from hicachectl.formats.profile import Profile
    from hicachectl.pages.inventory import Inventory

_SOURCES = ("prompts", "token_ids", "pages")

_choice = in_section(PROFILE)


@click.command(
    "hits",
    cls=Command,
    epilog="""\b
Examples:
  hicachectl hits prod: --token-ids requests.jsonl --profile prod.toml
  hicachectl hits prod: --prompts chats.jsonl --model-config /models/qwen3 --tp 8 --page-size 64
  hicachectl hits /tmp/hicache --pages chain.jsonl --format json
""",
)
@store_argument
@request_options
@_choice("--model", metavar="NAME", help="Choose one of several models in STORE.")
@allow_leases_option
@output_options
@profile_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    store: str,
    output_format: str,
    output: Path | None,
    **options: Any,
) -> None:
    """Show how much of each request a store can serve, and which object stops it.

    Give the requests with --prompts, --token-ids or --pages. STORE is only read.

    A page counts if all its objects of all ranks are present. Trailing pools (Mamba states,
    sliding windows) are needed only at the end of a prefix.

    Without a profile, --page-size (and --speculative-algorithm for EAGLE) decides how tokens are
    hashed, and --model, --tp, --pp, --cp and --dcp choose one of several deployments. Pages are
    then compared with each other, so a pool missing everywhere goes unnoticed.

    hicachectl-hits(1) describes request files.
    """
    _refuse_contradictions(options)
    from hicachectl.cli.output import write_rows
    from hicachectl.cli.text_tables import hits_for_people
    from hicachectl.pages.inventory import take_inventory
    from hicachectl.profiles.acceptance import acceptance_of
    from hicachectl.profiles.identities import expected_identities
    from hicachectl.requests.hit_rows import hit_remarks, hit_rows
    from hicachectl.requests.hits import find_hits, inventory_of_chains

    with (
        opened(ctx, store, allow_leases=options["allow_leases"]) as source,
        progress(ctx, "listing", " objects") as advance,
    ):
        profile = _profile(ctx, source, options)
        hashing = asked_hashing(profile, options)
        chains = asked_chains(options, hashing)
        if profile is None:
            inventory = take_inventory(source, on_batch=advance)
        else:
            inventory = inventory_of_chains(source, profile, chains, on_batch=advance)
        for text in source.remarks:
            remark(ctx, text)
        acceptance = acceptance_of(source, inventory, profile)
        hits = find_hits(
            inventory, _deployment(inventory, profile, options), chains, acceptance=acceptance
        )
        said = hit_remarks(hits, inventory, expected_identities(source, profile))
    page_size = None if hashing is None else hashing.page_size
    for text in said:
        remark(ctx, text)
    write_rows(
        hit_rows(hits, page_size),
        name="chains",
        human=hits_for_people,
        output_format=output_format,
        output=output,
    )


def _refuse_contradictions(options: dict[str, Any]) -> None:
    from hicachectl.profiles.sources import states_source

    refuse_other_sources(options, _SOURCES)
    if options["model"] and states_source(options):
        raise click.UsageError(
            "--model chooses a model from the contents of STORE; leave out --profile, "
            "--model-config and --server"
        )


def _profile(ctx: click.Context, store: Store, options: dict[str, Any]) -> Profile | None:
    """Return the profile of the options, else that of a pack, else None.

    Without a profile, flags such as --page-size only set the hashing or choose a deployment.
    """
    from hicachectl.profiles.sources import profile_from_options, states_source

    if not states_source(options):
        for_us = ("page_size", "speculative_algorithm", *AXES)
        options = {**options, **dict.fromkeys(for_us)}
    return profile_from_options(options, store, warn=partial(remark, ctx))


def _deployment(
    inventory: Inventory, profile: Profile | None, options: dict[str, Any]
) -> int | None:
    """Return the index of the deployment whose hits are counted; None if the store has no pages.

    The profile's deployment, or else the one that --model and the sizes choose.
    """
    from hicachectl.profiles.inference import PoolGuess, choose_deployment

    if profile is not None:
        return 0  # assign_affixes puts the profile's deployment first
    if not inventory.table.deployments and not any(r.readings for r in inventory.table.resolved):
        return None
    sizes = {axis: options[axis] for axis in AXES}
    return choose_deployment(inventory, PoolGuess(model=options["model"], **sizes))
