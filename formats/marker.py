"""Markers: what the directory of a file store says of its objects with trailers.

One JSON file states that objects with one suffix, identity and number of bytes have trailers. With
it, a listing knows the bytes of objects without opening them.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Annotated, Literal, NamedTuple, cast

import msgspec
from msgspec import Meta

from hicachectl.formats.documents import parse_json_object
from hicachectl.formats.errors import FormatError
from hicachectl.formats.forms import convert
from hicachectl.formats.identity import Identity

MAX_MARKER_BYTES = 16 << 10
_REMOVE = "remove the file"
_FORM = 1
_MAX_VALUES = 100
_MAX_OBJECT_BYTES = 1 << 48
_Digest = Literal["off", "xxh3", "blake3"]
_Text = Annotated[str, Meta(max_length=4096)]
_Count = Annotated[int, Meta(ge=0, le=_MAX_OBJECT_BYTES)]


class Marker(NamedTuple):
    """Objects with trailers that share a suffix, an identity and a size.

    suffix: text of their keys after the page hash.
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


class _Facts(msgspec.Struct, forbid_unknown_fields=True):
    """Fields of `Identity`."""

    model: _Text
    weights: _Text
    draft_weights: _Text
    pool: _Text
    part: _Text | None
    dtype: _Text
    layout: _Text
    page_size: _Count
    layer_bytes: _Count
    pp_partition: _Text = ""


class MarkerForm(msgspec.Struct, forbid_unknown_fields=True):
    """A marker in JSON."""

    form: int
    suffix: Annotated[str, Meta(min_length=1, max_length=255)]
    nbytes: _Count
    digest: _Digest
    identity: str
    facts: _Facts


def marker_form(marker: Marker) -> MarkerForm:
    """Return the form of a marker; inverse of `marker_of`."""
    return MarkerForm(
        form=_FORM,
        suffix=marker.suffix,
        nbytes=marker.nbytes,
        digest=cast("_Digest", marker.digest),
        identity=marker.identity.hash().hex(),
        facts=_Facts(**asdict(marker.identity)),
    )


def marker_of(form: MarkerForm, source: str) -> Marker:
    """Return a marker. source: names it in messages. Raises FormatError."""
    identity = Identity(**msgspec.structs.asdict(form.facts))
    if identity.hash().hex() != form.identity:
        raise FormatError(f"{source}: the identity is not that of its facts")
    return Marker(form.suffix, form.nbytes, identity, form.digest)


def dump_marker(marker: Marker) -> bytes:
    """Return a marker as JSON; inverse of `parse_marker`."""
    document = msgspec.to_builtins(marker_form(marker))
    return json.dumps(document, indent=1).encode() + b"\n"


def parse_marker(data: bytes, source: str) -> Marker:
    """Parse an untrusted marker. source: names it in messages. Raises FormatError."""
    if len(data) > MAX_MARKER_BYTES:
        raise FormatError(
            f"{source}: larger than {MAX_MARKER_BYTES} bytes, so not a marker; {_REMOVE}"
        )
    try:
        table = parse_json_object(data, source, max_values=_MAX_VALUES)
        if type(form := table.get("form")) is not int or form <= _FORM:
            return marker_of(convert(table, MarkerForm, source), source)
    except FormatError as error:
        raise FormatError(f"{error}; {_REMOVE}") from None
    raise FormatError(f"{source}: has form {form}, a later one; use a newer hicachectl")
