"""Markers, the JSON files that say which objects of a file store have trailers.

One marker states that the objects with one suffix, identity and number of bytes have trailers. With
markers, a listing knows the sizes of objects without opening the objects.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Literal, NamedTuple, cast

from msgspec import Meta, Struct, to_builtins

from hicachectl.formats.documents import parse_json_object
from hicachectl.formats.errors import FormatError
from hicachectl.formats.forms import convert
from hicachectl.formats.identity import Bytes, Identity  # noqa: TC001 - msgspec reads them

MAX_MARKER_BYTES = 16 << 10
_REMOVE = "remove the file"
_FORM = 1
_MAX_VALUES = 100
_Digest = Literal["off", "xxh3", "blake3"]


class Marker(NamedTuple):
    """Objects with trailers that share a suffix, an identity and a size.

    suffix: text of the objects' keys after the page hash.
    nbytes: size of each object, without the trailer.
    digest: one of `trailer.DIGEST_KINDS`.
    """

    suffix: str
    nbytes: int
    identity: Identity
    digest: str

    @property
    def name(self) -> str:
        """Return the name of the marker's file."""
        # A name in JSON can have lone surrogates.
        text = f"{self.nbytes} {self.suffix}".encode(errors="surrogatepass")
        short = hashlib.blake2b(text, digest_size=8).hexdigest()
        return f"{self.identity.hash().hex()}-{short}.json"


class _Form(Struct, forbid_unknown_fields=True):
    """A marker in JSON.

    identity: hash of `facts`, in hexadecimal digits.
    """

    form: int
    suffix: Annotated[str, Meta(min_length=1, max_length=255)]
    nbytes: Bytes
    digest: _Digest
    identity: str
    facts: Identity


def dump_marker(marker: Marker) -> bytes:
    """Return a marker as JSON; inverse of `parse_marker`."""
    identity = marker.identity
    digest = cast("_Digest", marker.digest)
    form = _Form(_FORM, marker.suffix, marker.nbytes, digest, identity.hash().hex(), identity)
    document = to_builtins(form)
    return json.dumps(document, indent=1).encode() + b"\n"


def parse_marker(data: bytes, source: str) -> Marker:
    """Parse an untrusted marker. source: names the marker in messages. Raises FormatError."""
    if len(data) > MAX_MARKER_BYTES:
        raise FormatError(
            f"{source}: larger than {MAX_MARKER_BYTES} bytes, so not a marker; {_REMOVE}"
        )
    try:
        table = parse_json_object(data, source, max_values=_MAX_VALUES)
        if type(number := table.get("form")) is not int or number <= _FORM:
            form = convert(table, _Form, source)
            if form.facts.hash().hex() != form.identity:
                raise FormatError(f"{source}: the identity does not match its facts")
            return Marker(form.suffix, form.nbytes, form.facts, form.digest)
    except FormatError as error:
        raise FormatError(f"{error}; {_REMOVE}") from None
    raise FormatError(
        f"{source}: has form {number}, but this version reads form {_FORM}; use a newer hicachectl"
    )
