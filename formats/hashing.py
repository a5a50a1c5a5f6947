"""Convert token ids to page hashes, as SGLang's storage path does.

A page's hash is SHA-256 over the previous page's hash and the page's words, which are the numbers
of its tokens. The previous hash has 32 bytes. Page 0 has no previous hash, or the seed of a
namespace in its place. Words are unsigned 32-bit little-endian. If a word of a page does not fit
into 32 bits, all words of the page have 64 bits, and a byte ff precedes them.
Source: sglang srt/mem_cache/utils.py :: get_storage_hash_str, storage_namespace_seed;
cpp_utils/hash_binding.cpp :: hash_pages_to_hex_blob; radix_cache.py :: RadixKey.
"""

from __future__ import annotations

import hashlib
import operator
import struct
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from hicachectl.formats.errors import FormatError
from hicachectl.formats.objects import PAGE_DIGITS

HASH_BYTES = PAGE_DIGITS // 2
MAX_TOKEN = 2**63 - 1

_MAX_NARROW = 0xFFFFFFFF
_WIDE_MARKER = 0xFF  # makes the byte count odd, so that no narrow page has the same hash
_NAMESPACE_TEXT = b"sglang-cache-namespace-v1"

Tokens = Sequence[int] | Sequence[tuple[int, ...]] | npt.NDArray[np.integer]


def page_hashes(
    token_ids: Tokens, page_size: int, *, bigram: bool = False, prior: bytes | None = None
) -> npt.NDArray[np.uint8]:
    """Return the hash of every full page of a token chain: [pages, 32] uint8, read-only.

    token_ids: tokens in 0..2^63-1. A token of several words is a tuple, or a row of a 2-D array.
    bigram:    hash pages of `page_size` pairs (t[i], t[i+1]), as servers with EAGLE do.
    prior:     raw hash of the previous page, or a namespace seed. To continue after `pages`
               pages, give the tokens from index pages * page_size on. This holds for bigrams, too,
               because a page of bigrams shares one token with the next page.

    Raises FormatError, which names the position of a bad token.
    """
    blob = _chain(_page_payloads(token_ids, page_size, bigram), prior)
    return np.frombuffer(blob, np.uint8).reshape(-1, HASH_BYTES)


def page_hashes_hex(
    token_ids: Tokens, page_size: int, *, bigram: bool = False, prior: bytes | None = None
) -> list[str]:
    """Return `page_hashes` as texts of 64 lowercase hex digits, as in keys."""
    text = _chain(_page_payloads(token_ids, page_size, bigram), prior).hex()
    return [text[start : start + PAGE_DIGITS] for start in range(0, len(text), PAGE_DIGITS)]


def namespace_seed(extra_key: str | None, cache_salt: str | None) -> bytes | None:
    """Return the `prior` of a namespace's first page; None if both arguments are None.

    An empty string differs from None here. SGLang replaces empty strings of a request by None
    (managers/io_struct.py), and appends a LoRA's identifier to `extra_key`.
    """
    if extra_key is None and cache_salt is None:
        return None
    digest = hashlib.sha256(_NAMESPACE_TEXT)
    for name, part in (("extra_key", extra_key), ("cache_salt", cache_salt)):
        if part is None:
            digest.update(b"\x00")
            continue
        try:
            text = part.encode()
        except UnicodeEncodeError as error:
            raise FormatError(f"{name}: not valid Unicode: {part!a}") from error
        digest.update(b"\x01" + struct.pack("<Q", len(text)) + text)
    return digest.digest()


def restorable_pages(num_tokens: int, page_size: int, *, bigram: bool = False) -> int:
    """Return the largest number of pages of a prompt that a server can restore.

    The last token is always computed (managers/schedule_batch.py ::
    Req._compute_max_prefix_len); only the tokens before it form bigrams.
    """
    _require_page_size(page_size)
    return max(num_tokens - 1 - bigram, 0) // page_size


