"""Page chains of many requests, in flat arrays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hicachectl.formats.errors import FormatError
from hicachectl.formats.hashing import (
    HASH_BYTES,
    namespace_seed,
    page_hashes,
    restorable_pages,
)
from hicachectl.formats.releases import release_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hicachectl.formats.profile import Profile
    from hicachectl.requests.files import Request

    IntArray = npt.NDArray[np.int64]

_SAMPLE_REQUESTS, _SAMPLE_TOKENS = 8, 1026  # tokens of a page of 1024, the next, and a bigram

_HEX = np.frombuffer("".join(f"{byte:02x}" for byte in range(256)).encode(), "<u2")
_DIGITS = np.zeros(256, np.uint8)
_DIGITS[np.frombuffer(b"0123456789abcdef", np.uint8)] = np.arange(16)


@dataclass(frozen=True, slots=True)
class Hashing:
    """How tokens become pages.

    page_size: tokens per page.
    bigram: whether token pairs are hashed.
    seeds: whether extra_key and cache_salt seed the hashes, as from SGLang 0.5.20 on.
    """

    page_size: int
    bigram: bool = False
    seeds: bool = True

    @classmethod
    def of(cls, profile: Profile) -> Hashing:
        """Return the hashing of a profile, which must not be inferred."""
        return cls(
            profile.page_size, profile.hash_unit == "bigram", release_of(profile.sglang).seeds
        )

    def hashes(self, request: Request) -> npt.NDArray[np.uint8]:
        """Return the hashes of full pages: [pages, 32]. Raises FormatError naming the line."""
        try:
            return self.hashes_of(request.token_ids, request.extra_key, request.cache_salt)
        except FormatError as error:
            raise FormatError(f"{request.where}: {error}") from error

    def hashes_of(
        self, token_ids: Sequence[int], extra_key: str | None, cache_salt: str | None
    ) -> npt.NDArray[np.uint8]:
        """Return the hashes of a request's full pages: [pages, 32]. Raises FormatError."""
        seed = namespace_seed(extra_key, cache_salt) if self.seeds else None
        return page_hashes(token_ids, self.page_size, bigram=self.bigram, prior=seed)


@dataclass(frozen=True, slots=True)
class Chains:
    """Page chains, one after another.

    pages:   [all pages, 32] uint8, raw page hashes
    offsets: [chains + 1] int64: chain i has pages[offsets[i]:offsets[i + 1]]
    tokens:  [chains] int64, tokens of each request; -1 if only hashes are known
    reach:   [chains] int64, pages that a server can take from a store: not the page of the last
        token, which it always computes; all pages if only hashes are known
    sample:  the first tokens of the first requests; empty if only hashes are known
    """

    pages: npt.NDArray[np.uint8]
    offsets: IntArray
    tokens: IntArray
    reach: IntArray
    sample: tuple[Request, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def requested_tokens(self, page_size: int) -> int:
        """Return the number of tokens that shares refer to.

        These are the tokens of the pages within reach. A request without such a page counts with
        all its tokens, none of which can be restored.
        """
        alone = np.where(self.reach == 0, np.maximum(self.tokens, 0), 0)
        return int(self.reach.sum()) * page_size + int(alone.sum())

    def within_reach(self) -> Chains:
        """Return the chains, each cut to its reach."""
        lengths = np.diff(self.offsets)
        if np.array_equal(lengths, self.reach):
            return self
        offsets = np.concatenate([[0], np.cumsum(self.reach)])
        shift = np.repeat(self.offsets[:-1] - offsets[:-1], self.reach)
        taken = self.pages[np.arange(offsets[-1]) + shift]
        return replace(self, pages=taken, offsets=offsets)

    def distinct_pages(self) -> tuple[pa.StringArray, IntArray]:
        """Return the distinct pages in hex [distinct], and each page's index among them."""
        fixed = pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(HASH_BYTES), len(self.pages), [None, pa.py_buffer(self.pages)]
        )
        coded = fixed.dictionary_encode()
        distinct = np.frombuffer(coded.dictionary.buffers()[1], np.uint8)
        distinct = distinct[: len(coded.dictionary) * HASH_BYTES].reshape(-1, HASH_BYTES)
        return hex_pages(distinct), coded.indices.to_numpy().astype(np.int64)


def chains_of(requests: Iterable[Request], hashing: Hashing) -> Chains:
    """Return the chains of requests, without tokens. Raises FormatError naming the line."""
    hashed: list[npt.NDArray[np.uint8]] = []
    tokens: list[int] = []
    sample = RequestSample()
    for request in requests:
        hashed.append(hashing.hashes(request))
        tokens.append(len(request.token_ids))
        sample.add(request)
    reach = [restorable_pages(n, hashing.page_size, bigram=hashing.bigram) for n in tokens]
    return replace(_chains(hashed, tokens, reach), sample=sample.requests)


class RequestSample:
    """The first tokens of the first requests."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def add(self, request: Request) -> None:
        """Keep the beginning of a request, if it is one of the first."""
        if not self.full:
            beginning = request.token_ids[:_SAMPLE_TOKENS]
            self._requests.append(replace(request, token_ids=beginning))

    @property
    def full(self) -> bool:
        """Whether no further request is kept."""
        return len(self._requests) == _SAMPLE_REQUESTS

    @property
    def requests(self) -> tuple[Request, ...]:
        """The requests."""
        return tuple(self._requests)


def chains_of_pages(chains: Iterable[list[str]], page_size: int | None) -> Chains:
    """Return the chains that lists of page hashes name. page_size: None if unknown."""
    hashed = [
        np.frombuffer(bytes.fromhex("".join(chain)), np.uint8).reshape(-1, HASH_BYTES)
        for chain in chains
    ]
    pages = [len(chain) for chain in hashed]
    tokens = [-1 if page_size is None else n * page_size for n in pages]
    return _chains(hashed, tokens, pages)


def hex_chains(requests: Iterable[Request], hashing: Hashing) -> Iterator[list[str]]:
    """Yield the page hashes of each request, in hex."""
    for request in requests:
        yield hex_pages(hashing.hashes(request)).to_pylist()


def hex_pages(pages: npt.NDArray[np.uint8]) -> pa.StringArray:
    """Return the hex form, as in keys, of raw page hashes [n, 32]."""
    width = 2 * HASH_BYTES
    text = _HEX[pages]
    # Arrow's 32-bit offsets can address only 2 GiB of text.
    kind, step = (pa.string(), np.int32) if text.nbytes < 1 << 31 else (pa.large_string(), np.int64)
    ends = np.arange(len(pages) + 1, dtype=step) * width
    return pa.Array.from_buffers(kind, len(pages), [None, pa.py_buffer(ends), pa.py_buffer(text)])


def raw_pages(names: pa.StringArray) -> npt.NDArray[np.uint8]:
    """Return raw page hashes [n, 32] uint8. names: in hex, without nulls."""
    if not len(names):
        return np.zeros((0, HASH_BYTES), np.uint8)
    start, width = names.offset, 2 * HASH_BYTES
    text = np.frombuffer(names.buffers()[2], np.uint8)[start * width : (start + len(names)) * width]
    digits: npt.NDArray[np.uint8] = _DIGITS[text].reshape(-1, HASH_BYTES, 2)
    pages: npt.NDArray[np.uint8] = digits[:, :, 0] * np.uint8(16) + digits[:, :, 1]
    return pages


def _chains(hashed: list[npt.NDArray[np.uint8]], tokens: list[int], reach: list[int]) -> Chains:
    lengths = [len(chain) for chain in hashed]
    return Chains(
        pages=np.concatenate([np.zeros((0, HASH_BYTES), np.uint8), *hashed]),
        offsets=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
        tokens=np.array(tokens, np.int64),
        reach=np.array(reach, np.int64),
    )
