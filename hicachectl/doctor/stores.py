"""Checks of `doctor` about one store, in the order of causes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from hicachectl.backends.capabilities import Serviced
from hicachectl.doctor.checks import FAIL, OK, STORE, WARN, Check, verdict_of
from hicachectl.doctor.sample import sample_checks
from hicachectl.doctor.space import last_write_checks, object_sizes, space_checks
from hicachectl.formats.errors import HicacheError, UsageError
from hicachectl.pages.census import byte_sum
from hicachectl.pages.inventory import describe_empty
from hicachectl.text.units import counted, human_size

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from fractions import Fraction

    from hicachectl.backends.base import Store
    from hicachectl.doctor.listed_store import ListedStore
    from hicachectl.pages.in_flight import ListingTime
    from hicachectl.pages.inventory import Inventory

_check = partial(Check, group=STORE)


def store_checks(listed: ListedStore, explained: Collection[Fraction] = ()) -> list[Check]:
    """Judge a store by its listing, a sample, its space and its services, in the order of causes.

    At most a sample of the pages is read, and nothing is changed. Without a server, this is the
    health of the store: it can be reached and read, it has room, and the age of its newest page.
    explained: shares of their expected size that objects have by settings that another check names.
    """
    store, inventory, listing = listed.store, listed.inventory, listed.listing
    if store is None or inventory is None or listing is None:
        return [Check.of_message("reachable", FAIL, listed.problem, group=STORE)]
    checks = [_reachable(store, inventory, listing)]
    try:
        if isinstance(store, Serviced):
            checks += _services(store)
            if verdict_of(checks) == FAIL:
                return checks  # its objects cannot be read
        if inventory.is_foreign.all():
            return [
                *checks,
                _empty(store, inventory),
                *space_checks(listed, store, inventory, listing),
            ]
        checks += sample_checks(listed, store, inventory, explained)
        checks += space_checks(listed, store, inventory, listing)
        checks += last_write_checks(listed, inventory, listing)
    except UsageError:
        raise
    except HicacheError as error:
        checks.append(Check.of_message("readable", FAIL, str(error), group=STORE))
    return checks


def _reachable(store: Store, inventory: Inventory, listing: ListingTime) -> Check:
    nbytes = byte_sum(object_sizes(inventory))
    size = f", {human_size(nbytes)}" if nbytes else ""
    return _check(
        "reachable",
        OK,
        f"The store can be listed: {counted(len(inventory.objects), 'object')}{size}",
        evidence="; ".join((f"listed in {listing.duration_ns / 1e9:.1f} s", *store.remarks)),
    )


def _empty(store: Store, inventory: Inventory) -> Check:
    what, _, next_step = describe_empty(store, inventory).rpartition("; ")
    return _check("pages", WARN, what, next=next_step)


def _services(store: Serviced) -> Iterator[Check]:
    for one in store.conditions():
        if one.problem:
            status = FAIL if one.is_lost else WARN
            yield Check.of_message(one.name, status, one.problem, group=STORE)
        else:
            yield _check(one.name, OK, one.text)
