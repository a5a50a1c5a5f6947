"""From a plan of groups to what batches of them need: what was scanned, and what is unwanted."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from hicachectl.checks.registry import is_structural
from hicachectl.formats.keys.resolve import ANCHOR_POOL
from hicachectl.move.records import Facts, Shape, Slot, TakenGroup, TakenObject
from hicachectl.pages.deployments import UNRESOLVED

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    import pyarrow as pa

    from hicachectl.formats.keys.base import Affix
    from hicachectl.move.planning import RepairPlan
    from hicachectl.pages.deployments import Deployment
    from hicachectl.pages.groups import PageGroups
    from hicachectl.pages.inventory import IntArray, Inventory

BATCH_OBJECTS = 1024  # about what a killed run leaves to be finished


@dataclass(frozen=True, slots=True)
class Planned:
    """A group of the plan; scanned and unwanted are by slot of its shape."""

    page: str
    model: str
    tag: str
    shape: Shape
    scanned: dict[int, Facts]
    unwanted: frozenset[int]
    findings: tuple[dict[str, str | None], ...]

    def as_it_is(self, there: Mapping[int, Facts], first_file: int) -> TakenGroup:
        """Describe the group as it is now; its objects get file numbers from `first_file`."""
        same = {
            s for s, facts in there.items() if s in self.scanned and facts.same(self.scanned[s])
        }
        objects = tuple(
            TakenObject(
                slot=slot,
                file=first_file + number,
                unwanted=slot in self.unwanted and slot in same,
                facts=facts,
            )
            for number, (slot, facts) in enumerate(there.items())
        )
        # None of its objects is unwanted once a group lacks nothing any more.
        lacks = any(is_structural(finding["code"] or "") for finding in self.findings)
        absent = () if lacks else set(range(len(self.shape))) - self.scanned.keys()
        return TakenGroup(
            self.page, self.model, self.tag, self.shape, objects, frozenset(absent), self.findings
        )


class Planner:
    """Makes of a plan's groups what batches need, without Python for what is not planned."""

    def __init__(self, inventory: Inventory, groups: PageGroups, plan: RepairPlan) -> None:
        self._inventory = inventory
        self._groups = groups
        self._plan = plan
        self._outright = np.isin(plan.groups, plan.outright)
        self._rows, self._objects = groups.objects_of(plan.groups)
        self._reasons = np.append(np.searchsorted(plan.about, plan.groups), len(plan.about))
        self._cut_shapes: dict[object, tuple[Shape, dict[int, int]]] = {}
        self._shapes = [_shape_of(deployment) for deployment in groups.deployments]
        self._specs = inventory.by_affix(inventory.table.spec_ids, UNRESOLVED)
        self._taken_slots = self._slots_of_others()

    def __len__(self) -> int:
        return len(self._plan.groups)

    def batches(self) -> Iterator[list[Planned]]:
        """Give the groups in batches of about BATCH_OBJECTS objects."""
        first = 0
        while first < len(self):
            limit = self._objects[first] + BATCH_OBJECTS
            last = int(np.searchsorted(self._objects, limit, side="right")) - 1
            last = max(first + 1, last)
            yield self._batch(first, last)
            first = last

    def _batch(self, first: int, last: int) -> list[Planned]:
        start = int(self._objects[first])
        rows = self._rows[start : self._objects[last]]
        objects = self._inventory.take(rows)
        keys = objects.column("key").to_pylist()
        columns = (_values(objects, name) for name in ("nbytes", "mtime_ns", "version"))
        facts = list(map(Facts, *columns))
        pages = self._groups.pages_at(self._plan.groups[first:last]).to_pylist()
        planned = []
        for number in range(first, last):
            mine = slice(self._objects[number] - start, self._objects[number + 1] - start)
            planned.append(
                self._planned(number, pages[number - first], rows[mine], keys[mine], facts[mine])
            )
        return planned

    def _planned(
        self, number: int, page: str, rows: IntArray, keys: list[bytes], facts: list[Facts]
    ) -> Planned:
        deployment_id = int(self._groups.deployment_ids[self._plan.groups[number]])
        lost = self._taken_slots.get(int(self._plan.groups[number]))
        if deployment_id == UNRESOLVED:
            shape, model, tag = self._ambiguous_shape(rows), "", ""
            slots = list(range(len(rows)))
        else:
            deployment = self._groups.deployments[deployment_id]
            shape, model, tag = self._shapes[deployment_id], deployment.model, deployment.tag
            slots = self._specs[rows].tolist()
            if lost:
                key = deployment_id, frozenset(lost)
                shape, places = self._cut_shapes.setdefault(key, _without(shape, lost))
                slots = [places[slot] for slot in slots]
        reasons = self._plan.reasons.slice(
            int(self._reasons[number]), int(self._reasons[number + 1] - self._reasons[number])
        ).to_pylist()
        damaged = {reason["key"] for reason in reasons if not is_structural(reason["code"])}
        # A finding without a key is about all of its page; with a key of another model's the group
        # will never be whole.
        everything = bool(self._outright[number]) or None in damaged or bool(lost)
        of_key = dict(zip(keys, slots, strict=True))
        return Planned(
            page=page,
            model=model,
            tag=tag,
            shape=shape,
            scanned=dict(zip(slots, facts, strict=True)),
            unwanted=frozenset(
                s for key, s in of_key.items() if everything or key.decode() in damaged
            ),
            findings=tuple(reasons),
        )

    def _slots_of_others(self) -> dict[int, set[int]]:
        """Find, by group, the slots whose key an object of another group of the page has.

        Only where two models have such keys: their objects are no part of the group.
        """
        groups, found = self._groups, defaultdict[int, set[int]](set)
        rows = self._inventory.split_rows
        if not len(rows):
            return found
        planned = np.zeros(int(groups.page_ids.max(initial=0)) + 1, dtype=np.bool_)
        planned[groups.page_ids[self._plan.groups]] = True
        owners = groups.of_object[rows]
        chosen = planned[groups.page_ids[owners]]
        rows, owners = rows[chosen], owners[chosen]
        holders: dict[int, list[tuple[int, Affix]]] = defaultdict(list)
        affixes = self._inventory.table.affixes
        ids = self._inventory.affix_ids[rows]
        pages = groups.page_ids[owners]
        for page, owner, affix in zip(pages.tolist(), owners.tolist(), ids.tolist(), strict=True):
            holders[page].append((owner, affixes[affix]))
        slots = [
            {spec.affix: slot for slot, spec in enumerate(deployment.specs)}
            for deployment in groups.deployments
        ]
        for group in self._plan.groups.tolist():
            deployment_id = int(groups.deployment_ids[group])
            if deployment_id == UNRESOLVED:
                continue
            for owner, affix in holders.get(int(groups.page_ids[group]), ()):
                slot = slots[deployment_id].get(affix)
                if owner != group and slot is not None:
                    found[group].add(slot)
        return found

    def _ambiguous_shape(self, rows: IntArray) -> Shape:
        """Make a shape of objects whose keys can be read in several ways: all belong together."""
        table = self._inventory.table
        return tuple(
            Slot(
                prefix=table.affixes[affix][0],
                suffix=table.affixes[affix][1],
                anchor=any(r.pool == ANCHOR_POOL for r in table.resolved[affix].readings),
                required=True,
                trailing=None,
                sidecars=(),
            )
            for affix in self._inventory.affix_ids[rows].tolist()
        )


