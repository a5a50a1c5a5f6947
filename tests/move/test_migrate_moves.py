"""--move removes only pages from the source that are whole and equal at the destination."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hicachectl.backends.base import Result, Status
from hicachectl.backends.file.store import FileStore
from hicachectl.backends.mooncake.client import MooncakeClient
from hicachectl.backends.mooncake.store import MooncakeStore
from hicachectl.cli.demo_store import PROFILE
from hicachectl.formats.transfer import retargeted
from hicachectl.move import runs, trial
from tests.mooncake_cluster import Cluster
from tests.move.migrations import MODEL, PAGES, migrated, profile_file
from tests.places import MooncakePlace
from tests.stores import contents

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.conftest import Invoke

MOVE = ("--move", "--yes")


@pytest.fixture
def killed(invoke: Invoke, source: Path, target: Path) -> None:
    """Leave the stores as a move does that is killed after all copies, before any deletion."""
    migrated(invoke, source, target)
    assert contents(target) == contents(source)


def without_rank_0(source: Path, pages: list[str]) -> list[Path]:
    """Remove the anchors of rank 0, as a move that is killed then; return the other objects."""
    for page in pages:
        (source / f"{page}_{MODEL}_0_2.bin").unlink()
    return [path for path in source.iterdir() if path.name[:64] in pages]


@pytest.mark.slow
@pytest.mark.usefixtures("killed")
def test_a_killed_move_is_completed(invoke: Invoke, source: Path, target: Path) -> None:
    before = contents(source)
    document = migrated(invoke, source, target, *MOVE)
    assert (document["moved"], document["pages"]) == (PAGES, 0)
    assert contents(target) == before
    assert contents(source) == {}
    assert migrated(invoke, source, target, *MOVE)["left_in_source"] == 0


@pytest.mark.slow
@pytest.mark.usefixtures("killed")
def test_what_the_destination_has_lost_since_is_copied_again_and_not_deleted(
    invoke: Invoke, source: Path, target: Path
) -> None:
    before = contents(source)
    lost, gone = sorted(before)[0], sorted({name[:64] for name in before})[3]
    (target / lost).unlink()
    for name in before:
        if name.startswith(gone):
            (target / name).unlink()
    document = migrated(invoke, source, target, *MOVE)
    assert document["moved"] == PAGES
    assert contents(target) == before
    assert contents(source) == {}


@pytest.mark.slow
@pytest.mark.usefixtures("killed")
@pytest.mark.parametrize("options", [(), ("--include-partial",)])
@pytest.mark.parametrize("known", [True, False])
def test_a_page_half_deleted_by_a_killed_move_is_deleted_wholly(
    invoke: Invoke,
    source: Path,
    target: Path,
    profile: Path,
    known: bool,
    options: tuple[str, ...],
) -> None:
    before = contents(source)
    without_rank_0(source, sorted({name[:64] for name in before})[:3])
    named = ("--profile", profile) if known else ()
    document = migrated(invoke, source, target, *MOVE, *named, *options)
    assert (document["moved"], document["pages"], document["left_in_source"]) == (PAGES, 0, 0)
    assert contents(target) == before
    assert contents(source) == {}


@pytest.mark.slow
def test_a_half_deleted_page_of_another_layout_is_deleted_wholly(
    invoke: Invoke, source: Path, target: Path, profile: Path
) -> None:
    """Nothing can be made of its rest, so only the whole page in the destination counts."""
    options = ("--profile", profile, "--to-tp", 1)
    migrated(invoke, source, target, *options)
    copies = contents(target)
    without_rank_0(source, sorted({name[:64] for name in copies})[:3])
    document = migrated(invoke, source, target, *options, *MOVE)
    assert (document["moved"], document["left_in_source"]) == (PAGES, 0)
    assert contents(target) == copies
    assert contents(source) == {}


@pytest.mark.slow
@pytest.mark.usefixtures("killed")
@pytest.mark.parametrize(
    "fault", ["other bytes", "another size", "no sidecar", "no anchor", "young"]
)
def test_the_rest_of_a_page_stays_unless_the_destination_has_the_page(
    invoke: Invoke, source: Path, target: Path, profile: Path, fault: str
) -> None:
    anchor = next(name for name in sorted(contents(source)) if ".mamba" in name)
    page = anchor[:64]
    other = target / f"{page}_{MODEL}_1_2.bin"
    if fault == "other bytes":
        data = bytearray(other.read_bytes())
        data[7] ^= 1
        other.write_bytes(data)
    elif fault == "another size":
        other.write_bytes(b"short")
    elif fault == "no sidecar":
        (target / anchor).unlink()
    elif fault == "no anchor":
        (target / f"{page}_{MODEL}_0_2.bin").unlink()
    there = contents(target)
    rest = without_rank_0(source, [page])
    if fault == "young":
        os.utime(rest[0])
    document = migrated(invoke, source, target, "--profile", profile, *MOVE)
    assert (document["moved"], document["left_in_source"]) == (PAGES - 1, 1)
    assert (document["failed"], document["conflicts"], document["pages"]) == (0, 0, 0)
    assert {source / name for name in contents(source)} == set(rest)
    assert contents(target) == there
    listing = f"hicachectl ls file://{source} --state orphan,partial"
    assert listing in document["stderr"]
    rows = invoke("ls", source, "--state", "orphan,partial", "--profile", profile).stdout
    assert page[:8] in rows


@pytest.mark.slow
def test_objects_that_the_profile_does_not_list_keep_their_page_in_the_source(
    invoke: Invoke, source: Path, target: Path, tmp_path: Path
) -> None:
    profile = profile_file(tmp_path / "profile.toml")
    page = sorted(contents(source))[0][:64]
    stray = source / f"{page}.swa_{MODEL}_0_2.bin"
    stray.write_bytes(b"another pool")
    options = ("--profile", profile, "--to-model", "new/name", *MOVE)
    for moved in (PAGES - 1, 0):
        document = migrated(invoke, source, target, *options, exit_code=4)
        assert (document["moved"], document["failed"]) == (moved, 1)
        assert "some of its objects were not copied" in document["problems"][0]["detail"]
        assert {name[:64] for name in contents(source)} == {page}
        assert stray.exists()
    assert {name[:64] for name in contents(target)} >= {page}


def test_shards_that_nothing_can_be_made_of_stay_in_the_source(
    invoke: Invoke, source: Path, target: Path, tmp_path: Path
) -> None:
    """Without the kv of one rank, the kv for TP size 1 cannot be made."""
    profile = profile_file(tmp_path / "profile.toml")
    name = next(name for name in sorted(contents(source)) if ".mamba" in name)
    page = name[:64]
    (source / f"{page}_{MODEL}_0_2.bin").unlink()
    left = {n for n in contents(source) if n.startswith(page)}
    document = migrated(
        invoke, source, target, "--profile", profile, "--to-tp", 1, "--include-partial",
        "--include-damaged", "--grace", "0s", *MOVE, exit_code=4,
    )  # fmt: skip
    assert document["moved"] == PAGES - 1
    assert set(contents(source)) == left
    there = profile_file(tmp_path / "there.toml", retargeted(PROFILE, tp=1))
    listed = invoke("ls", target, "--profile", there, "--format", "json").stdout
    states = [each["state"] for each in json.loads(listed)["pages"]]
    assert sorted(states) == sorted(["whole"] * (PAGES - 1) + ["orphan"])


def test_a_repeated_move_deletes_nothing_that_is_damaged_at_the_destination(
    invoke: Invoke, source: Path, target: Path, killed: None
) -> None:
    before = contents(source)
    damaged = sorted(contents(target))[0]
    os.truncate(target / damaged, 7)
    migrated(invoke, source, target, *MOVE, exit_code=4)
    assert contents(source) == {n: c for n, c in before.items() if n[:64] == damaged[:64]}


@pytest.mark.slow
def test_a_repeated_move_says_what_it_cannot_delete(
    invoke: Invoke, source: Path, target: Path, killed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: FileStore, rows: Any) -> Result:
        count = len(rows)
        statuses = np.full(count, Status.ERROR, dtype=np.uint8)
        return Result(statuses, dict.fromkeys(range(count), "no"))

    monkeypatch.setattr(FileStore, "delete", refuse)
    document = migrated(invoke, source, target, *MOVE, exit_code=4)
    assert document["failed"] == PAGES
    assert document["moved"] == 0


def test_a_move_from_a_cluster_goes_on_while_the_leases_of_its_own_reads_last(
    mooncake_package: None, invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the trial removes a page before all are copied: removal would only wait for leases."""
    profile = profile_file(tmp_path / "profile.toml")
    calls: list[str] = []  # page hashes of removals, "" for a read

    def reads(method: Any) -> Any:
        def noted(*arguments: Any, **options: Any) -> Any:
            calls.append("")
            return method(*arguments, **options)

        return noted

    def removes(client: MooncakeClient, keys: Sequence[str]) -> Any:
        calls.extend(key[:64] for key in keys)
        return remove(client, keys)

    remove = MooncakeClient.remove
    with Cluster(lease_ms=2000) as cluster:
        place = MooncakePlace(cluster)
        place.fill(PAGES)
        monkeypatch.setattr(runs, "_LEASE_SECONDS", 600.0)  # however slow the machine is
        with monkeypatch.context() as patch:
            patch.setattr(MooncakeStore, "read_into", reads(MooncakeStore.read_into))
            patch.setattr(MooncakeClient, "remove", removes)
            document = migrated(
                invoke, cluster.url, tmp_path / "target", "--profile", profile, *MOVE,
                "--buffer-bytes", "1MiB", "--jobs", "1",
            )  # fmt: skip
        assert document["moved"] == PAGES
        assert place.keys() == set()
    assert calls.count("") > 2
    early = {*calls[: len(calls) - calls[::-1].index("")]} - {""}
    assert len(early) <= trial.PAGES
