"""Quarantines of earlier releases are left alone."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from tests.move.earlier_forms import QUARANTINES, RELEASES, place
from tests.stores import put_pages

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke


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
    said = f"{run}: left alone, because this quarantine run has an earlier form"
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
