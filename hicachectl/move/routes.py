"""Routes between stores: source objects, the destination objects made from them, and keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from hicachectl.formats.keys.table import join_keys
from hicachectl.formats.spec import UNKNOWN_SIZE
from hicachectl.formats.transfer import TransferUnit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.formats.spec import ObjectSpec
    from hicachectl.formats.transfer import TransferPlan
    from hicachectl.pages.deployments import Deployment


@dataclass(frozen=True, eq=False)
class Route:
    """Route of the pages of one deployment.

    sources:  source objects of a page: the deployment's first specs. Objects of other specs are not
        copied.
    targets:  destination objects of a page; a target of UNKNOWN_SIZE is as large as its source.
    units:    transfers of some sources to some targets, with indices into `sources` and `targets`.
    verbatim: whether all objects keep their bytes.
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
        return " ".join(filter(None, (*reversed(deployment.names), sizes)))

    def keys(self, targets: IntArray, pages: pa.StringArray) -> pa.BinaryArray:
        """Return the keys of targets, one for each page."""
        return join_keys([target.affix for target in self.targets], pa.array(targets), pages)

    @cached_property
    def sizes(self) -> IntArray:
        """Expected bytes of each source: [sources], UNKNOWN_SIZE if only the listing has them."""
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
        """Which targets have their sources' size, but other bytes: [targets]."""
        relaid = np.zeros(len(self.targets), dtype=np.bool_)
        for unit in self.units:
            sizes = sorted(self.sizes[list(unit.sources)])
            made = sorted(self.target_bytes[list(unit.destinations)])
            relaid[list(unit.destinations)] = not unit.identity and sizes == made
        return relaid

    @cached_property
    def target_bytes(self) -> IntArray:
        """Bytes of each target: [targets], UNKNOWN_SIZE if it is as large as its source."""
        return np.array([target.nbytes for target in self.targets], dtype=np.int64)

    @cached_property
    def expected_bytes(self) -> IntArray:
        """Expected bytes of each target: [targets], or UNKNOWN_SIZE."""
        expected, sizes = self.target_bytes.copy(), self.sizes
        for unit in self.units:
            for target, source in zip(unit.destinations, unit.sources, strict=False):
                if expected[target] == UNKNOWN_SIZE:
                    expected[target] = sizes[source]
        return expected


def verbatim_routes(deployments: tuple[Deployment, ...]) -> Iterator[Route]:
    """Yield a route for each deployment in which every object keeps its key and bytes."""
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
    """Return the route of a plan. deployment: the profile's, the first of its store."""
    return Route(
        deployment_id=0,
        deployment=deployment,
        sources=deployment.specs[: len(plan.sources)],
        targets=plan.destinations,
        units=plan.units,
        verbatim=all(unit.identity for unit in plan.units),
    )
