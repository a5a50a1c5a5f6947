"""Page groups: which objects of each page are there, which are missing, in what state it is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.deployments import UNRESOLVED, Deployment
from hicachectl.formats.keys.labels import AMBIGUOUS
from hicachectl.page_order import page_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hicachectl.inventory import IntArray, Inventory

WHOLE, PARTIAL, ORPHAN, UNKNOWN = range(4)

UNKNOWN_BYTES = -1

_COUNTED_AT_ONCE = 1 << 20
_MOST_UNUSED = 4  # codes for each that is there

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Missing:
    """Members that groups of one deployment lack: group `groups[i]` lacks `members[i]`."""

    deployment_id: int
    deployment: Deployment
    groups: IntArray
    members: IntArray


@dataclass(frozen=True, slots=True)
class ObjectSet:
    """Members of a deployment that a page has all of: a column of `present` and `expected`."""

    pool: str
    members: IntArray
    trailing: bool
    listed: bool
    anchor: bool


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
        self._sets = [_object_sets(deployment) for deployment in table.deployments]
        in_group = ~inventory.is_foreign
        ranks, distinct = page_ranks(inventory, in_group)
        # In place: with millions of objects every further array would be felt.
        codes = self._deployments_of(np.flatnonzero(in_group))
        codes -= UNRESOLVED
        codes *= distinct
        codes += ranks
        numbers, first = _numbered(codes, (len(table.deployments) - UNRESOLVED) * distinct)
        del codes
        self.of_object: IntArray = np.full(len(in_group), -1, dtype=np.int64)
        self.of_object[in_group] = numbers
        self.page_ids: IntArray = ranks[first]
        self._rows: IntArray = np.flatnonzero(in_group)[first]  # the first object of each
        del numbers, ranks, in_group
        self.deployment_ids: IntArray = self._deployments_of(self._rows)

    def __len__(self) -> int:
        return len(self.page_ids)

    @property
    def pages(self) -> pa.StringArray:
        """The page hash of each group."""
        return self.pages_at(slice(None))

    def pages_at(self, groups: IntArray | slice) -> pa.StringArray:
        """Give the page hash of some groups."""
        return self._inventory.pages(self._rows[groups]).combine_chunks()

    def owners(self, keys: pa.BinaryArray) -> IntArray:
        """Return the group of the object with each key if two models have such keys, else -1."""
        of_group = np.full(len(keys), -1, dtype=np.int64)
        rows = self._inventory.split_rows
        if len(rows):
            there = self._inventory.take(rows, ["key"]).column("key").combine_chunks()
            at = pc.index_in(keys, value_set=there)
            known = at.is_valid().to_numpy(zero_copy_only=False)
            of_group[known] = self.of_object[rows[at.drop_null().to_numpy()]]
        return of_group

    def _deployments_of(self, objects: IntArray) -> IntArray:
        """Say which deployment each of some objects is of."""
        table = self._inventory.table
        of_affix = np.array([*table.deployment_ids, UNRESOLVED], dtype=np.int64)
        deployments: IntArray = of_affix[self._inventory.affix_ids[objects]]
        return deployments

    def _members_of(self, objects: IntArray) -> IntArray:
        """Say which member of its deployment each of some objects is, UNRESOLVED for none."""
        table = self._inventory.table
        of_affix = np.array([*table.member_ids, UNRESOLVED], dtype=np.int64)
        members: IntArray = of_affix[self._inventory.affix_ids[objects]]
        return members

    @cached_property
    def nbytes(self) -> IntArray:
        """Bytes of each group's objects; UNKNOWN_BYTES where the size of one is not known."""
        nbytes = self._reduce(np.add, "nbytes")
        sizes = self._inventory.objects.column("nbytes")
        if sizes.null_count:
            owners = self.of_object[sizes.is_null().to_numpy()]
            nbytes[owners[owners >= 0]] = UNKNOWN_BYTES
        return nbytes

    def total_bytes(self, groups: IntArray) -> int | None:
        """Sum the bytes of some groups; None where that of one is not known."""
        nbytes = self.nbytes[groups]
        return None if (nbytes == UNKNOWN_BYTES).any() else int(nbytes.sum())

    @cached_property
    def newest_ns(self) -> IntArray:
        """Mtime of each group's newest object, Unix nanoseconds; 0 where the store keeps none."""
        if not self.has_times:
            return np.zeros(len(self), dtype=np.int64)
        return self._reduce(np.maximum, "mtime_ns")

    @property
    def has_times(self) -> bool:
        """Whether the store says when objects were written."""
        times = self._inventory.objects.column("mtime_ns")
        return bool(times.null_count < len(times))

    def _reduce(self, function: np.ufunc, column: str) -> IntArray:
        if not len(self):
            return np.zeros(0, dtype=np.int64)
        values = self._inventory.objects.column(column).fill_null(0).to_numpy()
        grouped = np.flatnonzero(self.of_object >= 0)
        grouped = grouped[np.argsort(self.of_object[grouped], kind="stable")]
        starts = np.searchsorted(self.of_object[grouped], np.arange(len(self)))
        reduced: IntArray = function.reduceat(values[grouped], starts)
        return reduced

    @property
    def object_sets(self) -> list[list[ObjectSet]]:
        """For each deployment its object sets, in the columns of `present`."""
        return self._sets

    @property
    def labels(self) -> list[str]:
        """The distinct labels that `label_ids` count; the first is that of ambiguous keys."""
        return self._labelled[0]

    @property
    def label_ids(self) -> IntArray:
        """The label of each group: what its keys show of its deployment, as in `ls`."""
        return self._labelled[1]

    @cached_property
    def _labelled(self) -> tuple[list[str], IntArray]:
        codec = self._inventory.table.codec
        numbers = {AMBIGUOUS: 0}
        of_deployment = [0] * (len(self.deployments) - UNRESOLVED)
        apart: list[tuple[int, IntArray]] = []  # deployments with sets of other labels
        for number, deployment in enumerate(self.deployments):
            firsts = (deployment.members[s.members[0]] for s in self._sets[number])
            labels = [deployment.label(codec, [first]) for first in firsts]
            own = deployment.label(codec)
            ids = [numbers.setdefault(label, len(numbers)) for label in (own, *labels)]
            of_deployment[number] = ids[0]
            if len(set(ids)) > 1:
                apart.append((number, np.array(ids[1:], dtype=np.int64)))
        label_ids: IntArray = np.array(of_deployment, dtype=np.int64)[self.deployment_ids]
        for number, of_set in apart:
            groups = np.flatnonzero(self.deployment_ids == number)
            present = self.present[groups, : len(of_set)] > 0
            lone = ~present[:, of_set == of_deployment[number]].any(axis=1)
            label_ids[groups[lone]] = of_set[present[lone].argmax(axis=1)]
        return list(numbers), label_ids

    @cached_property
    def present(self) -> npt.NDArray[np.int32]:
        """[groups, object sets] how many members of each set are there."""
        width = max(map(len, self._sets), default=0)
        starts = np.cumsum([0, *(len(d.members) for d in self.deployments)])
        column_of = np.zeros(starts[-1], dtype=np.int64)  # of each member of each deployment
        for start, sets in zip(starts.tolist(), self._sets, strict=False):
            for column, object_set in enumerate(sets):
                column_of[start + object_set.members] = column
        counts = np.zeros(len(self) * width, dtype=np.int32)
        for start in range(0, len(self.of_object), _COUNTED_AT_ONCE):
            objects = np.arange(start, min(start + _COUNTED_AT_ONCE, len(self.of_object)))
            groups, members = self.of_object[objects], self._members_of(objects)
            resolved = (groups >= 0) & (members >= 0)
            groups, members = groups[resolved], members[resolved]
            columns = column_of[starts[self.deployment_ids[groups]] + members]
            np.add.at(counts, groups * width + columns, 1)
        return counts.reshape(len(self), width)

    @cached_property
    def expected(self) -> npt.NDArray[np.int32]:
        """[groups, object sets] how many a page must have; 0 for a trailing set that is absent."""
        full = self._per_set(lambda s: len(s.members) if s.listed else 0)
        absent = self._per_set(lambda s: s.trailing).astype(np.bool_) & (self.present == 0)
        return np.where(absent, 0, full).astype(np.int32)

    @cached_property
    def states(self) -> npt.NDArray[np.int8]:
        """WHOLE, PARTIAL, ORPHAN or UNKNOWN for each group."""
        listed = self._per_set(lambda s: s.listed).astype(np.bool_)
        whole = ((self.present == self.expected) | ~listed).all(axis=1)
        states = np.where(whole, WHOLE, PARTIAL).astype(np.int8)
        is_anchor = self._per_set(lambda s: s.anchor).astype(np.bool_)
        has_anchor = (is_anchor & (self.present > 0)).any(axis=1)
        can_lose = np.array([_can_be_orphan(d) for d in self.deployments] + [False])
        states[~has_anchor & can_lose[self.deployment_ids]] = ORPHAN
        states[self.deployment_ids == UNRESOLVED] = UNKNOWN
        return states

    def _per_set(self, value: Callable[[ObjectSet], int]) -> npt.NDArray[np.int32]:
        """Spread a value of object sets: [groups, object sets], 0 in columns a group lacks."""
        table = np.zeros((len(self._sets) + 1, self.present.shape[1]), dtype=np.int32)
        for number, sets in enumerate(self._sets):
            table[number, : len(sets)] = [value(object_set) for object_set in sets]
        return table[self.deployment_ids]

    def present_members(self, deployment_id: int, groups: IntArray) -> BoolArray:
        """Say which members of a deployment the given groups have: [groups, members]."""
        position = np.full(len(self) + 1, -1, dtype=np.int64)
        position[groups] = np.arange(len(groups))
        objects = np.flatnonzero(position[self.of_object] >= 0)
        members = len(self.deployments[deployment_id].members)
        present = np.zeros((len(groups), members), dtype=np.bool_)
        present[position[self.of_object[objects]], self._members_of(objects)] = True
        return present

    def missing(self) -> Iterator[Missing]:
        """List what groups that are not whole lack, a deployment at a time."""
        incomplete = (self.states == PARTIAL) | (self.states == ORPHAN)
        for number, deployment in enumerate(self.deployments):
            groups = np.flatnonzero(incomplete & (self.deployment_ids == number))
            if not len(groups):
                continue
            lacking = ~self.present_members(number, groups)
            for column, object_set in enumerate(self._sets[number]):
                not_due = self.expected[groups, column] == 0
                lacking[np.ix_(not_due, object_set.members)] = False
            rows, columns = np.nonzero(lacking)
            yield Missing(number, deployment, groups[rows], columns.astype(np.int64))

    def keys_of(self, missing: Missing) -> pa.BinaryArray:
        """Spell the missing keys, exactly as the server would have written them."""
        members = pa.array(missing.members)
        before = pa.array([m.affix[0] for m in missing.deployment.members], pa.string())
        after = pa.array([m.affix[1] for m in missing.deployment.members], pa.string())
        pages = self.pages_at(missing.groups)
        return pc.cast(
            pc.binary_join_element_wise(before.take(members), pages, after.take(members), ""),
            pa.binary(),
        )


