"""Checks of `doctor` about the free space of a store, and the times of its pages."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.doctor.checks import FAIL, OK, STORE, UNKNOWN, WARN, Check
from hicachectl.pages.census import byte_sum
from hicachectl.pages.naming import deployment_document, deployment_text
from hicachectl.text.units import human_age, human_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.backends.base import Store
    from hicachectl.doctor.listed_store import ListedStore
    from hicachectl.formats.arrays import IntArray
    from hicachectl.pages.in_flight import ListingTime
    from hicachectl.pages.inventory import Inventory

_HOUR, _DAY = 3600.0, 86400.0
_ROOM = 64 << 20  # with less, the next batch of pages does not fit
_LEAST_FREE = 0.05  # share of the sum of stored and free bytes
_check = partial(Check, group=STORE)


def space_checks(
    listed: ListedStore, store: Store, inventory: Inventory, listing: ListingTime
) -> Iterator[Check]:
    """Compare the free space with the writes of the last day."""
    free = store.free_bytes()
    if free is None or not store.traits.live:
        return
    sizes = inventory.known_sizes
    if store.traits.evicts:
        yield _check(
            "space",
            OK,
            f"{human_size(free)} are free; a full store evicts pages, which is normal",
        )
        return
    written, seconds = _written_lately(inventory, sizes, listing)
    hours = free * seconds / written / _HOUR if written else None
    rate = f"{human_size(written)} written in the last {human_age(seconds)}" if written else ""
    whole = free + byte_sum(sizes)
    if free < _ROOM:
        status, told = FAIL, f"No room: {human_size(free)} are free, so servers store nothing more"
    elif hours is not None and hours < _DAY / _HOUR:
        status, told = (
            WARN,
            f"The {human_size(free)} that are free last {human_age(hours * _HOUR)} at the rate of "
            "the last day, unless servers evict",
        )
    elif free < _LEAST_FREE * whole:
        status, told = (
            WARN,
            f"Only {human_size(free)} are free, {free / whole:.1%} of the stored and free bytes; "
            "the store gets full unless servers evict",
        )
    else:
        yield _check("space", OK, f"{human_size(free)} are free", evidence=rate)
        return
    limit = "max_size of hicachectl's storage backend limits a store"
    # `written` covers a day at most.
    lacking = max(_ROOM, _LEAST_FREE * whole, written) - free
    unit, name = (1 << 30, "GiB") if lacking > 1 << 30 else (1 << 20, "MiB")
    freed = math.ceil(lacking / unit)
    remedy = "give the store a larger file system, or remove other files from it"
    if 2 * freed * unit < byte_sum(sizes):
        target = f"--keep-free {math.ceil((free + lacking) / unit)}{name}"
        if store.capacity() is None:
            target = f"--free {freed}{name}"
        remedy = listed.mending.command(f"hicachectl rm STORE {target}")
    yield _check(
        "space",
        status,
        told,
        evidence="; ".join(filter(None, (rate, limit))),
        next=remedy,
    )


def _written_lately(
    inventory: Inventory, sizes: IntArray, listing: ListingTime
) -> tuple[int, float]:
    """Return the bytes written in the last day, and the seconds of this period.

    The period is shorter for a younger store. A store younger than an hour shows no rate, so the
    result for it is 0 bytes and 0 seconds.
    """
    times = inventory.objects.column("mtime_ns")
    ages = (listing.start_ns - times.drop_null().to_numpy()) / 1e9
    oldest = float(ages.max(initial=0.0))
    if oldest < _HOUR:
        return 0, 0.0
    seconds = min(oldest, _DAY)
    known = times.is_valid().to_numpy()
    return byte_sum(sizes[known][ages <= seconds]), seconds


def _other_pages(listed: ListedStore, inventory: Inventory) -> dict[str, str]:
    """Return the evidence and the next step for a store with pages of other deployments only."""
    table = inventory.table
    next_step = listed.mending.command("hicachectl ls STORE --summary")
    numbers = inventory.by_affix(table.deployment_ids, -1)
    if not (numbers > 0).any():
        return {"next": next_step}
    own, other = table.deployments[0], table.deployments[np.bincount(numbers[numbers > 0]).argmax()]
    evidence = f"most of its pages are of {deployment_text(deployment_document(other))}"
    if other.names == own.names:
        live = listed.store is not None and listed.store.traits.live
        target = "STORE" if live else "DST"  # a pack is written once
        converting = listed.mending.command(
            f"hicachectl migrate STORE {target} --profile OLD --to-profile FILE"
        )
        next_step = (
            "give the profile of these pages or, if the weights are the same, convert the pages "
            f"with their profile as OLD: {converting}"
        )
    return {"evidence": evidence, "next": next_step}


def last_write_checks(
    listed: ListedStore, inventory: Inventory, listing: ListingTime
) -> Iterator[Check]:
    """Compare the time of the newest page with the start of the server."""
    chosen = ~inventory.is_foreign
    if listed.profile is not None and not listed.profile.inferred:
        own = [number == 0 for number in inventory.table.deployment_ids]
        chosen &= inventory.by_affix(own, False)
        if not (chosen.any() or listed.has_servers):
            yield _check(
                "pages",
                WARN,
                "The store has no page of the profile's deployment",
                **_other_pages(listed, inventory),
            )
    times = inventory.objects.column("mtime_ns").filter(pa.array(chosen)).drop_null()
    if not len(times):
        return
    newest_ns = pc.max(times).as_py()
    detail = f"The newest page was written {human_age((listing.start_ns - newest_ns) / 1e9)} ago"
    running = 0.0 if listed.started is None else listing.start_ns / 1e9 - listed.started
    if listed.started is None or newest_ns / 1e9 >= listed.started or running < _HOUR:
        yield _check("last-write", OK, detail)
        return
    yield _check(
        "last-write",
        UNKNOWN,
        f"{detail}, before the server started {human_age(running)} ago, so the server has stored "
        "nothing new",
        evidence="a server that has answered new prompts stores them elsewhere, or not at all",
        next=listed.command("doctor", "--write-probe"),
    )
