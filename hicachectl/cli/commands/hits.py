"""`hicachectl hits`: why there was a hit, or none."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

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
    from hicachectl.requests.hits import Hits

_SOURCES = ("prompts", "token_ids", "pages")


@click.command(
    "hits",
    epilog="""\b
Examples:
  hicachectl hits prod: --token-ids requests.jsonl --profile prod.toml
  hicachectl hits prod: --prompts chats.jsonl --model-config /models/qwen3 --tp 8 --page-size 64
  hicachectl hits /tmp/hicache --pages chain.jsonl --format json
""",
)
@store_argument
@request_options
@click.option("--model", metavar="NAME", help="Which model of STORE, where it has several.")
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
    """Say for each request how far servers could restore it from STORE, and what stops it.

    A page counts with all its objects of every rank; of trailing pools (Mamba states, sliding
    windows) a prefix needs those at its end. The last token of a request is always computed.
    Servers ask for no prefix shorter than their prefetch threshold (256 tokens by default).

    A line of --prompts is JSON: a text, a list of messages, or an object with text, prompt or
    messages; a line of --token-ids a list, or an object with token_ids or input_ids. The objects
    can have extra_key and cache_salt.

    Without a profile, --page-size (and --speculative-algorithm for EAGLE) says how tokens are
    hashed; --model, --tp, --pp, --cp and --dcp choose one of several deployments; and a page is
    compared with what was seen, so that a pool that is absent everywhere cannot be noticed.
    """
    _refuse_contradictions(options)
    from hicachectl.cli.output import write_rows
    from hicachectl.cli.text_tables import hits_for_people
    from hicachectl.pages.inventory import take_inventory
    from hicachectl.requests.hit_rows import hit_rows
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
    hits = find_hits(inventory, _deployment(inventory, profile, options), chains)
    page_size = None if hashing is None else hashing.page_size
    _say_what_rows_do_not(ctx, hits, inventory)
    write_rows(
        hit_rows(hits, page_size),
        name="chains",
        human=hits_for_people,
        output_format=output_format,
        output=output,
    )


def _refuse_contradictions(options: dict[str, Any]) -> None:
    """Fail on options that make no sense together, before the store is opened."""
    from hicachectl.profiles.sources import states_source

    refuse_other_sources(options, _SOURCES)
    if options["model"] and states_source(options):
        raise click.UsageError("--model chooses from what STORE shows, and is for that alone")


def _profile(ctx: click.Context, store: Store, options: dict[str, Any]) -> Profile | None:
    """Build the profile asked for; without one, leave the flags that hashing and choice need."""
    from hicachectl.profiles.sources import profile_from_options, states_source

    if not states_source(options):
        for_us = ("page_size", "speculative_algorithm", *AXES)
        options = {**options, **dict.fromkeys(for_us)}
    return profile_from_options(options, store, warn=partial(remark, ctx))


def _deployment(
    inventory: Inventory, profile: Profile | None, options: dict[str, Any]
) -> int | None:
    """Find whose servers are meant: the profile's, else the only one that the store shows."""
    from hicachectl.profiles.inference import PoolGuess, choose_deployment

    if profile is not None:
        return 0  # assign_affixes puts it first
    if not inventory.table.deployments and not any(r.readings for r in inventory.table.resolved):
        return None
    sizes = {axis: options[axis] for axis in AXES}
    return choose_deployment(inventory, PoolGuess(model=options["model"], **sizes))


def _say_what_rows_do_not(ctx: click.Context, hits: Hits, inventory: Inventory) -> None:
    """Remark on what the rows alone do not show."""
    from hicachectl.formats.kinds.pool import pool_name
    from hicachectl.pages.ambiguity import ambiguity_remark

    if hits.deployment is None:
        remark(ctx, "the store has no pages")
        return
    if hits.deployment.profile is None:
        remark(
            ctx,
            "no profile given: a prefix is taken to need what was seen in the store; a pool that "
            "is absent everywhere cannot be noticed",
        )
        trailing = {needed.spec.pool for needed in hits.needs if needed.spec.trailing}
        for pool in sorted(pool for pool in trailing if not pool_name(pool).states):
            remark(ctx, f"{pool}: how many pages servers need is not known; 1 is assumed")
    ambiguous = ambiguity_remark(inventory)
    if ambiguous:
        remark(ctx, f"passed over: {ambiguous}")
    if hits.misfits:
        remark(ctx, f"{hits.misfits} chains stop at objects of a wrong size; see hicachectl verify")
