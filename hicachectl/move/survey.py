"""Survey the objects of a source for a copy, and the objects to write that the destination has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa

from hicachectl.formats.keys.table import join_keys
from hicachectl.formats.spec import UNKNOWN_SIZE, fits
from hicachectl.formats.transfer import TransferUnit
from hicachectl.formats.wording import conflict
from hicachectl.move.results import MOST_PROBLEMS, Problem
from hicachectl.pages.group_table import ABSENT, UNSIZED, GroupTable, fill_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy.typing as npt

    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.formats.spec import ObjectSpec
    from hicachectl.formats.transfer import TransferPlan
    from hicachectl.pages.deployments import Deployment
    from hicachectl.pages.groups import PageGroups


class Action(IntEnum):
    """Action for a page group."""

    NOTHING = 0  # nothing to copy, or not chosen
    SKIP = 1  # the destination has the whole group
    COPY = 2
    COMPLETE = 3  # the destination has a part of the group; if this part is equal, add the rest
    COMPARE = 4  # the destination has the whole group; compare its bytes
    REPLACE = 5  # remove the group from the destination, then copy it
    CONFLICT = 6  # the destination has a different object under one of the keys
    CLEAR = 7  # the source has the rest of a moved group; compare the rest, then remove it
    ADOPT = 8  # both stores are one; give the files of the group trailers


WRITING = (Action.COPY, Action.COMPLETE, Action.REPLACE, Action.ADOPT)
COMPARING = (Action.COMPARE, Action.CLEAR)
READS_BACK = (Action.COMPLETE, *COMPARING)


@dataclass(frozen=True, eq=False)
class Route:
    """Route of the pages of one deployment.

    sources:  specs of the objects that are read for a page. They are the first specs of the
        deployment. Objects of later specs are not copied.
    targets:  specs of the objects that are written for a page. A target of UNKNOWN_SIZE is as large
        as its source.
    units:    transfers of some sources to some targets, as indices into `sources` and `targets`.
    verbatim: whether all objects that are copied keep their bytes.
    """

    deployment_id: int
    deployment: Deployment
    sources: tuple[ObjectSpec, ...]
    targets: tuple[ObjectSpec, ...]
    units: tuple[TransferUnit, ...]
    verbatim: bool

    @property
    def name(self) -> str:
        """Name of the source's deployment in messages."""
        deployment = self.deployment
        sizes = deployment.shard.sizes_text() if deployment.specs else ""
        return " ".join(filter(None, (*reversed(deployment.names.columns.values()), sizes)))

    def keys(self, targets: IntArray, pages: pa.StringArray) -> pa.BinaryArray:
        """Return the key of one target for each page. targets: [pages] number of each target."""
        return join_keys([target.affix for target in self.targets], pa.array(targets), pages)

    @cached_property
    def sizes(self) -> IntArray:
        """Expected bytes of each source: [sources]. UNKNOWN_SIZE if only listings show it."""
        return np.array([source.nbytes for source in self.sources], dtype=np.int64)

    @cached_property
    def unit_of_target(self) -> IntArray:
        """Unit that makes each target: [targets]."""
        units = np.zeros(len(self.targets), dtype=np.int64)
        for number, unit in enumerate(self.units):
            units[list(unit.destinations)] = number
        return units

    @cached_property
    def relaid(self) -> BoolArray:
        """Which targets have the size of their sources, but bytes in another layout: [targets]."""
        relaid = np.zeros(len(self.targets), dtype=np.bool_)
        for unit in self.units:
            sizes = sorted(self.sizes[list(unit.sources)])
            made = sorted(self.target_bytes[list(unit.destinations)])
            relaid[list(unit.destinations)] = not unit.identity and sizes == made
        return relaid

    @cached_property
    def target_bytes(self) -> IntArray:
        """Bytes of each target: [targets]. UNKNOWN_SIZE if the target is as large as its source."""
        return np.array([target.nbytes for target in self.targets], dtype=np.int64)

    @cached_property
    def expected_bytes(self) -> IntArray:
        """Expected bytes of each target: [targets].

        The size of a target is UNKNOWN_SIZE if the size of its source is unknown, too.
        """
        expected, sizes = self.target_bytes.copy(), self.sizes
        for unit in self.units:
            for target, source in zip(unit.destinations, unit.sources, strict=False):
                if expected[target] == UNKNOWN_SIZE:
                    expected[target] = sizes[source]
        return expected


def verbatim_routes(deployments: tuple[Deployment, ...]) -> Iterator[Route]:
    """Yield one route for each deployment. On these routes, objects keep their keys and bytes."""
    for number, deployment in enumerate(deployments):
        specs = deployment.specs
        yield Route(
            deployment_id=number,
            deployment=deployment,
            sources=specs,
            targets=tuple(replace(spec, nbytes=UNKNOWN_SIZE) for spec in specs),
            units=tuple(
                TransferUnit((at,), (at,), (), identity=True, trailing=spec.trailing)
                for at, spec in enumerate(specs)
            ),
            verbatim=True,
        )


