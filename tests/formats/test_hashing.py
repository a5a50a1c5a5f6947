from __future__ import annotations

import hashlib
import struct
from array import array
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.formats.errors import FormatError
from hicachectl.formats.hashing import (
    MAX_TOKEN,
    namespace_seed,
    page_hashes,
    page_hashes_hex,
    restorable_pages,
)

# Made by sglang 0.5.23's native hash extension at page size 4.
GOLDEN_PLAIN = [
    "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72",
    "4ebfa8a1f3c341517621838c6e1b9aa350307e3f00b3cbd1a07ef740f54396d6",
]
GOLDEN_BIGRAM = [
    "f721fe42aac11dcbfd1a17f24cc5765a0d5b6bc264d1c0b6581d775a7344c11f",
    "c35ad698917936a474f7e55f3a4855eaee20585cd0bf156b1ae3a62666ba7220",
]
GOLDEN_LORA_SEED = "69df3de801c43e60adaa856ad245421b72609a9c94f2c6cc263c4d6c4497c3c5"
GOLDEN_TENANT = [
    "a611fa48ac3788409428afe671a14cda3fed8c00883575aeb1f9b4d511dbf053",
    "d2a18bd253d398a586cf82148a65793a7f564f418de7e8aabef473af53ad830c",
]
GOLDEN_WIDE = "a2ad9fe92a425d06aaaf12e074281aa24f51ecd05ff669e37f20e537b82238a1"

narrow_tokens = st.integers(0, 0xFFFFFFFF)
tokens = st.one_of(
    narrow_tokens, st.sampled_from([0, 0xFFFFFFFF, 2**32, MAX_TOKEN]), st.integers(0, MAX_TOKEN)
)
chains = st.one_of(st.lists(narrow_tokens, max_size=70), st.lists(tokens, max_size=70))
page_sizes = st.integers(1, 20)
priors = st.none() | st.binary(min_size=32, max_size=32)


