"""Before a store's pages are copied to another: by which keys, and how they become the other's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicachectl.backends.capabilities import Archive
from hicachectl.formats.errors import UsageError
from hicachectl.formats.transfer import transfer_plan
from hicachectl.move.routes import Route, planned_route, verbatim_routes

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicachectl.backends.base import Store
    from hicachectl.formats.profile import Profile
    from hicachectl.pages.inventory import Inventory


def settle_grammar(source: Store, destination: Store) -> str:
    """Name the grammar of the keys that will be written, and tell the destination.

    It is the destination's own; a new pack takes the source's.
    """
    if not isinstance(destination, Archive):
        return destination.grammar
    grammar = source.grammar if destination.open_grammar else destination.grammar
    destination.use_grammar(grammar)
    return grammar


def find_router(
    source: Store,
    destination: Store,
    grammar: str,
    profile: Profile | None,
    target: Profile | None,
) -> Callable[[Inventory], list[Route]]:
    """Decide how the source's deployments become the destination's, once it is listed.

    profile: of the source, None: as far as its keys tell. target: of the destination, None: the
    same. Raises UsageError, ProfileError or UnsupportedByBackend where they cannot.
    """
    same = source.url == destination.url
    if target in (None, profile) and grammar == source.grammar:
        if same:
            raise UsageError(f"{source.url}: source and destination are the same")
        return lambda inventory: list(verbatim_routes(inventory.table.deployments))
    if profile is None or profile.inferred:
        raise UsageError(
            f"{source.url}: keys or bytes are to change, and only a profile says what they mean: "
            "give --profile, or --model-config"
        )
    plan = transfer_plan(profile, source.grammar, target or profile, grammar)
    old, new = ({o.coordinate for o in objects} for objects in (plan.sources, plan.destinations))
    if same and old & new:
        raise UsageError(
            f"{source.url}: what is written would get keys of what is read; migrate to another "
            "store, or to another --to-model or --to-tag"
        )
    return lambda inventory: [planned_route(inventory.table.deployments[0], plan)]
