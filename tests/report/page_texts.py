"""Pictures of `hicachectl report`, and texts of its page."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

from hicachectl.backends.base import open_store
from hicachectl.report.picture import Picture, PictureRequest, take_picture
from hicachectl.verification.request import VerifyRequest

if TYPE_CHECKING:
    from pathlib import Path

    from hicachectl.formats.profile import Profile


def picture_of(store: Path | str, profile: Profile | None = None, **options: Any) -> Picture:
    """Return the picture of a store, with the checks that read no object."""
    with open_store(str(store)) as source:
        verify = VerifyRequest(checks=("names", "groups", "sizes"), profile=profile)
        return take_picture(source, PictureRequest(verify=verify, **options))


class _Texts(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def text_of(made: Path) -> str:
    """Return the text of a page, without its style, with single spaces."""
    parser = _Texts()
    parser.feed(re.sub("<style>.*?</style>", "", made.read_text("utf-8"), flags=re.DOTALL))
    assert "script" not in parser.tags
    return " ".join(" ".join(parser.texts).split())
