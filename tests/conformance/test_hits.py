"""`hits` returns the lengths that SGLang's own backends find and all ranks agree on."""

from __future__ import annotations

import json
import random
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from tests.conformance.store_cases import CASES, DEFAULT_LAYOUT, NEWEST
from tests.conformance.test_cli_stores import profile_files
from tests.mooncake_cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conformance.conftest import Manifest, SglangSession, WriteStore
    from tests.conftest import Invoke

    Answers = list[dict[str, Any]]
    Chain = list[str]

CHAINS = 60
PLACES = 6  # copies of a store, each without other objects
FILE_CASES = [name for name, case in CASES.items() if case.sglang == NEWEST]
MOONCAKE_CASES = (
    "gqa_tp2", "mla_indexer", "hybrid_mamba", "mla_mamba", "mha_draft", "swa", "pp2", "cp2",
    "mla_mha_draft", "split_heads_draft", "split_heads_pp2", "tag_and_none", "asymmetric",
    "deepseek_v4", "dcp2", "inkling",
)  # fmt: skip
PLUGIN_CASES = ("gqa_tp2", "mla_indexer", "hybrid_mamba", "mla_mamba", "swa", "pp2", "cp2",
                "deepseek_v4")  # fmt: skip

pytestmark = [pytest.mark.conformance, pytest.mark.xdist_group("sglang-mooncake")]


@pytest.fixture(scope="module")
def cluster(mooncake_package: None) -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.mark.parametrize("case", FILE_CASES)
def test_chains_in_files_reach_as_far_as_sglang_says(
    sglang_store: WriteStore,
    sglang_session: SglangSession,
    invoke: Invoke,
    tmp_path: Path,
    case: str,
) -> None:
    store, manifest = sglang_store(case, layout=DEFAULT_LAYOUT)
    chance = random.Random(case)
    places = []
    for number in range(PLACES):
        places.append(tmp_path / f"store-{number}")
        shutil.copytree(store, places[-1], copy_function=_empty_copy)
        for gone in some_objects(manifest, chance, share=number * 0.04):
            (places[-1] / gone["file"]).unlink()
    chains = chains_of(manifest["pages"], chance)
    answers = ask(sglang_session, manifest, chains, *places)
    reached = set()
    for number, place in enumerate(places):
        for deployment, profile in enumerate(profile_files(manifest, tmp_path)):
            told = [a for a in answers if (a["place"], a["deployment"]) == (number, deployment)]
            rows = hits_of(invoke, chains, tmp_path, place, "--profile", profile)
            compare(rows, told, chains)
            existing = {path.name for path in place.iterdir()}
            check_stops(rows, chains, existing)
            reached |= {(row["usable_pages"], row["kv_pages"]) for row in rows}
    if case == "cp2_without_dp":  # SGLang does not store the second rank's objects
        assert reached == {(0, 0)}
    else:
        assert len(reached) > 5


@pytest.mark.parametrize("case", PLUGIN_CASES)
def test_the_plug_in_finds_what_sglang_finds(
    sglang_store: WriteStore, sglang_session: SglangSession, tmp_path: Path, case: str
) -> None:
    """The same lengths for each rank and chain, out of files that HiCacheFile wrote."""
    store, manifest = sglang_store(case, layout=DEFAULT_LAYOUT)
    chance = random.Random(case)
    places = [tmp_path / "whole", tmp_path / "partial"]
    for place in places:
        shutil.copytree(store, place, copy_function=_empty_copy)
    for gone in some_objects(manifest, chance, share=0.1):
        (places[1] / gone["file"]).unlink()
    chains = chains_of(manifest["pages"], chance)
    answers = ask(sglang_session, manifest, chains, *places)
    assert any(max(lengths, default=0) for answer in answers for lengths in answer["restorable"])
    found = ask(sglang_session, manifest, chains, *places, backend="plugin")
    assert found == answers


def _empty_copy(source: str, target: str) -> None:
    """Create a file with an object's name and size: these tests read no content."""
    from pathlib import Path

    with Path(target).open("wb") as file:
        file.truncate(Path(source).stat().st_size)


