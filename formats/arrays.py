"""Types of arrays, and of counts in documents."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import numpy.typing as npt
from msgspec import Meta

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
# A number of things. Its bound leaves room to add two counts within 64 unsigned bits.
Count = Annotated[int, Meta(ge=0, le=2**62)]
