"""`hicachectl pin`: protect pages of a Mooncake cluster from eviction."""

from __future__ import annotations

from typing import Any

import click

from hicachectl.cli.command import Command
from hicachectl.cli.commands.pins import pin_pages
from hicachectl.cli.options import (
    filter_options,
    output_options,
    pin_ttl_option,
    profile_option,
    store_argument,
)
from hicachectl.cli.parameters import OWN, own_option


@click.command("pin", cls=Command)
@store_argument
@pin_ttl_option("--ttl", OWN)
@own_option("--dry-run", is_flag=True, help="Show what would be pinned; change nothing.")
@filter_options()
@output_options
@profile_option
@click.pass_context
def command(ctx: click.Context, /, store: str, **options: Any) -> None:
    """Protect pages of a Mooncake cluster from eviction, for a time.

    Give at least one filter, such as --pages FILE or --model NAME. All objects of the pages get
    soft pins, which end after --ttl. A cluster evicts objects with a soft pin only if it finds no
    other object to evict. If an object of a page was evicted after the listing, the page is not
    pinned, and the exit status is 4. Pages that are not whole are left out, unless --state names
    their state.

    If a page is pinned again, the new end of its pin replaces the old end, even if the new end is
    earlier. hicachectl unpin removes pins. The master must be of Mooncake 0.3.14 or later.
    hicachectl prewarm --pin pins the pages that it copies or finds.

    hicachectl-pin(1) explains how to pin the pages of some requests, and how far a soft pin
    protects.

    Examples:
      hicachectl pin mooncake: --pages pages.jsonl --ttl 12h
      hicachectl pin prod: --model Qwen/Qwen3-32B --state whole --profile prod.toml --dry-run
    """
    from hicachectl.move.pinning import PIN_SECONDS

    pin_pages(ctx, store, options, options["pin_seconds"] or PIN_SECONDS)