def planned_route(deployment: Deployment, plan: TransferPlan) -> Route:
    """Return the route of a plan. deployment: the profile's deployment, the first of the source."""
    return Route(
        deployment_id=0,
        deployment=deployment,
        sources=deployment.specs[: len(plan.sources)],
        targets=plan.destinations,
        units=plan.units,
        verbatim=all(unit.identity for unit in plan.units),
    )


IfExists = Literal["skip", "verify", "overwrite"]
Objects = tuple["IntArray", "IntArray", "IntArray"]  # survey row, target and bytes of each object


@dataclass(frozen=True, eq=False)
class Survey:
    """The n groups of one route, with their objects in both stores.

    groups: [n] group numbers of the source.
    pages:  [n] page hashes.
    rows:   table of the route's sources. A slot has the object's row in the inventory.
    sizes:  bytes of each row of the inventory; UNKNOWN_SIZE if neither store nor profile states
        them.
    wanted: table of the targets to write. A slot has the target's bytes, or UNSIZED if a source has
        an unknown or unexpected size.
    existing: table of the targets in the destination. A slot has the target's bytes, or UNSIZED.
    strays: [n] whether the group has objects that are not sources of the route.
    times:  mtime_ns of each row of the inventory; null if the store keeps no times.
    foreign: [n] whether a target in the destination has another identity than its copy would have.
    unproven: [n] whether only a comparison of bytes can show that the destination has the group.
        The objects there have the right size, but perhaps the source's layout.
    """

    route: Route
    groups: IntArray
    pages: pa.StringArray
    rows: GroupTable
    sizes: IntArray
    wanted: GroupTable
    existing: GroupTable
    strays: BoolArray
    times: pa.Int64Array
    foreign: BoolArray
    unproven: BoolArray

    @cached_property
    def lacking(self) -> GroupTable:
        """Wanted targets that the destination lacks."""
        return self.wanted.without(self.existing)

    @property
    def touched(self) -> GroupTable:
        """Targets with at least one source in the group. Other sources may be missing."""
        return made_of(self.route, self.rows, self.sizes, partly=True)

    @cached_property
    def left_over(self) -> BoolArray:
        """Which groups have objects that are not copied: [n].

        Sources that no unit reads, such as replicas, do not count.
        """
        left = self.strays.copy()
        for unit in self.route.units:
            groups, complete = self.rows.holders(unit.sources)
            left[groups[~complete]] = True
        return left

    @cached_property
    def unfit(self) -> BoolArray:
        """Which groups have a source of unknown or unexpected size: [n]."""
        blocks = self.wanted.blocks
        return self.wanted.where(block.values == UNSIZED for block in blocks).having()

    def keys(self, items: IntArray, targets: IntArray) -> pa.BinaryArray:
        """Return the key of one target for each item.

        items: rows of the survey.
        targets: [items] number of each target.
        """
        return self.route.keys(targets, self.pages.take(pa.array(items)))

    def having(self, found: Iterable[Objects]) -> Survey:
        """Return the survey for a destination that has the found targets."""
        return replace(self, existing=_table(self.route, self.existing.count, found))

    def as_if_written(self, items: IntArray) -> Survey:
        """Return the survey as if the destination had all wanted targets of the items."""
        places, targets, sizes = self.wanted.objects(items)
        written = items[places], targets, sizes
        known = self.existing.objects(np.arange(self.existing.count))
        return self.having([written, known])


def survey_source(groups: PageGroups, routes: Iterable[Route]) -> list[Survey]:
    """Survey the groups of each route in the source only."""
    inventory = groups.inventory
    sizes = inventory.objects.column("nbytes").fill_null(UNKNOWN_SIZE).to_numpy()
    if (sizes == UNKNOWN_SIZE).any():
        expected = inventory.table.expected_sizes[inventory.affix_ids]
        sizes = np.where(sizes == UNKNOWN_SIZE, expected, sizes)
    times = pa.nulls(len(sizes), pa.int64())
    if "mtime_ns" in inventory.objects.column_names:
        times = inventory.objects.column("mtime_ns").combine_chunks().cast(pa.int64())
    return [_survey(groups, route, sizes, times) for route in routes]


def _survey(groups: PageGroups, route: Route, sizes: IntArray, times: pa.Int64Array) -> Survey:
    table, span = groups.tables[route.deployment_id], groups.span(route.deployment_id)
    # The columns of a block form one set (`ObjectSpec.object_set`), with only sources or no source.
    taken = [block for block in table.blocks if block.columns[0] < len(route.sources)]
    others = [block for block in table.blocks if block.columns[0] >= len(route.sources)]
    rows = GroupTable(route.sources, table.count, tuple(taken))
    return Survey(
        route=route,
        groups=np.arange(span.start, span.stop),
        pages=groups.pages_at(span),
        rows=rows,
        sizes=sizes,
        wanted=made_of(route, rows, sizes),
        existing=_table(route, table.count, ()),
        strays=table.having(others),
        times=times,
        foreign=np.zeros(table.count, dtype=np.bool_),
        unproven=np.full(table.count, route.relaid.any()),
    )


