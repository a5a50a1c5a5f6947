"""The files that real Mooncake clients with SSD offload left behind, read after their end.

SGLang's own MooncakeStore writes several deployments into a cluster of two clients. They offload
the objects, one cluster to buckets and one to offset files, and are killed.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.__main__ import run
from hicachectl.backends.arena import Arena
from hicachectl.backends.base import open_store
from hicachectl.backends.testing import read, scanned_rows
from tests.conformance.test_migrated_stores import Place, check
from tests.conformance.test_mooncake_written import (
    Entry,
    Written,
    complaints,
    listed,
    verified,
)
from tests.hf3fs_server import MetadataServer
from tests.mooncake_cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.conformance.conftest import Manifest, SglangSession
    from tests.conftest import Invoke

OFFLOAD_TIMEOUT_S = 60
# Cases of different models or tags, so that one store can hold them.
CASES = {
    "bucket": ("mla_indexer", "hybrid_mamba", "mha_draft", "swa", "gqa_tp2", "mla_mamba"),
    "offset": ("pp2", "mla_fp8_indexer", "tag_and_none", "split_heads_draft"),
}
FOR_3FS = ("hybrid_mamba", "mla_fp8_indexer")
COMMON = {
    "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
    "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(32 << 20),
    # Without a limit, the offset allocator reserves most of the disk.
    "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES": str(64 << 20),
}
ENVIRONMENT = {
    "bucket": {"MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": "8"},
    "offset": {
        "MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR": "offset_allocator_storage_backend",
        "MOONCAKE_OFFSET_PERSIST_MODE": "strict",
        "MOONCAKE_OFFSET_EVICTION_POLICY": "fifo",  # the checkpoint then names the keys
    },
}

# All these tests run in the worker with the SGLang process and its cluster.
pytestmark = [pytest.mark.conformance, pytest.mark.xdist_group("sglang-mooncake")]


@dataclass(frozen=True, slots=True)
class Left:
    """A directory that two killed clients left behind.

    profiles: the file of each deployment's profile, with its manifest. hits: what `hits` printed
    for each profile while the cluster lived.
    """

    form: str
    directory: Path
    profiles: dict[Path, Manifest]
    hits: dict[Path, dict[str, Any]]

    @property
    def url(self) -> str:
        return f"mooncake-ssd://{self.directory}"

    @property
    def objects(self) -> dict[str, Entry]:
        manifests = self.profiles.values()
        return {entry["key"]: entry for manifest in manifests for entry in manifest["objects"]}

    def copy(self, path: Path) -> Left:
        shutil.copytree(self.directory, path)
        return Left(self.form, path, self.profiles, self.hits)


@pytest.fixture(scope="module", params=CASES)
def left(
    request: pytest.FixtureRequest,
    mooncake_package: None,
    sglang_session: SglangSession,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Left]:
    """Let SGLang write, and the clients offload; kill all processes."""
    form, folder = request.param, tmp_path_factory.mktemp(request.param)
    directory = folder / "ssd"
    directory.mkdir()
    environment = {**COMMON, **ENVIRONMENT[form]}
    profiles: dict[Path, Manifest] = {}
    with Cluster(stores=2, offload=directory, environment=environment) as cluster:
        for case in CASES[form]:
            place = (case, cluster.master, "--backend=mooncake")
            written = Written(cluster, sglang_session.run("write_store", *place))
            (folder / case).mkdir()
            for path in written.profiles(folder / case).values():
                profiles[path] = written.manifest
        hits = {path: hits_of(cluster.url, path, profiles[path]) for path in profiles}
        result = Left(form, directory, profiles, hits)
        await_offload(cluster, result)
    yield result
    shutil.rmtree(directory)


def await_offload(cluster: Cluster, left: Left) -> None:
    """Wait until metadata names every key.

    A bucket is written when it is full, so fill them. Of some hundred objects that are put at once,
    Mooncake 0.3.13 never offloads one; put those again.
    """
    keys = [b"default\0" + key.encode() for key in left.objects]
    deadline = time.monotonic() + OFFLOAD_TIMEOUT_S
    for number in range(1 << 20):
        metadata = b"".join(path.read_bytes() for path in left.directory.rglob("*.meta"))
        keys = [key for key in keys if key not in metadata]
        if not keys:
            return
        assert time.monotonic() < deadline, f"not offloaded: {keys[:3]}"
        if left.form == "bucket":
            for each in range(16):
                cluster.put(f"filling-{number}-{each}", b"x")
            for stored in keys if number % 20 == 19 else ():
                key = stored.removeprefix(b"default\0").decode()
                cluster.put(key, cluster.client().get(key))
        time.sleep(0.2)


OTHER_FORMS = {
    "file_per_key_storage_backend": "file_per_key",
    "offset_allocator_storage_backend": "Mooncake ran without MOONCAKE_OFFSET_PERSIST_MODE",
}


@pytest.mark.parametrize("form", OTHER_FORMS)
def test_other_forms_of_a_real_client_are_refused_by_name(
    mooncake_package: None, invoke: Invoke, tmp_path: Path, form: str
) -> None:
    environment = {
        **COMMON,
        "MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR": form,
        # The offset allocator reserves its whole file: by default 2 TiB, or all of the disk.
        "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES": str(64 << 20),
    }
    with Cluster(offload=tmp_path, environment=environment) as cluster:
        for number in range(16):
            cluster.put(f"{number:064x}_m_0_k", b"x" * 4096)
        waited_for(lambda: any(path.is_file() for path in tmp_path.rglob("*")))
    before = sorted(tmp_path.rglob("*"))
    for command in ("ls", "verify"):
        assert (
            OTHER_FORMS[form] in invoke(command, f"mooncake-ssd://{tmp_path}", exit_code=2).stderr
        )
    assert sorted(tmp_path.rglob("*")) == before


def hits_of(url: str, profile: Path, manifest: Manifest) -> dict[str, Any]:
    chain, out = profile.with_suffix(".chain"), profile.with_suffix(".hits")
    chain.write_text(json.dumps(manifest["pages"]))
    options = ("--pages", str(chain), "--profile", str(profile), "--format", "jsonl")
    assert run(["hits", url, *options, "-o", str(out)]) == 0
    document: dict[str, Any] = json.loads(out.read_text())
    return document


def test_ls_lists_exactly_what_sglang_wrote(left: Left, invoke: Invoke) -> None:
    """Beside SGLang's objects, only warm-up keys and our filling are listed."""
    rows = listed(invoke, left.url)
    names = ("key", "page", "pool", "part", "nbytes")
    for key, entry in left.objects.items():
        assert {name: rows[key][name] for name in names} == {name: entry[name] for name in names}
    assert all(rows[key]["page"] is None for key in rows.keys() - left.objects.keys())
    folders = {path.parent.name for path in left.directory.rglob("*.meta")}
    assert folders == {"rank_0_0_0_0", "rank_0_1_0_0"}


