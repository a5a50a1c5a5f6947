"""Page hashes and unified keys against SGLang's own functions, on random cases.

Every run uses a new seed, which a failing test prints; set HICACHECTL_TEST_SEED to repeat it.
"""

from __future__ import annotations

import os
import random
import secrets
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.formats.hashing import namespace_seed, page_hashes_hex
from hicachectl.formats.keys.unified import UnifiedGrammar
from tests.skips import missing

if TYPE_CHECKING:
    from hicachectl.formats.objects import Shard
    from tests.conformance.conftest import SglangSession

# In one worker, which asks SGLang once.
pytestmark = [pytest.mark.conformance, pytest.mark.xdist_group("sglang-hashing")]

SEED = int(os.environ.get("HICACHECTL_TEST_SEED") or secrets.randbits(32))
CHAINS, SEEDS, PLANS = 6000, 500, 2000
WIDE = (2**32, 2**33 + 1, 2**53 + 1, 2**63 - 1)
NARROW_EDGES = (0, 1, 2**31, 2**32 - 1)
NAMES = (None, None, "", "a", "lora1", "tenant-42", "München", "x" * 300)
DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


@pytest.fixture(scope="module")
def question() -> dict[str, list[Any]]:
    rng = random.Random(SEED)
    return {
        "chains": [random_chain(rng) for _ in range(CHAINS)],
        "seeds": [[rng.choice(NAMES), rng.choice(NAMES)] for _ in range(SEEDS)],
        "plans": [random_plan(rng) for _ in range(PLANS)],
    }