def made_of(route: Route, rows: GroupTable, sizes: IntArray, *, partly: bool = False) -> GroupTable:
    """Return the targets that the route makes from sources, like `Survey.wanted`.

    rows, sizes: see `Survey`.
    partly: whether to include targets of which some sources are missing, and to ignore the sizes of
        sources.
    """
    found: list[Objects] = []
    for unit in route.units:
        groups, complete = rows.holders(unit.sources)
        groups = groups if partly else groups[complete]
        if not len(groups):
            continue
        sources = np.array(unit.sources, dtype=np.int64)
        actual = sizes[rows.slots(groups, sources)]
        expected = route.target_bytes[list(unit.destinations)]
        if expected[0] == UNKNOWN_SIZE:  # the target has a single source, which keeps its size
            nbytes = np.where(actual == UNKNOWN_SIZE, UNSIZED, actual)
        else:
            unfit = (actual != route.sizes[sources]).any(axis=1, keepdims=True)
            nbytes = np.where(unfit & (not partly), UNSIZED, expected)
        for target, column in zip(unit.destinations, nbytes.T, strict=True):
            found.append((groups, np.full(len(groups), target), column))
    return _table(route, rows.count, found)


def compare(wanted: GroupTable, existing: GroupTable) -> tuple[BoolArray, BoolArray, BoolArray]:
    """Compare the wanted targets with the targets in the destination.

    Return three arrays, [n] each:

    - whether the destination has a wanted target of the group
    - whether the destination lacks a wanted target of the group
    - whether the destination has a wanted target of the group in another size

    An unknown size equals any size.
    wanted, existing: see `Survey`.
    """
    some, lacks, differs = np.zeros((3, wanted.count), dtype=np.bool_)
    for block, theirs in zip(wanted.blocks, existing.blocks, strict=True):
        found, groups = block.match(theirs), block.owners
        some[groups[found != ABSENT]] = True
        lacks[groups[found == ABSENT]] = True
        differs[groups[~fits(found, block.values)]] = True
    return some, lacks, differs


def decide(survey: Survey, chosen: BoolArray, if_exists: IfExists) -> npt.NDArray[np.int8]:
    """Return the action for each group: [n] of Action. chosen: [n] whether to copy the group."""
    some, lacks, differs = compare(survey.wanted, survey.existing)
    actions = np.full(len(survey.groups), Action.COPY, dtype=np.int8)
    actions[some] = Action.COMPLETE
    reads = survey.unproven | (if_exists == "verify")
    actions[some & ~lacks] = np.where(reads, Action.COMPARE, Action.SKIP)[some & ~lacks]
    if if_exists == "overwrite":
        actions[some] = Action.REPLACE
    else:
        actions[differs | survey.foreign] = Action.CONFLICT
    actions[~chosen | ~(some | lacks) | survey.unfit] = Action.NOTHING
    return actions


def conflicts(survey: Survey, items: IntArray) -> list[Problem]:
    """Return a problem for each page in conflict, at most MOST_PROBLEMS.

    items: rows of the survey.
    """
    items = items[:MOST_PROBLEMS]
    owners, targets, sizes = survey.wanted.objects(items)
    theirs = survey.existing.slots(items, np.arange(len(survey.route.targets)))[owners, targets]
    unlike = np.flatnonzero(~fits(theirs, sizes))
    _, first = np.unique(owners[unlike], return_index=True)
    named = unlike[first]  # one object of each page that has objects of another size
    keys = survey.keys(items[owners[named]], targets[named]).to_pylist()
    pages = survey.pages.take(pa.array(items)).to_pylist()
    other = "the destination has an object of another identity under a key of this page"
    problems = [Problem(page, None, conflict(other)) for page in pages]
    for place, key in zip(named.tolist(), keys, strict=True):
        owner, text = owners[place], key.decode(errors="backslashreplace")
        what = f"{theirs[place]} bytes in the destination, {sizes[place]} bytes to write"
        problems[owner] = Problem(pages[owner], text, conflict(what))
    return problems


def _table(route: Route, count: int, objects: Iterable[Objects]) -> GroupTable:
    """Return a table of targets. If several objects fall into a slot, the first one counts."""
    nothing = np.zeros(0, dtype=np.int64)
    columns = zip((nothing, nothing, nothing), *objects, strict=True)
    return fill_table(route.targets, count, *(np.concatenate(column) for column in columns))
