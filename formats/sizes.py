"""Sizes as users write them."""

from __future__ import annotations

import re
from fractions import Fraction

from hicachectl.formats.documents import shown
from hicachectl.formats.errors import UsageError

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{p}B": 1000**i for i, p in enumerate("KMGTPE", 1)},
    **{f"{p}iB": 1024**i for i, p in enumerate("KMGTPE", 1)},
}
_SIZE = re.compile(r"([0-9]{1,40}(?:\.[0-9]{1,40})?)\s*([KMGTPE]?i?B?)")
_TOO_LARGE = 2**63


def parse_size(text: str, least: int = 0) -> int:
    """Return the bytes of a size such as 200GiB or 1.5TB, or of a number of bytes.

    Raises UsageError for other text, for less than `least` bytes, and for 8 EiB or more.
    """
    match = _SIZE.fullmatch(text)
    if match is None or match[2] not in _UNITS:
        raise UsageError(f"{shown(text)} is not a size; write 200GiB, 1.5TB or a number of bytes")
    nbytes = int(Fraction(match[1]) * _UNITS[match[2]])
    if nbytes < least:
        raise UsageError(f"{shown(text)} is less than {least} bytes; give more")
    if nbytes >= _TOO_LARGE:
        raise UsageError(f"{shown(text)} is 8 EiB or more; give less")
    return nbytes
