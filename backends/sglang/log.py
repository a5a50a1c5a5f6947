"""The log of the plug-in: each line begins with `hicachectl:` and its level."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import MutableMapping


class _Lines(logging.LoggerAdapter[logging.Logger]):
    """A logger of one-line messages. SGLang's own prefix, with time and rank, comes before ours."""

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log one line. Escape characters that would end the line or control a terminal."""
        if self.isEnabledFor(level):
            text = str(msg) % args if args else str(msg)
            name = logging.getLevelName(level).lower()
            self.logger.log(level, "hicachectl: %s: %s", name, _plain(text), **kwargs)

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Return the message and its keywords unchanged."""
        return msg, kwargs


def _plain(text: str) -> str:
    if text.isprintable():
        return text
    shown = (character if character.isprintable() else ascii(character)[1:-1] for character in text)
    return "".join(shown)


logger = _Lines(logging.getLogger("hicachectl.sglang"), {})
