"""Page groups: which objects of each page are there, which are missing, in what state it is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.deployments import UNRESOLVED, Deployment, Member

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.inventory import IntArray, Inventory

WHOLE, PARTIAL, ORPHAN, UNKNOWN = range(4)
STATES = ("whole", "partial", "orphan", "unknown")

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Missing:
    """Members that groups of one deployment lack: group `groups[i]` lacks `members[i]`."""

    deployment: Deployment
    groups: IntArray
    members: IntArray


class PageGroups:
    """The objects of an inventory, grouped by page and deployment.

    A group is a row number 0..len-1, ordered by deployment and then page; all arrays are indexed
    by it unless they say otherwise. Objects whose key is ambiguous form groups of their own per
    page, in state unknown; foreign objects are in no group (-1).
    """

    def __init__(self, inventory: Inventory) -> None:
        table = inventory.table
        self._inventory = inventory
        self.deployments = table.deployments
        pages = pc.dictionary_encode(inventory.objects.column("page").combine_chunks())
        self._distinct_pages = pages.dictionary
        order = np.argsort(pc.array_sort_indices(pages.dictionary).to_numpy()).astype(np.int64)
        page_ids = pages.indices.fill_null(0).to_numpy().astype(np.int64)
        deployment_ids = inventory.by_affix(table.deployment_ids, UNRESOLVED)
        in_group = inventory.by_affix(tuple(bool(r.readings) for r in table.resolved), False) != 0
        ranked = deployment_ids * max(len(order), 1) + order[page_ids] if len(order) else page_ids
        _codes, first, inverse = np.unique(ranked[in_group], return_index=True, return_inverse=True)
        self.of_object: IntArray = np.full(len(page_ids), -1, dtype=np.int64)
        self.of_object[in_group] = inverse
        rows = np.flatnonzero(in_group)[first]
        self.page_ids: IntArray = page_ids[rows]
        self.deployment_ids: IntArray = deployment_ids[rows]
        self._member_ids = inventory.by_affix(table.member_ids, UNRESOLVED)

    def __len__(self) -> int:
        return len(self.page_ids)

    @property
    def pages(self) -> pa.StringArray:
        """The page hash of each group."""
        return self._distinct_pages.take(pa.array(self.page_ids))

    @cached_property
    def nbytes(self) -> IntArray:
        """Bytes of each group's objects."""
        return self._reduce(np.add, "nbytes")

    @cached_property
    def newest_ns(self) -> IntArray:
        """Mtime of each group's newest object, Unix nanoseconds; 0 where the store keeps none."""
        return self._reduce(np.maximum, "mtime_ns")

    def _reduce(self, function: np.ufunc, column: str) -> IntArray:
        if not len(self):
            return np.zeros(0, dtype=np.int64)
        values = self._inventory.objects.column(column).fill_null(0).to_numpy()
        grouped = np.flatnonzero(self.of_object >= 0)
        grouped = grouped[np.argsort(self.of_object[grouped], kind="stable")]
        starts = np.searchsorted(self.of_object[grouped], np.arange(len(self)))
        reduced: IntArray = function.reduceat(values[grouped], starts)
        return reduced

    @cached_property
    def object_sets(self) -> tuple[tuple[str, ...], ...]:
        """For each deployment the pools of its object sets, in the columns of `present`."""
        return tuple(tuple(pool for pool, _ in _sets(d)) for d in self.deployments)

    @cached_property
    def present(self) -> npt.NDArray[np.int32]:
        """[groups, object sets] how many members of each set are there."""
        width = max((len(sets) for sets in self.object_sets), default=0)
        # One lookup per (deployment, member), flattened: Python runs per member, not per object.
        column_of = [{s: i for i, s in enumerate(_sets(d))} for d in self.deployments]
        starts = np.cumsum([0, *(len(d.members) for d in self.deployments)])
        columns = np.array(
            [column_of[n][m.object_set] for n, d in enumerate(self.deployments) for m in d.members],
            dtype=np.int64,
        )
        resolved = np.flatnonzero((self.of_object >= 0) & (self._member_ids >= 0))
        groups = self.of_object[resolved]
        flat = starts[self.deployment_ids[groups]] + self._member_ids[resolved]
        counts = np.bincount(groups * width + columns[flat], minlength=len(self) * width)
        return counts.reshape(len(self), width).astype(np.int32)

    @cached_property
    def expected(self) -> npt.NDArray[np.int32]:
        """[groups, object sets] how many a page must have; 0 for a trailing set that is absent."""
        width = self.present.shape[1]
        full = np.zeros((len(self.deployments) + 1, width), dtype=np.int32)
        trailing = np.zeros_like(full, dtype=np.bool_)
        for number, deployment in enumerate(self.deployments):
            for column, members in enumerate(_sets(deployment).values()):
                full[number, column] = len(members)
                trailing[number, column] = members[0].trailing
        absent = trailing[self.deployment_ids] & (self.present == 0)
        return np.where(absent, 0, full[self.deployment_ids]).astype(np.int32)

    @cached_property
    def states(self) -> npt.NDArray[np.int8]:
        """WHOLE, PARTIAL, ORPHAN or UNKNOWN for each group."""
        whole = (self.present == self.expected).all(axis=1)
        states = np.where(whole, WHOLE, PARTIAL).astype(np.int8)
        has_anchor = np.zeros(len(self), dtype=np.bool_)
        for column in range(self.present.shape[1]):
            anchors = [_column_is_anchor(d, column) for d in self.deployments] + [False]
            has_anchor |= np.array(anchors)[self.deployment_ids] & (self.present[:, column] > 0)
        loses_anchor = np.array([_can_be_orphan(d) for d in self.deployments] + [False])
        states[~has_anchor & loses_anchor[self.deployment_ids]] = ORPHAN
        states[self.deployment_ids == UNRESOLVED] = UNKNOWN
        return states

    def present_members(self, deployment_id: int, groups: IntArray) -> BoolArray:
        """Say which members of a deployment the given groups have: [groups, members]."""
        deployment = self.deployments[deployment_id]
        position = np.full(len(self) + 1, -1, dtype=np.int64)
        position[groups] = np.arange(len(groups))
        rows = position[self.of_object]
        wanted = rows >= 0
        present = np.zeros((len(groups), len(deployment.members)), dtype=np.bool_)
        present[rows[wanted], self._member_ids[wanted]] = True
        return present

    def missing(self) -> Iterator[Missing]:
        """List what groups that are not whole lack, a deployment at a time."""
        for number, deployment in enumerate(self.deployments):
            incomplete = (self.states == PARTIAL) | (self.states == ORPHAN)
            groups = np.flatnonzero(incomplete & (self.deployment_ids == number))
            if not len(groups):
                continue
            lacking = ~self.present_members(number, groups)
            for column, members in enumerate(_sets(deployment).values()):
                if members[0].trailing:
                    numbers = [deployment.members.index(member) for member in members]
                    absent = self.present[groups, column] == 0
                    lacking[np.ix_(absent, numbers)] = False
            rows, columns = np.nonzero(lacking)
            yield Missing(deployment, groups[rows], columns.astype(np.int64))

    def keys_of(self, missing: Missing) -> pa.BinaryArray:
        """Spell the missing keys, exactly as the server would have written them."""
        members = pa.array(missing.members)
        before = pa.array([m.affix[0] for m in missing.deployment.members], pa.string())
        after = pa.array([m.affix[1] for m in missing.deployment.members], pa.string())
        pages = self.pages.take(pa.array(missing.groups))
        return pc.cast(
            pc.binary_join_element_wise(before.take(members), pages, after.take(members), ""),
            pa.binary(),
        )


def _sets(deployment: Deployment) -> dict[tuple[str, int | None], list[Member]]:
    sets: dict[tuple[str, int | None], list[Member]] = {}
    for member in deployment.members:
        sets.setdefault(member.object_set, []).append(member)
    return sets


def _column_is_anchor(deployment: Deployment, column: int) -> bool:
    sets = list(_sets(deployment).values())
    return column < len(sets) and sets[column][0].anchor


def _can_be_orphan(deployment: Deployment) -> bool:
    """Tell whether sidecars can lose their anchor: not where one of them stands in for kv."""
    anchors = [member for member in deployment.members if member.anchor]
    return not anchors or anchors[0].coordinate.pool == "kv"
