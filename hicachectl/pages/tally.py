"""Counts of a store, for texts. The counts of its parts add up to the counts of the store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import pyarrow.compute as pc

from hicachectl.formats.arrays import Count  # noqa: TC001 - msgspec reads it
from hicachectl.formats.errors import FormatError
from hicachectl.formats.forms import convert
from hicachectl.pages.census import MOST_BYTES, Census, byte_sums
from hicachectl.pages.deployments import UNRESOLVED
from hicachectl.text.vocabulary import STATES

if TYPE_CHECKING:
    from hicachectl.formats.arrays import IntArray
    from hicachectl.pages.deployments import AffixTable
    from hicachectl.pages.groups import PageGroups
    from hicachectl.pages.inventory import Inventory

# First and last write in a store that keeps no times.
NO_OLDEST, NO_NEWEST = np.iinfo(np.int64).max, 0
_ARRAYS = ("objects", "unsized", "states", "nbytes", "oldest_ns", "newest_ns")
_Time = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class _TallyForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    objects: list[Count]
    unsized: list[Count]
    first_keys: list[tuple[Count, bytes]]
    pages: Count
    states: list[tuple[Count, Count, Count, Count]]
    nbytes: list[Count]
    oldest_ns: list[_Time]
    newest_ns: list[_Time]


@dataclass(frozen=True, slots=True, eq=False)
class Tally:
    """Counts of some objects and their page groups. `+` adds the counts of other pages.
    objects: [affixes + 1] objects of each affix; the last entry is for foreign keys.
    unsized: [affixes + 1] objects without a listed size.
    first_keys: the smallest key of each ambiguous affix.
    pages: number of distinct pages.
    states: [deployments + 1, 4] groups by state; the last row is for groups of ambiguous keys.
    nbytes: [deployments + 1] listed bytes.
    oldest_ns, newest_ns: [deployments + 1] first and last write, Unix nanoseconds; NO_OLDEST and
        NO_NEWEST if not known.
    """

    objects: IntArray
    unsized: IntArray
    first_keys: dict[int, bytes]
    pages: int
    states: IntArray
    nbytes: IntArray
    oldest_ns: IntArray
    newest_ns: IntArray

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
            nbytes=np.minimum(self.nbytes + other.nbytes, MOST_BYTES),
            oldest_ns=np.minimum(self.oldest_ns, other.oldest_ns),
            newest_ns=np.maximum(self.newest_ns, other.newest_ns),
        )

    @classmethod
    def nothing(cls, table: AffixTable) -> Tally:
        """Return the counts of no objects."""
        of_affixes = np.zeros(len(table.affixes) + 1, dtype=np.int64)
        states = np.zeros((len(table.deployments) + 1, len(STATES)), dtype=np.int64)
        zeros = np.zeros(len(states), dtype=np.int64)
        times = zeros + NO_OLDEST, zeros + NO_NEWEST
        return cls(of_affixes, of_affixes, {}, 0, states, zeros, *times)

    def to_mapping(self) -> dict[str, Any]:
        """Return the counts for JSON."""
        arrays = {name: getattr(self, name).tolist() for name in _ARRAYS}
        form = _TallyForm(first_keys=list(self.first_keys.items()), pages=self.pages, **arrays)
        mapping: dict[str, Any] = msgspec.to_builtins(form)
        return mapping

    @classmethod
    def from_mapping(cls, mapping: Any, table: AffixTable, source: str) -> Tally:
        """Return the counts that `to_mapping` wrote.

        source: name of the mapping, for messages.
        Raises FormatError if the mapping does not fit the table.
        """
        form = convert(mapping, _TallyForm, source)
        nothing = cls.nothing(table)
        arrays = {name: np.array(getattr(form, name), np.int64) for name in _ARRAYS}
        if any(arrays[name].shape != getattr(nothing, name).shape for name in _ARRAYS):
            raise FormatError(f"{source}: has counts of other affixes or deployments")
        counted = zip(table.resolved, form.objects, strict=False)  # the last is for foreign keys
        ambiguous = [
            affix for affix, (one, objects) in enumerate(counted) if one.ambiguous and objects
        ]
        if sorted(first_keys := dict(form.first_keys)) != ambiguous:
            raise FormatError(f"{source}: has the first keys of other affixes")
        return cls(first_keys=first_keys, pages=form.pages, **arrays)

    @property
    def groups(self) -> int:
        """Number of page groups."""
        return int(self.states.sum())


def object_counts(inventory: Inventory) -> IntArray:
    """Return the number of objects of each affix, [affixes + 1]; the last is for foreign keys."""
    return _by_affix(inventory, inventory.affix_ids)


def tally_of(groups: PageGroups) -> Tally:
    """Count page groups, and the objects of their inventory."""
    inventory = groups.inventory
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
        **_sums(inventory),
    )


def _sums(inventory: Inventory) -> dict[str, IntArray]:
    """Return the bytes and the write times of each deployment, [deployments + 1]."""
    table = inventory.table
    of_affix = np.array([*table.deployment_ids, UNRESOLVED], dtype=np.int64)
    census = Census.of(inventory.objects, inventory.affix_ids)
    count = len(table.deployments) + 1
    which = of_affix[census.affixes] % count
    sizes = np.maximum(census.sizes, 0) * census.objects.astype(np.float64)
    oldest_ns, newest_ns = np.full(count, NO_OLDEST), np.full(count, NO_NEWEST)
    oldest, newest = (
        census.counts.column(name).fill_null(0).to_numpy() for name in ("oldest_ns", "newest_ns")
    )
    np.minimum.at(oldest_ns, which, np.where(oldest == 0, NO_OLDEST, oldest))
    np.maximum.at(newest_ns, which, newest)
    nbytes = byte_sums(sizes, which, count)
    return {"nbytes": nbytes, "oldest_ns": oldest_ns, "newest_ns": newest_ns}


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
