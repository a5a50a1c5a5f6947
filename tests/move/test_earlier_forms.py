"""Quarantines and journals of earlier releases are restored, completed and resumed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.move.earlier_forms import JOURNALS, QUARANTINES, RELEASES, objects, place
from tests.move.migrations import journals, migrated
from tests.move.repairs import quarantined
from tests.stores import contents

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import Invoke
    from tests.hf3fs_server import MetadataServer
    from tests.mooncake_cluster import Cluster
    from tests.move.earlier_forms import Earlier

    Placed = Callable[[str, str], Earlier]

GROUPS = 12  # of the store, and of quarantines of the whole store
REPAIRED = 4  # groups with a truncated object or without their indexer
PAGES = 24  # of the source of migrations
BESIDE = ("renamed", "repaired", "renaming", "restoring")
COPIES = ("copied", "deleting-copied", "copying-back")


@pytest.fixture(params=["here", "on another file system"])
def placed(request: pytest.FixtureRequest, tmp_path: Path) -> Placed:
    """Place quarantines of copies on the store's file system, or on another one."""
    elsewhere: Path | None = None
    if request.param != "here":
        elsewhere = request.getfixturevalue("other_file_system") / "quarantine"
    return lambda name, release: place(
        QUARANTINES / f"{name}-{release}.tar.gz", tmp_path, elsewhere=elsewhere
    )


def restored(invoke: Invoke, earlier: Earlier, *more: object) -> dict[str, Any]:
    command = ("restore", earlier.quarantine, earlier.store, "--yes", "--format", "json", *more)
    return invoke(*command).document


def repair(invoke: Invoke, earlier: Earlier, *more: object) -> str:
    """Repair a store, after completing killed runs; return stderr."""
    command = ("verify", earlier.store, "--profile", earlier.profile, "--checks", "groups,sizes")
    options = ("--repair", "quarantine", "--quarantine", earlier.quarantine, "--fail-on", "never")
    return invoke(*command, *options, *more).stderr


def check_restored(earlier: Earlier, document: dict[str, Any], groups: int) -> None:
    """Check that the store is complete again, and that the quarantine is empty."""
    assert objects(earlier.store) == earlier.before
    assert list(earlier.quarantine.iterdir()) == []
    assert (document["pages"], document["conflicts"], document["failed"]) == (groups, 0, 0)
    assert {row["state"] for row in document["groups"]} == {"restored"}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", BESIDE)
def test_what_was_renamed_is_restored(
    invoke: Invoke, tmp_path: Path, name: str, release: str
) -> None:
    """Includes killed runs, in the middle of renames in either direction."""
    earlier = place(QUARANTINES / f"{name}-{release}.tar.gz", tmp_path)
    check_restored(earlier, restored(invoke, earlier), REPAIRED if name == "repaired" else GROUPS)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", COPIES)
def test_what_was_copied_is_restored(
    invoke: Invoke, placed: Placed, name: str, release: str
) -> None:
    """Includes killed runs, while deleting copied objects or copying objects back."""
    earlier = placed(name, release)
    check_restored(earlier, restored(invoke, earlier), GROUPS)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", ["renamed", "copied"])
def test_groups_are_restored_one_by_one(
    invoke: Invoke, placed: Placed, tmp_path: Path, name: str, release: str
) -> None:
    """Rows of ls name groups of all shapes, also ambiguous groups."""
    earlier = placed(name, release)
    listed = tmp_path / "rows.jsonl"
    invoke("ls", tmp_path / "before", "--format", "jsonl", "-o", listed)
    rows = [json.loads(line) for line in listed.read_text().splitlines()]
    assert sorted({row["group"] for row in rows}) == ["?", "m tp2", "x-dsa"]
    there: set[str] = set()
    for number, row in enumerate(rows, 1):
        listed.write_text(json.dumps(row))
        document = restored(invoke, earlier, "--pages", listed)
        assert (document["pages"], document["bytes"]) == (1, row["nbytes"])
        there.add(row["page"])
        assert {key[:64] for key in objects(earlier.store)} == there
        assert len(quarantined(earlier.quarantine)) == len(earlier.before) - len(
            objects(earlier.store)
        ), number
    assert objects(earlier.store) == earlier.before
    assert list(earlier.quarantine.iterdir()) == []


