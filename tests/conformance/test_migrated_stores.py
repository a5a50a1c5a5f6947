"""After `hicachectl migrate`, SGLang reads a store as another deployment than it wrote.

The values of page_values.py show where in the model each element belongs. After a change of keys,
layout or shards, SGLang's own backends and host pools must give each rank of the destination
exactly its elements.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from tests.hf3fs_server import MetadataServer
from tests.mooncake_cluster import Cluster
from tests.speed import some

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conformance.conftest import Manifest, SglangSession, WriteStore
    from tests.conftest import Invoke

FILE_SIZE = 1 << 24

# All these tests run in the worker with the stores' processes.
pytestmark = [pytest.mark.conformance, pytest.mark.xdist_group("sglang-migrated")]


@dataclass(frozen=True, slots=True)
class Move:
    """A case of store_cases.py, and the deployment that its pages must serve.

    to: fields of the destination's profile that differ from the source's.
    layout: layout of the source; default: the case's.
    """

    case: str
    source: str
    destination: str
    to: dict[str, Any] = field(default_factory=dict)
    layout: str = ""

    @property
    def name(self) -> str:
        changes = [f"{name}={value}" for name, value in self.to.items()]
        return " ".join(filter(None, (self.case, self.layout, *changes))).replace("/", "-")


_DIRECT = {"layout": "page_first_direct"}
_HEAD = {"layout": "page_head"}
_THREE_ONE = {"pp": 2, "pp_partition": [3, 1]}
_ONE_STAGE: dict[str, Any] = {"pp": 1, "pp_partition": []}

# Each change of a deployment once, from and to each kind of store.
MOVES = (
    # Heads on other numbers of ranks, from one rank to more ranks than heads.
    Move("gqa_tp2", "file", "file", {"tp": 1}),
    Move("gqa_tp2", "file", "mooncake", {"tp": 4}),
    Move("gqa_tp2", "mooncake", "mooncake", {"tp": 8, **_DIRECT}),
    Move("gqa_tp2", "mooncake", "hf3fs", {"tp": 1, **_DIRECT}, layout="page_head"),
    Move("gqa_tp2", "hf3fs", "file", {"tp": 4, **_HEAD}),
    # Pipeline stages, also together with heads.
    Move("gqa_tp2", "hf3fs", "mooncake", _THREE_ONE),
    Move("pp2", "file", "file", {"tp": 4, **_ONE_STAGE}),
    Move("pp2", "mooncake", "file", {"pp_partition": [1, 4]}),
    Move("mla_pp2", "mooncake", "mooncake", {"pp": 3, "pp_partition": [1, 1, 2]}),
    # Byte orders.
    Move("mha_layouts", "file", "file", _HEAD, layout="layer_first"),
    Move("mla_indexer", "hf3fs", "mooncake", {"layout": "page_first"}, layout="layer_first"),
    # Latent rows and index keys, shared by the ranks.
    Move("mla_indexer", "file", "mooncake", {**_THREE_ONE, **_DIRECT}),
    Move("mla_fp8_indexer", "mooncake", "file", {"tp": 1, **_DIRECT}),
    # Recurrent states: gated delta net, and Kimi's, whose window is the first axis.
    Move("hybrid_mamba", "file", "file", {"tp": 4, **_DIRECT}),
    Move("hybrid_mamba", "mooncake", "hf3fs", {"tp": 4}, layout="page_first_direct"),
    Move("mla_mamba", "hf3fs", "mooncake", {"tp": 4, **_DIRECT}),
    # One group of Mamba2, of which every rank has a copy.
    Move("mamba2", "mooncake", "file", {"tp": 4}),
    # States that every rank holds whole, and heads of which TP 4 has too few.
    Move("zaya", "file", "mooncake", {"tp": 1}),
    Move("inkling", "mooncake", "file", {"tp": 4}),
    # Windows and drafts.
    Move("swa", "mooncake", "file", {"tp": 1, **_HEAD}),
    Move("mha_draft", "file", "mooncake", {"tp": 4}),
    Move("mla_mha_draft", "mooncake", "mooncake", {"tp": 4}),
    # Split heads, which several TP sizes share.
    Move("gqa_tp2", "file", "mooncake", {"tp_lcm_size": 4, **_HEAD}),
    Move("split_heads", "mooncake", "file", {"tp": 1, "tp_lcm_size": 0, "layout": "page_first"}),
    Move("split_heads_pp2", "mooncake", "mooncake", {"tp": 1, **_ONE_STAGE}),
    # K and V of different width, and of 8 bits.
    Move("asymmetric", "mooncake", "mooncake", {"tp": 4, **_DIRECT}),
    Move("fp8_mha", "mooncake", "hf3fs", {"tp": 1}),
    # Compressed pages; the file store has an anchor that Mooncake lacks.
    Move("deepseek_v4", "mooncake", "file", {"tp": 1, **_DIRECT}),
    # States of a form that only SGLang knows.
    Move("side_states", "file", "hf3fs"),
    # Tokens divided among ranks.
    Move("dcp2", "file", "mooncake", _DIRECT),
    # Names.
    Move("tag_and_none", "mooncake", "mooncake", {"tag": "", "model": "other/name"}),
    Move("cp2", "file", "file", {"model": "zai-org/Renamed", **_DIRECT}),
)
# HICACHECTL_TEST_ALL=1 combines more of the cases, changes and stores.
MORE_MOVES = (
    Move("gqa_tp2", "file", "file", {"tp": 4, **_DIRECT}),
    Move("gqa_tp2", "file", "file", {"tp": 8}),
    Move("gqa_tp2", "file", "hf3fs", {"tp": 4}),
    Move("gqa_tp2", "mooncake", "file", {"tp": 1, **_HEAD}),
    Move("gqa_tp2", "hf3fs", "mooncake", {"tp": 4, **_DIRECT}, layout="layer_first"),
    Move("gqa_tp2", "hf3fs", "hf3fs", {"tp": 1, **_DIRECT}),
    Move("gqa_tp2", "file", "file", {"tp": 4, **_THREE_ONE}),
    Move("pp2", "file", "hf3fs", _ONE_STAGE),
    Move("mla_pp2", "mooncake", "file", _ONE_STAGE),
    Move("mha_layouts", "file", "file", _DIRECT, layout="page_head"),
    Move("mha_layouts", "file", "mooncake", {"layout": "page_first"}, layout="page_head"),
    Move("mla_indexer", "file", "file", _DIRECT),
    Move("mla_indexer", "file", "hf3fs", {"tp": 4}),
    Move("hybrid_mamba", "file", "mooncake", {"tp": 1}),
    Move("hybrid_mamba", "hf3fs", "file", {"tp": 1}),
    Move("mla_mamba", "file", "hf3fs", {"tp": 4}),
    Move("mla_mamba", "mooncake", "file", {"tp": 1}),
    Move("mamba2", "file", "file", {"tp": 4, **_DIRECT}),
    Move("mamba2", "file", "mooncake", {"tp": 1}),
    Move("zaya", "mooncake", "file", {"tp": 4}),
    Move("inkling", "file", "file", {"tp": 4, **_DIRECT}),
    Move("inkling", "file", "mooncake", {"tp": 1}),
    Move("swa", "file", "mooncake", {"tp": 4}),
    Move("mha_draft", "mooncake", "file", {"tp": 1, **_DIRECT}),
    Move("mla_mla_draft", "mooncake", "file", {"tp": 1}, layout="layer_first"),
    Move("mla_mha_draft", "mooncake", "file", {"tp": 1}),
    Move("split_heads", "mooncake", "mooncake", {"tp": 1}),
    Move("split_heads_draft", "mooncake", "mooncake", {"tp": 4}),
    Move("split_heads_draft", "mooncake", "file", {"tp": 2, "tp_lcm_size": 0}),
    Move("split_heads_pp2", "mooncake", "file", {"tp": 4, "tp_lcm_size": 0, **_ONE_STAGE}),
    Move("fp8_mha", "file", "mooncake", {"tp": 4, **_DIRECT}),
    Move("fp8_mha", "hf3fs", "file", {"tp": 4, **_HEAD}),
    Move("deepseek_v4", "file", "mooncake", {"tp": 4}),
    Move("side_states", "hf3fs", "file", {"model": "Qwen/Renamed"}),
    Move("dcp2", "mooncake", "file", {"model": "moonshotai/Renamed"}),
    Move("hybrid_mamba", "file", "file", {"model": "Qwen/Renamed"}),
    Move("hybrid_mamba", "mooncake", "mooncake", {"tag": "teamB"}),
)


class Places:
    """Two places of each kind of store: a source and a destination."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.clusters = [Cluster(), Cluster()]
        self.servers = [MetadataServer(python), MetadataServer(python)]
        self._folder = folder
        self._numbers: dict[str, int] = defaultdict(int)

    def close(self) -> None:
        for cluster in self.clusters:
            cluster.close()
        for server in self.servers:
            server.close()

    def empty(self, kind: str, side: int) -> Place:
        """Return an empty store; side: source (0) or destination (1)."""
        self._numbers[kind] += 1
        folder = self._folder / f"{kind}-{self._numbers[kind]}"
        folder.mkdir()
        if kind == "file":
            return Place(kind, str(folder), lambda: str(folder))
        if kind == "mooncake":
            cluster = self.clusters[side]
            cluster.clear()
            return Place(kind, cluster.master, lambda: cluster.url)
        server = self.servers[side]
        server.reset()
        config = server.write_config(folder, FILE_SIZE)
        return Place(kind, str(config), lambda: f"hf3fs:?config={config}&snapshot={server.save()}")


