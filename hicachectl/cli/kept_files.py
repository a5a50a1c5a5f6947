"""Which existing files a result must not replace."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_HEAD_BYTES = 1 << 20
_PAGE_NAME = re.compile(r"[0-9a-f]{64}")


def head_of(path: Path) -> bytes:
    """Return the first bytes of a regular file; none of others."""
    try:
        if not path.is_file():
            return b""
        with path.open("rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError:
        return b""


def kept_kind(path: Path) -> str:
    """Return what an existing file is, if a command may need it; "" for others."""
    from hicachectl.backends.object_files.tree import SIDE_DIRECTORY

    head = head_of(path)
    if not head:
        return ""
    folder = path.resolve().parent
    if SIDE_DIRECTORY in folder.parts or (folder / SIDE_DIRECTORY).is_dir():
        return "a file in a store"
    if _PAGE_NAME.search(path.name):
        return "an object of a store"
    return _kind_of_content(path, head)


def _kind_of_content(path: Path, head: bytes) -> str:
    from hicachectl.formats.pack.records import MAGIC

    if head.startswith(MAGIC):
        return "a pack"
    if head.startswith(b"PAR1"):
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _HEAD_BYTES))
            return "a catalog" if b"hicachectl.catalog" in file.read() else ""
    return _kind_of_document(_document(head))


def _document(head: bytes) -> Mapping[str, Any]:
    """Return the JSON object or the TOML table that a file begins with; {} for other files."""
    from hicachectl.formats.documents import parse_json_object, parse_toml
    from hicachectl.formats.errors import FormatError

    if len(head) == _HEAD_BYTES:
        return {}
    with suppress(FormatError, UnicodeDecodeError):
        text = head.decode("utf-8-sig")
        is_json = text.lstrip().startswith("{")
        return parse_json_object(text, "") if is_json else parse_toml(text, "")
    return {}


def _kind_of_document(document: Mapping[str, Any]) -> str:
    if isinstance(document.get("stores"), dict):
        return "a config file of hicachectl"
    # Members that only such a file has together.
    for kind, members in (
        ("a profile", {"model", "page_size", "layout", "pools"}),
        ("a model's config", {"architectures"}),
        ("the record of a run", {"form", "run", "version"}),
        ("a marker of a store", {"form", "suffix"}),
    ):
        if members <= document.keys():
            return kind
    return ""