@pytest.mark.parametrize("release", RELEASES)
def test_findings_are_said_when_what_was_repaired_is_restored(
    invoke: Invoke, tmp_path: Path, release: str
) -> None:
    earlier = place(QUARANTINES / f"repaired-{release}.tar.gz", tmp_path)
    rows = restored(invoke, earlier, "--dry-run")["groups"]
    assert sorted(row["codes"] for row in rows) == [
        ["missing-pool"],
        *[["truncated"]] * (REPAIRED - 1),
    ]
    assert {row["state"] for row in rows} == {"would-restore"}


@pytest.mark.parametrize("release", RELEASES)
def test_what_left_a_cluster_is_restored(
    invoke: Invoke, tmp_path: Path, mooncake_cluster: Cluster, release: str
) -> None:
    earlier = place(QUARANTINES / f"mooncake-{release}.tar.gz", tmp_path)
    invoke("restore", earlier.quarantine, mooncake_cluster.url, "--yes")
    client = mooncake_cluster.client()
    there = {key: client.get(key) for key in mooncake_cluster.list_keys()}
    assert there == {key: data for key, (data, _) in earlier.before.items()}
    assert list(earlier.quarantine.iterdir()) == []


@pytest.mark.parametrize("release", RELEASES)
def test_what_left_a_3fs_store_is_listed(
    invoke: Invoke, tmp_path: Path, metadata_server: MetadataServer, release: str
) -> None:
    earlier = place(QUARANTINES / f"hf3fs-{release}.tar.gz", tmp_path)
    saved = metadata_server.save()
    url = f"hf3fs://{tmp_path}/hicache?server={metadata_server.url}&snapshot={saved}&file_size=4096"
    command = ("restore", earlier.quarantine, url, "--dry-run", "--format", "json")
    document = invoke(*command).document
    assert (document["pages"], document["objects"]) == (3, len(earlier.before))
    assert document["bytes"] == sum(len(data) for data, _ in earlier.before.values())
    assert {row["state"] for row in document["groups"]} == {"would-restore"}


def check_completed(invoke: Invoke, earlier: Earlier) -> None:
    """Complete a killed quarantine run, and restore its groups."""
    before = contents(earlier.store)
    assert f"An earlier run began to remove {GROUPS} pages" in repair(invoke, earlier, "--dry-run")
    assert contents(earlier.store) == before
    assert f"Completed the removal of {GROUPS} pages" in repair(invoke, earlier, "--yes")
    assert contents(earlier.store) == {}
    assert quarantined(earlier.quarantine) == earlier.before
    assert [path.suffix for path in earlier.quarantine.glob("*/0*")] in (
        [".json", ""],
        ["", ".json"],
    )
    check_restored(earlier, restored(invoke, earlier), GROUPS)


@pytest.mark.parametrize("release", RELEASES)
def test_a_killed_quarantine_by_renames_is_completed(
    invoke: Invoke, tmp_path: Path, release: str
) -> None:
    earlier = place(QUARANTINES / f"renaming-{release}.tar.gz", tmp_path)
    assert 0 < len(objects(earlier.store)) < len(earlier.before)
    check_completed(invoke, earlier)


@pytest.mark.parametrize("release", RELEASES)
def test_a_killed_quarantine_by_copies_is_completed(
    invoke: Invoke, tmp_path: Path, other_file_system: Path, release: str
) -> None:
    archive = QUARANTINES / f"deleting-copied-{release}.tar.gz"
    earlier = place(archive, tmp_path, elsewhere=other_file_system / "quarantine")
    assert 0 < len(objects(earlier.store)) < len(earlier.before)
    check_completed(invoke, earlier)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", ["removing", "discarding"])
def test_a_killed_removal_is_completed_and_never_restored(
    invoke: Invoke, tmp_path: Path, name: str, release: str
) -> None:
    earlier = place(QUARANTINES / f"{name}-{release}.tar.gz", tmp_path)
    before = objects(earlier.store)
    assert len(before) == 0 if name == "discarding" else 0 < len(before) < len(earlier.before)
    held = sorted(path.name for path in earlier.quarantine.rglob("*"))
    assert restored(invoke, earlier)["pages"] == 0
    assert objects(earlier.store) == before
    assert sorted(path.name for path in earlier.quarantine.rglob("*")) == held
    rm = ("rm", earlier.store, "--model", "none")
    assert f"An earlier run began to remove {GROUPS} pages" in invoke(*rm, "--dry-run").stderr
    assert objects(earlier.store) == before
    assert f"Completed the removal of {GROUPS} pages" in invoke(*rm, "--yes").stderr
    assert contents(earlier.store) == {}
    assert list(earlier.quarantine.iterdir()) == []


