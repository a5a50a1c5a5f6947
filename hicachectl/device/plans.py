"""Where each byte of a page object lies in layer-first pools: copy plans, computed once a kind.

Pools are as the server has them. MHA: K and V, [layer][slot][head][channel]; MLA and scaled rows:
[layer][slot][row]; indexer: [layer][page][block]; recurrent states: [layer][state slot][state].
The token slots of a page follow one another from page slot * tokens on, as SGLang's paged
allocator gives them. Source: SGLang srt/mem_cache/memory_pool.py (MHATokenToKVPool,
MLATokenToKVPool, MambaPool), srt/mem_cache/index_key_cache.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hicachectl.kernels.copies import MOST_AXES, VECTOR_BYTES, Axis, CopyPlan

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hicachectl.formats.layouts import TensorLayout

_KINDS = ("k", "v")


@dataclass(frozen=True, slots=True)
class PoolPiece:
    """One layer-first pool: [layers][slots][tokens][row_bytes] bytes.

    offset: bytes, for each slot, of the pools before it in the same memory.
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
    """The pools that hold objects of one kind, one after another in one memory."""

    tensors: tuple[TensorLayout, ...]
    pieces: tuple[PoolPiece, ...]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page slot over all pools and layers: those of an object."""
        return sum(piece.layers * piece.slot_bytes for piece in self.pieces)

    def plans(self, slots: int) -> tuple[CopyPlan, ...]:
        """Plan the scatter of objects into pools of so many page slots.

        Source places are offsets of objects in vectors of VECTOR_BYTES, destination places page
        slots. K and V of one shape are one plan.
        """
        by_name = {piece.name: piece for piece in self.pieces}
        made: list[CopyPlan] = []
        for tensor in self.tensors:
            made += _plans(tensor, by_name, slots)
        return tuple(_joined(made))


def pool_form(tensors: Sequence[TensorLayout]) -> PoolForm:
    """Derive the pools of one kind of object from the tensors that it is made of."""
    pieces: list[PoolPiece] = []
    offset = 0
    for tensor in tensors:
        lengths = dict(zip(tensor.axes, tensor.shape, strict=True))
        names = _KINDS if "kv" in lengths else (tensor.name,)
        layers, tokens = lengths["layer"], lengths.get("token", 1)
        row_bytes = tensor.nbytes // (layers * tokens * len(names))
        for name in names:
            pieces.append(PoolPiece(name, layers, tokens, row_bytes, offset))
            offset += layers * tokens * row_bytes
    return PoolForm(tuple(tensors), tuple(pieces))


def _plans(tensor: TensorLayout, pieces: dict[str, PoolPiece], slots: int) -> list[CopyPlan]:
    """Plan one tensor; one of both K and V gives a plan for each."""
    steps = _source_steps(tensor)
    lengths = dict(zip(tensor.axes, tensor.shape, strict=True))
    names = _KINDS if "kv" in lengths else (tensor.name,)
    return [
        _plan(
            pieces[name],
            tensor.offset + kind * steps.get("kv", 0),
            lengths,
            steps,
            slots,
        )
        for kind, name in enumerate(names)
    ]


def _source_steps(tensor: TensorLayout) -> dict[str, int]:
    steps, step = {}, tensor.itemsize
    for axis, length in zip(reversed(tensor.axes), reversed(tensor.shape), strict=True):
        steps[axis] = step
        step *= length
    return steps


def _plan(
    piece: PoolPiece,
    source_offset: int,
    lengths: dict[str, int],
    steps: dict[str, int],
    slots: int,
) -> CopyPlan:
    layer_bytes = slots * piece.slot_bytes
    axes = [Axis("layer", piece.layers, steps["layer"], layer_bytes)]
    run = piece.row_bytes
    if "token" in lengths:
        axes.append(Axis("token", piece.tokens, steps["token"], piece.row_bytes))
    if "head" in lengths:
        run //= lengths["head"]
        axes.append(Axis("head", lengths["head"], steps["head"], run))
    while len(axes) > 1 and axes[-1].source == axes[-1].destination == run:
        run *= axes.pop().length
    return CopyPlan(
        tuple(axes), run, source_offset, slots * piece.offset, VECTOR_BYTES, piece.slot_bytes
    )


def _joined(plans: Iterable[CopyPlan]) -> list[CopyPlan]:
    """Make one plan of two neighbours that differ in their offsets alone, as K's and V's do."""
    joined: list[CopyPlan] = []
    for plan in plans:
        last = joined[-1] if joined else None
        if last is not None and len(last.axes) < MOST_AXES and _alike(last, plan):
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