def _numbered(codes: IntArray, limit: int) -> tuple[IntArray, IntArray]:
    """Give each row the number of its code, in the order of codes, and each code its first row.

    limit: above all codes, none of which is negative.
    """
    if limit > _MOST_UNUSED * len(codes):
        _, first, numbers = np.unique(codes, return_index=True, return_inverse=True)
        return numbers, first
    used = np.zeros(limit, dtype=np.bool_)  # this many codes need no sort
    used[codes] = True
    numbers = (np.cumsum(used) - 1)[codes]
    first = np.zeros(np.count_nonzero(used), dtype=np.int64)
    first[numbers[::-1]] = np.arange(len(codes))[::-1]  # of equal ones the last stays
    return numbers, first


def _object_sets(deployment: Deployment) -> list[ObjectSet]:
    members: dict[object, list[int]] = {}
    for number, member in enumerate(deployment.members):
        members.setdefault(member.object_set, []).append(number)
    sets = []
    for numbers in members.values():
        first = deployment.members[numbers[0]]
        positions = np.array(numbers, dtype=np.int64)
        sets.append(
            ObjectSet(first.coordinate.pool, positions, first.trailing, first.listed, first.anchor)
        )
    return sets


def _can_be_orphan(deployment: Deployment) -> bool:
    """Tell whether sidecars can lose their anchor: not where one of them stands in for kv."""
    anchors = [member for member in deployment.members if member.anchor]
    return not anchors or anchors[0].coordinate.pool == "kv"
