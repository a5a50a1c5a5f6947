"""Compare trailers when objects of a file store are read; make trailers for new objects."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from hicachectl.backends.base import Status
from hicachectl.backends.object_files.markers import Marker
from hicachectl.formats.errors import FormatError
from hicachectl.formats.identity import differences
from hicachectl.formats.keys import WHOLE_PAGES, grammar_of
from hicachectl.formats.trailer import (
    NO_RANK,
    Expected,
    Trailer,
    digest_function,
    dump_trailer,
    parse_trailer,
    rank_text,
    trailer_name,
    trailer_rank,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from hicachectl.formats.identity import Identity
    from hicachectl.formats.keys.base import Affix
    from hicachectl.formats.trailer import Buffer

_T = TypeVar("_T")
_KEY = re.compile(rb"([0-9a-f]{64})(.*)", re.DOTALL)
_MOST_SUFFIXES = 1 << 12  # number of suffixes with cached expectations


class Verdict(NamedTuple):
    """Outcome of a comparison. why: message for statuses other than OK."""

    status: Status
    why: str = ""


_OK = Verdict(Status.OK)
_ANY = Expected(frozenset(), frozenset())


def split_key(key: bytes) -> tuple[bytes, bytes] | None:
    """Return the 32 bytes of a key's page hash, and its suffix; None without a page hash."""
    match = _KEY.fullmatch(key)
    return None if match is None else (bytes.fromhex(match[1].decode()), match[2])


class TrailerChecks:
    """Compares trailers with the keys of their objects, and with expected identities.

    identity_of: returns the identity that has a hash; None if it is unknown.
    """

    def __init__(
        self, identity_of: Callable[[bytes], Identity | None] = lambda hash_: None
    ) -> None:
        self._identity_of = identity_of
        self._identities: dict[bytes, Identity] = {}  # expected identity of each suffix
        self._known: dict[bytes, Expected] = {}  # cache, by suffix
        self._suspended = 0

    def expect(self, identities: Mapping[Affix, Identity]) -> None:
        """Replace the expected identities. identities: identity of each affix's objects."""
        self._identities = _by_suffix(identities)
        self._known.clear()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Accept every trailer in `check` while the context is open."""
        self._suspended += 1
        try:
            yield
        finally:
            self._suspended -= 1

    def compare(self, key: bytes, nbytes: int, trailer: Trailer) -> Verdict:
        """Compare a trailer with its object's key and size. Return OK, DAMAGED or FOREIGN."""
        parts = split_key(key)  # None for a file that is not named by a page hash
        page, suffix = parts or (trailer.page, b"")
        expected = self._expected(suffix) if parts else _ANY
        match expected.difference(trailer, nbytes, page):
            case "nbytes":
                return _damaged(f"its trailer says {trailer.nbytes} bytes, but it has {nbytes}")
            case "page":
                return _damaged(f"its trailer is of page {trailer.page.hex()}")
            case "name":
                return _damaged("its trailer is of another pool")
            case "identity":
                return Verdict(Status.FOREIGN, self._difference(trailer.identity, suffix))
            case "rank":
                return _of_another_rank(trailer, expected)
        return _OK

    def _difference(self, found: bytes, suffix: bytes) -> str:
        identity = self._identity_of(found)
        if identity is None:
            return f"its identity {found.hex()} is not the expected one, and no marker describes it"
        return f"its identity differs: {differences(identity, self._identities[suffix])}"

    def check(
        self, key: bytes, trailer: Trailer | Verdict, value: Iterable[Buffer], nbytes: int
    ) -> Verdict:
        """Compare a trailer with its object's key and bytes. Return OK, DAMAGED or FOREIGN.

        trailer: a trailer, or the verdict of `trailer_in` on a file that has none.
        value: bytes of the object.
        """
        if isinstance(trailer, Verdict):
            skipped = self._suspended and trailer.status == Status.DAMAGED
            return _OK if skipped else trailer
        if self._suspended:
            return _OK
        verdict = self.compare(key, nbytes, trailer)
        if verdict.status != Status.OK or trailer.digest_kind == "off":
            return verdict
        if digest_function(trailer.digest_kind)(value) == trailer.digest:
            return _OK
        return _damaged(f"its bytes differ from the {trailer.digest_kind} digest in its trailer")

    def belongs(self, key: bytes, nbytes: int, trailer: Trailer) -> bool:
        """Return whether a trailer belongs to a key, whatever its identity and rank."""
        return self.compare(key, nbytes, trailer).status in (Status.OK, Status.FOREIGN)

    def has_rank(self, key: bytes, trailer: Trailer) -> bool:
        """Return whether a trailer names the key's rank, or no rank."""
        parts = split_key(key)
        return parts is None or self._expected(parts[1]).has_rank(trailer)

    def _expected(self, suffix: bytes) -> Expected:
        expected = self._known.get(suffix)
        if expected is None:
            if len(self._known) >= _MOST_SUFFIXES:
                self._known.clear()
            expected = self._known[suffix] = _expected(suffix, self._identities.get(suffix))
        return expected


