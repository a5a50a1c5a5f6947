"""Read untrusted files up to a size limit, whole or line by line.

An option may name a pipe (`<(...)`) or device (/dev/stdin), so reading stops at the limit. A file
that another file names must be regular, because opening a FIFO would wait for a writer.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, BinaryIO

from hicachectl.backends.disk.io import open_regular
from hicachectl.formats.documents import parse_json_object
from hicachectl.formats.errors import FormatError, HicacheError, UsageError
from hicachectl.formats.wording import failed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_CONFIG_BYTES = 1 << 20
MAX_LINE_BYTES = 256 << 20  # a request of a million tokens takes about 8 MB


def read_bounded(
    path: Path | str,
    limit: int,
    *,
    what: str,
    regular: bool = False,
    where: str = "",
    refusal: type[HicacheError] | None = None,
) -> bytes:
    """Return the content of a file of at most `limit` bytes.

    what: kind of the expected file, such as "a profile".
    regular: refuse files that are not regular.
    where: the file's name in messages; by default its path.
    refusal: error raised for every failure; by default UsageError if the file is unreadable,
        FormatError if it is too large.
    """
    name = where or str(path)
    try:
        with _opened(path, regular) as file:
            data = file.read(limit + 1)
    except (OSError, ValueError) as error:  # a zero byte in the path raises ValueError
        raise (refusal or UsageError)(failed(name, "read", error, "check the path")) from error
    if len(data) > limit:
        raise (refusal or FormatError)(
            f"{name}: larger than {limit} bytes, so not {what}; check the path"
        )
    return data


def read_lines(path: Path, limit: int = MAX_LINE_BYTES) -> Iterator[tuple[int, bytes]]:
    """Yield the number of each line, counted from 1, and its bytes, with the line end.

    Raises UsageError if the file cannot be read, FormatError if a line has more than `limit` bytes.
    """
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(limit + 1):
                number += 1
                if len(line) > limit:
                    raise FormatError(
                        f"{path}: line {number}: longer than {limit} bytes; "
                        "write one JSON value per line"
                    )
                yield number, line
    except (OSError, ValueError) as error:
        raise UsageError(failed(path, "read", error, "check the path")) from error


def _opened(path: Path | str, regular: bool) -> BinaryIO:
    if regular:
        return os.fdopen(open_regular(path), "rb")
    return open(path, "rb")  # noqa: PTH123 - Path would normalise a string


def read_config(path: str, where: str) -> dict[str, Any]:
    """Read a JSON config of SGLang. where: the file's name in messages.

    Raises UsageError if the file cannot be read, FormatError if it is not a JSON object.
    """
    data = read_bounded(
        path, MAX_CONFIG_BYTES, what="a config of SGLang", regular=True, where=where
    )
    try:
        return parse_json_object(data, where)
    except FormatError as error:
        raise FormatError(f"{error}; give the JSON config that the servers read") from None
