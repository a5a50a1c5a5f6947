"""Verify while SGLang's own HiCacheHF3FS evicts objects and reuses their pages."""

from __future__ import annotations

import json
import os
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.formats.profile import profile_from_mapping
from hicachectl.formats.spec import object_specs
from tests.conformance.busy_store import PATIENCE_S
from tests.conformance.store_cases import DEFAULT_LAYOUT, HF3FS_CASES
from tests.hf3fs_server import MetadataServer
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.conformance.conftest import SglangSession
    from tests.conftest import Invoke

# All these tests run in the worker with the SGLang process.
pytestmark = [pytest.mark.conformance, pytest.mark.xdist_group("sglang-hf3fs")]

RUNS, FLUSHED_RUNS = 3, 15
EVICTED_S = 120  # within this time, an eviction falls into a run
GRACE_S = 2  # two saves of the server
PROMPT_FOLD = 3  # the prompt has three times the pages that fit
PAGES_OF_FILE = {"gqa_tp2": 128, "mla_indexer": 36, "hybrid_mamba": 48}
FLUSHED_NODES = 25
BFLOAT16_NAN = b"\xc0\x7f"

# Findings that are no damage while engines evict: a page is rewritten, the file is newer than the
# snapshot, or eviction, which works key by key, has removed some objects of a page. If a sidecar's
# file has more pages than kv's, such sidecars remain as long as they fit.
TRUE_OF_A_BUSY_STORE = {
    "re-recorded",
    "snapshot-stale",
    "orphan-sidecar",
    "missing-part",
    "missing-pool",
    "missing-rank",
}


@dataclass(frozen=True, slots=True)
class Live:
    """A store that SGLang keeps writing to."""

    server: MetadataServer
    folder: Path
    case: str

    @property
    def profile(self) -> dict[str, Any]:
        return {**HF3FS_CASES[self.case].deployments[0].profile, "layout": DEFAULT_LAYOUT}

    @property
    def page_bytes(self) -> int:
        """Bytes of one kv object."""
        expected = object_specs(profile_from_mapping(self.profile), "hf3fs")
        return next(each.nbytes for each in expected if each.coordinate.pool == "kv")

    @property
    def parts(self) -> int:
        """Number of kv objects of a page at one rank: K and V separate, or one object."""
        return 1 if self.profile["pools"][0]["kind"] == "mla" else 2

    @property
    def file_size(self) -> int:
        return PAGES_OF_FILE[self.case] * self.parts * self.page_bytes

    @property
    def config(self) -> Path:
        return self.server.write_config(self.folder, self.file_size)

    @property
    def arguments(self) -> list[object]:
        """Arguments of `verify`."""
        profile = self.folder / "profile.json"
        profile.write_text(json.dumps(self.profile))
        url = f"hf3fs:?config={self.folder / 'hf3fs.json'}&snapshot={self.server.snapshot}"
        catalog = ("--catalog", self.folder / "catalog.parquet", "--update-catalog")
        return [url, "--profile", profile, "--grace", f"{GRACE_S}s", *catalog]

    def tables(self) -> dict[str, Any]:
        """Return the tables of the server's last periodic save."""
        tables: dict[str, Any] = json.loads(self.server.snapshot.read_text())
        return tables

    def is_begun(self) -> bool:
        """Return whether SGLang has been imported, has filled its pools and stored an object."""
        return bool(self.tables().get("0:kv", {}).get("key_to_index"))

    def is_full(self) -> bool:
        """Return whether each rank's kv file is full, so that each write evicts."""
        tables = self.tables()
        ranks = [table for name, table in tables.items() if name.endswith(":kv")]
        return bool(ranks) and not any(table["free_pages"] for table in ranks)


@contextmanager
def writing(
    case: str, session: SglangSession, python: Path, folder: Path, *, clear_every: int = 0
) -> Iterator[Live]:
    """Have SGLang write until the end of the block."""
    stop = folder / "stop"
    (folder / "data").mkdir()
    with MetadataServer(python, save_interval_s=1) as server:
        live = Live(server, folder, case)
        question = {
            "case": case,
            "config": str(live.config),
            "pages": PAGES_OF_FILE[case] * PROMPT_FOLD,
            "clear_every": clear_every,
            "hot": str(folder / "hot"),
            "until": str(stop),
        }
        said = folder / "said"
        nodes = session.start("live_hf3fs", question, said)
        try:
            wait_until(lambda: not nodes.is_alive or live.is_begun(), patience_s=PATIENCE_S)
            yield live
            assert nodes.is_alive, said.read_text()
        finally:
            stop.touch()
            assert nodes.wait() == 0, said.read_text()


