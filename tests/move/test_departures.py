"""No sidecar leaves before the anchors of its page, in any order of removals and with failures.

The commands run over a store of two ranks with Mamba states. One step is broken: an anchor of
either rank, or a sidecar, cannot leave or cannot arrive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hicachectl.backends.file.store import FileStore
from tests.move.departures import HASH_DIGITS, anchors, sidecars, watched
from tests.move.migrations import flip_once_written, migrated
from tests.move.quarantines import quarantined
from tests.move.repairs import shorten
from tests.stores import contents

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke
    from tests.stores import Contents

BROKEN = ("nothing", "first anchor", "last anchor", "sidecar")
WAYS = ("renames", "deletes")


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Move objects to a quarantine and back by rename, or by copies, as without a mover."""
    if request.param == "deletes":
        monkeypatch.setattr(FileStore, "mover", lambda *_: None)
    return str(request.param)


def broken(objects: Contents, what: str) -> list[str]:
    """Return the object, of a page with Mamba states, whose removal fails."""
    page = sidecars(objects)[0][:HASH_DIGITS]
    of_page = anchors(objects, page)
    return {
        "nothing": [],
        "first anchor": of_page[:1],
        "last anchor": of_page[-1:],
        "sidecar": sidecars(objects, page)[:1],
    }[what]


def held(directory: Path) -> Contents:
    return contents(directory) if directory.exists() else {}


def check_kept(before: Contents, *places: Contents) -> None:
    """Check that every object is in one of the places, with its bytes and time."""
    for name, held_ in before.items():
        found = [place[name] for place in places if name in place]
        assert found, name
        assert all(each == held_ for each in found), name


@pytest.mark.slow
@pytest.mark.parametrize("what", BROKEN)
def test_a_move_takes_anchors_from_its_source_before_sidecars(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, source: Path, target: Path, what: str
) -> None:
    before = contents(source)
    stuck = broken(before, what)
    with watched(monkeypatch, source, before, stuck=stuck) as watch:
        code = 4 if stuck else 0
        migrated(invoke, source, target, "--move", "--yes", exit_code=code)
    assert watch.steps >= len(before) - len(stuck)
    assert watch.half == set()
    check_kept(before, held(source), held(target))


@pytest.mark.parametrize("what", BROKEN)
def test_a_copy_that_is_taken_back_loses_its_anchors_before_its_sidecars(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, source: Path, target: Path, what: str
) -> None:
    """One object of a page reads back with other bytes, so its page is rolled back."""
    before = contents(source)
    stuck = broken(before, what)
    page = sidecars(before)[0][:HASH_DIGITS]
    target.mkdir()
    flip_once_written(monkeypatch, target / anchors(before, page)[0], 0)
    with watched(monkeypatch, target, before, stuck=stuck) as watch:
        document = migrated(invoke, source, target, "--verify", exit_code=4)
    assert document["failed"] == 1
    assert watch.half == set()
    left = {name for name in contents(target) if name.startswith(page)}
    assert left == ({*stuck, *sidecars(before, page)} if "anchor" in what else set(stuck))
    assert contents(source) == before


@pytest.mark.parametrize("what", BROKEN)
def test_a_page_that_is_replaced_loses_its_anchors_before_its_sidecars(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, source: Path, target: Path, what: str
) -> None:
    before = contents(source)
    stuck = broken(before, what)
    target.mkdir()
    for name, (data, _) in before.items():
        (target / name).write_bytes(bytes(len(data)))
    with watched(monkeypatch, target, before, stuck=stuck) as watch:
        migrated(invoke, source, target, "--if-exists", "overwrite", exit_code=4 if stuck else 0)
    assert watch.half == set()
    if not stuck:
        assert contents(target) == before


@pytest.mark.slow
@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("command", ["rm", "quarantine", "delete"])
def test_pages_are_removed_with_their_anchors_first(
    invoke: Invoke,
    monkeypatch: pytest.MonkeyPatch,
    source: Path,
    profile: Path,
    command: str,
    way: str,
    what: str,
) -> None:
    for name in sidecars(contents(source)):
        shorten(source / name)
    before = contents(source)
    stuck = broken(before, what)
    arguments: tuple[object, ...] = ("rm", source, "--before", "0s", "--yes")
    if command != "rm":
        arguments = ("verify", source, "--profile", profile, "--grace", "0s", "--yes",
                     "--fail-on", "never", "--repair", command)  # fmt: skip
    with watched(monkeypatch, source, before, stuck=stuck) as watch:
        invoke(*arguments, exit_code=4 if stuck else 0)
    assert watch.half == set()
    assert watch.steps
    if command == "quarantine":
        check_kept(before, held(source), quarantined(source / ".hicachectl" / "quarantine"))


@pytest.mark.slow
@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_a_page_that_cannot_be_restored_whole_loses_its_anchors_before_its_sidecars(
    invoke: Invoke,
    monkeypatch: pytest.MonkeyPatch,
    source: Path,
    profile: Path,
    tmp_path: Path,
    way: str,
    what: str,
) -> None:
    """The last anchor cannot arrive, and not all earlier objects can be rolled back."""
    quarantine = tmp_path / "quarantine"
    shorten(source / sidecars(contents(source))[0])
    before = contents(source)
    invoke("verify", source, "--profile", profile, "--grace", "0s", "--repair", "quarantine",
           "--quarantine", quarantine, "--yes", "--fail-on", "never")  # fmt: skip
    taken = {name: held_ for name, held_ in before.items() if name not in contents(source)}
    assert len({name[:HASH_DIGITS] for name in taken}) == 1
    *first, last = anchors(taken)
    stuck = {"nothing": [], "first anchor": first[:1], "last anchor": [last],
             "sidecar": sidecars(taken)[:1]}[what]  # fmt: skip
    with watched(monkeypatch, source, before, stuck=stuck, refused=[last]) as watch:
        invoke("restore", quarantine, source, "--yes", exit_code=4)
    assert watch.half == set()
    check_kept(before, held(source), quarantined(quarantine))
    invoke("restore", quarantine, source, "--yes")
    assert contents(source) == before