def test_verify_is_clean_and_hits_are_those_of_the_live_store(left: Left, invoke: Invoke) -> None:
    for profile, manifest in left.profiles.items():
        document = verified(invoke, left.url, "--profile", profile)
        assert complaints(document) == []
        assert document["checks"][:4] == ["names", "groups", "sizes", "values"]
        assert document["bytes_read"] > 0
        assert hits_of(left.url, profile, manifest) == left.hits[profile]
        assert left.hits[profile]["usable_pages"] > 0


def test_each_damaged_object_is_named_and_no_other(
    left: Left, invoke: Invoke, tmp_path: Path
) -> None:
    """Cut off a bucket, or flip a byte of a record. A search in the files tells the objects."""
    copy = left.copy(tmp_path / "copy")
    profile, manifest = next(iter(left.profiles.items()))
    sizes = {entry["key"]: entry["nbytes"] for entry in manifest["objects"]}
    path, places = places_in(copy.directory, sizes)
    cut = sorted(places.values())[len(places) // 2] + 1
    if left.form == "bucket":
        os.truncate(path, cut)
        damaged = {key for key, place in places.items() if place + sizes[key] > cut}
        wanted = {(code, key) for key in damaged for code in ("truncated", "unreadable")}
    else:
        with path.open("r+b") as file:
            byte = os.pread(file.fileno(), 1, cut)
            os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), cut)
        damaged = {key for key, place in places.items() if place == cut - 1}
        wanted = {("digest-mismatch", key) for key in damaged}
    assert 0 < len(damaged) < len(places)
    document = verified(invoke, copy.url, "--profile", profile, exit_code=4)
    found = {(code, key) for code, _, key in complaints(document)}
    assert {one for one in found if one[1] in sizes} == wanted


