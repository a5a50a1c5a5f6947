"""Checks of `doctor` about one store. Basic causes come first."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from hicachectl.backends.capabilities import Serviced
from hicachectl.doctor.checks import FAIL, OK, STORE, WARN, Check, verdict_of
from hicachectl.doctor.sample import sample_checks
from hicachectl.doctor.space import last_write_checks, space_checks
from hicachectl.formats.errors import DeniedError, HicacheError, UsageError
from hicachectl.pages.census import byte_sum
from hicachectl.pages.inventory import describe_empty
from hicachectl.text.units import counted, human_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.backends.base import Store
    from hicachectl.doctor.listed_store import ListedStore
    from hicachectl.pages.in_flight import ListingTime
    from hicachectl.pages.inventory import Inventory

_check = partial(Check, group=STORE)


def store_checks(listed: ListedStore) -> list[Check]:
    """Judge a store by its services, its listing, a sample of its pages, and its space.

    Basic causes come first. At most a sample of the pages is read, and nothing is changed. Without
    a server, these checks show the health of the store.
    """
    store, inventory, listing = listed.store, listed.inventory, listed.listing
    if store is None or inventory is None or listing is None:
        return [Check.of_message("reachable", FAIL, listed.problem, group=STORE)]
    checks = [_reachable(store, inventory, listing)]
    try:
        if isinstance(store, Serviced):
            checks += _services(store)
            if verdict_of(checks) == FAIL:
                return checks  # the objects of the store cannot be read
        if inventory.is_foreign.all():
            return [
                *checks,
                _empty(listed, store, inventory, is_explained=verdict_of(checks) == WARN),
                *space_checks(listed, store, inventory, listing),
            ]
        try:
            checks += sample_checks(listed, store, inventory)
        except DeniedError as error:  # the checks below need only the listing
            checks.append(Check.of_message("readable", FAIL, str(error), group=STORE))
        checks += space_checks(listed, store, inventory, listing)
        checks += last_write_checks(listed, inventory, listing)
    except UsageError:
        raise
    except HicacheError as error:
        checks.append(Check.of_message("readable", FAIL, str(error), group=STORE))
    return checks


def _reachable(store: Store, inventory: Inventory, listing: ListingTime) -> Check:
    nbytes = byte_sum(inventory.known_sizes)
    size = f", {human_size(nbytes)}" if nbytes else ""
    return _check(
        "reachable",
        OK,
        f"The store can be listed: {counted(len(inventory.objects), 'object')}{size}",
        evidence="; ".join((f"listed in {listing.duration_ns / 1e9:.1f} s", *store.remarks)),
    )


def _empty(listed: ListedStore, store: Store, inventory: Inventory, *, is_explained: bool) -> Check:
    """Return the check of a store without pages.

    is_explained: whether a service of the store may have lost the pages.
    """
    what, _, next_step = describe_empty(store, inventory).rpartition("; ")
    if not (listed.is_shared and what.endswith(" is empty")):
        status = WARN if is_explained or listed.is_shared or listed.is_explained else FAIL
        return _check("pages", status, what, next=next_step)
    return _check(
        "pages",
        WARN,
        f"The servers have written no page yet: {what}",
        evidence="the write policy decides when pages are written; pages that were in a server's "
        "memory before the store was attached are not written",
        next="send new prompts of several pages to the servers, or the same prompts after "
        "/flush_cache, and run doctor again",
    )


def _services(store: Serviced) -> Iterator[Check]:
    for one in store.conditions():
        if one.problem:
            status = FAIL if one.is_lost else WARN
            yield Check.of_message(one.name, status, one.problem, group=STORE)
        else:
            yield _check(one.name, OK, one.text)