@dataclass(frozen=True, slots=True)
class Place:
    """A store: its arguments for the scripts, and its URL."""

    kind: str
    argument: str
    url: Any

    @property
    def arguments(self) -> tuple[str, str]:
        return self.argument, f"--backend={self.kind}"


@pytest.fixture(scope="module")
def places(
    sglang_python: Path, mooncake_package: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Places]:
    """Stores that no other module uses."""
    found = Places(sglang_python, tmp_path_factory.mktemp("places"))
    yield found
    found.close()


def changed(profile: dict[str, Any], to: dict[str, Any]) -> dict[str, Any]:
    """Return the destination's profile."""
    return {name: value for name, value in {**profile, **to}.items() if value not in ([], "")}


def check(
    session: SglangSession, place: Place, manifest: Manifest, profile: dict[str, Any]
) -> None:
    """Check that SGLang, with `profile`, finds every page of the manifest with its values."""
    for rank in session.read_back(place.argument, place.kind, manifest, profile):
        where = {name: rank[name] for name in ("pp", "cp", "tp")}
        assert rank["hit_pages"] == len(manifest["pages"]), where
        assert not any(rank["wrong"].values()), (where, rank["wrong"])
        assert rank["read"] == positions(manifest, profile), where


def positions(manifest: Manifest, profile: dict[str, Any]) -> dict[str, list[int]]:
    """Return the chain positions at which SGLang stored each pool with bytes."""
    number = {page: position for position, page in enumerate(manifest["pages"])}
    first = manifest["profile"]
    own = {"model": first["model"].replace("/", "-"), "tag": first.get("tag")}
    found: dict[str, set[int]] = {
        pool["name"]: set() for pool in profile["pools"] if pool["kind"] != "logical"
    }
    for entry in manifest["objects"]:
        if entry["pool"] in found and all(
            entry.get(name, value) == value for name, value in own.items()
        ):
            found[entry["pool"]].add(number[entry["page"]])
    return {pool: sorted(places) for pool, places in found.items()}


