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
_BARE = 10_000  # users who leave the unit out of a smaller size mean GiB or a percentage


def parse_size(text: str, least: int = 0, *, or_share: bool = False) -> int:
    """Return the bytes of a size such as 200GiB or 1.5TB, or of a number of bytes.

    or_share: whether a percentage is possible, too, for the message.
    Raises UsageError for other text, for a small number without a unit, and for less than `least`
    or 8 EiB or more.
    """
    match = _SIZE.fullmatch(text)
    if match is None or match[2] not in _UNITS:
        raise UsageError(f"{shown(text)} is not a size; write 200GiB, 1.5TB or a number of bytes")
    nbytes = int(Fraction(match[1]) * _UNITS[match[2]])
    if nbytes < least:
        raise UsageError(f"{shown(text)} is less than {least} bytes; give more")
    if not match[2] and 0 < nbytes < _BARE:
        share = f"{match[1]}%, " if or_share else ""
        raise UsageError(
            f"{shown(text)} is only {nbytes} bytes; write {share}{match[1]}GiB, or {nbytes}B if "
            "bytes are meant"
        )
    if nbytes >= _TOO_LARGE:
        raise UsageError(f"{shown(text)} is 8 EiB or more; give less")
    return nbytes
