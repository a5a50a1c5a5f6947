"""Objects that SGLang's own MooncakeStore wrote into a cluster are understood, and no others."""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hicachectl.formats.keys import grammar_of
from hicachectl.formats.keys.mooncake import WARM_UP_PATTERN
from hicachectl.formats.profile import profile_from_mapping
from hicachectl.formats.spec import ObjectSpec, object_specs
from tests.conformance.object_bytes import expected_bytes
from tests.conformance.store_cases import MOONCAKE_VARIANTS, has_values, is_trailing
from tests.conformance.test_cli_stores import on_pages_of_their_own, window_of
from tests.conformance.test_cli_values import NAN, WORDS
from tests.mooncake_cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conformance.conftest import Manifest, SglangSession
    from tests.conftest import Invoke

LEASE_S = 3
HAS_LEASE = -706
# The first pool of the case without objects for kv: without it, servers miss the page.
ANCHOR_WITHOUT_KV = "deepseek_v4_c4"

Entry = dict[str, Any]
Affix = tuple[str, str]

_COORDINATES = (
    "key", "page", "pool", "part", "model", "tag", "tp_rank", "tp_size", "pp_rank", "pp_size",
    "cp_rank", "cp_size", "dcp_rank", "heads", "nbytes",
)  # fmt: skip

# Every kind of object and rank, but not all variants: each run needs a second to close its client.
DAMAGED = [
    variant
    for variant in MOONCAKE_VARIANTS
    if variant[0] in ("mla_indexer", "hybrid_mamba", "pp2", "swa", "mla_mha_draft", "tag_and_none")
    or variant[0].startswith("split_heads")
]

# All these tests run in the worker with the SGLang process and its cluster.
pytestmark = [pytest.mark.conformance, pytest.mark.xdist_group("sglang-mooncake")]


class WrittenFiles:
    """What is known of a store whose keys have no more than a model: objects, and their specs."""

    backend: str
    folder: Path
    manifest: Manifest

    @property
    def profile(self) -> Path:
        """The deployment's profile, as a file."""
        path = self.folder / "profile.json"
        path.write_text(json.dumps(self.manifest["profile"]))
        return path

    @property
    def objects(self) -> dict[str, Entry]:
        return {entry["key"]: {**entry, "heads": None} for entry in self.manifest["objects"]}

    @property
    def expected(self) -> dict[Affix, ObjectSpec]:
        """The spec of each affix of a key, from the deployment's profile."""
        specs = object_specs(profile_from_mapping(self.manifest["profile"]), self.backend)
        return {grammar_of(self.backend).affix(each.coordinate): each for each in specs}


@dataclass(frozen=True, slots=True)
class Written:
    """A cluster with the objects that SGLang wrote for one case, and its warm-up keys."""

    cluster: Cluster
    manifest: Manifest

    @property
    def objects(self) -> dict[str, Entry]:
        return {entry["key"]: entry for entry in self.manifest["objects"]}

    @property
    def warm_up_keys(self) -> set[str]:
        return set(self.cluster.list_keys()) - self.objects.keys()

    @property
    def expected(self) -> dict[Affix, ObjectSpec]:
        """The spec of each affix of a key, from the deployments' profiles."""
        codec = grammar_of("mooncake")
        return {
            codec.affix(expected.coordinate): expected
            for deployment in self.manifest["deployments"]
            for expected in object_specs(profile_from_mapping(deployment["profile"]), "mooncake")
        }

    def profiles(self, folder: Path) -> dict[tuple[str, str | None], Path]:
        """Write the deployments' profiles; return the files by the manifest's model and tag."""
        paths = {}
        for number, deployment in enumerate(self.manifest["deployments"]):
            profile = deployment["profile"]
            path = folder / f"profile-{number}.json"
            path.write_text(json.dumps(profile))
            paths[profile["model"].replace("/", "-"), profile.get("tag")] = path
        return paths

    def of(self, model: str, tag: str | None) -> list[Entry]:
        """Return the objects that a deployment wrote."""
        return [e for e in self.manifest["objects"] if (e["model"], e["tag"]) == (model, tag)]

    def read_back(self, session: SglangSession) -> list[dict[str, Any]]:
        """Return what SGLang reads, for each deployment and rank."""
        return session.read_back(self.cluster.master, "mooncake", self.manifest)

    @contextmanager
    def damaged(self, values: dict[str, bytes | None]) -> Iterator[None]:
        """Replace or remove objects for the duration of the block."""
        client = self.cluster.client()
        before = {key: client.get(key) for key in values}
        for key, value in values.items():
            if value is None:
                self.cluster.remove(key)
            else:
                self.cluster.put(key, value)
        try:
            yield
        finally:
            for key, value in before.items():
                self.cluster.put(key, value)


