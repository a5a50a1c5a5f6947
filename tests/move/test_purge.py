"""`quarantine list` and `purge`: old runs go, wholly; everything else stays and is named."""

from __future__ import annotations

import fcntl
import json
import os
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.killed import Runner
from tests.move.quarantines import run_document, runs_in
from tests.move.repairs import default_quarantine, dsa_store, indexer, shorten
from tests.stores import DSA, contents

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.conftest import Invoke

REPAIR = ("--checks", "groups,sizes", "--repair", "quarantine", "--yes", "--fail-on", "never",
          "--format", "json")  # fmt: skip


@pytest.fixture
def store(tmp_path: Path, invoke: Invoke) -> Path:
    """Make a store, and quarantine its pages 1 and 2, each by a run."""
    store = dsa_store(tmp_path / "store", 4)
    (tmp_path / "profile.toml").write_text(DSA)
    for number in (1, 2):
        shorten(store / indexer(number))
        invoke("verify", store, "--profile", tmp_path / "profile.toml", *REPAIR)
    return store


def listed(invoke: Invoke, place: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = invoke("quarantine", "list", place, "--format", "json").document[
        "runs"
    ]
    return rows


def age(run: Path, seconds: float) -> None:
    """Let a run have begun earlier."""
    document = run_document(run)
    document["begin"] -= seconds
    (run / ".hicachectl" / "run.json").write_text(json.dumps(document))


def oldest(place: Path) -> Path:
    """Return a run after making it two days old."""
    run = runs_in(place)[0]
    age(run, 2 * 86400)
    return run


@pytest.mark.slow
def test_list_shows_each_run(invoke: Invoke, store: Path) -> None:
    rows = listed(invoke, default_quarantine(store))
    assert len(rows) == 2
    for row in rows:
        assert (row["groups"], row["objects"], row["state"]) == (1, 2, "kept")
        assert row["codes"] == ["truncated"]
        assert str(store) in row["store"]
        assert abs(row["removed"] - time.time()) < 600
        held = contents(default_quarantine(store) / row["run"])
        assert row["nbytes"] == sum(len(data) for data, _ in held.values())
    table = invoke("quarantine", "list", default_quarantine(store)).stdout
    assert rows[0]["run"] in table
    assert "2 runs, 2 pages, 4 objects" in table


@pytest.mark.slow
def test_a_store_stands_for_its_own_quarantine(invoke: Invoke, store: Path) -> None:
    own = default_quarantine(store)
    runs = invoke("quarantine", "list", store, "--format", "json").document
    assert (runs["quarantine"], runs["count"]) == (str(own), 2)
    own.rename(store.parent / "elsewhere")
    own.symlink_to(store.parent / "elsewhere")
    other = invoke("quarantine", "list", store, "--format", "json").document
    assert other["quarantine"] == str(store)  # the link is not followed


@pytest.mark.slow
def test_purge_deletes_older_runs_only(invoke: Invoke, store: Path) -> None:
    place = default_quarantine(store)
    run = oldest(place)
    before, inside = contents(store), contents(run)
    purge = ("quarantine", "purge", place, "--before", "1d", "--format", "json")
    document = invoke(*purge, "--dry-run").document
    assert (document["count"], document["pages"], document["objects"]) == (1, 1, 2)
    assert contents(run) == inside
    document = invoke(*purge, "--yes").document
    assert [(row["run"], row["state"]) for row in document["runs"]] == [(run.name, "purged")]
    assert not run.exists()
    assert contents(store) == before
    (kept,) = listed(invoke, place)
    assert kept["state"] == "kept"
    assert invoke("restore", place, store, "--yes", "--format", "json").document["pages"] == 1


def test_a_folder_that_does_not_name_itself_stops_a_purge(invoke: Invoke, store: Path) -> None:
    place = default_quarantine(store)
    run = oldest(place)
    (place / "mine").mkdir()
    (place / "mine" / "file").write_text("")
    run.rename(place / "renamed")
    before = sorted(place.rglob("*"))
    output = invoke("quarantine", "purge", place, "--before", "0s", "--yes", exit_code=2)
    assert f"its .hicachectl/run.json is of the run {run.name}" in output.stderr
    assert sorted(place.rglob("*")) == before
    (place / "renamed").rename(run)
    invoke("quarantine", "purge", place, "--before", "0s", "--yes")
    assert sorted(path.name for path in place.rglob("*")) == ["file", "mine"]


def test_a_purge_follows_no_link(invoke: Invoke, store: Path, tmp_path: Path) -> None:
    """Links in a run are removed themselves."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("kept")
    place = default_quarantine(store)
    run = oldest(place)
    (run / "link").symlink_to(tmp_path / "other")
    (run / "inner").mkdir()
    (run / "inner" / "link").symlink_to(tmp_path / "other" / "file")
    os.mkfifo(run / "pipe")
    invoke("quarantine", "purge", place, "--before", "1d", "--yes")
    assert not run.exists()
    assert (tmp_path / "other" / "file").read_text() == "kept"


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", ".purged"])
def test_what_is_left_of_a_run_goes(invoke: Invoke, store: Path, end: str) -> None:
    """A process was killed right after it made the folder, or right before it removed it."""
    place = default_quarantine(store)
    for number, names in enumerate(([], [".hicachectl"], [".hicachectl/.run.json.tmp"])):
        left = place / f"20260101T000000Z-00000{number}{end}"
        left.mkdir()
        for name in names:
            path = left / name
            path.parent.mkdir(exist_ok=True)
            path.mkdir() if name == ".hicachectl" else path.write_text("{")
    other = place / f"20260101T000000Z-ffffff{end}"
    other.mkdir()
    (other / "file").write_text("")
    assert len(listed(invoke, place)) == 2
    invoke("quarantine", "purge", place, "--before", "1d", "--yes")
    assert [path for path in runs_in(place) if path.name < "20260102"] == [other]


@pytest.mark.slow
def test_a_busy_run_stays(invoke: Invoke, store: Path) -> None:
    place = default_quarantine(store)
    run = oldest(place)
    holder = os.open(run, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    purge = ("quarantine", "purge", place, "--before", "1d", "--yes", "--format", "json")
    output = invoke(*purge)
    assert f"{run.name}: another process is working on it" in output.stderr
    assert output.document["count"] == 0
    os.close(holder)
    assert invoke(*purge).document["count"] == 1
    assert not run.exists()


@pytest.mark.slow
@pytest.mark.parametrize("output_format", ["jsonl", "csv", "parquet", "arrow"])
def test_every_format_has_the_runs(
    invoke: Invoke, store: Path, tmp_path: Path, output_format: str
) -> None:
    place, file = default_quarantine(store), tmp_path / "runs"
    invoke("quarantine", "list", place, "--format", output_format, "-o", file)
    assert min(run.name for run in place.iterdir()).encode() in file.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("at", ["quarantine", "run", "side", "run.json", "findings.jsonl"])
def test_links_are_refused_before_any_change(
    invoke: Invoke, store: Path, tmp_path: Path, at: str
) -> None:
    place = default_quarantine(store)
    run = oldest(place)
    side = run / ".hicachectl"
    link = {"quarantine": place, "run": run, "side": side}.get(at, side / at)
    link.rename(tmp_path / "elsewhere")
    link.symlink_to(tmp_path / "elsewhere")
    before = {path: path.lstat().st_ino for path in tmp_path.rglob("*")}
    output = invoke("quarantine", "purge", place, "--before", "0s", "--yes", exit_code=3)
    assert "is a symbolic link" in output.stderr
    assert {path: path.lstat().st_ino for path in tmp_path.rglob("*")} == before


def cut_form(run: Path) -> str:
    path = run / ".hicachectl" / "run.json"
    path.write_bytes(path.read_bytes()[:-20])
    return f"{path}: not a quarantine run of form 1 ("


def swollen_form(run: Path) -> str:
    os.truncate(path := run / ".hicachectl" / "run.json", (64 << 10) + 1)
    return f"{path}: larger than {64 << 10} bytes"


def cut_findings(run: Path) -> str:
    path = run / ".hicachectl" / "findings.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    return f"{path}: line 1 is not a finding ("


def linked_folder(run: Path) -> str:
    (run / ".hicachectl").rename(run.parents[3] / "elsewhere")
    (run / ".hicachectl").symlink_to(run.parents[3] / "elsewhere")
    return f"{run / '.hicachectl'}: is a symbolic link"


@pytest.mark.slow
@pytest.mark.parametrize("damage", [cut_form, swollen_form, cut_findings, linked_folder])
def test_list_names_a_run_that_cannot_be_read_and_shows_the_others(
    invoke: Invoke, store: Path, damage: Callable[[Path], str]
) -> None:
    place = default_quarantine(store)
    run, other = runs_in(place)
    said = damage(run)
    output = invoke("quarantine", "list", place, "--format", "json")
    states = {row["run"]: (row["state"], row["groups"]) for row in output.document["runs"]}
    assert states == {run.name: ("unreadable", None), other.name: ("kept", 1)}
    assert said in output.stderr
    assert output.document["pages"] == 1
    table = invoke("quarantine", "list", place).stdout
    assert "unreadable" in table
    assert "2 runs, 1 page" in table


def test_a_held_lock_stops_a_purge(invoke: Invoke, store: Path, tmp_path: Path) -> None:
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    purge = ("quarantine", "purge", default_quarantine(store), "--before", "0s", "--yes")
    document = invoke(*purge, "--lock", tmp_path / "lock", "--format", "json").document
    os.close(lock)
    assert (document["count"], document["complete"], document["stopped_by"]) == (0, False, "lock")
    assert len(listed(invoke, default_quarantine(store))) == 2


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    with Runner(tmp_path_factory.mktemp("killed")) as runner:
        yield runner


@pytest.mark.slow
def test_a_killed_purge_is_completed_and_nothing_is_restored_by_halves(
    invoke: Invoke, tmp_path: Path, runner: Runner
) -> None:
    """A run is killed before each step of its purge: it is restored wholly or not at all."""
    (tmp_path / "profile.toml").write_text(DSA)
    kept = set[int]()
    for step in range(1, 100):
        folder = tmp_path / f"{step}"
        store = dsa_store(folder / "store", 6)
        original = contents(store)
        for number in (1, 2):
            shorten(store / indexer(number))
        damaged = contents(store)
        invoke("verify", store, "--profile", tmp_path / "profile.toml", *REPAIR)
        place = default_quarantine(store)
        purge = ("quarantine", "purge", place, "--before", "0s", "--yes", "--format", "json")
        done = runner.run(*purge, home=folder, kill=("steps", step))
        if not done.killed:
            assert done.document["pages"] == 2
            break
        back = invoke("restore", place, store, "--yes", "--format", "json")
        kept.add(back.document["pages"])
        assert back.document["failed"] == 0
        assert back.document["pages"] in (0, 2)
        if back.document["pages"]:
            assert contents(store) == damaged
        else:
            assert len(contents(store)) == len(original) - 4
            invoke(*purge)
        assert not list(place.iterdir())
    assert step > 5
    assert kept == {0, 2}
