"""JSON config files of SGLang's backends, read as untrusted input."""

from __future__ import annotations

from typing import Any

from hicachectl.backends.disk.bounded import read_bounded
from hicachectl.formats.documents import parse_json_object
from hicachectl.formats.errors import FormatError

MAX_CONFIG_BYTES = 1 << 20


def read_config(path: str, where: str) -> dict[str, Any]:
    """Read a config file. where: the file's name in messages.

    Raises UsageError if the file cannot be read, FormatError if it is not a JSON object.
    """
    data = read_bounded(
        path, MAX_CONFIG_BYTES, what="a config of SGLang", regular=True, where=where
    )
    try:
        return parse_json_object(data, where)
    except FormatError as error:
        raise FormatError(f"{error}; give the JSON config that the servers read") from None
