"""One page of a store, in full."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.checks.group import check_groups
from hicachectl.checks.sizes import check_sizes
from hicachectl.findings import combine
from hicachectl.formats.errors import UsageError
from hicachectl.groups import PageGroups
from hicachectl.inventory import take_inventory
from hicachectl.listing import object_rows, page_rows
from hicachectl.selection import Selection, select

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicachectl.backends.base import Store
    from hicachectl.formats.profile import Profile

_NAMED_CANDIDATES = 4


@dataclass(frozen=True, slots=True)
class PageReport:
    """A page: its document for JSON, its objects as in `ls --objects`, and its findings."""

    document: dict[str, Any]
    objects: pa.Table
    findings: pa.Table


def inspect_page(
    store: Store,
    profile: Profile | None,
    prefix: str,
    *,
    grace_seconds: float = 60.0,
    on_batch: Callable[[int], None] = lambda objects: None,
) -> PageReport:
    """Gather all about the one page whose hash starts with the prefix.

    Raises UsageError when there is none, or several; StoreUnavailable.
    """
    inventory = take_inventory(store, profile, on_batch=on_batch)
    inventory = select(inventory, Selection(page=prefix))
    groups = PageGroups(inventory)
    pages = pc.unique(groups.pages).to_pylist()
    if len(pages) != 1:
        raise UsageError(_no_single_page(store.url, prefix, pages))
    in_flight = groups.newest_ns > time.time_ns() - int(grace_seconds * 1e9)
    found = combine(
        [
            *check_groups(inventory, groups, in_flight),
            *check_sizes(inventory, groups, in_flight, store.scheme),
        ]
    )
    states = page_rows(groups).drop_columns(["page"]).to_pylist()
    for state in states:
        state["pools"] = {pool: counts for pool, counts in state["pools"].items() if counts}
    document = {
        "store": store.url,
        "page": pages[0],
        "groups": states,
        "objects": None,
        "findings": found.to_pylist(),
    }
    return PageReport(document, object_rows(inventory), found)


def _no_single_page(store: str, prefix: str, pages: list[str]) -> str:
    if not pages:
        return f"{store}: no page starts with {prefix!r}"
    shown = ", ".join(sorted(pages)[:_NAMED_CANDIDATES])
    more = ", …" if len(pages) > _NAMED_CANDIDATES else ""
    return f"{store}: {len(pages)} pages start with {prefix!r}: {shown}{more}; give more digits"
