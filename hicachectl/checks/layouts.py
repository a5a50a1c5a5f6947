"""Check whether an object's bytes lie in another SGLang layout than the profile's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hicachectl.checks.registry import ValueIssue
from hicachectl.checks.tables import stored_layers
from hicachectl.formats.kinds import kind_of
from hicachectl.kernels.layout import (
    FIRST_CHANNELS,
    SECOND_CHANNELS,
    OrderLook,
    OrderTest,
    OrderVerdict,
    RowOrder,
    log_magnitudes,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.formats.arrays import IntArray
    from hicachectl.formats.layouts import Column, TensorLayout
    from hicachectl.formats.profile import Profile
    from hicachectl.formats.spec import ObjectSpec
    from hicachectl.kernels.layout import Floats
    from hicachectl.kernels.values import Bytes

    _Places = tuple[IntArray, IntArray]


@dataclass(frozen=True, slots=True)
class LayoutCheck:
    """Check for pages whose rows lie in the order of another layout.

    rivals: names of layouts with another row order; one text for each order.
    tensors: tensors of the object, all in one axis order.
    widths: number of channels to compare in each tensor.
    scales: column of the scales, if each row of the only tensor begins with codes; None for plain
        numbers.
    """

    layout: str
    rivals: tuple[str, ...]
    test: OrderTest
    tensors: tuple[TensorLayout, ...]
    widths: tuple[int, ...]
    scales: Column | None

    def __call__(self, objects: Bytes) -> Iterator[ValueIssue]:
        """Yield an issue for each object of [n, nbytes] whose rows lie in another order."""
        found = self.test.contradictions(partial(self._read, objects), len(objects))
        for index, verdict in sorted(found.items(), key=lambda item: item[0]):
            yield ValueIssue(index, "layout-mismatch", self._describe(verdict))

    @property
    def looks(self) -> list[OrderLook]:
        """The rows that the first look reads, followed by the rows of each rival's second look."""
        first = self._look(self.test.first_sets, FIRST_CHANNELS)
        return [first, *(self._look(sets, SECOND_CHANNELS) for sets in self.test.second_sets)]

    def _look(self, sets: IntArray, channels: int) -> OrderLook:
        layer, token, head = self.test.stored.coordinates(sets)
        tensor = self.tensors[0]
        width = self.widths[0]
        return OrderLook(
            layer=layer,
            token=token,
            head=head,
            width=width,
            step=_channel_step(width, channels),
            itemsize=tensor.itemsize,
            scaled=self.scales is not None,
        )

    def _read(self, objects: Bytes, pages: IntArray, rows: IntArray, channels: int) -> Floats:
        """Implement `kernels.layout.ReadRows`."""
        places = (pages[:, np.newaxis], rows)
        if self.scales is not None:
            return _read_codes(objects, self.tensors[0], self.scales, places, channels)[:, None]
        both = zip(self.tensors, self.widths, strict=True)
        return np.stack([_read_floats(objects, *one, places, channels) for one in both], 1)

    def _describe(self, verdict: OrderVerdict) -> str:
        rival = self.rivals[verdict.rival]
        return (
            f"rows lie in the order of {rival}, not of {self.layout}: tokens of one layer and "
            f"head correlate at {verdict.other:.2f} when read as {rival}, but at "
            f"{verdict.own:.2f} when read as {self.layout}; the difference is {verdict.sigma:.0f} "
            f"standard errors over {verdict.sets} sets of rows"
        )


def layout_check(expected: ObjectSpec, profile: Profile) -> LayoutCheck | None:
    """Return the check for one spec; None if the values cannot show another order."""
    pool = profile.pool(expected.coordinate.pool)
    if pool is None or not expected.tensors:
        return None
    kind, stored = kind_of(pool), expected.tensors[0]
    widths = tuple(kind.compared_channels(pool, tensor) for tensor in expected.tensors)
    if not all(widths):
        return None
    columns = kind.columns(pool, stored, code_dtype="float8_e4m3fn")
    lengths = dict(zip(stored.axes, stored.shape, strict=True))
    own = _row_order(stored.axes, lengths)
    rivals: dict[tuple[str, ...], tuple[RowOrder, list[str]]] = {}
    for layout in kind.layouts(pool):
        order = _row_order(stored.in_layout(layout).axes, lengths)
        rivals.setdefault(order.visible, (order, []))[1].append(layout)
    rivals.pop(own.visible, None)
    real = [i for i, layer in enumerate(stored_layers(expected, profile)) if layer is not None]
    test = OrderTest(own, [order for order, _ in rivals.values()], real)
    if not test.decidable:
        return None
    names = tuple(" or ".join(layouts) for _, layouts in rivals.values())
    scales = None if columns is None else columns[0].scales
    return LayoutCheck(profile.layout, names, test, expected.tensors, widths, scales)


def _row_order(axes: tuple[str, ...], lengths: dict[str, int]) -> RowOrder:
    rows = tuple(axis for axis in axes if axis != "channel")
    return RowOrder(rows, tuple(lengths[axis] for axis in rows))


def _read_floats(
    objects: Bytes, tensor: TensorLayout, width: int, places: _Places, channels: int
) -> Floats:
    items = _rows(objects, tensor).view(f"u{tensor.itemsize}")
    return log_magnitudes(_spread(items[..., :width], channels)[places])


def _read_codes(
    objects: Bytes, tensor: TensorLayout, scales: Column, places: _Places, channels: int
) -> Floats:
    """Read the log magnitudes of codes times scales.

    Only three mantissa bits of a scale count, because codes have no more.
    """
    stored = _rows(objects, tensor)
    codes = log_magnitudes(_spread(stored[..., : scales.offset], channels)[places])
    ends = scales.offset + scales.nbytes
    exponents = stored[..., scales.offset : ends].view(np.uint32)[places] >> 20
    by_tile = codes.reshape(*codes.shape[:-1], scales.items, -1)
    by_tile += exponents.astype(np.float32)[..., np.newaxis]
    return codes


def _rows(objects: Bytes, tensor: TensorLayout) -> Bytes:
    width = tensor.shape[-1] * tensor.itemsize
    stored = objects[:, tensor.offset : tensor.offset + tensor.nbytes]
    return stored.reshape(len(objects), -1, width)


def _spread(items: Any, channels: int) -> Any:
    """Return a view of at least `channels` evenly spaced channels of each row."""
    return items[..., :: _channel_step(items.shape[-1], channels)]


def _channel_step(width: int, channels: int) -> int:
    # A step that is a power of two takes equally many channels from each tile of 128 codes.
    return 1 << (max(1, width // channels).bit_length() - 1)
