"""Stores written by SGLang's own HiCacheHF3FS: page files and metadata are understood."""

from __future__ import annotations

import os
import random
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from hicachectl.backends.arena import Arena, place
from hicachectl.backends.base import open_store
from hicachectl.backends.hf3fs.store import Hf3fsStore
from hicachectl.formats.profile import profile_from_mapping
from tests.conformance.object_bytes import expected_bytes
from tests.conformance.store_cases import HF3FS_VARIANTS, is_trailing
from tests.conformance.test_cli_stores import on_pages_of_their_own
from tests.conformance.test_hits import ask, chains_of, hits_of, some_objects
from tests.conformance.test_mooncake_written import (
    Entry,
    WrittenFiles,
    affix_of,
    check_predicted,
    complaints,
    damage,
    listed,
    loss_findings,
    one_of_each_kind,
    verified,
)
from tests.hf3fs_server import MetadataServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conformance.conftest import Manifest, SglangSession
    from tests.conftest import Invoke

FILE_SIZE = 1 << 24

# Keys have no model. Ranks come from the file, or from the key of a Mamba state of an MLA model.
_COORDINATES = ("key", "page", "pool", "part", "tp_rank", "tp_size", "pp_rank", "cp_rank", "nbytes")

# All these tests run in the worker with the SGLang process and its server.
pytestmark = [pytest.mark.conformance, pytest.mark.xdist_group("sglang-hf3fs")]


@dataclass(frozen=True)
class Written(WrittenFiles):
    """A store with the objects that SGLang wrote for one case."""

    server: MetadataServer
    folder: Path
    manifest: Manifest
    backend: str = "hf3fs"

    @property
    def config(self) -> Path:
        """SGLang's JSON config."""
        return self.folder / "hf3fs.json"

    @property
    def url(self) -> str:
        """The store's URL, with a fresh snapshot."""
        return f"hf3fs:?config={self.config}&snapshot={self.server.save()}"

    def file(self, entry: Entry) -> Path:
        rank, namespace, _ = entry["key"].split(":")
        name = f"hicache.{rank}.bin" + ("" if namespace == "kv" else f".{namespace}")
        return self.folder / "data" / name

    def get(self, entry: Entry) -> bytes:
        """Return the bytes of an object's page."""
        with self.file(entry).open("rb") as file:
            return os.pread(file.fileno(), entry["nbytes"], entry["index"] * entry["nbytes"])

    def put(self, entry: Entry, value: bytes) -> None:
        """Write other bytes to an object's page."""
        with self.file(entry).open("r+b") as file:
            os.pwrite(file.fileno(), value, entry["index"] * entry["nbytes"])

    def read_back(self, session: SglangSession) -> list[dict[str, Any]]:
        """Return what SGLang reads, for each rank."""
        return session.read_back(self.config, "hf3fs", self.manifest)

    @contextmanager
    def without(self, entry: Entry) -> Iterator[None]:
        """Remove an object for the duration of the block."""
        rank, namespace, name = entry["key"].split(":")
        self.server.delete(int(rank), [name], namespace)
        try:
            yield
        finally:
            # The server reuses the page freed last, so the object gets the same page.
            assert self.server.put(int(rank), [name], namespace) == [entry["index"]]

    @contextmanager
    def file_as_it_was(self, entry: Entry) -> Iterator[Path]:
        """Restore an object's data file after the block, including its holes."""
        path = self.file(entry)
        mates = [e for e in self.objects.values() if self.file(e) == path]
        before = {e["key"]: self.get(e) for e in mates}
        try:
            yield path
        finally:
            os.truncate(path, FILE_SIZE)
            for mate in mates:
                self.put(mate, before[mate["key"]])


@pytest.fixture(scope="module")
def server(sglang_python: Path) -> Iterator[MetadataServer]:
    """A server for this module only, because a case stays from test to test."""
    with MetadataServer(sglang_python) as server:
        yield server


@pytest.fixture(scope="module", params=HF3FS_VARIANTS, ids="-".join)
def written(
    request: pytest.FixtureRequest,
    server: MetadataServer,
    sglang_session: SglangSession,
    tmp_path_factory: pytest.TempPathFactory,
) -> Written:
    """Each case in turn; a test that changes the store restores it."""
    case, layout = request.param
    folder = tmp_path_factory.mktemp("hf3fs")
    config = server.write_config(folder, FILE_SIZE)
    server.reset()
    place_ = (config, "--backend=hf3fs", f"--layout={layout}")
    return Written(server, folder, sglang_session.run("write_store", case, *place_))