@pytest.mark.parametrize("case", MOONCAKE_CASES)
def test_chains_in_mooncake_reach_as_far_as_sglang_says(
    cluster: Cluster,
    sglang_session: SglangSession,
    invoke: Invoke,
    tmp_path: Path,
    case: str,
) -> None:
    cluster.clear()
    manifest = sglang_session.run("write_store", case, cluster.master, "--backend=mooncake")
    chance = random.Random(case)
    chains = chains_of(manifest["pages"], chance)
    reached = set()
    for share in (0.0, 0.1):
        for gone in some_objects(manifest, chance, share=share):
            cluster.remove(gone["key"])
        answers = ask(sglang_session, manifest, chains, cluster.master, backend="mooncake")
        for deployment, profile in enumerate(profile_files(manifest, tmp_path)):
            told = [a for a in answers if a["deployment"] == deployment]
            rows = hits_of(invoke, chains, tmp_path, cluster.url, "--profile", profile)
            compare(rows, told, chains)
            check_stops(rows, chains, set(cluster.list_keys()))
            reached |= {(row["usable_pages"], row["kv_pages"]) for row in rows}
    assert len(reached) > 5


def test_requests_reach_the_pages_that_sglang_wrote_for_their_tokens(
    sglang_store: WriteStore, invoke: Invoke, tmp_path: Path
) -> None:
    store, manifest = sglang_store("hybrid_mamba", layout=DEFAULT_LAYOUT)
    (profile,) = profile_files(manifest, tmp_path)
    tokens = manifest["tokens"]
    requests = tmp_path / "requests.jsonl"
    requests.write_text("".join(f"{json.dumps(ids)}\n" for ids in ([*tokens, 1], tokens, [1] * 99)))
    out = invoke(
        "hits", store, "--token-ids", requests, "--profile", profile, "--format", "jsonl"
    ).stdout
    rows = [json.loads(line) for line in out.splitlines()]
    # If a prompt has only whole pages, the last page is recomputed. Mamba states are at pages 2, 5
    # and 7.
    assert [(row["kv_pages"], row["usable_pages"]) for row in rows] == [(8, 8), (7, 6), (0, 0)]
    assert rows[1]["usable_tokens"] == 6 * manifest["page_size"]
    assert rows[1]["stopped_by"]["pool"] == "mamba"
    assert rows[1]["stopped_by"]["page"] == manifest["pages"][6]


def some_objects(manifest: Manifest, chance: random.Random, share: float) -> list[dict[str, Any]]:
    return [entry for entry in manifest["objects"] if chance.random() < share]


def chains_of(pages: list[str], chance: random.Random) -> list[Chain]:
    """Return every prefix, and other chains: backends only look up names, in any order."""
    chains = [pages[:length] for length in range(1, len(pages) + 1)]
    while len(chains) < CHAINS:
        strangers = [f"{chance.getrandbits(256):064x}" for _ in range(2)]
        chains.append(chance.sample([*pages, *strangers], chance.randint(1, len(pages))))
        start = chance.randrange(len(pages))
        chains.append(pages[start : start + chance.randint(1, len(pages))])
    return chains


def ask(
    session: SglangSession,
    manifest: Manifest,
    chains: list[Chain],
    *places: object,
    backend: str = "file",
) -> Answers:
    question = {"deployments": manifest["deployments"], "chains": chains, "backend": backend}
    answers: Answers = session.ask("query_hits", {**question, "places": [*map(str, places)]})
    return answers


def hits_of(invoke: Invoke, chains: list[Chain], folder: Path, *arguments: object) -> Answers:
    listed = folder / "chains.jsonl"
    listed.write_text("".join(f"{json.dumps(chain)}\n" for chain in chains))
    return invoke("hits", *arguments, "--pages", listed, "--format", "jsonl").rows


def compare(rows: Answers, told: Answers, chains: list[Chain]) -> None:
    """Compare with the ranks' answers, combined as in _sync_prefetch_hit_query."""
    assert told
    for number, (row, chain) in enumerate(zip(rows, chains, strict=True)):
        agreed = set.intersection(*(set(answer["restorable"][number]) for answer in told))
        assert row["usable_pages"] == max(agreed, default=0), chain
        assert row["kv_pages"] == min(answer["kv"][number] for answer in told), chain


def check_stops(rows: Answers, chains: list[Chain], existing: set[str]) -> None:
    """Check that each chain is stopped by a missing object of one of its pages."""
    for row, chain in zip(rows, chains, strict=True):
        stop = row["stopped_by"]
        if row["usable_pages"] == len(chain):  # a chain can only be shorter than the threshold
            assert stop is None or (stop["page"], stop["reason"]) == (None, "below_threshold")
        else:
            assert stop["key"] not in existing
            assert stop["page"] in stop["key"]
            assert stop["page"] in chain[: row["kv_pages"] + 1]
