"""`hicachectl unpin`: let a Mooncake cluster evict pinned pages."""

from __future__ import annotations

from typing import Any

import click

from hicachectl.cli.command import Command
from hicachectl.cli.commands.pins import pin_pages
from hicachectl.cli.options import filter_options, output_options, profile_option, store_argument
from hicachectl.cli.parameters import own_option


@click.command("unpin", cls=Command)
@store_argument
@own_option("--dry-run", is_flag=True, help="Show what would lose its pins; change nothing.")
@filter_options()
@output_options
@profile_option
@click.pass_context
def command(ctx: click.Context, /, store: str, **options: Any) -> None:
    """Let a Mooncake cluster evict pinned pages again.

    Give at least one filter. All objects of the pages lose their soft pins, even pins that servers
    set. No object is removed. The master must be of Mooncake 0.3.14 or later.

    Examples:
      hicachectl unpin mooncake: --pages pages.jsonl
      hicachectl unpin prod: --model Qwen/Qwen3-32B
    """
    pin_pages(ctx, store, options, None)
