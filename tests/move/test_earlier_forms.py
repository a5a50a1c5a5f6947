"""Quarantines of earlier releases are left alone; their journals are resumed."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from tests.move.earlier_forms import JOURNALS, QUARANTINES, RELEASES, objects, place
from tests.move.migrations import journals, migrated
from tests.stores import contents, put_pages

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke
    from tests.move.earlier_forms import Earlier

PAGES = 24  # of the source of migrations


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", ["renamed", "renaming", "removing", "copying"])
def test_a_quarantine_of_an_earlier_form_is_named_and_left_alone(
    invoke: Invoke, tmp_path: Path, name: str, release: str
) -> None:
    """Also runs of killed processes, beside a run of the present form."""
    earlier = place(QUARANTINES / f"{name}-{release}.tar.gz", tmp_path)
    (run,) = earlier.quarantine.iterdir()
    shutil.rmtree(earlier.store / ".hicachectl" / "stamps", ignore_errors=True)
    before = {path: path.lstat().st_ino for path in earlier.quarantine.rglob("*")}
    said = f"{run}: left alone: a quarantine run of an earlier form"
    listed = invoke("quarantine", "list", earlier.quarantine, "--format", "json")
    assert [row["state"] for row in listed.document["runs"]] == ["earlier-form"]
    assert said in listed.stderr
    put_pages(earlier.store, range(99, 100), "_x-dsa")
    repair = ("--profile", earlier.profile, "--checks", "groups", "--repair", "quarantine", "--yes")
    quarantine = ("--quarantine", earlier.quarantine, "--despite-profile", "--fail-on", "never")
    invoke("verify", earlier.store, *repair, *quarantine)
    assert len(list(earlier.quarantine.iterdir())) == 2
    ran = invoke("restore", earlier.quarantine, earlier.store, "--yes", "--format", "json")
    assert ran.document["pages"] >= 1
    assert said in ran.stderr
    purged = invoke("quarantine", "purge", earlier.quarantine, "--before", "0s", "--yes")
    assert said in purged.stderr
    assert {path: path.lstat().st_ino for path in earlier.quarantine.rglob("*")} == before


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
