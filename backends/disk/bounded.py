"""Read files that somebody else wrote: whole up to a bound, or by lines of bounded length.

A file that an option names may be a pipe, as of `<(...)`, or a device, as /dev/stdin; its end, or
the bound, ends the reading. A file that another file names must be regular: opening a FIFO would
wait for a writer.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, BinaryIO

from hicachectl.formats.errors import FormatError, HicacheError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_LINE_BYTES = 256 << 20  # a request of a million tokens has some 8 MB


def read_bounded(
    path: Path | str,
    limit: int,
    *,
    what: str,
    regular: bool = False,
    where: str = "",
    refusal: type[HicacheError] | None = None,
) -> bytes:
    """Read a whole file of at most `limit` bytes.

    what: the kind of file that is expected, as "a profile", for the message about a larger one.
    regular: refuse anything but a regular file. where: names the file in messages; default: its
    path. refusal: raised for every failure; default: UsageError where the file cannot be read,
    FormatError where it is larger.
    """
    name = where or str(path)
    try:
        with _opened(path, regular) as file:
            data = file.read(limit + 1)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = getattr(error, "strerror", None) or error
        raise (refusal or UsageError)(f"cannot read {name}: {reason}") from error
    if len(data) > limit:
        raise (refusal or FormatError)(f"{name}: larger than {limit} bytes: not {what}")
    return data


def read_lines(path: Path, limit: int = MAX_LINE_BYTES) -> Iterator[tuple[int, bytes]]:
    """Give the number, from 1, and the bytes of each line, its end included.

    Raises UsageError where the file cannot be read, FormatError for a line of more than `limit`
    bytes.
    """
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(limit + 1):
                number += 1
                if len(line) > limit:
                    raise FormatError(f"{path}: line {number}: longer than {limit} bytes")
                yield number, line
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read {path}: {reason}") from error


def _opened(path: Path | str, regular: bool) -> BinaryIO:
    if not regular:
        return open(path, "rb")  # noqa: PTH123 - a text is not normalised
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "not a regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise
