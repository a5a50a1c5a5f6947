"""Find numbers in device pools that no healthy object holds: see `checks.values`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hicachectl.checks.tables import sections_of, stored_layers
from hicachectl.kernels.values_triton import Field, block_flags, certain_flags, supports

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from hicachectl.checks.tables import Section
    from hicachectl.device.plans import DevicePool, PoolForm
    from hicachectl.device.runs import DeviceRun
    from hicachectl.formats.layouts import TensorLayout
    from hicachectl.formats.profile import Profile
    from hicachectl.formats.spec import ObjectSpec


class NumberKernel:
    """Flags of bad numbers in the fields of objects on one lane, except padding layers."""

    def __init__(self, spec: ObjectSpec, profile: Profile, run: DeviceRun) -> None:
        stored = stored_layers(spec, profile)
        self._layers = [number for number, layer in enumerate(stored) if layer is not None]
        self._fields = list(fields_of(spec, profile, run.pools))
        self._run = run
        layers = torch.tensor(self._layers, dtype=torch.int64, device=run.lane.device)
        # Block numbers, object by object; blocks are [layer][slot].
        self._blocks = (layers * run.most + run.slots[:, None]).reshape(-1)

    @staticmethod
    def supports(spec: ObjectSpec, profile: Profile, pools: PoolForm) -> bool:
        """Return whether the kernel supports every field; not if bytes of a pool have none."""
        return all(supports(fields) for _, fields in fields_of(spec, profile, pools))

    def launch(self, count: int) -> list[torch.Tensor]:
        """Flag objects, [count, 2]: whether one is suspect; whether the CPU must find an issue.

        Suspects may be healthy: codes under a scale of 0 mean nothing; a row may begin with zeros.
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

    def suspects(self, seen: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.bool_]:
        """Return the flags, [count, 2]."""
        return seen[0].astype(np.bool_)


def fields_of(
    expected: ObjectSpec, profile: Profile, form: PoolForm
) -> Iterator[tuple[DevicePool, tuple[Field, ...]]]:
    """Yield each pool with the fields of its blocks; a block is one layer of one page slot."""
    sections = sections_of(expected, profile)
    for section, tensor, piece in zip(sections, expected.tensors, form.pieces, strict=True):
        yield piece, _fields(section, tensor, piece)


def _fields(section: Section, tensor: TensorLayout, piece: DevicePool) -> tuple[Field, ...]:
    columns = section.table.columns
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
