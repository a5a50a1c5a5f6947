"""Text for a terminal: nothing that a store holds may command it."""

from __future__ import annotations

import re

# C0, DEL and C1; in the syntax that `re` and RE2 share.
CONTROL_PATTERN = "[\\x00-\\x1f\\x7f\u0080-\u009f]"
_CONTROLS = re.compile(CONTROL_PATTERN)


def escape_controls(text: str, *, keep: str = "") -> str:
    r"""Write the control characters of a text as \xNN, but for those in `keep`."""
    return _CONTROLS.sub(lambda m: m[0] if m[0] in keep else f"\\x{ord(m[0]):02x}", text)
