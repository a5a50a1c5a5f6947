"""Exit codes, and the exit code of each exception class."""

from __future__ import annotations

from hicachectl.formats.errors import (
    DeviceError,
    FormatError,
    HicacheError,
    StoreUnavailable,
    UnsupportedByBackend,
    UsageError,
)

DONE = 0
BUG = 1
BAD_INPUT = 2
UNAVAILABLE = 3
FINDINGS = 4
INTERRUPTED = 130
TERMINATED = 143

# A subclass has the code of its base class.
EXIT_CODES: dict[type[HicacheError], int] = {
    UsageError: BAD_INPUT,
    FormatError: BAD_INPUT,
    UnsupportedByBackend: BAD_INPUT,
    StoreUnavailable: UNAVAILABLE,
    DeviceError: UNAVAILABLE,
}


def exit_code(error: HicacheError) -> int:
    """Return the exit code of an exception."""
    return next(EXIT_CODES[cls] for cls in type(error).__mro__ if cls in EXIT_CODES)
