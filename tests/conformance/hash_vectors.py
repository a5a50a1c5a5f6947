"""Compute page hashes and unified keys with SGLang; runs in SGLang's environment.

The question and the answer have an entry for each list:

- chains: {form, tokens, page_size, extra_key, cache_salt, prior} to the hashes of its pages
- seeds:  [extra_key, cache_salt] to the seed in hex, or null
- plans:  arguments of plan_unified_kv to {suffixes, layer_ranges, head_ranges}

If the native extension cannot be built, the entry of chains is a text with the reason: only that
extension hashes pages in SGLang 0.5.23.
"""

from __future__ import annotations

from array import array
from typing import Any


def answer(question: dict[str, list[Any]]) -> dict[str, Any]:
    from sglang.srt.mem_cache.utils import storage_namespace_seed

    return {
        "chains": hash_chains(question["chains"]),
        "seeds": [storage_namespace_seed(*seed) for seed in question["seeds"]],
        "plans": [plan(arguments) for arguments in question["plans"]],
    }


def hash_chains(chains: list[dict[str, Any]]) -> list[list[str]] | str:
    from sglang.srt.mem_cache.utils import get_hash_str

    try:
        get_hash_str([1], None, 1)
    except RuntimeError as error:
        return f"{error}: {error.__cause__}"
    return [hash_chain(**chain) for chain in chains]


def hash_chain(
    *,
    form: str,
    tokens: list[Any],
    page_size: int,
    extra_key: str | None,
    cache_salt: str | None,
    prior: str | None,
) -> list[str]:
    """Hash a chain, with its tokens in one of SGLang's forms.

    "int64" and "uint32" tree keys; "bigram" tree keys; "list" and "tuples" without a namespace.
    """
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_hash_str, get_storage_hash_str

    if form in ("list", "tuples"):
        units = [tuple(unit) for unit in tokens] if form == "tuples" else tokens
        full = len(units) // page_size * page_size
        return list(get_hash_str(units[:full], prior, page_size))
    raw = array("I" if form == "uint32" else "q", tokens)
    key = RadixKey(raw, extra_key, is_bigram=form == "bigram", cache_salt=cache_salt)
    return list(get_storage_hash_str(key.page_aligned(page_size), prior, page_size))


def plan(arguments: dict[str, Any]) -> dict[str, Any]:
    from sglang.srt.mem_cache.hicache_key_scheme import plan_unified_kv

    planned = plan_unified_kv(**arguments)
    return {
        "suffixes": planned.suffixes,
        "layer_ranges": planned.layer_ranges,
        "head_ranges": planned.head_ranges,
    }
