"""Verify while SGLang's own HiCacheHF3FS evicts, and writes to the pages that this frees."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.formats.profile import profile_from_mapping
from hicachectl.formats.spec import object_specs
from tests.conformance.store_cases import DEFAULT_LAYOUT, HF3FS_CASES
from tests.conformance.test_repair_live import PATIENCE_S
from tests.hf3fs_server import MetadataServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tests.conformance.conftest import SglangSession
    from tests.conftest import Invoke

# One worker holds the process that has SGLang in it.
pytestmark = [pytest.mark.conformance, pytest.mark.xdist_group("sglang-hf3fs")]

RUNS, FLUSHED_RUNS = 3, 15
EVICTED_S = 120  # by then something is evicted in the middle of a run
GRACE_S = 2  # two saves of the server
PROMPT_FOLD = 3  # as many pages are stored in turn as fit three times
PAGES_OF_FILE = {"gqa_tp2": 128, "mla_indexer": 36, "hybrid_mamba": 48}
FLUSHED_NODES = 25
BFLOAT16_NAN = b"\xc0\x7f"

# What is so while engines evict, and no damage: a page is rewritten, the file is newer than the
# snapshot, and eviction, which goes by keys, has left a page without some of its objects: where a
# sidecar's file holds more pages than kv's, for as long as they fit.
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
        """Of one object of kv."""
        expected = object_specs(profile_from_mapping(self.profile), "hf3fs")
        return next(each.nbytes for each in expected if each.coordinate.pool == "kv")

    @property
    def parts(self) -> int:
        """Objects of a page at one rank: K and V apart, or all in one."""
        return 1 if self.profile["pools"][0]["kind"] == "mla" else 2

    @property
    def file_size(self) -> int:
        return PAGES_OF_FILE[self.case] * self.parts * self.page_bytes

    @property
    def config(self) -> Path:
        return self.server.write_config(self.folder, self.file_size)

    @property
    def arguments(self) -> list[object]:
        """Of `verify`."""
        profile = self.folder / "profile.json"
        profile.write_text(json.dumps(self.profile))
        url = f"hf3fs:?config={self.folder / 'hf3fs.json'}&snapshot={self.server.snapshot}"
        catalog = ("--catalog", self.folder / "catalog.parquet", "--update-catalog")
        return [url, "--profile", profile, "--grace", f"{GRACE_S}s", *catalog]

    def tables(self) -> dict[str, Any]:
        """What the server has saved of its own accord."""
        tables: dict[str, Any] = json.loads(self.server.snapshot.read_text())
        return tables

    def is_begun(self) -> bool:
        """Whether SGLang has been imported, has filled its pools, and has stored something."""
        return bool(self.tables().get("0:kv", {}).get("key_to_index"))

    def is_full(self) -> bool:
        """Whether every page of every rank's kv is taken, so that to write is to evict."""
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
    with MetadataServer(python, save_interval_s=1) as server, ThreadPoolExecutor(1) as thread:
        live = Live(server, folder, case)
        pages = PAGES_OF_FILE[case] * PROMPT_FOLD
        options = (
            f"--pages={pages}",
            f"--hot={live.folder / 'hot'}",
            f"--until={stop}",
            f"--clear-every={clear_every}",
        )
        nodes = thread.submit(session.run, "live_hf3fs", case, live.config, *options)
        try:
            wait_until(lambda: nodes.done() or live.is_begun())
            yield live
            assert not nodes.done(), f"SGLang stopped: {nodes.result()}"
        finally:
            stop.touch()
            nodes.result(PATIENCE_S)


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Hot:
    """The page that engines back up all the time, so that it is never evicted."""

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
        """Ask for every object, as a hit does: whether all are where they were."""
        return all(
            self._server.page_indices(rank, [key], pool) == [index]
            for (rank, pool, key), index in self.places.items()
        )

    def damage(self, live: Live) -> tuple[str, str, str]:
        """Put a NaN into an object, as bad memory would; the finding that is due."""
        path = live.folder / "data" / "hicache.0.bin"
        descriptor = os.open(path, os.O_RDWR)
        try:
            os.pwrite(descriptor, BFLOAT16_NAN, self.places[0, "kv", self.key] * live.page_bytes)
        finally:
            os.close(descriptor)
        return "nan", "error", f"0:kv:{self.key}"


def verified(invoke: Invoke, live: Live) -> dict[str, Any]:
    return invoke("verify", *live.arguments, "--format", "json", "--fail-on", "never").document


def verified_often(invoke: Invoke, live: Live, runs: int) -> list[dict[str, Any]]:
    """Verify so many times, and on until something has gone in the middle of a run."""
    documents: list[dict[str, Any]] = []
    end = time.monotonic() + EVICTED_S
    while len(documents) < runs or not any(document["gone"] > 0 for document in documents):
        assert time.monotonic() < end, "nothing was evicted meanwhile"
        documents.append(verified(invoke, live))
    return documents


def no_leaks(documents: Sequence[dict[str, Any]]) -> bool:
    """Whether no page is called leaked time and again.

    One that is being written to in both snapshots of a run looks so; seldom, and never twice.
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
        wait_until(live.is_full)
        hot = Hot(live)
        clean = verified_often(invoke, live, RUNS)
        due = hot.damage(live)
        damaged = [verified(invoke, live) for _ in range(2)]
        assert hot.is_there()
    assert [damage_in(document) for document in clean] == [[]] * len(clean)
    # The catalog has other bytes of it as well.
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