# --- usable lengths of chains ---


def test_chains_reach_no_farther_than_sglang_says(
    written: Written, sglang_session: SglangSession, invoke: Invoke
) -> None:
    """HiCacheHF3FS returns the minimum of its pools' longest prefixes, which may not be usable."""
    chance = random.Random(written.manifest["case"])
    manifest = written.manifest
    chains = chains_of(manifest["pages"], chance)
    trailing = any(is_trailing(entry["pool"]) for entry in manifest["objects"])
    with ExitStack() as gone:
        for entry in reversed(some_objects(manifest, chance, share=0.07)):
            gone.enter_context(written.without(entry))
        answers = ask(sglang_session, manifest, chains, written.config, backend="hf3fs")
        rows = hits_of(invoke, chains, written.folder, written.url, "--profile", written.profile)
    for number, row in enumerate(rows):
        theirs = min(answer["restorable"][number][0] for answer in answers)
        assert row["kv_pages"] == min(answer["kv"][number] for answer in answers)
        assert row["usable_pages"] <= theirs
        assert trailing or row["usable_pages"] == theirs
    assert len({row["usable_pages"] for row in rows}) > 2


# --- written objects compared with the formats ---


def test_every_written_object_was_predicted_and_every_predicted_one_written(
    written: Written,
) -> None:
    check_predicted(written.manifest, written.objects, written.expected)


def test_pages_hold_their_values_in_the_documented_order(written: Written) -> None:
    wrong = [
        key
        for key, entry in written.objects.items()
        if written.get(entry) != expected_bytes(written.manifest, entry)
    ]
    assert wrong == []


# --- the commands ---


def test_ls_lists_exactly_what_sglang_wrote(written: Written, invoke: Invoke) -> None:
    rows = listed(invoke, written.url, "--profile", written.profile)
    assert rows.keys() == written.objects.keys()
    for key, entry in written.objects.items():
        assert {name: rows[key][name] for name in _COORDINATES} == {
            name: entry[name] for name in _COORDINATES
        }
        assert rows[key]["offset"] == entry["index"]


def test_verify_is_clean(written: Written, invoke: Invoke) -> None:
    document = verified(invoke, written.url, "--profile", written.profile)
    assert document["findings"] == []
    assert document["objects"] == len(written.objects)
    assert document["pages"] == len(written.manifest["pages"])
    valued = (e for e in written.objects.values() if written.expected[affix_of(e)].tensors)
    assert document["bytes_read"] == sum(entry["nbytes"] for entry in valued)
    assert {"names", "groups", "sizes", "values"} <= set(document["checks"])
    assert set(document["skipped_checks"]) - {"dtypes"} == {"digests"}


def test_each_lost_object_is_found_and_nothing_else(written: Written, invoke: Invoke) -> None:
    entries = list(written.objects.values())
    for lost in on_pages_of_their_own(entries):
        wanted = [one for entry in lost for one in loss_findings(entries, entry)]
        # Sidecars without kv are not reported here: 3FS evicts each pool separately.
        wanted = [each for each in wanted if each[0] != "orphan-sidecar"]
        with ExitStack() as gone:
            for entry in lost:
                gone.enter_context(written.without(entry))
            document = verified(
                invoke, written.url, "--profile", written.profile,
                "--checks", "names,groups,sizes", exit_code=4 if wanted else 0,
            )  # fmt: skip
        assert complaints(document) == sorted(wanted)


def test_bad_values_are_found_each_and_nothing_else(written: Written, invoke: Invoke) -> None:
    planted = []
    for entry in one_of_each_kind(list(written.objects.values())):
        value = damage("nan", written.get(entry), written.expected[affix_of(entry)])
        if value is not None:
            planted.append((entry, written.get(entry)))
            written.put(entry, value)
    assert planted
    try:
        document = verified(invoke, written.url, "--profile", written.profile, exit_code=4)
    finally:
        for entry, before in planted:
            written.put(entry, before)
    assert complaints(document) == sorted(("nan", "error", e["key"]) for e, _ in planted)


def highest_page(written: Written) -> Entry:
    """Return the last object in rank 0's kv file; pages are allocated from the end."""
    return max(
        (e for e in written.objects.values() if e["key"].startswith("0:kv:")),
        key=lambda entry: int(entry["index"]),
    )


def test_a_file_that_was_cut_off_is_found(written: Written, invoke: Invoke) -> None:
    entry = highest_page(written)
    with written.file_as_it_was(entry) as path:
        os.truncate(path, entry["index"] * entry["nbytes"] + 10)
        document = verified(invoke, written.url, "--profile", written.profile, exit_code=4)
        assert path.stat().st_size == entry["index"] * entry["nbytes"] + 10
    assert ("truncated", "error", entry["key"]) in complaints(document)


