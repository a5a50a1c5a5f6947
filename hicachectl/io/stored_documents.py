"""JSON documents of a directory that several processes share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct

from hicachectl.formats.documents import parse_json_object
from hicachectl.formats.errors import FormatError
from hicachectl.formats.forms import convert

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hicachectl.backends.disk.directory import Directory

MOST_BYTES = 64 << 20
_MOST_VALUES = 16_000_000

Form = TypeVar("Form", bound=Struct)


def read_document(
    directory: Directory,
    name: str,
    form: type[Form],
    next_step: str,
    *,
    check: Callable[[Mapping[str, Any]], None] = lambda document: None,
) -> Form:
    """Read a document, within bounds. See `parse_document`.

    Raises also OSError (FileNotFoundError for a missing one), UntrustedError.
    """
    content = directory.read(name, MOST_BYTES + 1)
    return parse_document(content, f"{directory.path}/{name}", form, next_step, check=check)


def parse_document(
    content: bytes,
    source: str,
    form: type[Form],
    next_step: str,
    *,
    check: Callable[[Mapping[str, Any]], None] = lambda document: None,
) -> Form:
    """Parse a document.

    source: names the document in messages. check: is called before the conversion to the form, and
    may raise. next_step: ends the message for a damaged document. Raises FormatError.
    """
    if len(content) > MOST_BYTES:
        raise FormatError(f"{source}: larger than {MOST_BYTES} bytes; {next_step}")
    try:
        document = parse_json_object(content, source, max_values=_MOST_VALUES)
    except FormatError as error:
        raise FormatError(f"{error}; {next_step}") from None
    check(document)
    try:
        return convert(document, form, source)
    except FormatError as error:
        raise FormatError(f"{error}; {next_step}") from None
