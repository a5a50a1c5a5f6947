"""Kernels of checks on device pools, for bad numbers and for row order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hicachectl.checks.layouts import layout_check
from hicachectl.checks.tables import sections_of, stored_layers
from hicachectl.kernels.layout import is_hinted, is_unseen
from hicachectl.kernels.layout_triton import MARGIN, correlations
from hicachectl.kernels.values_triton import Field, block_flags, certain_flags, supports

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from hicachectl.checks.tables import Section
    from hicachectl.device.plans import DevicePool, PoolForm
    from hicachectl.device.runs import DeviceRun
    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.formats.layouts import TensorLayout
    from hicachectl.formats.profile import Profile
    from hicachectl.formats.spec import ObjectSpec
    from hicachectl.kernels.layout import OrderLook

    Correlations = tuple[torch.Tensor, torch.Tensor]  # [pages, sets] float32, bool


class NumberKernel:
    """Kernel that flags bad numbers in the fields of objects on one lane.

    Padding layers are not checked.
    """

    def __init__(self, spec: ObjectSpec, profile: Profile, run: DeviceRun) -> None:
        stored = stored_layers(spec, profile)
        self._layers = [number for number, layer in enumerate(stored) if layer is not None]
        self._fields = list(fields_of(spec, profile, run.pools))
        self._run = run
        layers = torch.tensor(self._layers, dtype=torch.int64, device=run.lane.device)
        # Block numbers, object by object. Blocks are stored as [layer][slot].
        self._blocks = (layers * run.most + run.slots[:, None]).reshape(-1)

    @staticmethod
    def supports(spec: ObjectSpec, profile: Profile, pools: PoolForm) -> bool:
        """Return whether each pool has fields, and the kernel supports them."""
        return all(supports(fields) for _, fields in fields_of(spec, profile, pools))

    def launch(self, count: int) -> list[torch.Tensor]:
        """Return flags [count, 2], as a list of one result.

        They say whether the object is suspect, and whether the CPU must find an issue in it. A
        suspect may be healthy, because codes under a scale of 0 mean nothing, and a healthy row may
        begin with zeros.
        """
        layers = len(self._layers)
        found = torch.zeros((count, 2), dtype=torch.bool, device=self._run.lane.device)
        blocks = self._blocks[: count * layers]
        for piece, fields in self._fields:
            pool = self._run.lane.pools[self._run.most * piece.offset :]
            flags = block_flags(pool, blocks, piece.slot_bytes, fields, together=layers)
            found[:, 0] |= flags != 0
            found[:, 1] |= (flags & certain_flags(fields)) != 0
        return [found]

    def suspects(self, seen: Sequence[npt.NDArray[Any]]) -> BoolArray:
        """Return the flags, [count, 2]."""
        return seen[0].astype(np.bool_)


def fields_of(
    expected: ObjectSpec, profile: Profile, form: PoolForm
) -> Iterator[tuple[DevicePool, tuple[Field, ...]]]:
    """Yield each pool with the fields of its blocks. A block is one layer of one page slot."""
    sections = sections_of(expected, profile)
    for section, tensor, piece in zip(sections, expected.tensors, form.pieces, strict=True):
        yield piece, _fields(section, tensor, piece)


def _fields(section: Section, tensor: TensorLayout, piece: DevicePool) -> tuple[Field, ...]:
    columns = section.table.columns
    if any(column.pitch for column in columns):
        return ()
    if len(columns) == 1:
        # All numbers have one dtype, so the kernel can take each token as a row.
        items = piece.row_bytes // tensor.itemsize
        return (Field(piece.name, columns[0].dtype, piece.row_bytes, 0, items),)
    return tuple(
        Field(
            name=f"{piece.name}.{column.name}",
            dtype=column.dtype,
            pitch=piece.row_bytes,
            offset=column.offset,
            items=column.items,
            scale_floor=column.scale_floor,
            leads=column.offset == 0,
            excusable=column.scales is not None and not column.scales.scale_floor,
        )
        for column in columns
    )


class OrderKernel:
    """Kernel that correlates rows of objects on one lane, in the profile's and in rival orders."""

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
        """Return True, because the kernel supports every object that the check applies to."""
        return True

    def launch(self, count: int) -> list[torch.Tensor]:
        """Correlate rows. Return the correlations of the first look, the gains of each second look,
        and then the usable sets of each look. Each result is [count, sets].
        """
        looks = self.correlate(count)
        return [own for own, _ in looks] + [usable for _, usable in looks]

    def correlate(self, count: int) -> list[Correlations]:
        """Return the correlations of each look, each [count, sets], the profile's order first."""
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

        Column 1 is always False, because the CPU need not find an issue.
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
