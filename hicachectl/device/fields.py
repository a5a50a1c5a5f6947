"""What to look at in each pool: runs of equal numbers in the rows of its blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicachectl.checks.tables import sections_of
from hicachectl.kernels.statistics import Field

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.checks.tables import Section
    from hicachectl.device.plans import PoolForm, PoolPiece
    from hicachectl.formats.layouts import TensorLayout
    from hicachectl.formats.profile import Profile
    from hicachectl.formats.spec import ObjectSpec


def fields_of(
    expected: ObjectSpec, profile: Profile, form: PoolForm
) -> Iterator[tuple[PoolPiece, tuple[Field, ...]]]:
    """Name the fields of the blocks of each pool: a block is one layer of one page slot."""
    sections = sections_of(expected, profile)
    for section, tensor, piece in zip(sections, expected.tensors, form.pieces, strict=True):
        yield piece, _fields(section, tensor, piece)


def _fields(section: Section, tensor: TensorLayout, piece: PoolPiece) -> tuple[Field, ...]:
    columns = section.table.columns
    if len(columns) == 1:
        # Numbers throughout, so that a row may be a token's, whatever the rows of the object were.
        items = piece.row_bytes // tensor.itemsize
        return (Field(piece.name, columns[0].dtype, piece.tokens, piece.row_bytes, 0, items),)
    return tuple(
        Field(
            name=f"{piece.name}.{column.name}",
            dtype=column.dtype,
            rows=piece.tokens,
            pitch=piece.row_bytes,
            offset=column.offset,
            items=column.items,
            scale_floor=column.scale_floor,
            leads=column.offset == 0,
            excusable=column.scales is not None and not column.scales.scale_floor,
        )
        for column in columns
    )
