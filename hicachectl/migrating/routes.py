"""How the pages of a deployment get from one store to another: which objects become which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.checks.sizes import UNKNOWN_SIZE
from hicachectl.formats.keys.base import codec_for
from hicachectl.formats.transfer import TransferUnit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.deployments import Deployment
    from hicachectl.formats.keys.base import Affix
    from hicachectl.formats.objects import Coordinate
    from hicachectl.formats.transfer import TransferPlan
    from hicachectl.inventory import IntArray


@dataclass(frozen=True, slots=True)
class Target:
    """One object that a page gets at the destination; nbytes None: as many as its source has."""

    affix: Affix
    coordinate: Coordinate
    nbytes: int | None
    anchor: bool


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """How pages of one deployment of the source become pages of the destination.

    members: of each source of `units`, its place among the deployment's members.
    sizes: [sources] bytes expected of each, UNKNOWN_SIZE where only the listing says.
    targets: what a page becomes, in the indices of `units`.
    verbatim: whether every object keeps its bytes.
    """

    deployment_id: int
    deployment: Deployment
    members: IntArray
    sizes: IntArray
    targets: tuple[Target, ...]
    units: tuple[TransferUnit, ...]
    verbatim: bool

    @property
    def name(self) -> str:
        """Name the deployment of the source in journals and messages."""
        deployment = self.deployment
        rank = deployment.members[0].coordinate.shard.sizes_text() if deployment.members else ""
        return " ".join(filter(None, (deployment.tag, deployment.model, rank)))

    @property
    def unit_of_target(self) -> IntArray:
        """The unit that fills each target: [targets]."""
        units = np.zeros(len(self.targets), dtype=np.int64)
        for number, unit in enumerate(self.units):
            units[list(unit.destinations)] = number
        return units

    @property
    def target_bytes(self) -> IntArray:
        """Bytes of each target: [targets], UNKNOWN_SIZE where they are its source's."""
        return np.array(
            [UNKNOWN_SIZE if t.nbytes is None else t.nbytes for t in self.targets], dtype=np.int64
        )

    @property
    def expected_bytes(self) -> IntArray:
        """Bytes that objects of each target should have: [targets], UNKNOWN_SIZE without any."""
        expected = self.target_bytes
        for unit in self.units:
            for target, source in zip(unit.destinations, unit.sources, strict=False):
                if expected[target] == UNKNOWN_SIZE:
                    expected[target] = self.sizes[source]
        return expected


def verbatim_routes(deployments: tuple[Deployment, ...]) -> Iterator[Route]:
    """Let every object of every deployment keep its key and its bytes."""
    for number, deployment in enumerate(deployments):
        members = deployment.members
        yield Route(
            deployment_id=number,
            deployment=deployment,
            members=np.arange(len(members), dtype=np.int64),
            sizes=np.array(
                [UNKNOWN_SIZE if m.nbytes is None else m.nbytes for m in members], dtype=np.int64
            ),
            targets=tuple(Target(m.affix, m.coordinate, None, m.anchor) for m in members),
            units=tuple(
                TransferUnit((at,), (at,), (), identity=True, trailing=m.trailing)
                for at, m in enumerate(members)
            ),
            verbatim=True,
        )


def planned_route(deployment: Deployment, plan: TransferPlan, grammar: str) -> Route:
    """Follow a plan from the deployment of a profile, the first of its store.

    grammar: of the destination's keys.
    """
    spell = codec_for(grammar).affix
    numbers = {member.coordinate: at for at, member in enumerate(deployment.members)}
    return Route(
        deployment_id=0,
        deployment=deployment,
        members=np.array([numbers[s.coordinate] for s in plan.sources], dtype=np.int64),
        sizes=np.array([source.nbytes for source in plan.sources], dtype=np.int64),
        targets=tuple(
            Target(spell(d.coordinate), d.coordinate, d.nbytes, d.anchor) for d in plan.destinations
        ),
        units=plan.units,
        verbatim=all(unit.identity for unit in plan.units),
    )
