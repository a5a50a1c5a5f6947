"""JSON config files that SGLang's backends read, as untrusted input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hicachectl.formats.errors import FormatError, UsageError

MAX_CONFIG_BYTES = 1 << 20


def read_config(path: str, where: str) -> dict[str, Any]:
    """Read a config file; `where` names it in messages.

    Raises UsageError when it cannot be read, FormatError when it is no JSON object.
    """
    try:
        if not Path(path).is_file():  # opening a FIFO would wait for a writer
            raise UsageError(f"{where}: there is no such file")
        with Path(path).open("rb") as stream:
            text = stream.read(MAX_CONFIG_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        raise UsageError(f"{where}: {getattr(error, 'strerror', None) or error}") from error
    if len(text) > MAX_CONFIG_BYTES:
        raise FormatError(f"{where}: larger than {MAX_CONFIG_BYTES} bytes: no config of SGLang's")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise FormatError(f"{where}: expected a JSON object")
    return document
