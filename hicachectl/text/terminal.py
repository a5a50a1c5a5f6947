"""Make text safe to show, because data from a store must not control the terminal."""

from __future__ import annotations

import logging
import os
import re
import sys
import unicodedata
from contextlib import suppress

# A text without a match needs no escapes. The pattern is valid for `re` and for RE2.
UNUSUAL_PATTERN = "[^ -~]"
# Letters, marks and symbols without a visible glyph: Unicode's default ignorable characters and
# the blank Braille pattern (U+2800).
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
    "\U000e0100-\U000e01ef]"
)


def escape_controls(text: str, *, keep: str = "") -> str:
    r"""Escape characters that a terminal would obey or hide, as \xNN, \uNNNN or \UNNNNNNNN.

    These characters are escaped:

    - control characters
    - format characters, such as bidirectional overrides and zero-width characters
    - line and paragraph separators
    - surrogates, and private-use and unassigned code points
    - characters without a visible glyph
    - marks of a decomposed text, which looks like the composed text

    keep: characters that stay as they are.
    """
    if text.isascii() and text.isprintable():
        return text
    hides = _decomposed if not unicodedata.is_normalized("NFC", text) else lambda char: False
    return "".join(
        char if char in keep or (_visible(char) and not hides(char)) else _escaped(char)
        for char in text
    )


def shortened(text: str, most: int) -> str:
    """Return a text of at most `most` characters. A longer text loses its middle.

    The result is escaped (`escape_controls`), because vl-convert, which draws charts, ends the
    process at a control character.
    """
    text = escape_controls(text)
    if len(text) <= most:
        return text
    tail = (most - 1) // 2
    return f"{text[: most - 1 - tail]}…{text[len(text) - tail :]}"


def _visible(char: str) -> bool:
    if char.isprintable():
        return not _INVISIBLE.match(char)
    return unicodedata.category(char) == "Zs"  # non-ASCII spaces


def _decomposed(char: str) -> bool:
    """Return whether a composed text would have another character in place of this one."""
    is_part = unicodedata.category(char)[0] == "M" or "\u1160" <= char <= "\u11ff"
    return is_part or not unicodedata.is_normalized("NFC", char)


def _escaped(char: str) -> str:
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def message_text(text: str, *, keep: str = "") -> str:
    """Return a message with URL secrets removed and control characters escaped."""
    from hicachectl.backends.urls import without_secrets  # takes 12 ms, which --help can save

    return escape_controls(without_secrets(text), keep=keep)


class MessageHandler(logging.Handler):
    """Handler that makes records safe to show, and writes them to the present `sys.stderr`.

    The stream is looked up for each record, because programs and tests replace `sys.stderr` between
    two commands in one process.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record as a message (`message_text`), with its line breaks as they are."""
        try:
            text = message_text(f"hicachectl: {self.format(record)}", keep="\n")
        except Exception:
            self.handleError(record)
            return
        if sys.stderr is not None:
            with suppress(OSError, ValueError):  # stderr may be closed
                print(text, file=sys.stderr, flush=True)


def mute_native_logs() -> None:
    """Keep messages of native libraries off stderr until this process ends.

    C++ libraries write to descriptor 2 from their own threads, whatever their settings. So Python's
    stderr moves to a copy of descriptor 2, and descriptor 2 becomes /dev/null. If stderr uses
    another descriptor, nothing is muted.
    """
    try:
        if sys.stderr.fileno() != 2:
            return
    except (OSError, ValueError):  # stderr was replaced by an object without a descriptor
        return
    sys.stderr.flush()
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, encoding=sys.stderr.encoding,
                           errors=sys.stderr.errors)  # fmt: skip
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
