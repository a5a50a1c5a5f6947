"""Exit codes, and the exit code of each exception class."""

from __future__ import annotations

from hicachectl.formats.errors import (
    CollidingKeys,
    DeviceError,
    EmptyStore,
    FormatError,
    HicacheError,
    ProfileError,
    StoreUnavailable,
    UnfinishedPackError,
    UnsupportedByBackend,
    UntrustedError,
    UsageError,
)

DONE = 0
BUG = 1
BAD_INPUT = 2
UNAVAILABLE = 3
FINDINGS = 4
INTERRUPTED = 130
TERMINATED = 143

EXIT_CODES: dict[type[HicacheError], int] = {
    UsageError: BAD_INPUT,
    FormatError: BAD_INPUT,
    ProfileError: BAD_INPUT,
    UnfinishedPackError: BAD_INPUT,
    UnsupportedByBackend: BAD_INPUT,
    CollidingKeys: BAD_INPUT,
    StoreUnavailable: UNAVAILABLE,
    EmptyStore: UNAVAILABLE,
    UntrustedError: UNAVAILABLE,
    DeviceError: UNAVAILABLE,
}


def exit_code(error: HicacheError) -> int:
    """Return the exit code of the nearest listed base class."""
    return next(EXIT_CODES[cls] for cls in type(error).__mro__ if cls in EXIT_CODES)