class Hot:
    """The page that engines back up in every round and so never evict."""

    def __init__(self, live: Live) -> None:
        self._server = live.server
        tables, page = live.tables(), (live.folder / "hot").read_text()
        self.places = {
            (int(name.split(":")[0]), name.split(":")[1], key): index
            for name, table in tables.items()
            for key, index in table["key_to_index"]
            if key.startswith(page)
        }
        self.key = next(key for rank, pool, key in self.places if (rank, pool) == (0, "kv"))
        ranks = sum(name.endswith(":kv") for name in tables)
        assert sum(pool == "kv" for _, pool, _ in self.places) == ranks * live.parts

    def is_there(self) -> bool:
        """Query every object, as a hit does; return whether all are in place."""
        return all(
            self._server.page_indices(rank, [key], pool) == [index]
            for (rank, pool, key), index in self.places.items()
        )

    def damage(self, live: Live) -> tuple[str, str, str]:
        """Write a NaN into an object, as bad memory would; return the expected finding."""
        path = live.folder / "data" / "hicache.0.bin"
        descriptor = os.open(path, os.O_RDWR)
        try:
            os.pwrite(descriptor, BFLOAT16_NAN, self.places[0, "kv", self.key] * live.page_bytes)
        finally:
            os.close(descriptor)
        return "nan", "error", f"0:kv:{self.key}"


def verified(invoke: Invoke, live: Live) -> dict[str, Any]:
    flushed = ("--allow-empty", "--allow-shrink")
    options = ("--format", "json", "--fail-on", "never")
    return invoke("verify", *live.arguments, *flushed, *options).document


def verified_often(invoke: Invoke, live: Live, runs: int) -> list[dict[str, Any]]:
    """Verify `runs` times, and further until an object vanishes during a run."""
    documents: list[dict[str, Any]] = []
    end = time.monotonic() + EVICTED_S
    while len(documents) < runs or not any(document["gone"] > 0 for document in documents):
        assert time.monotonic() < end, "nothing was evicted meanwhile"
        documents.append(verified(invoke, live))
    return documents


def no_leaks(documents: Sequence[dict[str, Any]]) -> bool:
    """Return whether at most one run reports a leaked page.

    A page that is being written in both snapshots of a run looks leaked; this is rare.
    """
    return sum("page-leaked" in document["counts"] for document in documents) <= 1


def damage_in(document: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [
        (each["code"], each["severity"], each["key"])
        for each in document["findings"]
        if each["code"] not in TRUE_OF_A_BUSY_STORE | {"page-leaked"}
    ]


@pytest.mark.parametrize("case", ["gqa_tp2", "mla_indexer"])
def test_reused_pages_are_never_damage_and_a_damaged_page_always_is(
    sglang_session: SglangSession, sglang_python: Path, invoke: Invoke, tmp_path: Path, case: str
) -> None:
    with writing(case, sglang_session, sglang_python, tmp_path) as live:
        wait_until(live.is_full, patience_s=PATIENCE_S)
        hot = Hot(live)
        clean = verified_often(invoke, live, RUNS)
        due = hot.damage(live)
        damaged = [verified(invoke, live) for _ in range(2)]
        assert hot.is_there()
    assert [damage_in(document) for document in clean] == [[]] * len(clean)
    # The catalog's digest of the object differs too.
    mismatch = ("digest-mismatch", "warning", due[2])
    assert [sorted(damage_in(document)) for document in damaged] == [[mismatch, due]] * 2
    assert no_leaks([*clean, *damaged])
    assert all(document["bytes_read"] > 0 for document in (*clean, *damaged))


def test_pages_are_no_damage_while_the_store_is_flushed_again_and_again(
    sglang_session: SglangSession, sglang_python: Path, invoke: Invoke, tmp_path: Path
) -> None:
    with writing(
        "hybrid_mamba", sglang_session, sglang_python, tmp_path, clear_every=FLUSHED_NODES
    ) as live:
        documents = verified_often(invoke, live, FLUSHED_RUNS)
    assert [damage_in(document) for document in documents] == [[]] * len(documents)
    assert no_leaks(documents)
    assert sum(document["bytes_read"] for document in documents) > 0
