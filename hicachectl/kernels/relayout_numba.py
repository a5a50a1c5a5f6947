"""Carry out transfer plans by a loop that numba compiles, in the time of a copy.

numpy moves each run by ordinary stores, which first read the cache line that they overwrite. So
numpy moves 1.5 times as many bytes as libc does when it copies objects from end to end, because
libc then uses stores that do not read. The loop uses such stores, too. It reads the sources from
end to end, because gaps between reads cost more time than gaps between writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir
from numba import config, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from hicachectl.formats.copyplan import Axis

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    from hicachectl.formats.arrays import IntArray
    from hicachectl.formats.copyplan import CopyPlan
    from hicachectl.formats.transfer import TransferUnit

if config.DISABLE_JIT:  # type: ignore[attr-defined]
    raise ImportError("NUMBA_DISABLE_JIT is set: the loop cannot run uncompiled")

_AXES = 3
_ONE = Axis("", 1, 0, 0)
_FIRST = 5  # column of the first axis
_LINE = 64  # bytes of a cache line
_TURN_BYTES = 512  # if a turn has more bytes, processors read the gaps between its runs twice


def carry_out(
    unit: TransferUnit,
    sources: Sequence[npt.NDArray[np.uint8]],
    destinations: Sequence[npt.NDArray[np.uint8]],
) -> None:
    """Do what `relayout.relayout` does, after it has checked the arrays and filled the padding."""
    copies = list(unit.copies)
    while any(len(plan.axes) > _AXES for plan in copies):
        copies = [plan.at(0, n) for plan in copies for n in range(plan.axes[0].length)]
    copies.sort(key=lambda plan: (plan.source, plan.source_offset))
    to = [(pages.ctypes.data, pages.strides[0]) for pages in destinations]
    at = [(pages.ctypes.data, pages.strides[0]) for pages in sources]
    rows = np.array([_row(plan, to, at) for plan in copies], dtype=np.int64)
    turns = np.array([_turn(copies, rows, *group) for group in _groups(copies)], dtype=np.int64)
    _move(rows, turns, len(sources[0]))


def _row(plan: CopyPlan, to: list[tuple[int, int]], at: list[tuple[int, int]]) -> list[int]:
    """Return a copy as a row of `_loop`.

    to: address of the first page, and distance to the next page, of each destination object.
    at: the same numbers of each source object.
    """
    (target, further), (origin, farther) = to[plan.destination], at[plan.source]
    axes = sorted(plan.axes, key=lambda axis: -axis.source)
    axes[1:1] = [_ONE] * (_AXES - len(axes))  # the first axis stays first, the last stays last
    steps = [number for axis in axes for number in (axis.length, axis.destination, axis.source)]
    target += plan.destination_offset
    origin += plan.source_offset
    return [target, further, origin, farther, plan.run, *steps]


def _groups(copies: list[CopyPlan]) -> Iterator[tuple[int, int]]:
    """Yield groups of copies that read one stretch of a source, as half-open ranges of indices.

    copies: copies in the order of their sources.
    """
    begun = stretch = 0
    for n, plan in enumerate(copies):
        if n > begun and (plan.source != copies[begun].source or plan.source_offset >= stretch):
            yield begun, n
            begun = n
        span = sum((axis.length - 1) * axis.source for axis in plan.axes) + plan.run
        stretch = max(stretch if n > begun else 0, plan.source_offset + span)
    yield begun, len(copies)


def _turn(copies: list[CopyPlan], rows: IntArray, begun: int, end: int) -> tuple[int, ...]:
    """Return a group as a row of `_loop`.

    The copies of a group take turns, so that each part of their source is read only once.
    """
    length = step = int(rows[begun:end, _FIRST].max())
    if end > begun + 1:
        nbytes = sum(plan.nbytes for plan in copies[begun:end])
        step = max(1, length * _TURN_BYTES // nbytes)
    return begun, end, length, step


def _loop(copies: IntArray, turns: IntArray, pages: int) -> None:
    """Carry out copies, page by page.

    copies: [n, 14] int64. Addresses are not checked. The columns are:
        0, 1: address of the first page's destination, and distance to the next page's destination
        2, 3: the same numbers for the source
        4: bytes of a run
        5 to 13: for each axis, outermost first, its length, and its steps in the destination and
            in the source
    turns: [k, 4] int64. The columns are:
        0, 1: half-open range of the copies of a group
        2: length of the longest first axis of these copies
        3: number of indices of the first axis that a copy does before the next copy has its turn
    """
    for page in range(pages):
        for turn in range(len(turns)):
            step = turns[turn, 3]
            for start in range(0, turns[turn, 2], step):
                for n in range(turns[turn, 0], turns[turn, 1]):
                    run = copies[n, 4]
                    target = copies[n, 0] + page * copies[n, 1]
                    origin = copies[n, 2] + page * copies[n, 3]
                    for a in range(start, min(start + step, copies[n, 5])):
                        for b in range(copies[n, 8]):
                            to = target + a * copies[n, 6] + b * copies[n, 9]
                            at = origin + a * copies[n, 7] + b * copies[n, 10]
                            for _ in range(copies[n, 11]):
                                done = -to & (_LINE - 1)
                                if done + _LINE <= run:
                                    if done:
                                        _copy(to, at, done)
                                    while done + _LINE <= run:
                                        _stream(to + done, at + done)
                                        done += _LINE
                                else:
                                    done = 0
                                if done < run:
                                    _copy(to + done, at + done, run - done)
                                to += copies[n, 12]
                                at += copies[n, 13]
    _fence()  # after the fence, other threads see all lines that were stored


def _copying(_context: Any, to: Any, at: Any, nbytes: Any) -> Any:
    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        to, at, nbytes = arguments
        byte = ir.IntType(8).as_pointer()
        target, source = builder.inttoptr(to, byte), builder.inttoptr(at, byte)
        cgutils.raw_memcpy(builder, target, source, nbytes, 1)  # type: ignore[no-untyped-call]
        return context.get_dummy_value()

    return types.void(to, at, nbytes), code


def _streaming(_context: Any, to: Any, at: Any) -> Any:
    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        line = ir.VectorType(ir.IntType(64), _LINE // 8).as_pointer()
        target, source = (builder.inttoptr(place, line) for place in arguments)
        stored = builder.store(builder.load(source, align=1), target, align=_LINE)
        once = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        stored.set_metadata("nontemporal", once)
        return context.get_dummy_value()

    return types.void(to, at), code


def _fencing(_context: Any) -> Any:
    def code(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), code


# _copy(to, at, nbytes) copies bytes between addresses. _stream(to, at) copies a line to an aligned
# address, and does not read the bytes that it overwrites. _fence() waits for all streamed lines.
_copy: Any = intrinsic(_copying)
_stream: Any = intrinsic(_streaming)
_fence: Any = intrinsic(_fencing)

_move: Callable[[IntArray, IntArray, int], None]
_move = njit("void(int64[:, ::1], int64[:, ::1], int64)", nogil=True)(_loop)