def test_a_page_that_an_engine_cut_off_and_stretched_again_is_found(
    written: Written, invoke: Invoke
) -> None:
    """SGLang's clients stretch a file that is too short when they open it."""
    entry = highest_page(written)
    with written.file_as_it_was(entry) as path:
        os.truncate(path, entry["index"] * entry["nbytes"])
        os.truncate(path, FILE_SIZE)
        document = verified(invoke, written.url, "--profile", written.profile, exit_code=4)
    assert complaints(document) == [("unwritten-page", "error", entry["key"])]


# --- read by SGLang; these tests come last because they move or remove objects ---


def write(written: Written, objects: dict[str, bytes]) -> None:
    """Write objects with hicachectl in random order."""
    order = np.random.default_rng(0).permutation(len(objects)).tolist()
    keys = [list(objects)[n] for n in order]
    sizes = np.array([len(objects[key]) for key in keys], dtype=np.int64)
    offsets, total = place(sizes)
    with Arena(total) as arena, open_store(written.url, create=True) as store:
        assert isinstance(store, Hf3fsStore)
        store.use_profile(profile_from_mapping(written.manifest["profile"]))
        store.attach(arena)
        for key, offset, size in zip(keys, offsets.tolist(), sizes.tolist(), strict=True):
            arena.view(offset, size)[:] = np.frombuffer(objects[key], dtype=np.uint8)
        rows = pa.table({"key": pa.array([key.encode() for key in keys], pa.binary())})
        assert store.write_from(rows, offsets, sizes, if_absent=True).all_ok


def test_sglang_starts_on_a_store_that_hicachectl_made(
    written: Written, sglang_session: SglangSession
) -> None:
    """The server has no rank and no file, as before the first start of a new cluster."""
    objects = {key: written.get(entry) for key, entry in written.objects.items()}
    before = {name: table["num_pages"] for name, table in written.server.saved().items()}
    for entry in one_of_each_kind(list(written.objects.values())):
        written.file(entry).unlink(missing_ok=True)
    written.server.reset()
    write(written, objects)
    made = written.server.saved()
    assert {name: table["num_pages"] for name, table in made.items()} == before
    for result in written.read_back(sglang_session):
        assert result["hit_pages"] == len(written.manifest["pages"])
        assert not any(result["wrong"].values())
    tables = written.server.saved()
    assert {name: table["num_pages"] for name, table in tables.items()} == before
    for entry in written.manifest["objects"]:  # for the later tests
        rank, namespace, name = entry["key"].split(":")
        entry["index"] = dict(tables[f"{rank}:{namespace}"]["key_to_index"])[name]


def test_sglang_reads_what_hicachectl_wrote_byte_for_byte(
    written: Written, sglang_session: SglangSession
) -> None:
    """The objects go into an empty store, to other pages than before."""
    objects = {key: written.get(entry) for key, entry in written.objects.items()}
    for name in written.server.saved():
        rank, namespace = name.split(":")
        written.server.post(int(rank), "clear", namespace=namespace)
    for entry in one_of_each_kind(list(written.objects.values())):
        os.truncate(written.file(entry), 0)
        os.truncate(written.file(entry), FILE_SIZE)
    assert all(result["hit_pages"] == 0 for result in written.read_back(sglang_session))

    write(written, objects)
    for result in written.read_back(sglang_session):
        assert result["hit_pages"] == len(written.manifest["pages"])
        assert not any(result["wrong"].values())
    tables = written.server.saved()
    assert sum(len(table["key_to_index"]) for table in tables.values()) == len(objects)
    for table in tables.values():
        assert len(table["free_pages"]) + len(table["key_to_index"]) == table["num_pages"]


def test_sglang_misses_what_hicachectl_deleted(
    written: Written, sglang_session: SglangSession
) -> None:
    page = written.manifest["pages"][4]
    keys = [key.encode() for key, entry in written.objects.items() if entry["page"] == page]
    with open_store(written.url) as store:
        assert store.delete(pa.table({"key": pa.array(keys, pa.binary())})).all_ok
    hits = [result["hit_pages"] for result in written.read_back(sglang_session)]
    # Each node of three pages has a state at its end, and a hit ends at a state.
    stateful = any(entry["pool"] == "mamba" for entry in written.objects.values())
    assert set(hits) == {3 if stateful else 4}
