"""Pages that files name: as token ids of prompts, or by their hashes."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from hicachectl.formats.errors import FormatError, UsageError
from hicachectl.formats.hashing import namespace_seed, page_hashes_hex

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hicachectl.formats.profile import Profile

_MEMBERS = {"token_ids", "extra_key", "cache_salt"}
_HASH = re.compile(r"[0-9a-f]{64}")


def read_chains(path: Path, profile: Profile) -> Iterator[list[str]]:
    """Hash the prompts of a file into page chains, a line at a time.

    A line is JSON: a list of token ids, or {"token_ids": [...]} with "extra_key" and
    "cache_salt" where the request had them. Raises UsageError when the file cannot be read,
    FormatError naming the line.
    """
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _chain(line, profile, f"{path}: line {number}")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def read_pages(path: Path) -> set[str]:
    """Read page hashes, one a line: bare, or as the "page" of a JSON row such as `ls` prints.

    Raises UsageError when the file cannot be read, FormatError naming the line.
    """
    pages = set()
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if text := line.strip():
                    pages.add(_page(text, f"{path}: line {number}"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    return pages


def _page(text: bytes, where: str) -> str:
    page: object = text.decode(errors="replace")
    if text.startswith(b"{"):
        try:
            page = json.loads(text).get("page")
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{where}: not JSON: {error}") from error
    if not isinstance(page, str) or not _HASH.fullmatch(page):
        raise FormatError(f"{where}: {page!r:.80} is no page hash (64 hexadecimal digits)")
    return page


def _chain(line: bytes, profile: Profile, where: str) -> list[str]:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: not JSON: {error}") from error
    request = {"token_ids": document} if isinstance(document, list) else document
    if not isinstance(request, dict) or not isinstance(request.get("token_ids"), list):
        raise FormatError(f'{where}: neither a list of token ids nor an object with "token_ids"')
    if unknown := sorted(request.keys() - _MEMBERS):
        raise FormatError(f"{where}: unknown member {unknown[0]!r}")
    try:
        # A server takes empty ones for none: managers/io_struct.py.
        seed = namespace_seed(_namespace(request, "extra_key"), _namespace(request, "cache_salt"))
        return page_hashes_hex(
            request["token_ids"],
            profile.page_size,
            bigram=profile.hash_unit == "bigram",
            prior=seed,
        )
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from error


def _namespace(request: dict[str, Any], name: str) -> str | None:
    value = request.get(name)
    if value is not None and not isinstance(value, str):
        raise FormatError(f"{name}: expected a text")
    return value or None
