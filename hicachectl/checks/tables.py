"""Tensors of objects as tables of rows, for value checks.

Kinds (`formats.kinds`) define the columns of a row. The padding layers are those of SGLang
srt/mem_cache/pool_host/.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.formats.kinds import kind_of
from hicachectl.formats.kinds.pool import pool_name
from hicachectl.formats.layouts import Column
from hicachectl.formats.pools import model_layer_count
from hicachectl.kernels.values import RowTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicachectl.formats.arrays import IntArray
    from hicachectl.formats.kinds.pool import Pool
    from hicachectl.formats.layouts import TensorLayout
    from hicachectl.formats.profile import Profile
    from hicachectl.formats.spec import ObjectSpec

# Rows of more bytes, such as rows of recurrent states, are cut along the next axis.
_ROW_BYTES = 64 << 10
_ROW_AXES = ("layer", "token")
WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class Section:
    """A tensor of an object as a table of rows.

    layers: model layer number of each stored layer; None for padding.
    """

    table: RowTable
    layers: tuple[int | None, ...]
    dtype: str

    def coordinates(self, rows: IntArray) -> dict[str, IntArray]:
        """Return the coordinates of rows by axis. Layers are those of the model; -1 for padding."""
        numbers = np.array([-1 if layer is None else layer for layer in self.layers])
        return {**self._unravelled(rows), "layer": numbers[self.stored_layer(rows)]}

    def stored_layer(self, rows: IntArray) -> IntArray:
        """Return the index of each row's layer among the stored layers."""
        return self._unravelled(rows)["layer"]

    @property
    def plain(self) -> bool:
        """Whether each row has only numbers of the dtype, in whole words of WORD_BYTES."""
        table = self.table
        return len(table.columns) == 1 and not (table.pitch | table.offset) % WORD_BYTES

    def sample_words(self, most: int) -> IntArray:
        """Choose words of a plain tensor at random, but not in padding layers; return their places.

        Each run chooses the same words.
        most: largest number of words to choose.
        """
        table = self.table
        rows = np.concatenate([np.arange(*run) for run in table.runs] or [np.zeros(0, np.int64)])
        width = table.pitch // WORD_BYTES
        if not len(rows):
            return rows
        count = len(rows) * width
        words: IntArray = np.random.default_rng(0).choice(count, min(count, most), False)
        places: IntArray = table.offset // WORD_BYTES + rows[words // width] * width + words % width
        return places

    def _unravelled(self, rows: IntArray) -> dict[str, IntArray]:
        table = self.table
        return dict(zip(table.axes, np.unravel_index(rows, table.shape), strict=True))


def sections_of(expected: ObjectSpec, profile: Profile) -> tuple[Section, ...]:
    """Return the tensors of an object as tables; empty if the profile lacks the object's pool."""
    pool = profile.pool(expected.coordinate.pool)
    if pool is None:
        return ()
    layers = stored_layers(expected, profile)
    code_dtype = code_dtype_of(profile, pool)
    return tuple(_section(tensor, layers, pool, code_dtype) for tensor in expected.tensors)


def stored_layers(expected: ObjectSpec, profile: Profile) -> tuple[int | None, ...]:
    """Return the model layer of each stored layer, None for padding.

    Padding lies after the model's own layers and before the layers of a draft in the same object.
    """
    packed = 0
    if not pool_name(expected.pool).draft:
        total = model_layer_count(profile)
        packed = sum(layer >= total for layer in expected.layers)
    own = len(expected.layers) - packed
    padding = (None,) * expected.padding_layers
    return (*expected.layers[:own], *padding, *expected.layers[own:])


def code_dtype_of(profile: Profile, pool: Pool) -> str:
    """Return the fp8 dtype of quantised codes.

    An SGLang process has one such dtype (is_fp8_fnuz). The dtype of the pool, or of the first pool
    of the profile, shows which.
    """
    fnuz = "float8_e4m3fnuz"
    return fnuz if fnuz in (pool.dtype, profile.pools[0].dtype) else "float8_e4m3fn"


def _section(
    tensor: TensorLayout, layers: tuple[int | None, ...], pool: Pool, code_dtype: str
) -> Section:
    cut = _row_axes(tensor)
    columns = kind_of(pool).columns(pool, tensor, code_dtype)
    row = tensor.shape[cut:]
    if columns is None:
        columns = (Column("", 0, tensor.dtype, tensor.axes[cut:], row),)
    axes, shape = tensor.axes[:cut], tensor.shape[:cut]
    table = RowTable(
        name=tensor.name,
        offset=tensor.offset,
        pitch=prod(row) * tensor.itemsize,
        axes=axes,
        shape=shape,
        columns=columns,
        runs=_runs(axes, shape, layers),
    )
    return Section(table, layers, tensor.dtype)


def _row_axes(tensor: TensorLayout) -> int:
    """Return the number of leading axes whose indices tell rows apart.

    These are the axes up to layer and token, and further axes if a row would be too long.
    """
    cut = 1 + max(i for i, axis in enumerate(tensor.axes) if axis in _ROW_AXES)
    while len(tensor.axes) - cut > 1 and prod(tensor.shape[cut:]) * tensor.itemsize > _ROW_BYTES:
        cut += 1
    return cut


def _runs(
    axes: Sequence[str], shape: Sequence[int], layers: tuple[int | None, ...]
) -> tuple[tuple[int, int], ...]:
    """Return half-open ranges of rows whose layer is not padding."""
    real = np.array([layer is not None for layer in layers], dtype=np.int8)
    axis = list(axes).index("layer")
    along = real.reshape([-1 if i == axis else 1 for i in range(len(axes))])
    rows = np.broadcast_to(along, tuple(shape)).reshape(-1)
    edges = np.flatnonzero(np.diff(rows, prepend=0, append=0)).reshape(-1, 2)
    return tuple((int(start), int(stop)) for start, stop in edges)
