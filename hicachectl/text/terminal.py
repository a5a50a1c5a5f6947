"""Text for a terminal: nothing that a store holds may command it."""

from __future__ import annotations

import logging
import os
import re
import sys
import unicodedata

from hicachectl.backends.urls import without_secrets

# Texts without a match need no look at each character; in the syntax that `re` and RE2 share.
UNUSUAL_PATTERN = "[^ -~]"
# Letters and marks that take no place, or none that is seen: Unicode's default ignorable ones.
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
    "\U000e0100-\U000e01ef]"
)


def escape_controls(text: str, *, keep: str = "") -> str:
    r"""Write what a terminal would obey or hide as \xNN, \uNNNN or \UNNNNNNNN.

    These are control and format characters (bidirectional overrides, zero-width ones), line and
    paragraph separators, surrogates, and code points of private or no use; not those in `keep`.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if char in keep or _visible(char) else _escaped(char) for char in text)


def _visible(char: str) -> bool:
    if char.isprintable():
        return not _INVISIBLE.match(char)
    return unicodedata.category(char) == "Zs"  # spaces other than ASCII's


def _escaped(char: str) -> str:
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def message_text(text: str, *, keep: str = "") -> str:
    """Make a message fit to be shown: without the secrets of URLs, and escaped."""
    return escape_controls(without_secrets(text), keep=keep)


class MessageFormatter(logging.Formatter):
    """A formatter of log records as messages."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record; its lines stay apart."""
        return message_text(super().format(record), keep="\n")


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