def reference_hashes(
    token_ids: list[int], page_size: int, bigram: bool, prior: bytes | None
) -> list[str]:
    """Hash by the documented rules, word by word."""
    units = [*pairwise(token_ids)] if bigram else [(token,) for token in token_ids]
    found = []
    previous = prior or b""
    for page in range(len(units) // page_size):
        unit_words = units[page * page_size : (page + 1) * page_size]
        words = [word for unit in unit_words for word in unit]
        data = previous
        if any(word > 0xFFFFFFFF for word in words):
            data += b"\xff" + b"".join(struct.pack("<Q", word) for word in words)
        else:
            data += b"".join(struct.pack("<I", word) for word in words)
        previous = hashlib.sha256(data).digest()
        found.append(previous.hex())
    return found


def test_plain_pages_have_the_hashes_that_sglang_gives_them() -> None:
    assert page_hashes_hex(range(1, 9), 4) == GOLDEN_PLAIN


def test_bigram_pages_have_the_hashes_that_sglang_gives_them() -> None:
    assert page_hashes_hex(range(1, 10), 4, bigram=True) == GOLDEN_BIGRAM


def test_a_page_with_a_wide_token_has_the_hash_that_sglang_gives_it() -> None:
    assert page_hashes_hex([1, 2, 3, 2**33], 4) == [GOLDEN_WIDE]


def test_a_namespace_has_the_seed_that_sglang_gives_it() -> None:
    seed = namespace_seed("lora1", None)
    assert seed is not None
    assert seed.hex() == GOLDEN_LORA_SEED


def test_a_namespaced_chain_starts_from_its_seed() -> None:
    prior = namespace_seed(None, "tenant-42")
    assert page_hashes_hex(range(1, 9), 4, prior=prior) == GOLDEN_TENANT


def test_a_request_without_namespace_has_no_seed() -> None:
    assert namespace_seed(None, None) is None


def test_namespaces_that_join_to_the_same_text_have_different_seeds() -> None:
    parts: list[tuple[str | None, str | None]] = [
        ("ab", None), (None, "ab"), ("a", "b"), ("ab", ""), ("", "ab"), ("", ""), ("", None),
    ]  # fmt: skip
    assert len({namespace_seed(*part) for part in parts}) == len(parts)


def test_a_namespace_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(FormatError, match=r"cache_salt: not valid Unicode: '\\udcff'"):
        namespace_seed(None, "\udcff")


@given(chains, page_sizes, st.booleans(), priors)
def test_hashes_equal_the_rules_word_by_word(
    token_ids: list[int], page_size: int, bigram: bool, prior: bytes | None
) -> None:
    found = page_hashes_hex(token_ids, page_size, bigram=bigram, prior=prior)
    assert found == reference_hashes(token_ids, page_size, bigram, prior)


@given(chains, page_sizes, st.booleans(), st.data())
def test_a_chain_hashed_in_two_calls_equals_one_call(
    token_ids: list[int], page_size: int, bigram: bool, data: st.DataObject
) -> None:
    whole = page_hashes(token_ids, page_size, bigram=bigram)
    split = data.draw(st.integers(0, len(whole)))
    head_tokens = token_ids[: split * page_size + bigram]
    head = page_hashes(head_tokens, page_size, bigram=bigram)
    prior = head[-1].tobytes() if split else None
    tail = page_hashes(token_ids[split * page_size :], page_size, bigram=bigram, prior=prior)
    assert np.array_equal(np.concatenate((head, tail)), whole)


@given(chains, page_sizes, st.booleans())
def test_only_full_pages_are_hashed(token_ids: list[int], page_size: int, bigram: bool) -> None:
    units = max(len(token_ids) - bigram, 0)
    found = page_hashes(token_ids, page_size, bigram=bigram)
    assert found.shape == (units // page_size, 32)
    assert found.dtype == np.uint8


@given(chains, page_sizes)
def test_hex_and_raw_hashes_are_the_same(token_ids: list[int], page_size: int) -> None:
    raw = [row.tobytes().hex() for row in page_hashes(token_ids, page_size)]
    assert page_hashes_hex(token_ids, page_size) == raw


@given(st.lists(st.tuples(tokens, tokens, tokens), max_size=20), st.integers(1, 5))
def test_tuple_tokens_are_hashed_as_their_words_in_order(
    units: list[tuple[int, int, int]], page_size: int
) -> None:
    flat = [word for unit in units for word in unit]
    assert page_hashes_hex(units, page_size) == page_hashes_hex(flat, 3 * page_size)


@pytest.mark.parametrize(
    "token_ids",
    [
        array("I", range(1, 9)),
        array("q", range(1, 9)),
        tuple(range(1, 9)),
        np.arange(1, 9, dtype=np.uint8),
        np.arange(1, 9, dtype=np.uint64),
        np.arange(1, 9, dtype=">i4"),
        np.arange(1, 17)[::2] // 2 + 1,
        [np.uint64(token) if token % 2 else token for token in range(1, 9)],
        [(token,) for token in range(1, 9)],
    ],
    ids=["array-I", "array-q", "tuple", "u1", "u8", "big-endian", "strided", "mixed", "1-tuples"],
)
def test_every_integer_sequence_hashes_alike(token_ids: Any) -> None:
    assert page_hashes_hex(token_ids, 4) == GOLDEN_PLAIN


@pytest.mark.parametrize("token_ids", [[], (), np.zeros(0), np.zeros((0, 2), int)])
@pytest.mark.parametrize("bigram", [False, True])
def test_a_chain_without_tokens_has_no_hashes(token_ids: Any, bigram: bool) -> None:
    assert page_hashes(token_ids, 1, bigram=bigram).shape == (0, 32)
    assert page_hashes_hex(token_ids, 1, bigram=bigram) == []


def test_a_page_larger_than_any_chain_has_no_hash() -> None:
    assert page_hashes([7], 2**62).shape == (0, 32)


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([1, 2, -1], r"token 2: -1 is not in 0\.\.2\^63-1"),
        (np.array([5, -3]), "token 1: -3 is not in"),
        ([1, 2**63], f"token 1: {2**63} is not in"),
        ([-1, 2**63], "token 0: -1 is not in"),
        (np.array([2**63], np.uint64), "token 0: 9223372036854775808 is not in"),
        ([2**70], "token 0: 1180591620717411303424 is not in"),
        ([1, 2.5], "token 1: 2.5 is not a whole number"),
        ([1, None], "token 1: None is not a whole number"),
        (["1"], "token 0: '1' is not a whole number"),
        ([(1, 2), (3,)], "token 1: has 1 words, but token 0 has 2"),
        ([(1, 2), (3, -4)], "token 1: -4 is not in"),
        ([(), ()], "token 0: is an empty tuple"),
        ([[[1]]], r"token 0: \[\[1\]\] is not a whole number"),
    ],
)
def test_a_bad_token_is_refused_with_its_position(token_ids: Any, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        page_hashes(token_ids, 1)


def test_a_bad_token_in_the_partial_last_page_is_refused() -> None:
    with pytest.raises(FormatError, match="token 4"):
        page_hashes([1, 2, 3, 4, -1], 4)


def test_bigrams_of_tuples_are_refused() -> None:
    with pytest.raises(FormatError, match="bigrams need tokens that are single numbers"):
        page_hashes([(1, 2), (3, 4)], 1, bigram=True)


@pytest.mark.parametrize("page_size", [0, -4])
def test_a_page_size_below_one_is_refused(page_size: int) -> None:
    with pytest.raises(FormatError, match="page_size: must be at least 1"):
        page_hashes([1], page_size)
    with pytest.raises(FormatError, match="page_size: must be at least 1"):
        restorable_pages(1, page_size)


@pytest.mark.parametrize("prior", [b"", b"\0" * 31, b"0" * 64])
def test_a_prior_that_is_no_digest_is_refused(prior: bytes) -> None:
    with pytest.raises(FormatError, match=f"prior: must be 32 bytes, but has {len(prior)}"):
        page_hashes([1], 1, prior=prior)


@pytest.mark.parametrize(
    ("num_tokens", "page_size", "bigram", "pages"),
    [
        (0, 4, False, 0),
        (1, 1, False, 0),
        (8, 4, False, 1),
        (9, 4, False, 2),
        (9, 4, True, 1),
        (10, 4, True, 2),
        (2, 1, True, 0),
        (0, 1, True, 0),
    ],
)
def test_the_last_prompt_token_is_never_restored(
    num_tokens: int, page_size: int, bigram: bool, pages: int
) -> None:
    assert restorable_pages(num_tokens, page_size, bigram=bigram) == pages
