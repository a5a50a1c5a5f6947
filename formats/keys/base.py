"""Interface of the key codecs, and their table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from hicachectl.formats.errors import UsageError
from hicachectl.formats.wording import not_one_of

if TYPE_CHECKING:
    from hicachectl.formats.objects import Coordinate

Affix = tuple[str, str]  # text of a key before and after its page hash


class KeyCodec(Protocol):
    """One backend's grammar: converts affixes to coordinates and back."""

    scheme: str

    def readings(self, prefix: str, suffix: str) -> tuple[Coordinate, ...]:
        """Return every coordinate that an affix can mean; none if foreign."""

    def affix(self, coordinate: Coordinate) -> Affix:
        """Return the affix of a coordinate; inverse of `readings`."""


def codec_for(scheme: str) -> KeyCodec:
    """Return the codec of a key scheme. Raises UsageError if unknown."""
    from hicachectl.formats.keys.file import FileCodec
    from hicachectl.formats.keys.hf3fs import Hf3fsCodec
    from hicachectl.formats.keys.mooncake import MooncakeCodec
    from hicachectl.formats.keys.nixl import NixlBufferedCodec, NixlCodec
    from hicachectl.formats.keys.unified import UnifiedCodec

    codecs: dict[str, type[KeyCodec]] = {
        "file": FileCodec,
        "hf3fs": Hf3fsCodec,
        "mooncake": MooncakeCodec,
        NixlCodec.scheme: NixlCodec,
        NixlBufferedCodec.scheme: NixlBufferedCodec,
        "unified": UnifiedCodec,
    }
    if scheme not in codecs:
        raise UsageError(not_one_of("Key scheme", scheme, codecs))
    return codecs[scheme]()