@pytest.mark.parametrize("move", some((*MOVES, *MORE_MOVES), *MOVES), ids=lambda move: move.name)
def test_sglang_reads_what_was_migrated_as_the_destination_it_was_made_for(
    move: Move, places: Places, sglang_session: SglangSession, invoke: Invoke, tmp_path: Path
) -> None:
    source, destination = places.empty(move.source, 0), places.empty(move.destination, 1)
    layout = [f"--layout={move.layout}"] if move.layout else []
    manifest = sglang_session.run("write_store", move.case, *source.arguments, *layout)
    profile = changed(manifest["profile"], move.to)
    if move.destination == "hf3fs":  # as if servers had registered their files
        none = {**manifest, "pages": []}
        sglang_session.read_back(destination.argument, destination.kind, none, profile)
    before, after = tmp_path / "from.json", tmp_path / "to.json"
    before.write_text(json.dumps(manifest["profile"]))
    after.write_text(json.dumps(profile))
    invoke(
        "migrate", source.url(), destination.url(),
        "--profile", before, "--to-profile", after, "--verify", "--grace", "0s",
    )  # fmt: skip
    check(sglang_session, destination, manifest, profile)
    compare(invoke, source, before, destination, after, manifest)
    if "mooncake" not in (move.source, move.destination):  # whose clients take a second
        compare(invoke, destination, after, source, before, manifest)


