"""One process, merged parts and a Ray cluster agree on damaged stores that SGLang itself wrote.

Parts know nothing of pools and layouts, so a few stores stand for all of HICACHECTL_TEST_ALL=1.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from hicachectl.__main__ import run
from hicachectl.backends.mooncake.store import MooncakeStore
from tests.conformance.store_cases import (
    HF3FS_VARIANTS,
    MOONCAKE_VARIANTS,
    VARIANTS,
    has_values,
    store_name,
)
from tests.conformance.test_cli_stores import profile_files
from tests.conformance.test_hf3fs_written import FILE_SIZE
from tests.conformance.test_hf3fs_written import Written as WrittenPages
from tests.conformance.test_mooncake_written import write
from tests.mooncake_cluster import Cluster
from tests.parts.test_verify_parts import comparable
from tests.speed import ALL, some
from tests.stores import contents

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.conformance.conftest import Manifest, SglangSession, WriteStore
    from tests.hf3fs_server import MetadataServer
    from tests.parts.connected import Connected

pytestmark = [pytest.mark.conformance, pytest.mark.xdist_group("ray")]

PARTS = 3
EACH = 5  # one object of so many is damaged
FINDINGS = 4  # exit status

Entry = dict[str, Any]
Files = dict[str, tuple[bytes, int]]  # bytes and mtime

FILE_STORES = some(
    VARIANTS,
    ("hybrid_mamba", "page_first"),
    ("deepseek_v4", "page_first"),
    ("two_models", "page_first"),
    ("cp2_without_dp", "page_first"),
)
MOONCAKE_STORES = some(
    MOONCAKE_VARIANTS,
    ("mla_indexer", "page_first"),
    ("split_heads", "page_head"),
    ("hybrid_mamba", "page_first_direct"),
)
HF3FS_STORES = some(
    HF3FS_VARIANTS,
    ("mla_indexer", "layer_first"),
    ("hybrid_mamba", "page_first_direct"),
)
ON_RAY = ("hybrid_mamba", "mla_indexer")

every_file_store = pytest.mark.parametrize(
    ("case", "layout"), FILE_STORES, ids=[store_name(*variant) for variant in FILE_STORES]
)


def overwritten(value: bytes, content: bytes) -> bytes:
    """Return an object whose first bytes are others."""
    return content[: len(value)] + value[len(content) :]


# What becomes of the bytes of an object; None removes it.
DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "none": lambda value: value,
    "lost": lambda value: None,
    "short": lambda value: value[: len(value) // 2],
    "long": lambda value: value + b"\0",
    "nan": lambda value: overwritten(value, b"\xff" * 4096),
    "zeros": lambda value: bytes(len(value)),
    "flipped": lambda value: overwritten(value, bytes([value[0] ^ 1]) if value else b""),
}
# Damages that are done at once, to different objects. Findings are compared object by object, so
# that one damage hides no difference of another; `test_one_damage` compares the exit statuses.
TOGETHER = (("lost", "short", "long"), ("nan", "zeros", "flipped"))


def chosen(manifest: Manifest, damage: str) -> list[Entry]:
    """Return objects of all kinds and pages, others for each damage."""
    entries: list[Entry] = manifest["objects"][list(DAMAGE).index(damage) % EACH :: EACH]
    return entries


class Comparison:
    """Runs a command as one process, in parts, and on a Ray cluster if there is a driver."""

    def __init__(
        self, capfd: pytest.CaptureFixture[str], folder: Path, driver: Connected | None
    ) -> None:
        self._capfd = capfd
        self._driver = driver
        self._folder = folder
        self._number = 0

    def folder(self) -> Path:
        """Return a new folder."""
        self._number += 1
        folder = self._folder / f"compared-{self._number}"
        folder.mkdir()
        return folder

    def run(self, *arguments: object) -> tuple[int, dict[str, Any]]:
        """Run a command; return the exit status and the document, {} without one."""
        self._capfd.readouterr()
        status = run([str(argument) for argument in arguments])
        output, said = self._capfd.readouterr()
        assert status in (0, FINDINGS), said
        return status, json.loads(output) if output else {}

    def parts(self, path: Path, *arguments: object) -> tuple[int, dict[str, Any]]:
        """Do all parts, and merge them."""
        for part in range(PARTS):
            status, _ = self.run(*arguments, "--shard", f"{part}/{PARTS}", "--run", path)
            assert status == 0
        return self.run("merge", path, "--format", "json")

    def divided(
        self, path: Path, given: Callable[[str], tuple[object, ...]]
    ) -> dict[str, tuple[int, dict[str, Any]]]:
        """Run a command in parts and on the cluster; return exit statuses and documents by name."""
        found = {"parts": self.parts(path, *given("parts"))}
        if self._driver is not None:
            workers = ("--workers", PARTS, "--format", "json")
            status, output, said = self._driver.run(*given("ray"), *workers)
            assert status in (0, FINDINGS), said
            assert "is done again" not in said
            found["ray"] = status, json.loads(output)
        return found

    def verify(self, url: object, *options: object, catalog: Path | None = None) -> dict[str, Any]:
        """Compare the documents, exit statuses and new catalogs of `verify`; return the document.

        catalog: an earlier catalog, which the runs compare with.
        """
        folder = self.folder()

        def given(name: str) -> tuple[object, ...]:
            words = ("verify", url, "--grace", "0s", *options)
            if catalog is None:
                return words
            own = shutil.copy(catalog, folder / name)
            return (*words, "--catalog", own, "--update-catalog")

        alone = self.run(*given("alone"), "--format", "json")
        divided = self.divided(folder / "run", given)
        if catalog is not None:
            catalog_too = ("--again", "--format", "json", "--catalog", folder / "parts")
            self.run("merge", folder / "run", *catalog_too)
        for name, (status, document) in divided.items():
            assert comparable(document) == comparable(alone[1])
            assert status == alone[0]
            assert document["parts"] == PARTS
            if catalog is not None:
                assert digests(folder / name) == digests(folder / "alone")
        return alone[1]

    def copies(
        self, command: str, source: object, *options: object, keeps_times: bool = False
    ) -> Files:
        """Compare the destinations, documents and exit statuses of copies; return the files.

        command: `migrate` or `prewarm`. keeps_times: the command keeps the times of the source.
        """
        folder = self.folder()

        def to(name: str) -> tuple[object, ...]:
            target = folder / name
            places = (source, target) if command == "migrate" else (target, "--from", source)
            return (command, *places, *options)

        alone = self.run(*to("alone"), "--format", "json")
        files = files_in(folder / "alone", times=keeps_times)
        for name, (status, document) in self.divided(folder / "run", to).items():
            assert status == alone[0]
            assert of_copies(document) == of_copies(alone[1])
            assert files_in(folder / name, times=keeps_times) == files
            assert document["parts"] == PARTS
        return files


def files_in(store: Path, *, times: bool) -> Files:
    """Return the files of a directory; none if no page was copied, which creates none."""
    files = contents(store) if store.exists() else {}
    return {name: (content, mtime if times else 0) for name, (content, mtime) in files.items()}


def of_copies(document: dict[str, Any]) -> dict[str, Any]:
    """Return what must be equal for one process and for parts."""
    other = ("destination", "seconds", "listed", "parts", "missing_parts")
    return {name: value for name, value in document.items() if name not in other}


def digests(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a catalog without their times, in one order."""
    table = pq.read_table(path)
    kept = [
        name for name in table.column_names if name not in ("first_seen_ns", "last_verified_ns")
    ]
    return sorted(table.select(kept).to_pylist(), key=repr)