def tokens_to_restore(pages: int, page_size: int, *, bigram: bool = False) -> int:
    """Return the smallest number of tokens of a prompt with `pages` restorable pages.

    Inverse of `restorable_pages`; 0 for no pages.
    """
    _require_page_size(page_size)
    return pages * page_size + 1 + bigram if pages else 0


def _require_page_size(page_size: int) -> None:
    if page_size < 1:
        raise FormatError(f"page_size: must be at least 1, but is {page_size}")


def _chain(payloads: Iterable[bytes], prior: bytes | None) -> bytes:
    if prior is not None and len(prior) != HASH_BYTES:
        raise FormatError(f"prior: must be {HASH_BYTES} bytes, but has {len(prior)}")
    # A page can have one token, so this loop must be fast. It uses local names and few calls.
    sha256 = hashlib.sha256
    hashes: list[bytes] = []
    append = hashes.append
    last = prior or b""
    for payload in payloads:
        last = sha256(last + payload).digest()
        append(last)
    return b"".join(hashes)


def _page_payloads(token_ids: Tokens, page_size: int, bigram: bool) -> Iterable[bytes]:
    _require_page_size(page_size)
    units = _units(token_ids)
    if bigram:
        if units.shape[1] != 1:
            raise FormatError("bigrams need tokens that are single numbers, not tuples")
        units = np.hstack((units[:-1], units[1:]))
    pages = len(units) // page_size
    if not pages:
        return ()
    words = units[: pages * page_size].reshape(pages, page_size * units.shape[1])
    wide: npt.NDArray[np.bool_] = np.any(words > _MAX_NARROW, axis=1)
    if not wide.any():
        return _rows(words.astype("<u4"))
    marker = np.full((int(wide.sum()), 1), _WIDE_MARKER, np.uint8)
    wide_rows = _rows(np.hstack((marker, words[wide].astype("<u8").view(np.uint8))))
    narrow_rows = _rows(words[~wide].astype("<u4"))
    return (next(wide_rows if is_wide else narrow_rows) for is_wide in wide.tolist())


def _rows(array: npt.NDArray[np.integer]) -> Iterator[bytes]:
    width = array.shape[1] * array.itemsize
    return map(operator.itemgetter(0), struct.iter_unpack(f"{width}s", array.tobytes()))


def _units(token_ids: Tokens) -> npt.NDArray[np.int64]:
    """Return the checked tokens: [tokens, words per token]."""
    try:
        values = np.asarray(token_ids)
    except ValueError:  # rows of unequal length
        return _units_one_by_one(token_ids)
    if (
        values.dtype.kind not in "iu"
        or values.ndim not in (1, 2)
        or not values.size
        or values.min() < 0
        or values.max() > MAX_TOKEN
    ):
        return _units_one_by_one(token_ids)
    return values.reshape(len(values), -1).astype(np.int64)


def _units_one_by_one(token_ids: Tokens) -> npt.NDArray[np.int64]:
    """Convert tokens that numpy cannot convert. An error names a bad token."""
    units = [_words_of(token, position) for position, token in enumerate(token_ids)]
    width = len(units[0]) if units else 1
    for position, unit in enumerate(units):
        if len(unit) != width:
            raise FormatError(f"token {position}: has {len(unit)} words, but token 0 has {width}")
    return np.array(units, np.int64).reshape(len(units), width)


def _words_of(token: object, position: int) -> list[int]:
    parts = token if isinstance(token, tuple | list | np.ndarray) else (token,)
    try:
        words = [operator.index(part) for part in parts]
    except TypeError as error:
        raise FormatError(f"token {position}: {token!r:.60} is not a whole number") from error
    if not words:
        raise FormatError(f"token {position}: is an empty tuple")
    for word in words:
        if not 0 <= word <= MAX_TOKEN:
            raise FormatError(f"token {position}: {word} is not in 0..2^63-1")
    return words
