"""Counts of a store that texts about the whole store need, as sums over its parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow.compute as pc

from hicachectl.formats.errors import FormatError
from hicachectl.formats.forms import convert
from hicachectl.io.table_files import Count  # noqa: TC001 - msgspec reads it
from hicachectl.text.vocabulary import STATES

if TYPE_CHECKING:
    from hicachectl.pages.deployments import AffixTable
    from hicachectl.pages.groups import PageGroups
    from hicachectl.pages.inventory import IntArray, Inventory


class _TallyForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    objects: list[Count]
    unsized: list[Count]
    first_keys: list[tuple[Count, bytes]]
    pages: Count
    states: list[list[Count]]


@dataclass(frozen=True, slots=True, eq=False)
class Tally:
    """Counts of some objects and their page groups; `+` adds those of other pages.

    objects, unsized: [affixes + 1] objects of each affix, and those without a listed size; the last
    entry is for foreign keys. first_keys: the smallest key of each ambiguous affix. pages: distinct
    pages. states: [deployments + 1, 4] groups by state; the last row is for groups of ambiguous
    keys.
    """

    objects: IntArray
    unsized: IntArray
    first_keys: dict[int, bytes]
    pages: int
    states: IntArray

    def __add__(self, other: Tally) -> Tally:
        first_keys = dict(self.first_keys)
        for affix, key in other.first_keys.items():
            first_keys[affix] = min(key, first_keys.get(affix, key))
        return Tally(
            objects=self.objects + other.objects,
            unsized=self.unsized + other.unsized,
            first_keys=first_keys,
            pages=self.pages + other.pages,
            states=self.states + other.states,
        )

    @classmethod
    def nothing(cls, table: AffixTable) -> Tally:
        """Return the counts of no objects."""
        of_affixes = np.zeros(len(table.affixes) + 1, dtype=np.int64)
        states = np.zeros((len(table.deployments) + 1, len(STATES)), dtype=np.int64)
        return cls(of_affixes, of_affixes, {}, 0, states)

    def to_mapping(self) -> dict[str, Any]:
        """Return the counts for JSON."""
        form = _TallyForm(
            objects=self.objects.tolist(),
            unsized=self.unsized.tolist(),
            first_keys=list(self.first_keys.items()),
            pages=self.pages,
            states=self.states.tolist(),
        )
        mapping: dict[str, Any] = msgspec.to_builtins(form)
        return mapping

    @classmethod
    def from_mapping(cls, mapping: Any, table: AffixTable, source: str) -> Tally:
        """Return the counts that `to_mapping` wrote. Raises FormatError, naming the source."""
        form = convert(mapping, _TallyForm, source)
        columns = [np.array(column, np.int64) for column in (form.objects, form.unsized)]
        none = cls.nothing(table)
        if any(len(row) != len(STATES) for row in form.states) or (
            [*map(len, columns), len(form.states)]
            != [*map(len, (none.objects, none.unsized, none.states))]
        ):
            raise FormatError(f"{source}: has counts of other affixes or deployments")
        counted = zip(table.resolved, form.objects, strict=False)  # the last is for foreign keys
        ambiguous = [
            affix for affix, (one, objects) in enumerate(counted) if one.ambiguous and objects
        ]
        if sorted(first_keys := dict(form.first_keys)) != ambiguous:
            raise FormatError(f"{source}: has the first keys of other affixes")
        states = np.array(form.states, np.int64)
        return cls(columns[0], columns[1], first_keys, form.pages, states)

    @property
    def groups(self) -> int:
        """Number of page groups."""
        return int(self.states.sum())


def object_counts(inventory: Inventory) -> IntArray:
    """Return the number of objects of each affix, [affixes + 1]; the last is for foreign keys."""
    return _by_affix(inventory, inventory.affix_ids)


def tally_of(inventory: Inventory, groups: PageGroups) -> Tally:
    """Count the objects of an inventory and their groups."""
    objects = object_counts(inventory)
    without_size = inventory.objects.column("nbytes").is_null().to_numpy()
    deployments = len(groups.deployments) + 1
    codes = (groups.deployment_ids % deployments) * len(STATES) + groups.states
    counts = np.bincount(codes, minlength=deployments * len(STATES))
    return Tally(
        objects=objects,
        unsized=_by_affix(inventory, inventory.affix_ids[without_size]),
        first_keys=_first_keys(inventory, objects),
        pages=int(np.count_nonzero(np.bincount(groups.page_ids))),
        states=counts.reshape(deployments, len(STATES)),
    )


def _by_affix(inventory: Inventory, affix_ids: np.ndarray) -> IntArray:
    count = len(inventory.table.affixes)
    shifted: IntArray = np.bincount(affix_ids + 1, minlength=count + 1)
    return np.roll(shifted, -1)


def _first_keys(inventory: Inventory, objects: IntArray) -> dict[int, bytes]:
    found = {}
    for affix, resolved in enumerate(inventory.table.resolved):
        if resolved.ambiguous and objects[affix]:
            rows = np.flatnonzero(inventory.affix_ids == affix)
            found[affix] = pc.min(inventory.take(rows, ["key"]).column("key")).as_py()
    return found