@pytest.mark.parametrize("release", RELEASES)
def test_copies_that_nothing_left_the_store_for(
    invoke: Invoke, placed: Placed, release: str
) -> None:
    """Copies with a note are deleted. Copies of the earliest release have none: they stay."""
    earlier = placed("copying", release)
    noted = bool(list(earlier.quarantine.glob("*/*.copying")))
    assert noted == (release != "c343c6e")
    copies = sorted(earlier.quarantine.glob("*/000000/*"))
    assert copies
    stderr = repair(invoke, earlier, "--yes")
    assert contents(earlier.store) == earlier.before
    assert sorted(earlier.quarantine.glob("*/000000/*")) == ([] if noted else copies)
    assert (str(copies[0].parent) in stderr) != noted
    if noted:
        assert list(earlier.quarantine.iterdir()) == []


def resumed(invoke: Invoke, earlier: Earlier, *more: object) -> dict[str, Any]:
    """Resume the migration of a journal; check that its pages count and that it is removed."""
    (journal,) = journals(earlier.root / "home")
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    noted = sum(len(line["pages"]) // 64 for line in lines[1:] if line["what"] != "removed")
    assert 0 < noted < PAGES
    document = migrated(invoke, *earlier.command[1:], "--resume", *more)
    assert (document["resumed"], document["failed"], document["complete"]) == (noted, 0, True)
    assert journals(earlier.root / "home") == []
    return document


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("existing", ["skip", "verify", "overwrite"])
@pytest.mark.parametrize("name", ["copying", "verifying"])
def test_a_killed_migration_is_resumed(
    invoke: Invoke, tmp_path: Path, name: str, existing: str, release: str
) -> None:
    """Pages in the journal are not written again, not even with --if-exists overwrite."""
    earlier = place(JOURNALS / f"{name}-{release}.tar.gz", tmp_path)
    lacking = {name[:64] for name in earlier.after.keys() - objects(earlier.target).keys()}
    document = resumed(invoke, earlier, "--if-exists", existing)
    written = PAGES - document["resumed"] if existing == "overwrite" else len(lacking)
    assert (document["pages"], document["pages"] + document["skipped"]) == (written, PAGES)
    assert contents(earlier.target) == earlier.after
    assert contents(earlier.store) == earlier.before


@pytest.mark.parametrize("release", RELEASES)
def test_a_killed_migration_into_a_pack_is_resumed(
    invoke: Invoke, tmp_path: Path, release: str
) -> None:
    earlier = place(JOURNALS / f"packing-{release}.tar.gz", tmp_path)
    resumed(invoke, earlier)
    migrated(invoke, earlier.command[2], earlier.target, "--verify")
    assert contents(earlier.target) == earlier.before
    assert contents(earlier.store) == earlier.before


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", ["comparing", "moving"])
def test_a_killed_move_is_resumed(invoke: Invoke, tmp_path: Path, name: str, release: str) -> None:
    earlier = place(JOURNALS / f"{name}-{release}.tar.gz", tmp_path)
    left = {name[:64] for name in objects(earlier.store)}
    assert 0 < len(left) < PAGES
    document = resumed(invoke, earlier)
    assert document["moved"] == len(left)
    assert contents(earlier.target) == earlier.before == earlier.after
    assert contents(earlier.store) == {}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", ["copying", "verifying"])
def test_a_killed_migration_that_is_not_resumed_is_completed(
    invoke: Invoke, tmp_path: Path, name: str, release: str
) -> None:
    earlier = place(JOURNALS / f"{name}-{release}.tar.gz", tmp_path)
    document = migrated(invoke, *earlier.command[1:])
    assert "An earlier run of this migration was interrupted" in document["stderr"]
    assert (document["complete"], document["resumed"], document["failed"]) == (True, 0, 0)
    assert contents(earlier.target) == earlier.after
    assert journals(tmp_path / "home") == []