@pytest.fixture(scope="module")
def cluster(mooncake_package: None) -> Iterator[Cluster]:
    """A cluster for this module only, because a case stays from test to test."""
    # A read by verify grants leases; short leases keep repairs fast.
    with Cluster(lease_ms=LEASE_S * 1000) as cluster:
        yield cluster


@pytest.fixture(
    scope="module",
    params=MOONCAKE_VARIANTS,
    ids="-".join,
)
def written(
    request: pytest.FixtureRequest, cluster: Cluster, sglang_session: SglangSession
) -> Written:
    """Each case in turn; a test that changes the store restores it."""
    case, layout = request.param
    return write(sglang_session, cluster, case, layout=layout)


def write(session: SglangSession, cluster: Cluster, case: str, **options: Any) -> Written:
    """Empty the cluster and have SGLang write a case."""
    cluster.clear()
    arguments = [f"--{name}={value}" for name, value in options.items()]
    return Written(
        cluster,
        session.run("write_store", case, cluster.master, "--backend=mooncake", *arguments),
    )


def affix_of(entry: Entry) -> Affix:
    before, _, after = entry["key"].partition(entry["page"])
    return before, after


def check_predicted(
    manifest: Manifest, objects: dict[str, Entry], expected: dict[Affix, ObjectSpec]
) -> None:
    """Check that every object was predicted, and that each page has every predicted object."""
    pages_of: dict[Affix, set[str]] = defaultdict(set)
    for key, entry in objects.items():
        assert entry["nbytes"] == expected[affix_of(entry)].nbytes, key
        pages_of[affix_of(entry)].add(entry["page"])
    assert pages_of.keys() == expected.keys()
    for affix, spec in expected.items():
        assert spec.trailing or pages_of[affix] == set(manifest["pages"]), affix


def without_size(entry: Entry) -> bool:
    """Return whether a query of the key needs a lease: the master splits keys at commas."""
    return "," in entry["key"]


def listed(invoke: Invoke, url: str, *arguments: object) -> dict[str, Entry]:
    out = invoke("ls", url, *arguments, "--objects", "--format", "jsonl").stdout
    return {row["key"]: row for row in map(json.loads, out.splitlines())}


def verified(invoke: Invoke, url: str, *arguments: object, exit_code: int = 0) -> dict[str, Any]:
    return invoke.document("verify", url, *arguments, "--grace", "0s", exit_code=exit_code)