@pytest.fixture
def comparison(
    request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Comparison:
    """Return a comparison of runs, with Ray for a store of each kind."""
    uses_ray = ALL or request.node.callspec.params.get("case") in ON_RAY
    driver = request.getfixturevalue("ray_driver") if uses_ray else None
    return Comparison(capfd, tmp_path, driver)


# --- files and packs ---


@contextmanager
def damaged_files(store: Path, manifest: Manifest, copy: Path, *damages: str) -> Iterator[Path]:
    """Yield a copy of a store with damages, and a file that is no object."""
    shutil.copytree(store, copy)
    (copy / "notes.txt").write_text("no object")
    for damage in damages:
        for entry in chosen(manifest, damage):
            path = copy / entry["file"]
            value = DAMAGE[damage](path.read_bytes())
            path.unlink()
            if value is not None:
                path.write_bytes(value)
                os.utime(path, ns=((store / entry["file"]).stat().st_mtime_ns,) * 2)
    try:
        yield copy
    finally:
        shutil.rmtree(copy)


@every_file_store
def test_verify_of_files(
    sglang_store: WriteStore, comparison: Comparison, tmp_path: Path, case: str, layout: str
) -> None:
    """Documents, exit statuses and catalogs are equal for each damage."""
    store, manifest = sglang_store(case, layout=layout)
    profile = profile_files(manifest, tmp_path)[0]
    catalog = tmp_path / "catalog.parquet"
    recorded = ("--grace", "0s", "--catalog", catalog, "--update-catalog", "--format", "json")
    comparison.run("verify", store, *recorded)
    found: set[str] = set()
    for damages in TOGETHER:
        with damaged_files(store, manifest, tmp_path / "store", *damages) as copy:
            options = ("--profile", profile, "--identity", "size")
            document = comparison.verify(copy, *options, catalog=catalog)
            assert document["complete"]
            found.update(document["counts"])
    assert found >= {"truncated", "oversized", "digest-mismatch"}
    if has_values(manifest["profile"]):
        assert "all-zero" in found
        assert found & {"nan", "bad-scale"}


# A finding of each damage.
FOUND = {
    "none": "foreign-object",
    "lost": "missing-pool",
    "short": "truncated",
    "long": "oversized",
    "nan": "bad-scale",
    "zeros": "all-zero",
    "flipped": "digest-mismatch",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_one_damage(
    sglang_store: WriteStore, comparison: Comparison, tmp_path: Path, damage: str
) -> None:
    """A store with one kind of damage gives equal documents, exit statuses and catalogs."""
    store, manifest = sglang_store("mla_fp8_indexer")
    profile = profile_files(manifest, tmp_path)[0]
    catalog = tmp_path / "catalog.parquet"
    recorded = ("--grace", "0s", "--catalog", catalog, "--update-catalog", "--format", "json")
    comparison.run("verify", store, *recorded)
    with damaged_files(store, manifest, tmp_path / "store", damage) as copy:
        options = ("--profile", profile, "--identity", "size")
        document = comparison.verify(copy, *options, catalog=catalog)
    assert FOUND[damage] in document["counts"]


@every_file_store
def test_packs(
    sglang_store: WriteStore, comparison: Comparison, tmp_path: Path, case: str, layout: str
) -> None:
    """Parts verify a pack of a damaged store, and a damaged pack, as one process does."""
    store, manifest = sglang_store(case, layout=layout)
    profile = profile_files(manifest, tmp_path)[0]
    pack = tmp_path / "store.hcpack"
    with damaged_files(store, manifest, tmp_path / "store", "lost") as copy:
        given = ("--profile", profile, "--include-partial", "--grace", "0s", "--format", "json")
        comparison.run("migrate", copy, f"pack://{pack}", *given)
    comparison.verify(f"pack://{pack}", "--profile", profile)
    with pack.open("r+b") as stream:
        stream.seek(pack.stat().st_size // 3)
        stream.write(bytes(64))
    document = comparison.verify(f"pack://{pack}", "--profile", profile)
    assert {"unreadable", "digest-mismatch"} & document["counts"].keys()


@every_file_store
def test_copies_of_files(
    sglang_store: WriteStore, comparison: Comparison, tmp_path: Path, case: str, layout: str
) -> None:
    """Parts copy the bytes and times that one process copies, from whole and damaged stores."""
    store, manifest = sglang_store(case, layout=layout)
    options = ("--profile", profile_files(manifest, tmp_path)[0], "--grace", "0s")
    for damages in (("none",), ("lost", "short")):
        with damaged_files(store, manifest, tmp_path / "store", *damages) as copy:
            given = ("--include-partial", *options)
            copied = comparison.copies("migrate", copy, *given, keeps_times=True)
            assert copied or "none" not in damages
    copied = comparison.copies("prewarm", store, "--all", *options[:2])
    assert bool(copied) == (case != "cp2_without_dp")  # whose pages are not whole


# --- Mooncake ---


@pytest.fixture(scope="module")
def cluster(mooncake_package: None) -> Iterator[Cluster]:
    """A cluster whose leases are short."""
    with Cluster(lease_ms=3000) as cluster:
        yield cluster


@pytest.mark.parametrize(("case", "layout"), MOONCAKE_STORES, ids=map("-".join, MOONCAKE_STORES))
def test_verify_of_mooncake(
    cluster: Cluster,
    sglang_session: SglangSession,
    comparison: Comparison,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    layout: str,
) -> None:
    """Documents, exit statuses and copies are equal; parts list the master once."""
    written = write(sglang_session, cluster, case, layout=layout)
    client = cluster.client()
    planted: dict[str, bytes | None] = {}
    for damage in ("lost", "short", "long", "nan"):
        for entry in chosen(written.manifest, damage)[:: len(DAMAGE)]:
            planted[entry["key"]] = DAMAGE[damage](client.get(entry["key"]))
    profile = next(iter(written.profiles(tmp_path).values()))
    scans = counted_scans(monkeypatch, MooncakeStore)
    # Values need a client, whose end takes a second.
    values = () if case == "mla_indexer" else ("--checks", "names,groups,sizes")
    with written.damaged(planted):
        document = comparison.verify(cluster.url, "--profile", profile, *values)
    assert document["counts"].keys() - {"foreign-object"}
    assert len(scans) == 1 + 1  # of the parts, and of the whole
    if not values:
        options = ("--profile", profile, "--grace", "0s")
        assert comparison.copies("migrate", cluster.url, *options)


def counted_scans(monkeypatch: pytest.MonkeyPatch, backend: Any) -> list[None]:
    """Return a list that grows by one with each listing of a store."""
    scans: list[None] = []
    scan = backend.scan

    def counts(*arguments: Any, **named: Any) -> Any:
        scans.append(None)
        return scan(*arguments, **named)

    monkeypatch.setattr(backend, "scan", counts)
    return scans


# --- 3FS ---


@pytest.mark.parametrize(("case", "layout"), HF3FS_STORES, ids=map("-".join, HF3FS_STORES))
def test_verify_of_3fs(
    metadata_server: MetadataServer,
    sglang_session: SglangSession,
    comparison: Comparison,
    tmp_path: Path,
    case: str,
    layout: str,
) -> None:
    """Documents, exit statuses and copies are equal, with damaged values and lost objects."""
    config = metadata_server.write_config(tmp_path, FILE_SIZE)
    place = (config, "--backend=hf3fs", f"--layout={layout}")
    manifest = sglang_session.run("write_store", case, *place)
    written = WrittenPages(metadata_server, tmp_path, manifest)
    options = ("--profile", written.profile)
    comparison.verify(written.url, *options)
    for damage in ("nan", "zeros"):
        for entry in chosen(manifest, damage):
            value = DAMAGE[damage](written.get(entry))
            assert value is not None
            written.put(entry, value)
    document = comparison.verify(written.url, *options)
    assert document["counts"].keys() >= {"nan", "all-zero"}
    for entry in chosen(manifest, "lost"):
        rank, namespace, name = entry["key"].split(":")
        metadata_server.delete(int(rank), [name], namespace)
    assert comparison.verify(written.url, *options)["objects"] < document["objects"]
    assert comparison.copies("migrate", written.url, *options, "--grace", "0s")
