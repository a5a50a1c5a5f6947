"""Stable slices of a store's pages: nightly runs cover all in turn."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np
import pyarrow.compute as pc
from msgspec import Meta

from hicachectl.formats.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from hicachectl.formats.arrays import BoolArray


_SECONDS_A_DAY = 86_400


@dataclass(frozen=True, slots=True)
class Sample:
    """One of `slices` equal shares of all pages, by page hash."""

    slices: Annotated[int, Meta(ge=1)]
    number: Annotated[int, Meta(ge=0)]

    @classmethod
    def parse(cls, text: str, number: int | None = None) -> Sample:
        """Return the slice for a text such as 5%. number: see `of`. Raises UsageError."""
        if not re.fullmatch(r"\d+(\.\d+)?%", text):
            raise UsageError(f"--sample: {text!r} is not a share in percent; write 5%")
        return cls.of(float(text[:-1]), number)

    @classmethod
    def of(cls, percent: float, number: int | None = None) -> Sample:
        """Return the slice for a share in percent.

        number: number of the slice; default: the day number, so that slices take turns.
        Raises UsageError unless 0 < percent <= 100.
        """
        if not 0 < percent <= 100:
            raise UsageError(f"--sample {percent:g}%: must be above 0% and at most 100%")
        slices = max(1, round(100 / percent))
        day = int(time.time() // _SECONDS_A_DAY)
        return cls(slices, (day if number is None else number) % slices)

    def contains(self, pages: pa.StringArray) -> BoolArray:
        """Return which page hashes are in the slice: [pages]."""
        # Eight hex digits of a SHA-256 are as good as random; Arrow parses "0x..." vectorised.
        digits = pc.binary_join_element_wise("0x", pc.utf8_slice_codeunits(pages, 0, 8), "")
        numbers = pc.cast(digits, "uint32").to_numpy(zero_copy_only=False)
        chosen: BoolArray = numbers % self.slices == np.uint32(self.number)
        return chosen
