"""Ways to carry out copy plans on a device, which write the same bytes: Triton, plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from hicachectl.kernels.copy_triton import strided_copy

if TYPE_CHECKING:
    import torch

    from hicachectl.formats.copyplan import CopyPlan


class Provider(Protocol):
    """Executor of copy plans between 1D uint8 tensors of one device, on the current stream."""

    def copy(
        self,
        plan: CopyPlan,
        source: torch.Tensor,
        source_places: torch.Tensor,
        destination: torch.Tensor,
        destination_places: torch.Tensor,
    ) -> None:
        """Carry out a plan for each pair of places ([n] int64, on the device)."""


class TorchProvider:
    """Plain torch: one strided copy per object. The reference, on any device."""

    def copy(
        self,
        plan: CopyPlan,
        source: torch.Tensor,
        source_places: torch.Tensor,
        destination: torch.Tensor,
        destination_places: torch.Tensor,
    ) -> None:
        """Carry out a plan. Synchronises, to read the places."""
        shape = (*(axis.length for axis in plan.axes), plan.run)
        steps = (
            (*(axis.source for axis in plan.axes), 1),
            (*(axis.destination for axis in plan.axes), 1),
        )
        for first, last in zip(source_places.tolist(), destination_places.tolist(), strict=True):
            start = plan.source_offset + first * plan.source_step
            end = plan.destination_offset + last * plan.destination_step
            destination.as_strided(shape, steps[1], end).copy_(
                source.as_strided(shape, steps[0], start)
            )


class TritonProvider:
    """hicachectl's own Triton kernel: one launch per plan."""

    copy = staticmethod(strided_copy)
