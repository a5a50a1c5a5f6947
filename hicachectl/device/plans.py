"""Copy plans between page objects and layer-first pools, computed once per kind of object.

Pools have the server's layout:

- MHA, K and V: [layer][slot][head][channel]
- MLA and scaled rows: [layer][slot][row]
- indexer: [layer][page][block]
- recurrent states: [layer][state slot][state]

The token slots of a page are consecutive and begin at page slot * tokens, as SGLang's paged
allocator assigns them.
Source: SGLang srt/mem_cache/memory_pool.py (MHATokenToKVPool, MLATokenToKVPool, MambaPool),
srt/mem_cache/index_key_cache.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hicachectl.formats.copyplan import VECTOR_BYTES, Axis, CopyPlan, compact

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hicachectl.formats.layouts import TensorLayout


@dataclass(frozen=True, slots=True)
class DevicePool:
    """One layer-first pool: [layers][slots][tokens][row_bytes] bytes.

    offset: number of bytes that one page slot has in the pools before this pool in the same memory.
    """

    name: str
    layers: int
    tokens: int
    row_bytes: int
    offset: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of one layer of one page slot."""
        return self.tokens * self.row_bytes


@dataclass(frozen=True, slots=True)
class PoolForm:
    """The pools for objects of one kind. They follow one another in one memory."""

    tensors: tuple[TensorLayout, ...]
    pieces: tuple[DevicePool, ...]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page slot in all pools, which is the size of an object."""
        return sum(piece.layers * piece.slot_bytes for piece in self.pieces)

    def plans(self, slots: int) -> tuple[CopyPlan, ...]:
        """Return the plans that scatter objects into pools of `slots` page slots.

        Source places are offsets of objects, counted in vectors of VECTOR_BYTES. Destination places
        are page slots. K and V of one shape share a plan.
        """
        made = (_plan(*both, slots) for both in zip(self.tensors, self.pieces, strict=True))
        return tuple(_joined(made))


def pool_form(tensors: Sequence[TensorLayout]) -> PoolForm:
    """Return the pools for objects of these tensors."""
    pieces: list[DevicePool] = []
    offset = 0
    for tensor in tensors:
        lengths = dict(zip(tensor.axes, tensor.shape, strict=True))
        layers, tokens = lengths["layer"], lengths.get("token", 1)
        row_bytes = tensor.nbytes // (layers * tokens)
        pieces.append(DevicePool(tensor.name, layers, tokens, row_bytes, offset))
        offset += tensor.nbytes
    return PoolForm(tuple(tensors), tuple(pieces))


def _plan(tensor: TensorLayout, piece: DevicePool, slots: int) -> CopyPlan:
    """Return the plan for one tensor. Its pool is ordered by layer, slot, token and head."""
    source = tensor.strides
    rows: list[str] = [axis for axis in ("token", "head") if axis in source]
    rows += [axis for axis in tensor.axes if axis not in ("layer", *rows)]
    lengths = dict(zip(tensor.axes, tensor.shape, strict=True))
    packed = replace(tensor, axes=tuple(rows), shape=tuple(lengths[axis] for axis in rows))
    steps = [Axis("", lengths[axis], source[axis], step) for axis, step in packed.strides.items()]
    steps.append(Axis("layer", piece.layers, source["layer"], slots * piece.slot_bytes))
    axes, run = compact(steps, tensor.itemsize)
    return CopyPlan(axes, run, tensor.offset, slots * piece.offset, VECTOR_BYTES, piece.slot_bytes)


def _joined(plans: Iterable[CopyPlan]) -> list[CopyPlan]:
    """Join neighbouring plans that differ only in offsets, as the plans of K and V do."""
    joined: list[CopyPlan] = []
    for plan in plans:
        last = joined[-1] if joined else None
        if last is not None and _alike(last, plan):
            step = Axis(
                "kv",
                2,
                plan.source_offset - last.source_offset,
                plan.destination_offset - last.destination_offset,
            )
            joined[-1] = replace(last, axes=(step, *last.axes))
        else:
            joined.append(plan)
    return joined


def _alike(one: CopyPlan, two: CopyPlan) -> bool:
    same = replace(two, source_offset=one.source_offset, destination_offset=one.destination_offset)
    return same == one and one.axes[0].name != "kv"
