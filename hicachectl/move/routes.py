"""How pages get from one store to another: by which keys, and which objects become which."""

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

    from hicachectl.formats.spec import ObjectSpec
    from hicachectl.formats.transfer import TransferPlan
    from hicachectl.pages.deployments import Deployment
    from hicachectl.pages.inventory import IntArray


@dataclass(frozen=True, eq=False)
class Route:
    """How pages of one deployment of the source become pages of the destination.

    sources: the objects that a page's are made of, in the order of the indices in `units`; they
        are the first specs of the deployment, and objects of its others stay behind.
    targets: the objects that a page gets at the destination, in the order of the indices in
        `units`; of UNKNOWN_SIZE are those that have as many bytes as their source.
    verbatim: whether every object keeps its bytes.
    """

    deployment_id: int
    deployment: Deployment
    sources: tuple[ObjectSpec, ...]
    targets: tuple[ObjectSpec, ...]
    units: tuple[TransferUnit, ...]
    verbatim: bool

    @property
    def name(self) -> str:
        """Name the deployment of the source in journals and messages."""
        deployment = self.deployment
        rank = deployment.shard.sizes_text() if deployment.specs else ""
        return " ".join(filter(None, (deployment.tag, deployment.model, rank)))

    def keys(self, targets: IntArray, pages: pa.StringArray) -> pa.BinaryArray:
        """Spell the keys of targets, one for each page."""
        return join_keys([target.affix for target in self.targets], pa.array(targets), pages)

    @cached_property
    def sizes(self) -> IntArray:
        """Bytes expected of each source: [sources], UNKNOWN_SIZE where only the listing tells."""
        return np.array([source.nbytes for source in self.sources], dtype=np.int64)

    @cached_property
    def unit_of_target(self) -> IntArray:
        """The unit that fills each target: [targets]."""
        units = np.zeros(len(self.targets), dtype=np.int64)
        for number, unit in enumerate(self.units):
            units[list(unit.destinations)] = number
        return units

    @cached_property
    def target_bytes(self) -> IntArray:
        """Bytes of each target: [targets], UNKNOWN_SIZE where they are its source's."""
        return np.array([target.nbytes for target in self.targets], dtype=np.int64)

    @cached_property
    def expected_bytes(self) -> IntArray:
        """Bytes that objects of each target should have: [targets], UNKNOWN_SIZE without any."""
        expected, sizes = self.target_bytes.copy(), self.sizes
        for unit in self.units:
            for target, source in zip(unit.destinations, unit.sources, strict=False):
                if expected[target] == UNKNOWN_SIZE:
                    expected[target] = sizes[source]
        return expected


def verbatim_routes(deployments: tuple[Deployment, ...]) -> Iterator[Route]:
    """Let every object of every deployment keep its key and its bytes."""
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
    """Follow a plan from the deployment of a profile, the first of its store."""
    return Route(
        deployment_id=0,
        deployment=deployment,
        sources=deployment.specs[: len(plan.sources)],
        targets=plan.destinations,
        units=plan.units,
        verbatim=all(unit.identity for unit in plan.units),
    )
