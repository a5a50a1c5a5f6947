"""`hits`: usable prefixes of chains, and the object that stops each, on file stores."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from hicachectl.backends.base import open_store
from hicachectl.formats.hashing import namespace_seed, page_hashes_hex
from hicachectl.formats.keys import grammar_of
from hicachectl.formats.profile import Profile, parse_profile
from hicachectl.formats.spec import ObjectSpec, object_specs
from hicachectl.pages.scanning import take_inventory
from hicachectl.requests.chains import Hashing, requests_of, requests_of_pages
from hicachectl.requests.forms import Request
from hicachectl.requests.hits import find_hits
from tests.stores import DSA, page, put

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke

# Every hit policy, and a window of more than one page.
MANY_PAGES = 6000  # of two objects: more keys than are looked up one by one
MIXED = """
model = "x/mixed"
page_size = 4
prefetch_threshold = 4
tp = 2
[[pools]]
name = "kv"
kind = "mha"
dtype = "bfloat16"
layers = 1
kv_heads = 2
head_dim = 4
[[pools]]
name = "draft"
kind = "mha"
dtype = "bfloat16"
layers = 1
kv_heads = 2
head_dim = 2
[[pools]]
name = "mamba"
kind = "mamba"
layers = 1
temporal = { shape = [2, 4], dtype = "float32" }
[[pools]]
name = "swa"
kind = "mha"
dtype = "bfloat16"
layers = 1
kv_heads = 2
head_dim = 4
trailing_pages = 2
"""


@pytest.fixture
def dsa(tmp_path: Path) -> tuple[Path, Path]:
    """An empty store, and the profile of a model with an indexer."""
    store, profile = tmp_path / "store", tmp_path / "dsa.toml"
    store.mkdir()
    profile.write_text(DSA)
    return store, profile


def put_dsa(store: Path, pages: list[str], pools: tuple[str, ...] = ("", ".indexer")) -> None:
    sizes = {"": 9216, ".indexer": 1056}
    for name in pages:
        for pool in pools:
            put(store, f"{name}{pool}_x-dsa.bin", sizes[pool])


def rows(invoke: Invoke, *arguments: object) -> list[dict[str, Any]]:
    document = invoke("hits", *arguments, "--format", "json").document
    assert document["schema"] == 1
    chains: list[dict[str, Any]] = document["chains"]
    return chains


def lines(path: Path, *documents: object) -> Path:
    path.write_text("".join(f"{json.dumps(document)}\n" for document in documents))
    return path


def test_a_row_says_how_far_a_request_reaches_and_what_stops_it(
    invoke: Invoke, tmp_path: Path, dsa: tuple[Path, Path]
) -> None:
    store, profile = dsa
    tokens = list(range(22))
    pages = page_hashes_hex(tokens, 4)
    put_dsa(store, pages)
    (store / f"{pages[3]}.indexer_x-dsa.bin").unlink()
    requests = lines(tmp_path / "requests.jsonl", tokens, tokens[:14])
    first, second = rows(invoke, store, "--token-ids", requests, "--profile", profile)
    assert first == {
        "chain": 0,
        "tokens": 22,
        "kv_pages": 5,
        "usable_pages": 3,
        "usable_tokens": 12,
        "served_tokens": 12,
        "lost_pages": 2,
        "unreachable_pages": 1,
        "stopped_by": {
            "page": pages[3],
            "pool": "indexer",
            "part": None,
            "shard": {},
            "key": f"{pages[3]}.indexer_x-dsa.bin",
            "exists_at": None,
            "reason": None,
            "fault": "missing",
        },
    }
    assert second == {
        "chain": 1,
        "tokens": 14,
        "kv_pages": 3,
        "usable_pages": 3,
        "usable_tokens": 12,
        "served_tokens": 12,
        "lost_pages": 0,
        "unreachable_pages": 0,
        "stopped_by": None,
    }


def test_the_last_token_of_a_request_is_always_computed(
    invoke: Invoke, tmp_path: Path, dsa: tuple[Path, Path]
) -> None:
    store, profile = dsa
    put_dsa(store, page_hashes_hex(range(16), 4))
    requests = lines(tmp_path / "r.jsonl", list(range(16)), list(range(17)), [], [1])
    found = rows(invoke, store, "--token-ids", requests, "--profile", profile)
    assert [row["usable_pages"] for row in found] == [3, 4, 0, 0]
    assert [row["stopped_by"] for row in found] == [None] * 4


def test_namespaces_and_bigrams_make_other_chains(
    invoke: Invoke, tmp_path: Path, dsa: tuple[Path, Path]
) -> None:
    store, profile = dsa
    tokens = list(range(14))
    put_dsa(store, page_hashes_hex(tokens, 4, prior=namespace_seed("lora", "tenant")))
    requests = lines(
        tmp_path / "r.jsonl",
        tokens,
        {"token_ids": tokens, "extra_key": "lora", "cache_salt": "tenant"},
        {"input_ids": tokens, "extra_key": "", "sampling_params": {"max_new_tokens": 1}},
    )
    found = rows(invoke, store, "--token-ids", requests, "--profile", profile)
    assert [row["usable_pages"] for row in found] == [0, 3, 0]
    profile.write_text('hash_unit = "bigram"\n' + DSA)
    put_dsa(store, page_hashes_hex(tokens, 4, bigram=True))
    found = rows(invoke, store, "--token-ids", requests, "--profile", profile)
    assert [row["usable_pages"] for row in found] == [3, 0, 3]


def test_pages_are_chains_by_themselves(
    invoke: Invoke, tmp_path: Path, dsa: tuple[Path, Path]
) -> None:
    store, profile = dsa
    names = [page(number) for number in range(4)]
    put_dsa(store, names[:3])
    listed = tmp_path / "pages"
    listed.write_text(f'{json.dumps(names)}\n\n{names[1]}\n{{"page": "{names[3]}", "x": 1}}\n[]\n')
    found = rows(invoke, store, "--pages", listed, "--profile", profile)
    assert [(r["tokens"], r["usable_pages"], r["usable_tokens"]) for r in found] == [
        (16, 3, 12), (4, 1, 4), (4, 0, 0), (0, 0, 0),
    ]  # fmt: skip
    assert [r["stopped_by"] and r["stopped_by"]["page"] for r in found] == [
        names[3], None, names[3], None,
    ]  # fmt: skip


def test_an_object_of_another_size_stops_a_chain(
    invoke: Invoke, tmp_path: Path, dsa: tuple[Path, Path]
) -> None:
    store, profile = dsa
    names = [page(number) for number in range(3)]
    put_dsa(store, names)
    put(store, f"{names[1]}_x-dsa.bin", 9215)
    listed = lines(tmp_path / "pages", names)
    outcome = invoke("hits", store, "--pages", listed, "--profile", profile, "--format", "jsonl")
    row = outcome.document
    assert (row["kv_pages"], row["usable_pages"]) == (1, 1)
    assert row["stopped_by"]["key"] == f"{names[1]}_x-dsa.bin"
    assert "Objects of the wrong size stop 1 chain; run" in outcome.stderr


def test_without_a_profile_chains_need_what_was_seen(
    invoke: Invoke, tmp_path: Path, dsa: tuple[Path, Path]
) -> None:
    store, _ = dsa
    tokens = list(range(13))
    pages = page_hashes_hex(tokens, 4)
    put_dsa(store, pages)
    (store / f"{pages[2]}.indexer_x-dsa.bin").unlink()
    requests = lines(tmp_path / "r.jsonl", tokens)
    outcome = invoke("hits", store, "--token-ids", requests, "--page-size", 4, "--format", "jsonl")
    row = outcome.document
    assert (row["usable_pages"], row["usable_tokens"]) == (2, 8)
    assert row["stopped_by"]["pool"] == "indexer"
    assert "No --profile" in outcome.stderr
    (row,) = rows(invoke, store, "--pages", lines(tmp_path / "pages", pages))
    assert (row["tokens"], row["usable_pages"], row["usable_tokens"]) == (None, 2, None)


def test_without_a_profile_one_deployment_is_chosen(invoke: Invoke, tmp_path: Path) -> None:
    store = tmp_path / "store"
    for model in ("a", "b"):
        for rank in range(2):
            put(store, f"{page(0)}_{model}_{rank}_2.bin")
    put(store, f"{page(1)}_a_0_2.bin")
    listed = lines(tmp_path / "pages", [page(0), page(1)])
    assert "choose one" in invoke("hits", store, "--pages", listed, exit_code=2).stderr
    (row,) = rows(invoke, store, "--pages", listed, "--model", "a", "--tp", 2)
    assert row["usable_pages"] == 1
    assert row["stopped_by"]["shard"] == {"tp_rank": 1, "tp_size": 2}
    assert row["stopped_by"]["key"] == f"{page(1)}_a_1_2.bin"


def test_an_empty_store_restores_nothing(
    invoke: Invoke, tmp_path: Path, dsa: tuple[Path, Path]
) -> None:
    store, profile = dsa
    listed = lines(tmp_path / "pages", [page(0), page(1)])
    outcome = invoke("hits", store, "--pages", listed, "--format", "jsonl")
    row = outcome.document
    assert (row["kv_pages"], row["usable_pages"]) == (0, 0)
    assert row["stopped_by"] == {
        "page": page(0), "pool": "kv", "part": None, "shard": None, "key": None,
        "exists_at": None, "reason": None, "fault": "missing",
    }  # fmt: skip
    assert f"{store} is empty; check the mount" in outcome.stderr
    (row,) = rows(invoke, store, "--pages", listed, "--profile", profile)
    assert row["stopped_by"]["key"] == f"{page(0)}_x-dsa.bin"


def test_a_pack_says_itself_what_to_expect(
    invoke: Invoke, tmp_path: Path, dsa: tuple[Path, Path]
) -> None:
    store, profile = dsa
    tokens = list(range(13))
    pages = page_hashes_hex(tokens, 4)
    put_dsa(store, pages)
    (store / f"{pages[2]}.indexer_x-dsa.bin").unlink()
    pack = f"pack://{tmp_path / 'x.hcpack'}"
    invoke("migrate", store, pack, "--profile", profile)  # leaves the partial page out
    (row,) = rows(invoke, pack, "--token-ids", lines(tmp_path / "r.jsonl", tokens))
    assert (row["kv_pages"], row["usable_tokens"]) == (2, 8)
    assert row["stopped_by"]["pool"] == "kv"


def test_few_pages_are_asked_for_and_many_listed_to_the_same_end(
    invoke: Invoke, tmp_path: Path, dsa: tuple[Path, Path]
) -> None:
    store, profile = dsa
    names = [page(number) for number in range(20)]
    put_dsa(store, names)
    for number in (3, 7, 12):
        (store / f"{names[number]}.indexer_x-dsa.bin").unlink()
    put(store, f"{names[16]}_x-dsa.bin", 100)
    chains = [names[start:] for start in range(20)]
    few = lines(tmp_path / "few", *chains)
    more = [page(number) for number in range(1000, 1000 + MANY_PAGES)]
    many = lines(tmp_path / "many", *chains, more)
    asked = rows(invoke, store, "--pages", few, "--profile", profile)
    listed = rows(invoke, store, "--pages", many, "--profile", profile)
    assert listed[:20] == asked
    assert (listed[20]["tokens"], listed[20]["usable_pages"]) == (4 * MANY_PAGES, 0)
    assert [row["usable_pages"] for row in asked][:8] == [3, 2, 1, 0, 3, 2, 1, 0]


def test_a_table_is_for_people(invoke: Invoke, tmp_path: Path, dsa: tuple[Path, Path]) -> None:
    store, profile = dsa
    put_dsa(store, [page(number) for number in (0, 1, 2, 4)])
    chain = [page(number) for number in range(5)]
    listed = lines(tmp_path / "pages", chain, chain, chain[:3])
    out = invoke("hits", store, "--pages", listed, "--profile", profile).stdout.splitlines()
    assert out[0] == (
        "CHAIN  TOKENS  KV PAGES  USABLE PAGES  USABLE TOKENS  SERVED TOKENS  UNREACHABLE  "
        "STOPPED BY"
    )
    assert out[1].split() == ["0", "20", "3", "3", "12", "12", "1", "kv", "page", page(3)[:16]]
    assert out[3].split() == ["2", "12", "3", "3", "12", "12", "0", "-"]
    assert out[4:] == [
        "2 whole pages (1 distinct) are out of reach, because servers can restore only shorter "
        "prefixes",
        "69% of 52 tokens served by x/dsa tp 1",
    ]


# --- against a reference that checks page by page ---


@pytest.mark.slow
def test_random_stores_agree_with_a_twin_that_asks_page_by_page(tmp_path: Path) -> None:
    chance = random.Random(7)
    profile = parse_profile(MIXED)
    expected = object_specs(profile, "file")
    names = [page(number) for number in range(8)]
    seen, counts = set(), set()
    for trial in range(30):
        store = tmp_path / str(trial)
        store.mkdir()
        held = _random_store(store, expected, names, chance)
        chains = [names[: chance.randrange(9)] for _ in range(4)] + [names[::-1]]
        with open_store(str(store)) as opened:
            inventory = take_inventory(opened, profile)
        hits = find_hits(inventory, 0, requests_of_pages(chains, None))
        out_of_reach: set[str] = set()
        reached: set[str] = set()
        for number, chain in enumerate(chains):
            usable = max(p for p in range(len(chain) + 1) if _fits(chain, p, expected, held))
            assert hits.usable_pages[number] == usable
            kv = [e for e in expected if e.coordinate.pool == "kv"]
            assert hits.kv_pages[number] == _run(chain, kv, held)
            stop, member = hits.stop_pages[number], hits.stop_specs[number]
            assert (stop, member) == _stop(chain, usable, expected, held)
            behind = _behind(chain, usable, expected, held)
            assert hits.unreachable_pages[number] == len(behind)
            seen.add((usable > 0, member))
            out_of_reach |= set(behind)
            reached |= set(chain[:usable])
        unreachable = hits.page_names.filter(pa.array(hits.unreachable)).to_pylist()
        assert set(unreachable) == out_of_reach - reached
        counts.add(len(unreachable))
    assert len(counts) > 3
    assert {(True, -1), (False, 0)} < seen
    assert len({member for _, member in seen}) == len(expected) + 1  # each object stops a chain


Held = set[tuple[str, int]]  # page, number of the expected object


def _random_store(
    store: Path, expected: tuple[ObjectSpec, ...], names: list[str], chance: random.Random
) -> Held:
    codec = grammar_of("file")
    held = set()
    density = chance.choice([0.8, 0.9, 0.97, 1.0])
    for name in names:
        for number, one in enumerate(expected):
            before, after = codec.affix(one.coordinate)
            if chance.random() < density:
                put(store, f"{before}{name}{after}", one.nbytes)
                held.add((name, number))
            elif chance.random() < 0.2:
                put(store, f"{before}{name}{after}", one.nbytes - 1)
    return held


def _required(chain: list[str], p: int, one: ObjectSpec) -> list[str]:
    return chain[max(0, p - one.trailing_pages) : p] if one.trailing else chain[:p]


def _fits(chain: list[str], p: int, expected: tuple[ObjectSpec, ...], held: Held) -> bool:
    return all(
        (name, number) in held
        for number, one in enumerate(expected)
        for name in _required(chain, p, one)
    )


def _run(chain: list[str], pool: list[ObjectSpec], held: Held) -> int:
    numbers = range(len(pool))  # kv objects come first in `expected`
    whole = [all((name, number) in held for number in numbers) for name in chain]
    return whole.index(False) if False in whole else len(chain)


def _behind(
    chain: list[str], usable: int, expected: tuple[ObjectSpec, ...], held: Held
) -> list[str]:
    always = [number for number, one in enumerate(expected) if not one.trailing]
    return [name for name in chain[usable:] if all((name, n) in held for n in always)]


def _stop(
    chain: list[str], usable: int, expected: tuple[ObjectSpec, ...], held: Held
) -> tuple[int, int]:
    if usable == len(chain):
        return -1, -1
    always = [number for number, one in enumerate(expected) if not one.trailing]
    run = next(
        (i for i, name in enumerate(chain) if any((name, n) not in held for n in always)),
        len(chain),
    )
    if run == usable:
        return run, next(n for n in always if (chain[run], n) not in held)
    return next(
        (place, number)
        for place, name in enumerate(chain[:run])
        for number, one in enumerate(expected)
        if one.trailing and name in _required(chain, run, one) and (name, number) not in held
    )


def test_putting_back_what_stops_a_chain_restores_all_of_it_in_the_end(tmp_path: Path) -> None:
    profile = parse_profile(MIXED)
    expected = object_specs(profile, "file")
    codec = grammar_of("file")
    names = [page(number) for number in range(6)]
    _random_store(tmp_path, expected, names, random.Random(3))
    usable = -1
    for _ in range(len(names) * len(expected) + 1):
        hits = _hits(tmp_path, profile, [names])
        assert hits.usable_pages[0] >= usable
        usable, stop = hits.usable_pages[0], hits.stop_pages[0]
        if stop < 0:
            break
        one = expected[hits.stop_specs[0]]
        before, after = codec.affix(one.coordinate)
        put(tmp_path, f"{before}{names[stop]}{after}", one.nbytes)
    assert usable == len(names)


def test_needed_objects_are_the_prefixes_and_their_trailing_states(tmp_path: Path) -> None:
    profile = parse_profile(MIXED)
    codec = grammar_of("file")
    names = [page(number) for number in range(6)]
    for number, name in enumerate(names):
        for one in object_specs(profile, "file"):
            if not (one.coordinate.pool == "mamba" and number == 4):
                before, after = codec.affix(one.coordinate)
                put(tmp_path, f"{before}{name}{after}", one.nbytes)
    hits = _hits(tmp_path, profile, [names[:5], names[:2]])
    assert hits.usable_pages.tolist() == [4, 2]
    needed = hits.needed()
    columns = {b.spec.pool: needed[:, n] for n, b in enumerate(hits.needs)}
    places = {name: hits.page_names.to_pylist().index(name) for name in names[:5]}
    found = {
        pool: [n for n, name in enumerate(names[:5]) if column[places[name]]]
        for pool, column in columns.items()
    }
    assert found == {
        "kv": [0, 1, 2, 3], "draft": [0, 1, 2, 3], "mamba": [1, 3], "swa": [0, 1, 2, 3],
    }  # fmt: skip
    alone = _hits(tmp_path, profile, [names[:5]])
    swa = next(n for n, b in enumerate(alone.needs) if b.spec.pool == "swa")
    assert np.flatnonzero(alone.needed()[:, swa]).tolist() == [2, 3]


def _hits(store: Path, profile: Profile, chains: list[list[str]]) -> Any:
    with open_store(str(store)) as opened:
        return find_hits(take_inventory(opened, profile), 0, requests_of_pages(chains, None))


def test_chains_keep_what_requests_say() -> None:
    requests = [Request("a", list(range(9))), Request("b", []), Request("c", list(range(8)))]
    chains = requests_of(requests, Hashing(4))
    assert chains.offsets.tolist() == [0, 2, 2, 4]
    assert (chains.tokens.tolist(), chains.reach.tolist()) == ([9, 0, 8], [2, 0, 1])
    assert chains.page_names.to_pylist() == page_hashes_hex(range(8), 4)
    assert chains.blocks.tolist() == [0, 1, 0, 1]
    cut = chains.within_reach()
    assert cut.offsets.tolist() == [0, 2, 2, 3]
    assert cut.blocks.tolist() == [0, 1, 0]


# --- the prefetch threshold ---


@pytest.fixture
def half(tmp_path: Path, dsa: tuple[Path, Path]) -> tuple[object, ...]:
    """The arguments of requests of 20 and 12 usable tokens, of 24 and 12."""
    store, profile = dsa
    long, short = list(range(25)), list(range(100, 113))
    put_dsa(store, [*page_hashes_hex(long, 4)[:5], *page_hashes_hex(short, 4)])
    asked = lines(tmp_path / "requests.jsonl", long, short)
    return store, "--token-ids", asked, "--profile", profile


@pytest.mark.slow
@pytest.mark.parametrize(
    ("threshold", "served", "reasons"),
    [
        (0, [20, 12], [None, None]),
        (12, [20, 12], [None, None]),
        (13, [20, 0], [None, "below_threshold"]),
        (20, [20, 0], [None, "below_threshold"]),
        (21, [0, 0], ["below_threshold", "below_threshold"]),
    ],
)
def test_servers_fetch_nothing_below_their_threshold(
    invoke: Invoke, half: tuple[object, ...], threshold: int, served: list[int], reasons: list[str]
) -> None:
    command = ("hits", *half, "--prefetch-threshold", threshold)
    output = invoke(*command, "--format", "json")
    document = output.document
    chains = document["chains"]
    assert [row["served_tokens"] for row in chains] == served
    assert [row["usable_tokens"] for row in chains] == [20, 12]
    assert (document["usable_tokens"], document["requested_tokens"]) == (32, 36)
    assert document["served_tokens"] == sum(served)
    assert [(row["stopped_by"] or {"reason": None})["reason"] for row in chains] == reasons
    assert chains[0]["stopped_by"]["pool"] == "kv"  # the object that is missing is named as well
    below = sum(map(bool, reasons))
    assert (f"than the prefetch threshold of the servers ({threshold})" in output.stderr) == (
        below > 0
    )
    share = f"{round(sum(served) / 36 * 100)}% of 36 tokens served by x/dsa tp 1"
    table = invoke(*command).stdout.splitlines()
    assert table[-1] == share
    assert sum("below threshold" in line for line in table) == below
    least = sum(served) / 36 + 0.01
    said = invoke(*command, "--min-usable", least, exit_code=4).stderr
    more = f", and {32 - sum(served)} usable tokens are below the servers' thresholds"
    assert f"({sum(served)} of 36{more if below else ''})" in said
    invoke(*command, "--min-usable", max(least - 0.02, 0))


def test_the_threshold_is_sglangs_unless_the_profile_states_one(
    invoke: Invoke, tmp_path: Path, half: tuple[object, ...]
) -> None:
    """SGLang: HybridCacheController.parse_storage_backend_extra_config."""
    store, _, asked, *_ = half
    usual = tmp_path / "usual.toml"
    usual.write_text(DSA.replace("prefetch_threshold = 4\n", ""))
    for stated in (("--profile", usual), ("--page-size", 4)):
        document = invoke("hits", store, "--token-ids", asked, *stated, "--format", "json").document
        assert (document["usable_tokens"], document["served_tokens"]) == (32, 0)
    assert invoke("hits", *half, "--format", "json").document["served_tokens"] == 32


STATES = """
[[pools]]
name = "mamba"
kind = "opaque"
nbytes = 64
"""


@pytest.mark.parametrize("more", ["", STATES])
def test_servers_compute_fewer_than_ten_tokens_again_unless_they_load_states(
    invoke: Invoke, tmp_path: Path, dsa: tuple[Path, Path], more: str
) -> None:
    """SGLang has a second threshold; pages and the prefetch threshold can be below it."""
    store, profile = dsa
    profile.write_text(DSA + more)
    prompts = [list(range(1000 * pages, 1004 * pages + 1)) for pages in (1, 2, 3)]
    for tokens in prompts:
        pages = page_hashes_hex(tokens, 4)
        put_dsa(store, pages)
        put(store, f"{pages[-1]}.mamba_x-dsa_0_1.bin", 64)
    asked = lines(tmp_path / "requests.jsonl", *prompts)
    output = invoke("hits", store, "--token-ids", asked, "--profile", profile, "--format", "json")
    chains = output.document["chains"]
    assert [row["usable_tokens"] for row in chains] == [4, 8, 12]
    assert [row["served_tokens"] for row in chains] == ([4, 8, 12] if more else [0, 0, 12])
    if not more:
        reasons = [(row["stopped_by"] or {"reason": None})["reason"] for row in chains]
        assert reasons == ["below_load_back", "below_load_back", None]
        assert "2 requests: fewer than 10 tokens are usable" in output.stderr