def compare(invoke: Invoke, a: Place, of_a: Path, b: Place, of_b: Path, manifest: Manifest) -> None:
    """Check that every page is equal, byte by byte, but for its conversion."""
    profiles = ("--profile", of_a, "--to-profile", of_b)
    compared = invoke.document("diff", a.url(), b.url(), *profiles, "--verify", "--grace", "0s")
    assert compared["equal"] == len(manifest["pages"])
    assert compared["bytes_compared"]


@pytest.mark.parametrize(
    ("case", "sglang", "ends"),
    [
        ("gqa_tp2", "0.5.16", {"_0_k", "_0_v", "_1_k", "_1_v"}),
        ("mla_mamba", "0.5.16", {"__k", "_0_temporal", "_1_temporal", "_0_conv_0", "_1_conv_0"}),
        ("mla_pp2", "0.5.12", {"_0_k", "_1_k", "_0_indexer", "_1_indexer"}),
        ("gqa_tp2", "0.5.7", {"_0_k", "_0_v", "_1_k", "_1_v"}),
    ],
)  # fmt: skip
def test_pages_of_an_older_release_are_found_again_under_their_new_names(
    case: str,
    sglang: str,
    ends: set[str],
    places: Places,
    sglang_session: SglangSession,
    invoke: Invoke,
    tmp_path: Path,
) -> None:
    new, old = places.empty("mooncake", 0), places.empty("mooncake", 1)
    manifest = sglang_session.run("write_store", case, *new.arguments)
    profile, older = tmp_path / "profile.json", tmp_path / "older.json"
    profile.write_text(json.dumps(manifest["profile"]))
    older.write_text(json.dumps({**manifest["profile"], "sglang": sglang}))
    options = ("--verify", "--grace", "0s")
    invoke("migrate", new.url(), old.url(), "--profile", profile, "--to-sglang", sglang, *options)
    pages = set(manifest["pages"])
    named = [key for key in places.clusters[1].list_keys() if key[:64] in pages]
    assert len(named) == len(manifest["objects"])
    assert {key[64:] for key in named} == ends

    new = places.empty("mooncake", 0)
    newest = manifest["profile"]["sglang"]
    # Releases from 0.5.22 on may store fewer index keys, so only a profile says which.
    to = ("--to-profile", profile) if case == "mla_pp2" else ("--to-sglang", newest)
    invoke("migrate", old.url(), new.url(), "--profile", older, *to, *options)
    check(sglang_session, new, manifest, manifest["profile"])


def test_states_of_an_older_release_that_kept_one_rank_of_two_are_refused(
    sglang_store: WriteStore, invoke: Invoke, tmp_path: Path
) -> None:
    directory, manifest = sglang_store("legacy_mla_mamba")
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(manifest["profile"]))
    arguments = (directory, tmp_path / "new", "--profile", profile)
    refused = invoke("migrate", *arguments, "--to-sglang", "0.5.23", exit_code=2)
    assert "pools[mamba]: keys beside an MLA target do not name the TP rank" in refused.stderr
    assert not (tmp_path / "new").exists()
