"""Convert parsed, untrusted documents to structs."""

from __future__ import annotations

import threading
from itertools import islice
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin

import msgspec

from hicachectl.formats.documents import shown, storable
from hicachectl.formats.errors import FormatError, HicacheError

if TYPE_CHECKING:
    from collections.abc import Iterator

_T = TypeVar("_T", bound=msgspec.Struct)
_V = TypeVar("_V")

_MAX_PROBLEMS = 20  # most problems that one message names
_UNIONS = (Union, UnionType)
# msgspec raises UnicodeEncodeError for field names, and for some texts, with a lone surrogate.
_REFUSALS = (msgspec.ValidationError, UnicodeEncodeError)
# At the first use of a class, msgspec reads its fields. Without the lock, another thread would see
# them half read, and the process would end with SIGSEGV.
_converting = threading.Lock()


def convert(
    document: Any, form: type[_T], source: str, *, refusal: type[HicacheError] = FormatError
) -> _T:
    """Convert a parsed document to a struct, without coercion, so neither true nor 1.0 is an int.

    source: names the document in messages.
    Raises `refusal`, which names each wrong field with the expected type and the value found, but
    at most 20 fields.
    """
    try:
        with _converting:
            return msgspec.convert(document, form)
    except _REFUSALS as error:
        problems = list(islice(_problems(document, form, ""), _MAX_PROBLEMS)) or [str(error)]
        raise refusal(f"{source}: {'; '.join(problems)}") from None


def decode(decoder: msgspec.json.Decoder[_V], text: bytes) -> _V:
    """Decode large JSON in one pass.

    Raises FormatError if the text is not JSON. Otherwise, the error has the path, but not the
    value, of the first wrong field.
    """
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        raise FormatError(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"not JSON: {error}") from error


def _problems(value: Any, form: Any, path: str) -> Iterator[str]:
    arms = get_args(form) if get_origin(form) in _UNIONS else (form,)
    for arm in arms:
        if isinstance(value, dict) and _is_struct(arm):
            yield from _field_problems(value, arm, path)
            return
        if isinstance(value, list) and get_origin(arm) in (list, tuple):
            for index, item in enumerate(value):
                yield from _problems(item, get_args(arm)[0], f"{path}[{index}]")
            return
    try:  # msgspec encodes texts before it compares them, and cannot encode lone surrogates
        with _converting:
            msgspec.convert(storable(value) if isinstance(value, str) else value, form)
    except _REFUSALS as error:
        yield f"{path}: {_expectation(error)}, found {shown(value)}".removeprefix(": ")


def _field_problems(table: dict[str, Any], form: type[msgspec.Struct], path: str) -> Iterator[str]:
    fields = {field.encode_name: field for field in msgspec.structs.fields(form)}
    where = f"{path}: " if path else ""
    if form.__struct_config__.forbid_unknown_fields and not fields.keys() >= table.keys():
        yield from (f"{where}unknown field {shown(name)}" for name in table if name not in fields)
        yield f"known fields: {', '.join(fields)}"
    for name, field in fields.items():
        if name in table:
            yield from _problems(table[name], field.type, f"{path}.{name}".removeprefix("."))
        elif field.required:
            yield f"{where}field {name!r} is missing"


def _is_struct(form: Any) -> bool:
    return isinstance(form, type) and issubclass(form, msgspec.Struct)


def _expectation(error: Exception) -> str:
    text = str(error).partition(" - at ")[0].partition(", got ")[0].replace("`", "")
    for word, ours in ((" | null", ""), (" | ", " or "), ("array", "list"), ("object", "table")):
        text = text.replace(word, ours)
    return text[:1].lower() + text[1:]