def _shape_of(deployment: Deployment) -> Shape:
    """List the slots of a deployment's pages, by spec."""
    sets: dict[object, int] = {}
    specs = deployment.specs
    sidecars = [n for n, spec in enumerate(specs) if spec.awaited and not spec.anchor]
    return tuple(
        Slot(
            prefix=spec.affix[0],
            suffix=spec.affix[1],
            anchor=spec.anchor,
            required=spec.awaited,
            # Which unlisted objects a page has together, nothing tells.
            trailing=(
                sets.setdefault(spec.object_set, len(sets))
                if spec.trailing and spec.listed
                else None
            ),
            sidecars=tuple(n for n in sidecars if spec.anchor and spec.shares_rank(specs[n])),
        )
        for spec in specs
    )


def _without(shape: Shape, lost: Collection[int]) -> tuple[Shape, dict[int, int]]:
    """Leave out some slots; also return the new number of each slot that stays."""
    places = {slot: n for n, slot in enumerate(s for s in range(len(shape)) if s not in lost)}
    cut = tuple(
        replace(
            shape[slot],
            sidecars=tuple(places[other] for other in shape[slot].sidecars if other in places),
        )
        for slot in places
    )
    return cut, places


def _values(table: pa.Table, name: str) -> list[Any]:
    if name not in table.column_names:
        return [None] * len(table)
    values: list[Any] = table.column(name).to_pylist()
    return values
