"""The server's own copy on a device, to compare ours with."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.formats.copyplan import Axis, CopyPlan

# sgl_kernel's kernels move words of 8 bytes: TORCH_CHECK(item_size % 8 == 0) in transfer.cu.
_SGL_WORD = 8
# Thread blocks per launch. A server uses 2, to leave SMs to its model; no model runs beside us.
_SGL_BLOCKS = 64


class SglKernelProvider:
    """The server's kernels: sgl_kernel.kvcacheio, one launch per layer.

    Page-first variants read row i at i * layout_dim and write row j at j * item_size, in bytes
    (csrc/kvcacheio/transfer.cu :: get_global_offset_pf, get_global_offset_lf). With the plan's unit
    as layout_dim, an index is an address, so these variants serve every layout. Rows and units must
    be whole words of 8 bytes.
    """

    def __init__(self, operations: Any = None, *, blocks: int = _SGL_BLOCKS) -> None:
        """Use the server's operations, or given ones with the same signatures.

        blocks: most thread blocks per launch.
        """
        if operations is None:
            from sgl_kernel import kvcacheio

            operations = kvcacheio
        self._load = operations.transfer_kv_per_layer_mla_pf_lf
        self._load_kv = operations.transfer_kv_per_layer_pf_lf
        self._back_up = operations.transfer_kv_all_layer_mla_lf_pf
        self._blocks = blocks

    def supports(self, plan: CopyPlan) -> bool:
        """Return whether rows are whole words, and one side of a plan has whole rows of layers."""
        return plan.unit % _SGL_WORD == 0 and (_dense(plan) or _dense(plan.reversed()))

    def copy(
        self,
        plan: CopyPlan,
        source: torch.Tensor,
        source_places: torch.Tensor,
        destination: torch.Tensor,
        destination_places: torch.Tensor,
    ) -> None:
        """Carry out a plan that is supported."""
        if not len(source_places):  # the server's launcher divides by their number
            return
        assert self.supports(plan)
        if _dense(plan):
            self._scatter(plan, source, source_places, destination, destination_places)
        else:
            back = plan.reversed()
            self._gather(back, destination, destination_places, source, source_places)

    def _scatter(
        self,
        plan: CopyPlan,
        objects: torch.Tensor,
        object_places: torch.Tensor,
        pools: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        kinds = [axis for axis in plan.axes if axis.name == "kv"]
        from_units, to_items = _indices(plan, object_places, slots)
        for layer in _layers(plan):
            first, last = objects[layer.source_offset :], pools[layer.destination_offset :]
            if kinds:
                second = objects[layer.source_offset + kinds[0].source :]
                values = pools[layer.destination_offset + kinds[0].destination :]
                self._load_kv(
                    first, last, second, values, from_units, to_items, 0, plan.run, plan.unit,
                    block_quota=self._blocks,
                )  # fmt: skip
            else:
                self._load(
                    first, last, from_units, to_items, 0, plan.run, plan.unit,
                    block_quota=self._blocks,
                )  # fmt: skip

    def _gather(
        self,
        plan: CopyPlan,
        objects: torch.Tensor,
        object_places: torch.Tensor,
        pools: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        kinds = [axis for axis in plan.axes if axis.name == "kv"]
        offsets = [(0, 0), *((axis.source, axis.destination) for axis in kinds)]
        object_units, pool_items = _indices(plan, object_places, slots)
        for layer, (to_kind, from_kind) in product(_layers(plan), offsets):
            pool = pools[layer.destination_offset + from_kind :]
            address = pool.data_ptr()
            table = torch.full((1,), address, dtype=torch.int64, device=pools.device)
            self._back_up(
                table.view(torch.uint64),
                objects[layer.source_offset + to_kind :],
                pool_items,
                object_units,
                plan.run,
                plan.unit,
                1,
                block_quota=self._blocks,
            )


def _dense(plan: CopyPlan) -> bool:
    """Return whether a plan writes whole rows of layers, as `*_pf_lf` kernels do."""
    steps = [axis.destination for axis in plan.axes if axis.name not in ("kv", "layer")]
    return all(step % plan.run == 0 for step in (*steps, plan.destination_step)) and any(
        axis.name == "layer" and axis.destination >= plan.destination_step for axis in plan.axes
    )


def _along_rows(plan: CopyPlan) -> list[Axis]:
    """Return the axes that a launch covers; their lengths make its rows for each object."""
    return [axis for axis in plan.axes if axis.name not in ("kv", "layer")]


def _layers(plan: CopyPlan) -> Iterator[CopyPlan]:
    """Split a plan by layer, K and V together."""
    place, axis = next((n, axis) for n, axis in enumerate(plan.axes) if axis.name == "layer")
    return (plan.at(place, layer) for layer in range(axis.length))


def _indices(
    plan: CopyPlan, object_places: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return row indices of one layer of K, or of the only tensor: in objects, and in pools.

    Indices in objects count units; those in pools count rows. Other layers have equal indices at
    other offsets.
    """
    axes = _along_rows(plan)
    sides = (
        (object_places * plan.source_step, [axis.source for axis in axes]),
        (slots * plan.destination_step, [axis.destination for axis in axes]),
    )
    indices = []
    for (first, steps), width in zip(sides, (plan.unit, plan.run), strict=True):
        rows = first
        for axis, step in zip(axes, steps, strict=True):
            along = torch.arange(axis.length, device=rows.device) * step
            rows = (rows[:, None] + along).reshape(-1)
        indices.append(rows // width)
    return indices[0], indices[1]
