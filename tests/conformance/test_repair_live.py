"""Repair while SGLang's own file backend keeps reading and writing the directory."""

from __future__ import annotations

import json
import os
import shutil
import time
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from hicachectl.backends.base import Status
from hicachectl.backends.file.store import FileStore
from hicachectl.checks.findings import findings
from hicachectl.formats.profile import parse_profile
from hicachectl.move.withdrawal import remove_groups
from hicachectl.pages.group_table import WHOLE
from hicachectl.pages.groups import PageGroups
from hicachectl.pages.scanning import take_inventory
from tests.conformance.busy_store import BusyStore, lines
from tests.conformance.store_cases import CASES
from tests.move.quarantines import quarantined
from tests.move.repairs import plan_for

if TYPE_CHECKING:
    from pathlib import Path

    from hicachectl.backends.base import Store
    from hicachectl.backends.object_files.mover import FileMover
    from hicachectl.move.results import GroupReport
    from hicachectl.pages.groups import PageGroups as Groups
    from tests.conformance.conftest import Manifest, SglangSession, WriteStore

pytestmark = pytest.mark.conformance

Damaged = dict[str, list[str]]  # page to the files that were damaged


class Watched(FileStore):
    """A store that records when each object was last moved out."""

    last_taken: dict[str, int]

    def mover(self, run: Store) -> FileMover | None:
        real = super().mover(run)
        assert real is not None
        take = real._take

        def noted(key: bytes, version: bytes | None) -> Status | None:
            status = take(key, version)
            if status == Status.OK:
                self.last_taken[key.decode()] = time.time_ns()
            return status

        real._take = noted  # type: ignore[method-assign]
        return real


def damage(path: Path) -> None:
    """Change bytes in the middle of a file, as a bad disk would."""
    facts = path.stat()
    value = bytearray(path.read_bytes())
    middle = len(value) // 2
    value[middle : middle + 64] = bytes(byte ^ 0xFF for byte in value[middle : middle + 64])
    with path.open("r+b") as stream:
        stream.write(value)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def objects_of_rank_0(manifest: Manifest, page: str) -> dict[str, str]:
    """Return the files of a page by pool, for rank 0, which the reader uses."""
    return {
        entry["pool"]: entry["file"]
        for entry in manifest["objects"]
        if entry["page"] == page and not entry["tp_rank"]
    }


def scanned(store: FileStore, manifest: Manifest) -> Groups:
    profile = parse_profile(json.dumps(manifest["profile"]))
    return PageGroups(take_inventory(store, profile, columns=("version",)))


def repair(store: Watched, manifest: Manifest, damaged: Damaged) -> GroupReport:
    groups = scanned(store, manifest)
    found = pa.concat_tables(
        findings("digest-mismatch", keys=pa.array(files), pages=pa.array([page] * len(files)))
        for page, files in damaged.items()
    )
    plan = plan_for(groups, found)
    return remove_groups(store, groups, plan, mode="quarantine")


@pytest.mark.parametrize(("case", "writers"), [("mla_indexer", 1), ("hybrid_mamba", 2)])
def test_no_damaged_page_is_read_once_its_anchor_is_gone(
    sglang_store: WriteStore,
    sglang_session: SglangSession,
    tmp_path: Path,
    case: str,
    writers: int,
) -> None:
    pristine, manifest = sglang_store(case)
    manifest = {**manifest, "node_pages": CASES[case].node_pages}
    store = tmp_path / "store"
    shutil.copytree(pristine, store)
    damaged: Damaged = {}
    side = next(pool["name"] for pool in manifest["profile"]["pools"] if pool["name"] != "kv")
    for number, pool in ((1, "kv"), (2, side), (5, side), (5, "kv"), (7, side)):
        page = manifest["pages"][number]
        file = objects_of_rank_0(manifest, page)[pool]
        damage(store / file)
        damaged.setdefault(page, []).append(file)
    bytes_before = {path.name: path.read_bytes() for path in store.iterdir()}
    inodes = {path.name: path.stat().st_ino for path in store.iterdir()}

    with BusyStore(sglang_session, store, manifest, tmp_path / "server") as server:
        rounds = [server.serve("write", rank) for rank in range(writers)]
        reads = server.serve("read", 0)
        server.wait_until(lambda: all(len(lines(log)) > 2 for log in rounds))
        server.wait_until(lambda: {r["page"] for r in lines(reads) if r["wrong"]} == {*damaged})
        with Watched(store) as opened:
            opened.last_taken = {}
            outcome = repair(opened, manifest, damaged)
        written = [len(lines(log)) for log in rounds]
        server.wait_until(
            lambda: all(len(lines(log)) > n + 2 for log, n in zip(rounds, written, strict=True))
        )
        server.wait_until(
            lambda: (
                {r["page"] for r in lines(reads)[-40:] if not r["wrong"]} == {*manifest["pages"]}
            )
        )
        server.stop()

    assert (outcome.groups, outcome.failures, outcome.remaining) == (len(damaged), (), 0)
    gone_at = {
        page: max(
            opened.last_taken[entry["file"]]
            for entry in manifest["objects"]
            if entry["page"] == page and entry["pool"] == "kv"
        )
        for page in damaged
    }
    for read in lines(reads):
        if read["wrong"]:
            assert read["page"] in damaged
            assert read["start"] < gone_at[read["page"]], read
    check_store(store, pristine, inodes, damaged)
    check_quarantine(store, manifest, bytes_before, damaged)
    with FileStore(store) as opened_again:
        groups = scanned(opened_again, manifest)
    assert (groups.states == WHOLE).all()
    assert len(groups) == len(manifest["pages"])


def check_store(store: Path, pristine: Path, inodes: dict[str, int], damaged: Damaged) -> None:
    """Check that all files are as SGLang writes them, and healthy ones still the same files."""
    for path in pristine.iterdir():
        found = store / path.name
        assert found.read_bytes() == path.read_bytes(), path.name
        same = found.stat().st_ino == inodes[path.name]
        assert same == (path.name[:64] not in damaged), path.name


def check_quarantine(
    store: Path, manifest: Manifest, before: dict[str, bytes], damaged: Damaged
) -> None:
    """Check that the quarantine has every object of the bad groups, with its bytes."""
    found = quarantined(store / ".hicachectl" / "quarantine")
    held = {name: content for name, (content, _) in found.items()}
    wanted = {e["file"] for e in manifest["objects"] if e["page"] in damaged}
    assert held == {name: before[name] for name in wanted}