def complaints(document: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the findings other than info."""
    return sorted(
        (found["code"], found["severity"], found["key"])
        for found in document["findings"]
        if found["severity"] != "info"
    )


def one_of_each_kind(entries: list[Entry]) -> list[Entry]:
    """Return one object of each pool, part and rank, each from the last page that has it."""
    return list({affix_of(entry): entry for entry in entries}.values())


# --- written objects compared with the formats ---


def test_every_written_object_was_predicted_and_every_predicted_one_written(
    written: Written,
) -> None:
    check_predicted(written.manifest, written.objects, written.expected)


def test_the_store_holds_what_was_put_and_warm_up_keys(written: Written) -> None:
    assert set(written.cluster.list_keys()) >= written.objects.keys()
    assert written.warm_up_keys
    assert all(re.search(WARM_UP_PATTERN, key) for key in written.warm_up_keys)


def test_objects_hold_their_values_in_the_documented_order(written: Written) -> None:
    client = written.cluster.client()
    wrong = [
        key
        for key, entry in written.objects.items()
        if client.get(key) != expected_bytes(written.manifest, entry)
    ]
    assert wrong == []


def test_objects_of_a_page_are_one_group_where_sglang_groups_them(
    cluster: Cluster, sglang_session: SglangSession
) -> None:
    written = write(sglang_session, cluster, "groups")
    for entry in written.objects.values():
        assert entry["group"] == f"sglang-hicache:{entry['model']}_{entry['page']}"
    first, *mates = (e["key"] for e in written.objects.values() if e["page"] == entry["page"])
    client = cluster.client()
    time.sleep(LEASE_S + 0.5)  # SGLang queried them when it wrote
    assert client.is_exist(first) == 1
    assert {client.remove(mate) for mate in mates} == {HAS_LEASE}


# --- the commands ---


def test_ls_lists_exactly_what_sglang_wrote(
    written: Written, invoke: Invoke, tmp_path: Path
) -> None:
    for (model, tag), profile in written.profiles(tmp_path).items():
        rows = listed(invoke, written.cluster.url, "--profile", profile)
        assert rows.keys() == written.objects.keys() | written.warm_up_keys
        for entry in written.of(model, tag):
            wanted = {name: entry[name] for name in _COORDINATES}
            wanted["nbytes"] = None if without_size(entry) else entry["nbytes"]
            row = rows[entry["key"]]
            assert {name: row[name] for name in _COORDINATES} == wanted


def test_ls_without_a_profile_knows_pages_pools_parts_and_sizes(
    written: Written, invoke: Invoke
) -> None:
    rows = listed(invoke, written.cluster.url, "--allow-leases")
    names = ("key", "page", "pool", "part", "nbytes")
    for key, entry in written.objects.items():
        assert {name: rows[key][name] for name in names} == {name: entry[name] for name in names}
    assert all(rows[key]["page"] is None for key in written.warm_up_keys)


def test_verify_is_clean_and_takes_warm_up_keys_for_what_they_are(
    written: Written, invoke: Invoke, tmp_path: Path
) -> None:
    deployments = written.profiles(tmp_path)
    for profile in deployments.values():
        document = verified(invoke, written.cluster.url, "--profile", profile)
        others = {"other-deployment"} if any(tag for _, tag in deployments) else set()
        assert {found["code"] for found in document["findings"]} == {"foreign-object"} | others
        assert {found["severity"] for found in document["findings"]} == {"info"}
        keys = {found["key"] for found in document["findings"]}
        assert keys - {None} == written.warm_up_keys
        assert document["objects"] == len(written.objects) + len(written.warm_up_keys)
        assert document["pages"] == len(written.manifest["pages"])
        checks = ["names", "groups", "sizes", "values"]
        skipped = {"digests"}
        if not has_values(written.manifest["profile"]):
            skipped.add(checks.pop())
        assert document["checks"] == checks
        if len(deployments) > 1:
            skipped.add("other-deployments")
        if any("," in key for key in written.objects):  # the master returns no sizes for such keys
            skipped.add("sizes")
        assert set(document["skipped_checks"]) - {"dtypes"} == skipped
        assert (document["bytes_read"] > 0) == ("values" in checks)


def test_each_lost_object_is_found_and_nothing_else(
    written: Written, invoke: Invoke, tmp_path: Path
) -> None:
    for (model, tag), profile in written.profiles(tmp_path).items():
        entries = written.of(model, tag)
        for lost in on_pages_of_their_own(entries):
            wanted = [one for entry in lost for one in loss_findings(entries, entry)]
            with written.damaged({entry["key"]: None for entry in lost}):
                document = verified(
                    invoke, written.cluster.url, "--profile", profile,
                    "--checks", "names,groups,sizes", exit_code=4 if wanted else 0,
                )  # fmt: skip
            assert complaints(document) == sorted(wanted)


def loss_findings(entries: list[Entry], entry: Entry) -> list[tuple[str, str, str]]:
    """Return the findings expected after the loss of one object, from the manifest alone."""
    mates = [e for e in entries if e["page"] == entry["page"] and e is not entry]
    same_pool = [e for e in mates if window_of(e["pool"]) == window_of(entry["pool"])]
    ranks = ("pool", "tp_rank", "pp_rank", "dcp_rank", "heads")
    trailing = is_trailing(entry["pool"])
    weak = trailing or entry["pool"].startswith("draft")
    key = entry["key"]
    if any(all(e.get(rank) == entry.get(rank) for rank in ranks) for e in same_pool):
        return [("missing-part", "warning" if weak else "error", key)]
    if entry["pool"] == "kv" and not same_pool:
        return sorted(("orphan-sidecar", "warning", e["key"]) for e in mates)
    if entry["pool"] == "kv" or trailing:
        return [("missing-rank", "warning", key)] if same_pool else []
    if entry["pool"] == ANCHOR_WITHOUT_KV and not any(e["pool"] == "kv" for e in mates):
        return [("missing-rank", "warning", key)]
    return [("missing-pool", "warning" if weak else "error", key)]


@pytest.mark.parametrize("written", DAMAGED, indirect=True, ids="-".join)
def test_short_long_and_bad_objects_are_found_each_and_nothing_else(
    written: Written, invoke: Invoke, tmp_path: Path
) -> None:
    client = written.cluster.client()
    for (model, tag), profile in written.profiles(tmp_path).items():
        pages = {
            code: [e for e in written.of(model, tag) if e["page"] in places]
            for code, places in zip(
                ("nan", "truncated", "oversized"), thirds(written.manifest["pages"]), strict=True
            )
        }
        planted: dict[str, bytes | None] = {}
        wanted = []
        for code, entries in pages.items():
            for entry in one_of_each_kind(entries):
                value = damage(code, client.get(entry["key"]), written.expected[affix_of(entry)])
                # Only the size shows that an object is too long: Mooncake refuses to read it.
                if value is not None and not (code == "oversized" and without_size(entry)):
                    planted[entry["key"]] = value
                    severity = "warning" if code == "oversized" else "error"
                    wanted.append((code, severity, entry["key"]))
        assert {code for code, _, _ in wanted} >= {"truncated", "oversized"}
        with written.damaged(planted):
            document = verified(invoke, written.cluster.url, "--profile", profile, exit_code=4)
        assert complaints(document) == sorted(wanted)


def thirds(pages: list[str]) -> list[list[str]]:
    """Split a chain into three runs, each with the end of a node."""
    return [pages[:3], pages[3:6], pages[6:]]


def damage(code: str, value: bytes, expected: ObjectSpec) -> bytes | None:
    """Return a damaged object, None if its kind cannot have this damage."""
    if code == "truncated":
        return value[: len(value) // 2]
    if code == "oversized":
        return value + b"\0"
    tensor = next((tensor for tensor in expected.tensors if tensor.dtype in NAN), None)
    if tensor is None:
        return None
    data = np.frombuffer(value, dtype=np.uint8).copy()
    words = data[tensor.offset : tensor.offset + tensor.nbytes].view(WORDS[tensor.itemsize])
    words[len(words) // 2] = NAN[tensor.dtype]
    return data.tobytes()


# --- read by SGLang ---


def test_sglang_reads_a_short_object_with_success_and_other_values(
    cluster: Cluster, sglang_session: SglangSession
) -> None:
    """This makes `truncated` an error on Mooncake: the rest of the page keeps its old values."""
    written = write(sglang_session, cluster, "gqa_tp2")
    results = written.read_back(sglang_session)
    assert all(result["hit_pages"] == 8 for result in results)
    assert all(result["wrong"] == {"kv": []} for result in results)
    entry = next(e for e in written.of("Qwen-Qwen3-Tiny", None) if e["tp_rank"] == 0)
    position = written.manifest["pages"].index(entry["page"])
    with written.damaged({entry["key"]: bytes(entry["nbytes"] // 2)}):
        first, second = written.read_back(sglang_session)
    assert first["hit_pages"] == second["hit_pages"] == 8
    assert (first["wrong"], second["wrong"]) == ({"kv": [position]}, {"kv": []})


def test_second_context_parallel_rank_reads_the_layers_of_the_first(
    cluster: Cluster, sglang_session: SglangSession
) -> None:
    """Mooncake's keys have no CP rank, so the second rank's objects are never stored."""
    written = write(sglang_session, cluster, "cp2")
    first, second = written.read_back(sglang_session)
    assert first["wrong"]["kv"] == []
    assert second["wrong"]["kv"] == list(range(8))


@pytest.mark.parametrize("case", ["hybrid_mamba", "mla_mha_draft"])
def test_sglang_reads_what_was_quarantined_and_restored(
    cluster: Cluster, sglang_session: SglangSession, invoke: Invoke, tmp_path: Path, case: str
) -> None:
    written = write(sglang_session, cluster, case)
    client = cluster.client()
    before = {key: client.get(key) for key in written.objects}
    profile = next(iter(written.profiles(tmp_path).values()))
    page = written.manifest["pages"][4]
    entry = next(e for e in written.manifest["objects"] if (e["page"], e["pool"]) == (page, "kv"))
    bad = damage("nan", before[entry["key"]], written.expected[affix_of(entry)])
    with written.damaged({entry["key"]: bad}):
        verified(
            invoke, cluster.url, "--profile", profile, "--repair", "quarantine",
            "--quarantine", tmp_path / "quarantine", "--yes", "--lease-wait", "60s", exit_code=4,
        )  # fmt: skip
        assert not any(page in key for key in cluster.list_keys())
        results = written.read_back(sglang_session)
        assert {result["hit_pages"] for result in results} <= {3, 4}
        invoke("restore", tmp_path / "quarantine", cluster.url, "--yes")
        assert client.get(entry["key"]) == bad
    assert {key: client.get(key) for key in written.objects} == before
    for result in written.read_back(sglang_session):
        assert result["hit_pages"] == 8
        assert not any(result["wrong"].values())