@pytest.fixture(scope="module")
def answer(sglang_session: SglangSession, question: dict[str, list[Any]]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = sglang_session.ask("hash_vectors", question)
    return found


@pytest.fixture(scope="module")
def chain_hashes(answer: dict[str, Any]) -> list[list[str]]:
    hashes: list[list[str]] | str = answer["chains"]
    if isinstance(hashes, str):
        missing("SGLang's page hash", f"apt-get install g++ ninja-build libssl-dev ({hashes})")
    return hashes


def test_page_hashes_equal_those_of_sglang(
    question: dict[str, list[Any]], chain_hashes: list[list[str]]
) -> None:
    for chain, expected in zip(question["chains"], chain_hashes, strict=True):
        prior = namespace_seed(chain["extra_key"], chain["cache_salt"] or None)
        if chain["prior"] is not None:
            prior = bytes.fromhex(chain["prior"])
        bigram = chain["form"] == "bigram"
        found = page_hashes_hex(chain["tokens"], chain["page_size"], bigram=bigram, prior=prior)
        assert found == expected, f"seed {SEED}: {chain}"


def test_the_random_chains_cover_what_they_should(
    question: dict[str, list[Any]], chain_hashes: list[list[str]]
) -> None:
    chains = question["chains"]
    pages = [len(found) for found in chain_hashes]
    assert sum(count > 1 for count in pages) > CHAINS // 2
    assert {chain["form"] for chain in chains} == {"int64", "uint32", "bigram", "list", "tuples"}
    assert any(chain["prior"] for chain in chains)
    assert any(len(chain["tokens"]) % chain["page_size"] for chain in chains)


def test_namespace_seeds_equal_those_of_sglang(
    question: dict[str, list[Any]], answer: dict[str, list[Any]]
) -> None:
    for names, expected in zip(question["seeds"], answer["seeds"], strict=True):
        seed = namespace_seed(*names)
        assert (seed and seed.hex()) == expected, f"seed {SEED}: {names}"


def test_unified_keys_name_the_ranges_that_sglang_puts_there(
    question: dict[str, list[Any]], answer: dict[str, list[Any]]
) -> None:
    codec = UnifiedGrammar()
    for arguments, planned in zip(question["plans"], answer["plans"], strict=True):
        layers, heads = planned["layer_ranges"], planned["head_ranges"]
        rectangles = [(tuple(x), tuple(y)) for x in layers for y in heads]
        found = []
        for suffix in planned["suffixes"]:
            (coordinate,) = codec.readings("", f"_{suffix}")
            assert codec.affix(coordinate) == ("", f"_{suffix}"), f"seed {SEED}: {suffix}"
            found.append(local_ranges(coordinate.shard, arguments))
        assert found == rectangles, f"seed {SEED}: {arguments}"


def random_chain(rng: random.Random) -> dict[str, Any]:
    form = rng.choice(("int64", "uint32", "bigram", "list", "tuples"))
    page_size = rng.choice((1, 1, 2, 3, 4, 7, 16, 32, 64))
    count = rng.randrange(6 * page_size + 2)
    wide_share = 0.0 if form == "uint32" else rng.choice((0.0, 0.0, 1 / page_size / 2, 1.0))
    words = rng.randrange(1, 4) if form == "tuples" else 1
    tokens = [random_token(rng, wide_share) for _ in range(count * words)]
    named = form in ("int64", "uint32", "bigram") and rng.random() < 0.4
    return {
        "form": form,
        "tokens": (
            [tokens[start : start + words] for start in range(0, len(tokens), words)]
            if form == "tuples"
            else tokens
        ),
        "page_size": page_size,
        "extra_key": rng.choice(NAMES) if named else None,
        "cache_salt": rng.choice(NAMES) if named else None,
        "prior": rng.randbytes(32).hex() if rng.random() < 0.3 else None,
    }


def random_token(rng: random.Random, wide_share: float) -> int:
    if rng.random() < wide_share:
        return rng.choice(WIDE) if rng.random() < 0.5 else rng.randrange(2**32, 2**63)
    return rng.choice(NARROW_EDGES) if rng.random() < 0.05 else rng.randrange(200_000)


def random_plan(rng: random.Random) -> dict[str, Any]:
    """Return random arguments that plan_unified_kv accepts."""
    tp_size = rng.choice((1, 2, 3, 4, 8))
    local_heads = rng.choice((1, 2, 4, 6, 8))
    divisors = [group for group in range(1, local_heads + 1) if local_heads % group == 0]
    # Without a head group, SGLang uses the rank's heads, except one head on several ranks.
    undecided = local_heads == 1 and tp_size > 1
    partition = rng.choice((None, 0, 1, 4, 16))
    step = partition or 1
    start = step * rng.randrange(6)
    is_final = rng.random() < 0.5
    layers = rng.randrange(1, 40) if is_final else step * rng.randrange(1, 5)
    replicated = rng.random() < 0.3
    return {
        "model_id": rng.choice(("m", "Qwen/Qwen3-32B", "/models/é", "x" * 40, "y" * 300)),
        "dtype": rng.choice(DTYPES),
        "page_size": rng.choice((1, 16, 64, 127, 128, 256, 70_000)),
        "rank_replicated": replicated,
        "local_kv_heads": local_heads,
        "attn_tp_rank": rng.randrange(tp_size),
        "attn_tp_size": tp_size,
        "attn_cp_size": 1,
        "start_layer": start,
        "end_layer": start + layers,
        "is_final_stage": is_final,
        "head_group": rng.choice(divisors if undecided else [None, *divisors]),
        "layer_partition": partition,
    }


def local_ranges(
    shard: Shard, arguments: dict[str, Any]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return a key's layers and heads, counted within its rank; heads (0, 1) if it has none."""
    assert shard.layers is not None
    offset = arguments["start_layer"]
    layers = (shard.layers[0] - offset, shard.layers[1] - offset)
    if shard.heads is None:
        return layers, (0, 1)
    local = arguments["local_kv_heads"]
    group = arguments["head_group"] or local
    first = arguments["attn_tp_rank"] * local
    return layers, (shard.heads[0] * group - first, shard.heads[1] * group - first)