def _expected(suffix: bytes, identity: Identity | None) -> Expected:
    """Return what a trailer may state, given every way in which its key's suffix can be read.

    If the suffix can be read in no way, the trailer may state anything.
    identity: identity of the objects, if known. It tells where the model's name ends in the suffix.
    """
    try:
        readings = grammar_of(WHOLE_PAGES).readings("", suffix.decode())
    except UnicodeDecodeError:
        readings = ()
    own = [one for one in readings if identity is not None and one.names.model == identity.model]
    return Expected(
        frozenset(trailer_name(one.pool, one.part) for one in readings),
        frozenset(trailer_rank(one.shard) for one in own or readings) - {NO_RANK},
        None if identity is None else identity.hash(),
    )


class NewTrailers:
    """Makes trailers for new objects.

    identities: identity of new objects, by suffix.
    """

    def __init__(self, identities: Mapping[Affix, Identity], kind: str) -> None:
        """Choose identities and the digest.

        identities: identity of new objects, by affix.
        kind: kind of the digest, one of `trailer.DIGEST_KINDS`.
        Raises UsageError for an unknown kind.
        """
        self.identities = _by_suffix(identities)
        self._hashes = {suffix: one.hash() for suffix, one in self.identities.items()}
        self._ranks = {
            suffix: _only(_expected(suffix, one).ranks) for suffix, one in self.identities.items()
        }
        self._kind = kind
        self._digest = digest_function(kind)

    def wants(self, key: bytes, trailer: Trailer) -> bool:
        """Return whether a trailer has the identity and the rank that `make` would write."""
        parts = split_key(key)
        if parts is None or parts[1] not in self._hashes:
            return False
        wanted = self._hashes[parts[1]], self._ranks[parts[1]]
        return wanted == (trailer.identity, trailer.rank)

    def markers(self, keys: list[bytes], sizes: list[int]) -> set[Marker]:
        """Return the markers that state the trailers of new objects.

        sizes: [n] bytes of each key's object.
        """
        kinds = {
            (parts[1], nbytes)
            for key, nbytes in zip(keys, sizes, strict=True)
            if (parts := split_key(key)) is not None and parts[1] in self.identities
        }
        return {
            Marker(suffix.decode(), nbytes, self.identities[suffix], self._kind)
            for suffix, nbytes in kinds
        }

    def make(self, key: bytes, value: Iterable[Buffer], nbytes: int) -> bytes | None:
        """Return the trailer of a new object; None if the object gets no trailer."""
        parts = split_key(key)
        identity = None if parts is None else self.identities.get(parts[1])
        if parts is None or identity is None:
            return None
        return dump_trailer(
            Trailer(
                self._kind,
                self._digest(value),
                nbytes,
                parts[0],
                self._hashes[parts[1]],
                trailer_name(identity.pool, identity.part),
                self._ranks[parts[1]],
            )
        )


def _only(ranks: frozenset[int]) -> int:
    """Return the rank if there is exactly one, else NO_RANK."""
    return next(iter(ranks)) if len(ranks) == 1 else NO_RANK


def trailer_in(data: Buffer) -> Trailer | Verdict:
    """Parse the trailer in the last bytes of a file. Return a verdict if they are no trailer.

    The verdict is DAMAGED, or OVERSIZED if the bytes have no sign of a trailer.
    """
    try:
        return parse_trailer(data) or Verdict(Status.OVERSIZED)
    except FormatError as error:
        return Verdict(Status.DAMAGED, str(error))


def _of_another_rank(trailer: Trailer, expected: Expected) -> Verdict:
    ours = " or ".join(map(rank_text, sorted(expected.ranks))) or "no rank"
    theirs = rank_text(trailer.rank)
    return Verdict(Status.FOREIGN, f"its trailer is of {theirs}, but its key is of {ours}")


def _damaged(why: str) -> Verdict:
    return Verdict(Status.DAMAGED, why)


def _by_suffix(by_affix: Mapping[Affix, _T]) -> dict[bytes, _T]:
    return {suffix.encode(): one for (prefix, suffix), one in by_affix.items() if not prefix}