def places_in(directory: Path, keys: dict[str, int]) -> tuple[Path, dict[str, int]]:
    """Return the data file with most of these objects, and where their values start in it."""
    found = []
    for path in sorted([*directory.rglob("*.bucket"), *directory.rglob("kv_cache.data")]):
        places = {}
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
            for key in keys:
                stored = b"default\0" + key.encode()
                at = content.find(stored)
                if at >= 0:
                    end = at + len(stored)
                    start = at - 24
                    aligned = start + -(-(end - start) // 4096) * 4096
                    places[key] = aligned if path.name == "kv_cache.data" else end
        found.append((path, places))
    return max(found, key=lambda one: len(one[1]))


def test_sglang_reads_what_was_migrated_into_another_cluster(
    left: Left, invoke: Invoke, sglang_session: SglangSession, tmp_path: Path
) -> None:
    profile = next(iter(left.profiles))
    with Cluster() as cluster:
        command = ("migrate", left.url, cluster.url, "--profile", profile, "--format", "json")
        document = invoke(*command).document
        assert (document["failed"], document["conflicts"], document["complete"]) == (0, 0, True)
        manifests = {manifest["case"]: manifest for manifest in left.profiles.values()}
        for manifest in manifests.values():
            for result in Written(cluster, manifest).read_back(sglang_session):
                assert result["hit_pages"] == len(manifest["pages"])
                assert not any(result["wrong"].values())


def test_sglang_reads_from_3fs_what_was_migrated_there(
    left: Left, invoke: Invoke, sglang_session: SglangSession, sglang_python: Path, tmp_path: Path
) -> None:
    """Proves that the pages of a deployment reach 3FS, with their states or index keys."""
    manifest = next(m for m in left.profiles.values() if m["case"] in FOR_3FS)
    document = manifest["profile"]
    profile, pages = tmp_path / "profile.json", tmp_path / "pages.json"
    profile.write_text(json.dumps(document))
    pages.write_text(json.dumps(manifest["pages"]))
    with MetadataServer(sglang_python) as server:
        place = Place("hf3fs", str(server.write_config(tmp_path, 1 << 24)), None)
        # Servers register their files when they start.
        none = {**manifest, "pages": []}
        sglang_session.read_back(place.argument, place.kind, none, document)

        def url() -> str:
            return f"hf3fs:?config={place.argument}&snapshot={server.save()}"

        options = ("--profile", profile, "--grace", "0s")
        command = ("migrate", left.url, url(), *options, "--pages-from", pages, "--verify")
        assert invoke(*command, "--format", "json").document["complete"]
        check(sglang_session, place, manifest, document)
        assert verified(invoke, url(), *options)["findings"] == []


def test_a_pack_and_show_have_the_same_objects(left: Left, invoke: Invoke, tmp_path: Path) -> None:
    """A pack of the tier lists SGLang's objects; `show` reads all objects of a page."""
    pack = f"pack://{tmp_path}/rescued.hcpack"
    invoke("migrate", left.url, pack)
    rows = listed(invoke, pack)
    assert {key: row["nbytes"] for key, row in rows.items()} == {
        key: entry["nbytes"] for key, entry in left.objects.items()
    }
    profile, manifest = next(iter(left.profiles.items()))
    page = manifest["pages"][0]
    shown = invoke("show", left.url, page, "--profile", profile, "--format", "json").document
    wanted = {entry["key"] for entry in manifest["objects"] if entry["page"] == page}
    assert {one["key"] for one in shown["objects"]} >= wanted
    assert shown["findings"] == []


def test_a_restarted_client_serves_what_was_read(
    left: Left, invoke: Invoke, tmp_path: Path
) -> None:
    """Proves that looking leaves the files as a client needs them, byte for byte."""
    copy = left.copy(tmp_path / "copy")
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files_of(copy)}
    rows = listed(invoke, copy.url)
    profile, manifest = next(iter(left.profiles.items()))
    verified(invoke, copy.url, "--profile", profile)
    invoke("show", copy.url, manifest["pages"][0], "--profile", profile)
    assert before == {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in files_of(copy)}
    environment = {**COMMON, **ENVIRONMENT[left.form]}
    with (
        Cluster(stores=2, offload=copy.directory, environment=environment) as cluster,
        open_store(copy.url) as store,
    ):
        waited_for(lambda: set(rows) <= set(cluster.list_keys()))
        keys = [entry["key"] for entry in manifest["objects"]][:5]
        with Arena(1 << 20) as arena:
            store.attach(arena)
            encoded = [key.encode() for key in keys]
            sizes = [rows[key]["nbytes"] for key in keys]
            result, values = read(store, scanned_rows(store, encoded), sizes)
            assert result.all_ok
            for at, key in enumerate(keys):
                assert cluster.client().get(key) == values[at]
            store.detach()


def files_of(left: Left) -> list[Path]:
    return [path for path in left.directory.rglob("*") if path.is_file()]


def waited_for(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + OFFLOAD_TIMEOUT_S
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_nothing_is_written_to_the_files(left: Left, invoke: Invoke, tmp_path: Path) -> None:
    """As a destination, for rm, and for repairs: refused, with the remedy, before any change."""
    before = {path: path.stat() for path in left.directory.rglob("*")}
    profile = next(iter(left.profiles))
    yes = ("--profile", profile, "--yes")
    commands: tuple[tuple[object, ...], ...] = (
        ("migrate", tmp_path, left.url),
        ("migrate", left.url, tmp_path, "--profile", profile, "--move", "--yes"),
        ("rm", left.url, "--model", "Qwen/Qwen3-Tiny", *yes),
        ("verify", left.url, "--repair", "delete", *yes),
    )
    for command in commands:
        said = invoke(*command, exit_code=2).stderr
        assert left.url in said, said
    after = {path: path.stat() for path in left.directory.rglob("*")}
    assert {p: (s.st_size, s.st_mtime_ns) for p, s in after.items()} == {
        p: (s.st_size, s.st_mtime_ns) for p, s in before.items()
    }
