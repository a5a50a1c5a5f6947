"""Text for a terminal: nothing that a store holds may command it."""

from __future__ import annotations

import logging
import os
import re
import sys

# C0, DEL and C1; in the syntax that `re` and RE2 share.
CONTROL_PATTERN = "[\\x00-\\x1f\\x7f\u0080-\u009f]"
_CONTROLS = re.compile(CONTROL_PATTERN)


def escape_controls(text: str, *, keep: str = "") -> str:
    r"""Write the control characters of a text as \xNN, but for those in `keep`."""
    return _CONTROLS.sub(lambda m: m[0] if m[0] in keep else f"\\x{ord(m[0]):02x}", text)


def mute_native_logs() -> None:
    """Let nothing but this program's own messages reach stderr, until it ends.

    Libraries in C++ write to descriptor 2, from threads of theirs, whatever they are told. Python's
    stderr goes to a copy of it; a stderr that is not descriptor 2 is left as it is.
    """
    try:
        if sys.stderr.fileno() != 2:
            return
    except (OSError, ValueError):  # replaced by something that is no file
        return
    sys.stderr.flush()
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, encoding=sys.stderr.encoding,
                           errors=sys.stderr.errors)  # fmt: skip
    for handler in logging.root.handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
