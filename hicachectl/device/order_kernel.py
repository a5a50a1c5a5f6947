"""Check the row order of objects in device pools: see `checks.layouts`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hicachectl.checks.layouts import layout_check
from hicachectl.kernels.layout import is_hinted, is_unseen
from hicachectl.kernels.layout_triton import MARGIN, correlations

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from hicachectl.device.plans import PoolForm
    from hicachectl.device.runs import DeviceRun
    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.formats.profile import Profile
    from hicachectl.formats.spec import ObjectSpec
    from hicachectl.kernels.layout import OrderLook

    Correlations = tuple[torch.Tensor, torch.Tensor]  # [pages, sets] float32, bool


class OrderKernel:
    """Row correlations of objects on one lane: in the profile's order, then in rival orders."""

    def __init__(self, spec: ObjectSpec, profile: Profile, run: DeviceRun) -> None:
        check = layout_check(spec, profile)
        assert check is not None  # else the check is not run
        self._looks = check.looks
        self._run = run
        self._rows = [
            torch.from_numpy(_row_places(look, run.pools, run.most)).to(run.lane.device)
            for look in self._looks
        ]

    @staticmethod
    def supports(spec: ObjectSpec, profile: Profile, pools: PoolForm) -> bool:
        """Return True: every object that the check applies to is supported."""
        return True

    def launch(self, count: int) -> list[torch.Tensor]:
        """Correlate rows: gains [count, sets] of all looks, then the usable sets, likewise."""
        looks = self.correlate(count)
        return [own for own, _ in looks] + [usable for _, usable in looks]

    def correlate(self, count: int) -> list[Correlations]:
        """Correlate the rows of each look, the profile's order first: [count, sets] each."""
        piece, run = self._run.pools.pieces[0], self._run
        return [
            correlations(
                run.lane.pools,
                rows,
                run.slots[:count],
                look,
                weights=(1.0, -1.0) if number else (0.5, 0.5),
                slot_bytes=piece.slot_bytes,
                tensor_bytes=run.most * piece.layers * piece.slot_bytes,
                tensors=len(run.pools.pieces),
            )
            for number, (look, rows) in enumerate(zip(self._looks, self._rows, strict=True))
        ]

    def suspects(self, seen: Sequence[npt.NDArray[Any]]) -> BoolArray:
        """Flag objects that do not show the profile's order but hint at a rival order: [count, 2].

        Column 1 is False: the CPU need not find an issue.
        """
        gains, usable = seen[: len(self._rows)], seen[len(self._rows) :]
        found = np.zeros((len(gains[0]), 2), dtype=np.bool_)
        unseen = np.flatnonzero(is_unseen(gains[0], usable[0], MARGIN))
        if len(unseen):
            for gain, sets in zip(gains[1:], usable[1:], strict=True):
                found[unseen, 0] |= is_hinted(gain[unseen], sets[unseen], MARGIN)
        return found


def _row_places(look: OrderLook, pools: PoolForm, slots: int) -> IntArray:
    """Return byte offsets of a look's rows in the first pool, in page slot 0: [3, sets]."""
    piece, tensor = pools.pieces[0], pools.tensors[0]
    heads = dict(zip(tensor.axes, tensor.shape, strict=True)).get("head", 1)
    places: IntArray = (
        look.layer * slots * piece.slot_bytes
        + look.token * piece.row_bytes
        + look.head * (piece.row_bytes // heads)
    )
    return places
