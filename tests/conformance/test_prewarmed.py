"""After a prewarm of Mooncake from files, SGLang's own backend finds exactly the reported pages.

SGLang writes the stores; then the tests remove objects, also in the middle of chains.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from hicachectl.formats.profile import profile_from_mapping
from hicachectl.requests.chains import Hashing, requests_of
from hicachectl.requests.forms import Request
from tests.conformance.store_cases import DEFAULT_LAYOUT
from tests.conformance.test_hits import ask, compare
from tests.mooncake_cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conformance.conftest import Manifest, SglangSession, WriteStore
    from tests.conftest import Invoke

    Tokens = list[int]

PROMPTS = 6  # per run; each is a part of the stored chain with another continuation
SHARES = (0.0, 0.04, 0.12)  # share of the objects other than kv that are removed
WHOLE_PAGES = 0.05  # share of the pages that are removed completely, unless the share is 0

pytestmark = [pytest.mark.conformance, pytest.mark.xdist_group("sglang-mooncake")]


@pytest.fixture(scope="module")
def cluster(mooncake_package: None) -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("case", "to"),
    [
        ("gqa_tp2", {}),
        ("gqa_tp2", {"tp": 4}),
        ("mla_indexer", {}),
        ("hybrid_mamba", {}),
        ("hybrid_mamba", {"tp": 4}),
        ("mla_mamba", {}),
        ("mha_draft", {}),
        ("swa", {}),
    ],
    ids=str,
)
def test_sglang_finds_the_prefixes_that_prewarm_claims(
    cluster: Cluster,
    sglang_store: WriteStore,
    sglang_session: SglangSession,
    invoke: Invoke,
    tmp_path: Path,
    case: str,
    to: dict[str, int],
) -> None:
    store, manifest = sglang_store(case, layout=DEFAULT_LAYOUT)
    chance = random.Random(f"{case} {to}")
    before, after = manifest["profile"], {**manifest["profile"], **to}
    (tmp_path / "from.json").write_text(json.dumps(before))
    (tmp_path / "to.json").write_text(json.dumps(after))
    options = [f"--to-{name}={value}" for name, value in to.items()]
    served = [{**manifest["deployments"][0], "profile": after}]
    claimed = set()
    for number, share in enumerate(SHARES):
        cluster.clear()
        archive = tmp_path / f"archive-{number}"
        shutil.copytree(store, archive)
        for gone in _taken_out(manifest, chance, share):
            (archive / gone).unlink()
        prompts = _prompts(manifest, chance)
        asked = tmp_path / f"prompts-{number}.jsonl"
        asked.write_text("".join(f"{json.dumps(tokens)}\n" for tokens in prompts))
        document = json.loads(
            invoke(
                "prewarm", cluster.url, "--from", archive, "--token-ids", asked,
                "--profile", tmp_path / "from.json", *options,
            ).stdout
        )  # fmt: skip
        rows = _hits(invoke, cluster.url, asked, tmp_path / "to.json")
        chains = _chains(prompts, after)
        told = ask(
            sglang_session, {"deployments": served}, chains, cluster.master,
            backend="mooncake",
        )  # fmt: skip
        compare(rows, told, chains)
        assert document["usable_tokens"] == sum(row["usable_tokens"] for row in rows)
        # Exactly the pages that the archive can serve.
        could = _hits(invoke, archive, asked, tmp_path / "from.json")
        assert [r["usable_pages"] for r in rows] == [r["usable_pages"] for r in could]
        worth = {p for r, c in zip(rows, chains, strict=True) for p in c[: r["usable_pages"]]}
        assert {p for p in manifest["pages"] if any(p in k for k in cluster.list_keys())} == worth
        assert document["copied_pages"] == len(worth)
        assert document["requested_pages"] == len(worth) + document["missing_pages"]
        claimed |= {row["usable_pages"] for row in rows}
    assert len(claimed) > 2


def _taken_out(manifest: Manifest, chance: random.Random, share: float) -> list[str]:
    """Return files to remove: some sidecars, and all files of some pages."""
    pages = {p for p in manifest["pages"] if share and chance.random() < WHOLE_PAGES}
    sidecars = {"indexer", "mamba", "draft", "swa"}
    return [
        entry["file"]
        for entry in manifest["objects"]
        if entry["page"] in pages or (entry["pool"] in sidecars and chance.random() < share)
    ]


def _prompts(manifest: Manifest, chance: random.Random) -> list[Tokens]:
    tokens, page_size = manifest["tokens"], manifest["page_size"]
    prompts = [[*tokens, 1]]
    while len(prompts) < PROMPTS:
        shared = chance.randint(1, len(tokens) // page_size) * page_size
        prompts.append([*tokens[:shared], *(chance.randrange(1000) for _ in range(page_size + 1))])
    return prompts


def _chains(prompts: list[Tokens], profile: dict[str, Any]) -> list[list[str]]:
    """Return the page hashes that a server looks for."""
    hashing = Hashing.of(profile_from_mapping(profile))
    chains = requests_of((Request("", tokens) for tokens in prompts), hashing).within_reach()
    pages = chains.page_names.take(pa.array(chains.blocks)).to_pylist()
    ends = chains.offsets.tolist()
    return [pages[start:end] for start, end in itertools.pairwise(ends)]


def _hits(invoke: Invoke, store: object, asked: Path, profile: Path) -> list[dict[str, Any]]:
    return invoke(
        "hits", store, "--token-ids", asked, "--profile", profile, "--format", "jsonl"
    ).rows
