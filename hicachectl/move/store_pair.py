"""Pairs of stores: what is copied between them, and what the destination has of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicachectl.backends.capabilities import Archive, Losing, Mounted, Profiled
from hicachectl.formats.errors import StoreUnavailable, UsageError
from hicachectl.formats.transfer import transfer_plan
from hicachectl.formats.wording import inferred_refused, one_place
from hicachectl.move.destination import refuse_destination, refuse_other_owner, survey_destination
from hicachectl.move.routes import planned_route, verbatim_routes
from hicachectl.move.survey import survey_source

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from hicachectl.backends.base import Store
    from hicachectl.formats.profile import Profile
    from hicachectl.formats.transfer import TransferPlan
    from hicachectl.move.routes import Route
    from hicachectl.move.survey import Survey
    from hicachectl.pages.deployments import AffixTable
    from hicachectl.pages.groups import PageGroups
    from hicachectl.pages.inventory import Inventory


class StorePair:
    """A source, a destination, and the transfer between them.

    profile: profile of the source; None if only its keys are known.
    target: profile of the destination; None for the source's.
    grammar: grammar of the keys to write: the destination's, or the source's for a new pack.
    """

    def __init__(
        self, source: Store, destination: Store, profile: Profile | None, target: Profile | None
    ) -> None:
        """Plan the transfer; set the destination's grammar and profile.

        Raises UsageError, ProfileError or UnsupportedByBackend if that is impossible, and
        StoreUnavailable.
        """
        self.source = source
        self.destination = destination
        self.profile = profile
        self.target = target
        self.grammar = destination.grammar
        if isinstance(destination, Archive):
            if destination.open_grammar:
                self.grammar = source.grammar
            destination.use_grammar(self.grammar)
        self._shared = _shared_places(source, destination)
        # Whether an object can have the same key in both stores.
        self._keeps_keys = True
        self._plan = self._planned()
        if target is not None and isinstance(destination, Profiled):
            destination.use_profile(target)
        refuse_other_owner(destination, target)

    def refuse_removals(self, option: str) -> None:
        """Raise UsageError if an option could remove objects that both stores have."""
        if self.unchanged and self._shared:
            raise UsageError(
                f"{self.source.url}: has objects of {self.destination.url}, which {option} would "
                f"remove; leave out {option}"
            )

    def refuse_one_place(self, changed: Store, option: str) -> None:
        """Raise StoreUnavailable if a new file in one store shows in the other.

        Different device numbers prove nothing: mounts give one directory several.
        changed: the store from which an option would remove objects that the other store has.
        """
        other = self.destination if changed is self.source else self.source
        if not (self._keeps_keys and isinstance(changed, Mounted) and isinstance(other, Mounted)):
            return
        with changed.probe() as name:
            if other.shows(name):
                evidence = f"a new file of {changed.url} is also in {other.url}"
                raise StoreUnavailable(one_place(self.source.url, evidence, option))

    def claim(self) -> None:
        """Name the deployment to write in a destination whose keys do not, before the first write.

        Raises ProfileError if the destination has pages of another one, StoreUnavailable.
        """
        refuse_other_owner(self.destination, self.target, claims=True)

    @property
    def remarks(self) -> list[str]:
        """Report objects of the destination that lie where no server looks for them."""
        destination = self.destination
        return [str(loss) for loss in destination.losses] if isinstance(destination, Losing) else []

    @property
    def unchanged(self) -> bool:
        """Whether all objects keep key and bytes."""
        return self._plan is None

    def _planned(self) -> TransferPlan | None:
        """Return a page's transfer; None if all objects keep key and bytes."""
        source, profile = self.source, self.profile
        same = self._shared and source.places == self.destination.places
        if self.target in (None, profile) and self.grammar == source.grammar:
            if same:
                raise UsageError(
                    f"{source.url}: source and destination are the same, and the pages would "
                    "not change; to convert pages inside a store, give --profile of the servers "
                    "that wrote them and another --to-tp or --to-profile; else give another "
                    "destination"
                )
            return None
        if profile is None or profile.inferred:
            raise UsageError(f"{source.url}: {inferred_refused('changing keys or bytes')}")
        plan = transfer_plan(profile, source.grammar, self.target or profile, self.grammar)
        old, new = ({o.coordinate for o in objs} for objs in (plan.sources, plan.destinations))
        self._keeps_keys = self.grammar == source.grammar and not old.isdisjoint(new)
        if self._shared and old & new:
            raise UsageError(
                f"{source.url}: the new objects would have the keys of the objects being read; "
                "migrate to another store, or give another --to-model or --to-tag"
            )
        return plan

    def routes(self, table: AffixTable) -> list[Route]:
        """Return the route of each deployment to copy."""
        if self._plan is not None:
            return [planned_route(table.deployments[0], self._plan)]
        return list(verbatim_routes(table.deployments))

    def refuse_destination(
        self, table: AffixTable, *, on_batch: Callable[[int], None] = lambda objects: None
    ) -> None:
        """Raise ProfileError as `survey` does. table: affixes of the source."""
        refuse_destination(self.destination, self.routes(table), self.grammar, on_batch=on_batch)

    def survey(
        self,
        inventory: Inventory,
        groups: PageGroups,
        *,
        first_only: bool = False,
        asks: bool = False,
        on_batch: Callable[[int], None] = lambda objects: None,
    ) -> list[Survey]:
        """Survey the groups of each deployment in both stores, or of the first only.

        asks: ask the destination for each object, instead of listing it.

        Raises ProfileError if a listing shows that the destination has objects of another topology
        under the same keys, StoreUnavailable.
        """
        routes = self.routes(inventory.table)
        surveys = survey_source(inventory, groups, routes[:1] if first_only else routes)
        return survey_destination(
            self.destination, surveys, self.grammar, asks=asks, on_batch=on_batch
        )


def _shared_places(source: Store, destination: Store) -> set[Hashable]:
    # One class can add abilities to another: NIXL stores with and without side files.
    if not (isinstance(source, type(destination)) or isinstance(destination, type(source))):
        return set()
    return set(source.places) & set(destination.places)
