"""Verify while SGLang's own file backend keeps filling the directory with new pages."""

from __future__ import annotations

import json
import os
import shutil
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.conformance.busy_store import PATIENCE_S, BusyStore, lines
from tests.conformance.store_cases import CASES
from tests.skips import needs_root
from tests.small_file_system import small_file_system
from tests.stores import OLD

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conformance.conftest import SglangSession, WriteStore
    from tests.conftest import Invoke

pytestmark = pytest.mark.conformance

WATCHED_S = 3.5
BLOCK = 4096  # objects take whole blocks


@pytest.mark.parametrize(("case", "writers"), [("mla_indexer", 1), ("hybrid_mamba", 2)])
def test_a_store_that_is_being_filled_is_clean(
    sglang_store: WriteStore,
    sglang_session: SglangSession,
    invoke: Invoke,
    tmp_path: Path,
    case: str,
    writers: int,
) -> None:
    pristine, manifest = sglang_store(case)
    manifest = {**manifest, "node_pages": CASES[case].node_pages}
    store, profile = tmp_path / "store", tmp_path / "profile.json"
    shutil.copytree(pristine, store)
    for path in store.iterdir():
        os.utime(path, (OLD, OLD))
    profile.write_text(json.dumps(manifest["profile"]))
    documents: list[dict[str, Any]] = []

    with BusyStore(sglang_session, store, manifest, tmp_path / "server") as server:
        rounds = [server.serve("fill", rank) for rank in range(writers)]
        server.wait_until(lambda: all(lines(log) for log in rounds))
        began = time.monotonic()
        while len(documents) < 2 or time.monotonic() < began + WATCHED_S:
            assert time.monotonic() < began + PATIENCE_S
            out = invoke("verify", store, "--profile", profile, "--format", "json").stdout
            documents.append(json.loads(out))
        server.stop()

    assert all(document["findings"] == [] for document in documents)
    assert all(document["in_flight"] > 0 for document in documents)
    assert all(document["sampled"] == len(manifest["pages"]) for document in documents)
    objects = [document["objects"] for document in documents]
    assert objects[0] < objects[-1]
    shutil.rmtree(store)  # hundreds of megabytes


@needs_root
def test_space_is_kept_free_in_a_store_that_is_being_filled(
    sglang_store: WriteStore, sglang_session: SglangSession, invoke: Invoke, tmp_path: Path
) -> None:
    """Both ranks write; no run of `rm` takes too little, a page too much, or a part of a page."""
    pristine, manifest = sglang_store("hybrid_mamba")
    manifest = {**manifest, "node_pages": CASES["hybrid_mamba"].node_pages}
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(manifest["profile"]))
    gone: set[str] = set()
    with small_file_system(tmp_path / "disk", 48 << 20) as disk:
        store = disk / "store"
        shutil.copytree(pristine, store)
        limit = 24 << 20
        command = ("rm", store, "--keep-free", limit, "--profile", profile, "--yes")
        with BusyStore(sglang_session, store, manifest, tmp_path / "server") as server:
            for rank in range(2):
                server.serve("fill", rank)
            began = time.monotonic()
            while len(gone) < 50:
                assert time.monotonic() < began + PATIENCE_S
                time.sleep(0.2)
                document = invoke(*command, "--format", "json").document
                assert document["lacking_bytes"] == 0
                assert document["free_bytes"] >= limit
                if rows := document["groups"]:
                    largest = max(row["nbytes"] + BLOCK * row["objects"] for row in rows)
                    assert document["free_bytes"] < limit + largest
                    assert {row["state"] for row in rows} == {"removed"}
                gone |= {row["page"] for row in rows}
            server.stop()
        assert not gone & {path.name[:64] for path in store.glob("*.bin")}
