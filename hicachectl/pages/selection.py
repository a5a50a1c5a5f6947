"""Filters on page groups: one class for every command."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc

from hicachectl.formats.errors import UsageError
from hicachectl.formats.objects import AXES
from hicachectl.pages.group_table import PARTIAL
from hicachectl.pages.groups import PageGroups
from hicachectl.pages.page_lists import NamedGroups, PageList
from hicachectl.text.vocabulary import STATES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicachectl.formats.arrays import BoolArray
    from hicachectl.pages.deployments import Deployment
    from hicachectl.pages.inventory import Inventory

_HEX = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Filters on page groups: a group is selected if it fits all that are given, as a whole.

    model: served name; "/" and "-" are equal.
    tag: tag of Mooncake keys; "" selects groups without one.
    tp, pp, cp, dcp: sizes of the deployment, as `ls` shows them.
    pool: selects groups with an object of the pool.
    page: prefix of page hashes.
    since: Unix seconds; the newest object of a group is not older.
    before: Unix seconds; the newest object of a group is older.
    states: names in `vocabulary.STATES`. With a profile, only its own groups can be partial: the
        specs of other deployments are inferred, so one stray object makes all their pages partial.
    pages: pages or groups that a list names.
    Raises UsageError for an empty text, which a script with an unset variable gives, and for a
    prefix that is not hexadecimal.
    """

    model: str | None = None
    tag: str | None = None
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    dcp: int | None = None
    pool: str | None = None
    page: str | None = None
    since: float | None = None
    before: float | None = None
    states: tuple[str, ...] = ()
    pages: PageList | None = None

    def __post_init__(self) -> None:
        for name in ("model", "pool", "page"):
            text = getattr(self, name)
            if text is not None and not text.strip():
                raise UsageError(f"{name}: empty; give a {name}, or leave it out")
        if self.page is not None and not _HEX.issuperset(self.page.lower()):
            raise UsageError(f"Page prefix {self.page!r}: must be hexadecimal digits")

    def __bool__(self) -> bool:
        return self != EVERYTHING

    @property
    def names_deployment(self) -> bool:
        """Whether a filter on the deployment is given."""
        asked = (self.model, self.tag, *(getattr(self, axis) for axis in AXES))
        return any(value is not None for value in asked)

    def fits(self, deployment: Deployment, sizes: Mapping[str, int] | None = None) -> bool:
        """Return whether a deployment fits.

        sizes: size of each axis; None for those that `ls` shows.
        """
        model, tag = deployment.names
        if self.model is not None and model != self.model.replace("/", "-"):
            return False
        if sizes is None:
            sizes = {axis: getattr(deployment.shard, f"{axis}_size") for axis in AXES}
        wanted = ((getattr(self, axis), sizes[axis]) for axis in AXES)
        return self.tag in (None, tag) and all(n in (None, size) for n, size in wanted)

    def chosen(self, groups: PageGroups) -> BoolArray:
        """Return which groups are selected: [groups].

        Raises UsageError if `since` or `before` is given and the store keeps no times.
        """
        chosen = np.ones(len(groups), dtype=np.bool_)
        if self.names_deployment:
            fitting = [self.fits(deployment) for deployment in groups.deployments]
            chosen &= np.array([*fitting, False])[groups.deployment_ids]
        if self.page is not None:
            chosen &= pc.starts_with(groups.pages, self.page.lower()).to_numpy(zero_copy_only=False)
        for option, moment in (("--since", self.since), ("--before", self.before)):
            if moment is None:
                continue
            if len(groups) and not groups.has_times:
                raise no_times(option)
            older = groups.newest_ns < int(moment * 1e9)
            chosen &= (groups.newest_ns > 0) & (older if option == "--before" else ~older)
        if self.states:
            chosen &= np.isin(groups.states, [STATES.index(state) for state in self.states])
            chosen &= ~unjudged_partial(groups)
        if self.pool is not None:
            chosen &= groups.having(self.pool)
        if self.pages is not None:
            chosen &= NamedGroups(self.pages, groups).chosen
        return chosen

    def unjudged(self, groups: PageGroups) -> int:
        """Return how many groups look partial, but are not selected as such."""
        if STATES[PARTIAL] not in self.states:
            return 0
        unjudged = unjudged_partial(groups) & replace(self, states=()).chosen(groups)
        return int(unjudged.sum())

    def alone(self) -> dict[str, Selection]:
        """Return each filter that is given, by itself. Keys: the filters on a command line."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            _option_text(name, value): Selection(**{name: value})
            for name, value in given.items()
            if value != getattr(EVERYTHING, name)
        }


EVERYTHING = Selection()


def select(inventory: Inventory, selection: Selection) -> Inventory:
    """Return the inventory of the selected groups. Raises UsageError as `Selection.chosen`."""
    if not selection:
        return inventory
    groups = PageGroups(inventory)
    return inventory.only(groups.rows_in(selection.chosen(groups)))


def no_times(option: str) -> UsageError:
    """Return the refusal of an option about times for a store that keeps none."""
    return UsageError(f"{option}: the store keeps no timestamps; leave out {option}")


def unjudged_partial(groups: PageGroups) -> BoolArray:
    """Return which groups look partial, but are of other deployments than the profile's: [groups].

    Without a profile, groups of all deployments are judged alike.
    """
    profiled = np.array([*(d.profile is not None for d in groups.deployments), False])
    if not profiled.any():
        return np.zeros(len(groups), dtype=np.bool_)
    unjudged: BoolArray = (groups.states == PARTIAL) & ~profiled[groups.deployment_ids]
    return unjudged


def _option_text(name: str, value: Any) -> str:
    """Return a filter as on the command line; times and lists without value."""
    if name == "tag" and not value:
        return "--no-tag"
    if name in ("since", "before", "pages"):
        return f"--{name}"
    if name == "states":
        return f"--state {','.join(value)}"
    return f"--{name} {value}"
