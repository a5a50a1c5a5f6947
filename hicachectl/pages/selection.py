"""Filters on page groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.compute as pc

from hicachectl.formats.errors import UsageError
from hicachectl.pages.groups import BoolArray, PageGroups
from hicachectl.text.vocabulary import STATES

if TYPE_CHECKING:
    from hicachectl.pages.inventory import Inventory


@dataclass(frozen=True, slots=True)
class Selection:
    """Filters on page groups; None selects everything, and so does an empty tuple.

    model: served name; "/" and "-" are equal. page: a prefix of page hashes. since, before:
    Unix seconds; a group is selected if its newest object is not older, or is older. pool: selects
    whole groups with an object of the pool. states: names in `vocabulary.STATES`.
    Raises UsageError for an empty text, which a script with an unset variable gives.
    """

    model: str | None = None
    pool: str | None = None
    page: str | None = None
    since: float | None = None
    before: float | None = None
    states: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("model", "pool", "page"):
            text = getattr(self, name)
            if text is not None and not text.strip():
                raise UsageError(f"{name}: empty; give a {name}, or leave it out")

    def __bool__(self) -> bool:
        return self != EVERYTHING


EVERYTHING = Selection()


def select(inventory: Inventory, selection: Selection) -> Inventory:
    """Return the inventory of the selected groups.

    Raises UsageError if the page prefix is not hexadecimal, or if `since` or `before` is given and
    the store keeps no times.
    """
    if not selection:
        return inventory
    groups = PageGroups(inventory)
    return inventory.only(groups.rows_in(_chosen(groups, inventory, selection)))


def _chosen(groups: PageGroups, inventory: Inventory, selection: Selection) -> BoolArray:
    chosen = np.ones(len(groups), dtype=np.bool_)
    if selection.model is not None:
        model = selection.model.replace("/", "-")
        named = [deployment.model == model for deployment in groups.deployments]
        chosen &= np.array([*named, False])[groups.deployment_ids]
    if selection.page is not None:
        prefix = selection.page.lower()
        if not set(prefix) <= set("0123456789abcdef"):
            raise UsageError(f"Page prefix {selection.page!r}: must be hexadecimal digits")
        chosen &= pc.starts_with(groups.pages, prefix).to_numpy(zero_copy_only=False)
    for option, moment in (("--since", selection.since), ("--before", selection.before)):
        if moment is None:
            continue
        if len(groups) and not groups.has_times:
            raise UsageError(f"{option}: the store keeps no timestamps; leave out {option}")
        older = groups.newest_ns < int(moment * 1e9)
        chosen &= older if option == "--before" else ~older
    if selection.states:
        wanted = [STATES.index(state) for state in selection.states]
        chosen &= np.isin(groups.states, wanted)
    if selection.pool is not None:
        rows = np.flatnonzero(inventory.of_pool(selection.pool))
        has_pool = np.zeros(len(groups) + 1, dtype=np.bool_)
        has_pool[groups.of_object[rows]] = True
        chosen &= has_pool[:-1]
    return chosen
