"""Page groups: a store's objects by page and deployment, and the objects that groups lack."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.formats.keys.labels import AMBIGUOUS
from hicachectl.formats.keys.table import join_keys
from hicachectl.pages.census import byte_sum, byte_sums
from hicachectl.pages.deployments import UNRESOLVED
from hicachectl.pages.group_table import UNKNOWN, GroupTable, fill_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.pages.deployments import Deployment
    from hicachectl.pages.inventory import Inventory

UNKNOWN_BYTES = -1

_MOST_UNUSED = 4  # with more possible codes per object, a sort of codes is cheaper than marks


@dataclass(frozen=True, slots=True)
class Missing:
    """Missing objects of one deployment: group `groups[i]` lacks spec `specs[i]`."""

    deployment_id: int
    deployment: Deployment
    groups: IntArray
    specs: IntArray


class PageGroups:
    """Objects of an inventory, grouped by page and deployment.

    Groups are numbered from 0, by deployment, then page. Arrays are indexed by group unless stated
    otherwise. The objects of a page with ambiguous keys form a group in state unknown. Foreign
    objects have the group number -1.

    inventory: the objects that are grouped.
    of_object: [objects] group of each object.
    page_ids: page of each group, numbered by hash.
    """

    def __init__(self, inventory: Inventory) -> None:
        table = inventory.table
        self.inventory = inventory
        self.deployments = table.deployments
        in_group = ~inventory.is_foreign
        ranks, distinct = inventory.page_ranks(in_group)
        # The codes are made in place, to save memory, because a store has millions of objects.
        codes = self._deployments_of(np.flatnonzero(in_group))
        codes -= UNRESOLVED
        codes *= distinct
        codes += ranks
        numbers, first = _numbered(codes, (len(table.deployments) - UNRESOLVED) * distinct)
        del codes
        self.of_object: IntArray = np.full(len(in_group), -1, dtype=np.int64)
        self.of_object[in_group] = numbers
        self.page_ids: IntArray = ranks[first]
        self._rows: IntArray = np.flatnonzero(in_group)[first]  # the first object of each group
        del numbers, ranks, in_group
        self.deployment_ids: IntArray = self._deployments_of(self._rows)
        self._starts: IntArray = np.searchsorted(
            self.deployment_ids, np.arange(len(table.deployments) + 1)
        )

    def __len__(self) -> int:
        return len(self.page_ids)

    @property
    def pages(self) -> pa.StringArray:
        """Page hash of each group."""
        return self.pages_at(slice(None))

    def pages_at(self, groups: IntArray | slice) -> pa.StringArray:
        """Return the page hashes of some groups."""
        return self.inventory.pages(self._rows[groups]).combine_chunks()

    def find(self, deployment_id: int, pages: pa.StringArray) -> IntArray:
        """Return a deployment's group of each page; -1 if it has none, or if the page is null."""
        span = self.span(deployment_id)
        at = pc.index_in(pages, value_set=self.pages_at(span), skip_nulls=True)
        known = at.is_valid().to_numpy(zero_copy_only=False)
        return np.where(known, at.fill_null(0).to_numpy() + span.start, -1)

    def rows_in(self, chosen: BoolArray) -> IntArray:
        """Return the rows of chosen groups' objects, in listing order. chosen: [groups]."""
        return np.flatnonzero(np.append(chosen, False)[self.of_object])

    def having(self, pool: str) -> BoolArray:
        """Return which groups have an object of a pool, under any reading: [groups]."""
        has_pool = np.zeros(len(self) + 1, dtype=np.bool_)
        has_pool[self.of_object[self.inventory.of_pool(pool)]] = True
        return has_pool[:-1]

    def objects_of(self, groups: IntArray) -> tuple[IntArray, IntArray]:
        """Return the rows of some groups' objects, group by group.

        Also return the start of each group's rows, followed by the end of all rows: [groups + 1].
        """
        order, starts = self._by_group
        lengths = starts[groups + 1] - starts[groups]
        offsets = np.append(0, np.cumsum(lengths))
        places = np.arange(offsets[-1]) + np.repeat(starts[groups] - offsets[:-1], lengths)
        return order[places], offsets

    @cached_property
    def _by_group(self) -> tuple[IntArray, IntArray]:
        """Rows by group, then in listing order, and each group's start."""
        order = np.argsort(self.of_object, kind="stable")
        starts = np.searchsorted(self.of_object[order], np.arange(len(self) + 1))
        return order, starts

    def _deployments_of(self, objects: IntArray) -> IntArray:
        table = self.inventory.table
        of_affix = np.array([*table.deployment_ids, UNRESOLVED], dtype=np.int64)
        deployments: IntArray = of_affix[self.inventory.affix_ids[objects]]
        return deployments

    def span(self, deployment_id: int) -> slice:
        """Return the span of a deployment's groups."""
        return slice(int(self._starts[deployment_id]), int(self._starts[deployment_id + 1]))

    @cached_property
    def tables(self) -> list[GroupTable]:
        """Table of each deployment; slots are rows of the inventory, int32.

        Group g of a table is group span(deployment).start + g.
        """
        rows = np.flatnonzero(self.of_object >= self._starts[0]).astype(np.int32)
        deployments = self.deployment_ids[self.of_object[rows]]
        if len(self.deployments) > 1:
            narrow = np.int16 if len(self.deployments) <= np.iinfo(np.int16).max else np.int32
            rows = rows[np.argsort(deployments.astype(narrow), kind="stable")]
        ends = np.cumsum(np.bincount(deployments, minlength=len(self.deployments)))
        table = self.inventory.table
        spec_of = np.array([*table.spec_ids, UNRESOLVED], dtype=np.int32)
        tables = []
        for number, deployment in enumerate(self.deployments):
            own = rows[ends[number - 1] if number else 0 : ends[number]]
            span = self.span(number)
            tables.append(
                fill_table(
                    deployment.specs,
                    span.stop - span.start,
                    self.of_object[own] - span.start,
                    spec_of[self.inventory.affix_ids[own]],
                    own,
                )
            )
        return tables

    @cached_property
    def nbytes(self) -> IntArray:
        """Bytes of each group's objects; UNKNOWN_BYTES if any size is not known."""
        sizes = self.inventory.objects.column("nbytes")
        grouped = self.of_object >= 0
        known = sizes.fill_null(0).to_numpy()
        nbytes = byte_sums(known[grouped], self.of_object[grouped], len(self))
        if sizes.null_count:
            owners = self.of_object[sizes.is_null().to_numpy()]
            nbytes[owners[owners >= 0]] = UNKNOWN_BYTES
        return nbytes

    def total_bytes(self, groups: IntArray) -> int | None:
        """Return the bytes of some groups; None if any size is not known."""
        nbytes = self.nbytes[groups]
        return None if (nbytes == UNKNOWN_BYTES).any() else byte_sum(nbytes)

    @cached_property
    def newest_ns(self) -> IntArray:
        """Mtime of each group's newest object, Unix nanoseconds; 0 if the store keeps no times."""
        if not self.has_times:
            return np.zeros(len(self), dtype=np.int64)
        return self._reduce(np.maximum, "mtime_ns")

    @cached_property
    def used_ns(self) -> IntArray:
        """Time of the last known write or read of each group, Unix nanoseconds; 0 if unknown."""
        if "atime_ns" not in self.inventory.objects.column_names:
            return self.newest_ns
        return np.maximum(self.newest_ns, self._reduce(np.maximum, "atime_ns"))

    def oldest_ns(self, groups: IntArray) -> int | None:
        """Return the mtime of the oldest object of some groups, Unix nanoseconds.

        Return None if the store keeps no times.
        """
        objects = self.inventory.objects.column("mtime_ns")
        oldest: int | None = pc.min(
            objects.filter(pa.array(np.isin(self.of_object, groups)))
        ).as_py()
        return oldest

    @property
    def has_times(self) -> bool:
        """Whether the store keeps write times."""
        times = self.inventory.objects.column("mtime_ns")
        return bool(times.null_count < len(times))

    def _reduce(self, function: np.ufunc, column: str) -> IntArray:
        reduced = np.zeros(len(self), dtype=np.int64)
        values = self.inventory.objects.column(column).fill_null(0).to_numpy()
        grouped = self.of_object >= 0
        function.at(reduced, self.of_object[grouped], values[grouped])
        return reduced

    @property
    def labels(self) -> list[str]:
        """Distinct labels, which `label_ids` indexes. The first label is for ambiguous keys."""
        return self._labelled[0]

    @property
    def label_ids(self) -> IntArray:
        """Index of each group's label, as in `ls`. A label tells what keys show of a deployment."""
        return self._labelled[1]

    @cached_property
    def _labelled(self) -> tuple[list[str], IntArray]:
        grammar = self.inventory.table.grammar
        numbers = {AMBIGUOUS: 0}
        label_ids: IntArray = np.zeros(len(self), dtype=np.int64)
        for number, deployment in enumerate(self.deployments):
            table = self.tables[number]
            own = deployment.label(grammar)
            labels = [deployment.label(grammar, [block.spec]) for block in table.blocks]
            ids = {label: numbers.setdefault(label, len(numbers)) for label in (own, *labels)}
            # A group gets the deployment's label if the specs of one of its blocks have this label.
            # Otherwise, it gets the label of its first block.
            order = sorted(range(len(labels)), key=lambda at: (labels[at] == own, -at))
            of_groups = label_ids[self.span(number)]
            for at in order:
                of_groups[table.blocks[at].groups] = ids[labels[at]]
        return list(numbers), label_ids

    @cached_property
    def states(self) -> npt.NDArray[np.int8]:
        """WHOLE, PARTIAL, ORPHAN or UNKNOWN for each group."""
        states = np.full(len(self), UNKNOWN, dtype=np.int8)
        for number, table in enumerate(self.tables):
            states[self.span(number)] = table.states
        return states

    def missing(self) -> Iterator[Missing]:
        """Yield the missing objects of each deployment."""
        for number, table in enumerate(self.tables):
            groups, specs = table.missing()
            if len(groups):
                start = self.span(number).start
                yield Missing(number, self.deployments[number], start + groups, specs)

    def keys_of(self, missing: Missing) -> pa.BinaryArray:
        """Return the missing keys, exactly as servers write them."""
        affixes = [spec.affix for spec in missing.deployment.specs]
        return join_keys(affixes, pa.array(missing.specs), self.pages_at(missing.groups))


def _numbered(codes: IntArray, limit: int) -> tuple[IntArray, IntArray]:
    """Return the rank of each row's code, and the first row of each distinct code.

    codes: codes of the rows, not negative.
    limit: number greater than every code.
    """
    if limit > _MOST_UNUSED * len(codes):
        _, first, numbers = np.unique(codes, return_index=True, return_inverse=True)
        return numbers, first
    used = np.zeros(limit, dtype=np.bool_)  # mark the codes, without a sort
    used[codes] = True
    numbers = (np.cumsum(used) - 1)[codes]
    first = np.zeros(np.count_nonzero(used), dtype=np.int64)
    first[numbers[::-1]] = np.arange(len(codes))[::-1]  # the last assignment is the first row
    return numbers, first
