"""`hicachectl runs`: run directories as they are listed, described and deleted."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import time
from copy import copy
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl import __version__
from hicachectl.backends.disk.directory import Directory
from hicachectl.parts.directory import RunDirectory
from hicachectl.parts.job import MODULES
from hicachectl.parts.results import mark_merged
from hicachectl.parts.runs import list_runs, purge_runs, run_status
from tests.parts.runs import ToyRun, names_in, toy_run  # noqa: F401 - a fixture
from tests.parts.toy import LISTED_NS
from tests.skips import needs_root
from tests.stores import contents, put_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.conftest import Invoke

DAY_S = 86_400
LISTING = "listing-0123456789abcdef"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyRun]:
    """A directory of runs in each state, with other things beside them."""
    run = ToyRun(tmp_path_factory.mktemp("template"))
    folder = run.folder / "runs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODULES, "toy", "tests.parts.toy")
        for name, parts in {"merged": [0, 1], "finished": [0, 1], "unfinished": [0]}.items():
            run.path = folder / name
            for part in parts:
                run.part(part, 2)
        merge(folder / "merged")
        (folder / "listing" / LISTING).mkdir(parents=True)
        (folder / "other").mkdir()
        (folder / "other" / "notes.txt").write_text("mine")
        (folder / "latest").symlink_to("merged")
        (folder / "file").write_text("mine")
        yield run


@pytest.fixture
def runs(template: ToyRun, tmp_path: Path) -> ToyRun:
    """A copy of the directory of runs; the stores are those of the template."""
    copied = copy(template)
    copied.folder, copied.path = tmp_path, tmp_path / "runs"
    shutil.copytree(template.folder / "runs", copied.path, symlinks=True)
    return copied


def merge(path: Path) -> None:
    with RunDirectory.existing(path) as run:
        mark_merged(run)


def states(path: Path) -> dict[str, str]:
    return {row["run"]: row["state"] for row in list_runs(path).rows.to_pylist()}


STATES = {
    "finished": "finished",
    "listing": "listing",
    "merged": "merged",
    "unfinished": "unfinished",
}


def test_the_runs_of_a_directory_are_listed_by_name(runs: ToyRun) -> None:
    """Links, files and other directories are no runs."""
    before = tree(runs.path)
    rows = {row["run"]: row for row in list_runs(runs.path).rows.to_pylist()}
    assert {name: row["state"] for name, row in rows.items()} == STATES
    row = rows["merged"]
    stores = [str(runs.store), str(runs.destination)]
    assert (row["command"], row["parts"], row["done"]) == ("toy", 2, 2)
    assert [url.removeprefix("file://") for url in row["stores"]] == stores
    assert row["listed"] == LISTED_NS / 1e9
    files = [path for path in (runs.path / "merged").rglob("*") if path.is_file()]
    assert row["nbytes"] == sum(path.stat().st_size for path in files)
    assert row["changed"] == max(path.stat().st_mtime for path in files)
    assert rows["unfinished"]["done"] == 1
    assert tree(runs.path) == before, "looking changes nothing"


def tree(path: Path) -> dict[str, int]:
    """Return the names below a directory, with the times of their content."""
    return {str(one): one.lstat().st_mtime_ns for one in [path, *path.rglob("*")]}


@pytest.mark.parametrize("name", STATES)
def test_one_run_is_listed_by_its_own_path(runs: ToyRun, name: str) -> None:
    assert states(runs.path / name) == {name: STATES[name]}


@pytest.mark.parametrize(
    ("name", "missing", "next_step"),
    [
        ("merged", [], "hicachectl merge RUN --again"),
        ("finished", [], "hicachectl merge RUN"),
        ("unfinished", [1], "run part 1 of 2 with --run RUN and the other parts' options"),
        ("listing", [], "part 0 lists the store; if its process has ended, run part 0 again"),
    ],
)
def test_the_status_says_what_is_missing_and_what_to_do(
    runs: ToyRun, name: str, missing: list[int], next_step: str
) -> None:
    path = runs.path / name
    status = run_status(path)
    assert status.document.state == STATES[name]
    assert status.document.missing_parts == missing
    assert status.document.next == next_step.replace("RUN", str(path))
    rows = status.rows.to_pylist()
    assert [row["state"] for row in rows] == [
        "missing" if part in missing else "done" for part in range(len(rows))
    ]
    assert all((row["host"] is None) == (row["state"] == "missing") for row in rows)


def test_a_run_whose_last_part_was_killed_before_the_finish_says_so(runs: ToyRun) -> None:
    path = runs.path / "finished"
    (path / "finish.json").unlink()
    status = run_status(path).document
    assert (status.state, status.missing_parts) == ("unfinished", [])
    assert status.next == f"run any part again with --run {path}, which finishes the run"


def test_parts_that_are_not_complete_or_damaged_are_told_apart(
    toy_run: ToyRun,  # noqa: F811
) -> None:
    toy_run.part(0, 3)
    toy_run.part(1, 3, full=7)
    (toy_run.path / "parts" / "00002.json").write_text("{")
    status = run_status(toy_run.path)
    assert [row["state"] for row in status.rows.to_pylist()] == ["done", "not-complete", "damaged"]
    assert "remove 00002.json and run part 2 again" in status.remarks[0]


@pytest.mark.parametrize("seconds", ["1e999", "1e300", "-1", "NaN"])
def test_a_duration_that_is_none_is_damage(invoke: Invoke, runs: ToyRun, seconds: str) -> None:
    path = runs.path / "merged" / "parts" / "00001.json"
    path.write_text(re.sub('"seconds": [^,]+', f'"seconds": {seconds}', path.read_text()))
    shown = invoke("runs", "status", runs.path / "merged")
    assert "damaged" in shown.stdout
    assert "seconds" in shown.stderr


@pytest.mark.parametrize(
    ("options", "gone"),
    [
        ({}, {"merged"}),
        ({"unmerged": True}, set(STATES)),
    ],
)
def test_a_purge_deletes_merged_runs_and_others_if_told_so(
    runs: ToyRun, options: dict[str, Any], gone: set[str]
) -> None:
    before = tree(runs.path)
    dry = purge_runs(runs.path, time.time() + 1, dry_run=True, **options)
    assert {row["run"]: row["state"] for row in dry.rows.to_pylist()} == dict.fromkeys(
        sorted(gone), "would-purge"
    )
    assert tree(runs.path) == before
    report = purge_runs(runs.path, time.time() + 1, **options)
    assert {row["run"] for row in report.rows.to_pylist()} == gone
    assert {row["state"] for row in report.rows.to_pylist()} == {"purged"}
    assert report.counts == dry.counts == {"unmerged": len(set(STATES) - gone)}
    assert set(names_in(runs.path)) == {*STATES, "other", "latest", "file"} - gone
    assert (runs.path / "other" / "notes.txt").read_text() == "mine"
    assert contents(runs.destination), "the stores stay as they are"


def date(path: Path, age_s: float) -> None:
    for one in path.rglob("*"):
        os.utime(one, (time.time() - age_s,) * 2)


def test_the_last_change_decides_how_old_a_run_is(runs: ToyRun) -> None:
    """A part may have its result days after the listing."""
    path = runs.path / "merged"
    date(path, 8 * DAY_S)
    os.utime(path / "merged.json", (time.time() - 6 * DAY_S,) * 2)
    assert len(purge_runs(runs.path, time.time() - 7 * DAY_S, unmerged=True).rows) == 0
    os.utime(path / "merged.json", (time.time() - 7.1 * DAY_S,) * 2)
    os.utime(path / "parts")  # a look at its owner may have changed it
    assert len(purge_runs(runs.path, time.time() - 7 * DAY_S, unmerged=True).rows) == 1
    assert not path.exists()


@pytest.mark.parametrize("place", ["", "parts", LISTING])
@pytest.mark.parametrize("name", ["notes.txt", "00001.json.bak", ".hidden"])
def test_a_run_with_another_file_stays_whole(runs: ToyRun, place: str, name: str) -> None:
    path = runs.path / "merged"
    (folder,) = path.glob("listing-*") if place == LISTING else [path / place]
    (folder / name).write_text("mine")
    before = tree(path)
    report = purge_runs(runs.path, time.time() + 1)
    ((where, why),) = report.failures
    assert where == str(path)
    assert (
        why == f"not purged: {folder}/{name}: is not a file of a run; move it away, then run again"
    )
    assert [row["state"] for row in report.rows.to_pylist()] == ["failed"]
    assert tree(path) == before


@pytest.mark.parametrize("name", ["parts", "parts/00000.json", "finish.json"])
def test_a_purge_follows_no_link(runs: ToyRun, name: str) -> None:
    path, elsewhere = runs.path / "merged", runs.folder / "elsewhere"
    (path / name).rename(elsewhere)
    (path / name).symlink_to(elsewhere)
    before = tree(runs.folder)
    report = purge_runs(runs.path, time.time() + 1)
    assert "is a symbolic link" in str([*report.failures, *report.left])
    assert not any(row["state"] == "purged" for row in report.rows.to_pylist())
    assert {*tree(runs.folder)} == {*before}


def test_a_link_to_a_run_as_the_argument_is_the_run(runs: ToyRun) -> None:
    purge_runs(runs.path / "latest", time.time() + 1)
    assert not (runs.path / "merged").exists()
    assert (runs.path / "latest").is_symlink()


def test_a_directory_that_takes_the_place_of_a_run_stays(
    runs: ToyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replaced(directory: Directory) -> bool:
        (runs.path / "merged").rename(runs.path / "moved")
        (runs.path / "merged").mkdir()
        return True

    monkeypatch.setattr(Directory, "lock", replaced)
    report = purge_runs(runs.path, time.time() + 1)
    assert [row["state"] for row in report.rows.to_pylist()] == ["busy"]
    assert (runs.path / "merged").exists()
    assert names_in(runs.path / "moved")


@needs_root
@pytest.mark.parametrize("name", [".", "parts", "parts/00000.json"])
def test_the_run_of_a_stranger_stays(runs: ToyRun, name: str) -> None:
    path = runs.path / "merged"
    os.chown(path / name, 12345, 12345)
    before = tree(path)
    list_runs(runs.path)
    run_status(runs.path / "finished")
    purge_runs(runs.path, time.time() + 1, dry_run=True)
    assert tree(path) == before, "looking tries no file"
    report = purge_runs(runs.path, time.time() + 1)
    assert "belongs to user 12345" in str([*report.failures, *report.left])
    assert {*tree(path)} == {*before}


@pytest.mark.parametrize(
    ("member", "value", "state"),
    [("version", "0.0.1", "merged"), ("form", 99, "unreadable"), ("command", "x", "unreadable")],
)
def test_the_runs_of_other_releases(runs: ToyRun, member: str, value: object, state: str) -> None:
    """After an upgrade, last week's runs are purged as before; those of another form stay."""
    path = runs.path / "merged" / "run.json"
    document = json.loads(path.read_text())
    assert document["version"] == __version__
    path.write_text(json.dumps(document | {member: value}))
    assert states(runs.path)["merged"] == state
    report = purge_runs(runs.path, time.time() + 1, unmerged=True)
    assert (runs.path / "merged").exists() == (state == "unreadable")
    assert bool(report.left) == (state == "unreadable")


def test_a_damaged_run_is_unreadable_and_stays(runs: ToyRun) -> None:
    path = runs.path / "merged" / "run.json"
    path.write_bytes(path.read_bytes()[:-5])
    assert states(runs.path)["merged"] == "unreadable"
    assert "not JSON" in list_runs(runs.path).left[0]
    purge_runs(runs.path, time.time() + 1, unmerged=True)
    assert names_in(runs.path / "merged")


def test_two_purges_at_once_do_not_disturb_each_other(runs: ToyRun) -> None:
    descriptor = os.open(runs.path / "merged", os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        report = purge_runs(runs.path, time.time() + 1)
    finally:
        os.close(descriptor)
    assert [row["state"] for row in report.rows.to_pylist()] == ["busy"]
    assert "another process is working on it" in report.left[0]
    assert not report.failures
    assert states(runs.path)["merged"] == "merged"


def purge_killed_at(path: Path, step: int) -> int:
    """Purge in another process, which is killed before its next change of a name."""
    child = os.fork()
    if not child:
        left = step

        def dying(call: Callable[..., None]) -> Callable[..., None]:
            def one(*arguments: Any, **options: Any) -> None:
                nonlocal left
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                call(*arguments, **options)

            return one

        for name in ("rename", "unlink", "rmdir"):
            setattr(os, name, dying(getattr(os, name)))
        os._exit(bool(purge_runs(path, time.time() + 1).failures))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.slow
def test_a_purge_killed_anywhere_is_completed_by_the_next(runs: ToyRun) -> None:
    template = runs.folder / "template"
    shutil.copytree(runs.path, template, symlinks=True)
    steps = 0
    while True:
        shutil.rmtree(runs.path)
        shutil.copytree(template, runs.path, symlinks=True)
        status = purge_killed_at(runs.path, steps)
        left = states(runs.path)
        if status == 0:
            break
        assert status == -signal.SIGKILL
        killed = "merged" if steps == 0 else "merged.purged"
        assert left.pop(killed) == ("merged" if steps == 0 else "half-purged")
        assert left == {name: state for name, state in STATES.items() if name != "merged"}
        assert (runs.path / "merged").exists() == (steps == 0)
        files = names_in(runs.path / killed)
        assert "run.json" in files or not files, "it says who is trusted"
        report = purge_runs(runs.path, time.time() - DAY_S if steps else time.time() + 1)
        assert [row["state"] for row in report.rows.to_pylist()] == ["purged"]
        assert set(names_in(runs.path)) == {*STATES, "other", "latest", "file"} - {"merged"}
        steps += 1
    assert steps > 10
    assert "merged" not in left


def test_a_name_is_used_again_while_a_purge_is_half_done(runs: ToyRun) -> None:
    """The rest of the earlier run goes first, then the new run of that name."""
    old = runs.path / "merged.purged"
    shutil.copytree(runs.path / "merged", old)
    (old / "merged.json").unlink()
    report = purge_runs(runs.path, time.time() + 1)
    assert [row["run"] for row in report.rows.to_pylist()] == ["merged.purged", "merged"]
    assert not report.failures
    assert not old.exists()
    assert not (runs.path / "merged").exists()


def test_a_part_that_still_runs_ends_with_an_error(toy_run: ToyRun) -> None:  # noqa: F811
    """Its result has no place any more; it makes no new one."""
    toy_run.part(0, 2)

    def purge(_: str) -> None:
        report = purge_runs(toy_run.path, time.time() + 1, unmerged=True)
        assert [row["state"] for row in report.rows.to_pylist()] == ["purged"]

    with pytest.raises(Exception, match="cannot use the run directory"):
        toy_run.part(1, 2, meanwhile=purge)
    assert not toy_run.path.exists()


def hostile(path: Path) -> None:
    document = json.loads((path / "run.json").read_text())
    document["identity"] |= {"source": "\x1b[31m\ud800\n", "destination": {"a": 1}}
    (path / "run.json").write_text(json.dumps(document))


@pytest.mark.parametrize("change", [None, hostile])
def test_hostile_names_are_escaped(
    invoke: Invoke, runs: ToyRun, change: Callable[[Path], None] | None
) -> None:
    path = os.fsencode(runs.path / "merged")
    if change is not None:
        change(runs.path / "merged")
    os.rename(path, os.path.dirname(path) + b"/\xff\x1b[31m")  # noqa: PTH104, PTH120
    for words in (["list"], ["purge", "--before", "0s", "--dry-run"]):
        for output_format in ("table", "json", "jsonl", "csv"):
            shown = invoke("runs", words[0], runs.path, *words[1:], "--format", output_format)
            assert "\x1b" not in shown.stdout + shown.stderr
            assert "31m" in shown.stdout


def test_the_command_purges_and_says_what_it_kept(
    invoke: Invoke, tmp_path: Path, runs: ToyRun
) -> None:
    store = tmp_path / "pages"
    store.mkdir()
    put_pages(store, range(3), "_m_0_1")
    for name in ("a", "b"):
        invoke("verify", store, "--shard", "0/1", "--run", runs.path / name)
    invoke("merge", runs.path / "a")
    listed = invoke.document("runs", "list", runs.path)
    assert listed["count"] == 6
    (row,) = [row for row in listed["runs"] if row["run"] == "a"]
    assert (row["command"], row["stores"], row["state"]) == (
        "verify",
        [f"file://{store}"],
        "merged",
    )
    assert invoke("runs", "status", runs.path / "b").stdout.splitlines()[-2:] == [
        f"{runs.path}/b: finished run of verify file://{store}, 1 of 1 parts have a result",
        f"Next: hicachectl merge {runs.path}/b",
    ]
    purge = ("runs", "purge", runs.path, "--before", "0s")
    assert "give --yes or --dry-run" in invoke(*purge, exit_code=2).stderr
    done = invoke(*purge, "--yes")
    assert done.stdout.splitlines()[-1].startswith("2 runs, ")
    assert done.stderr == (
        f"hicachectl: {runs.path}: 4 runs not merged, and kept; see --unmerged\n"
    )
    (runs.path / "b" / "x").write_text("")
    os.utime(runs.path / "b" / "x", (0, 0))
    failed = invoke(*purge, "--yes", "--unmerged", exit_code=4)
    assert f"{runs.path}/b: not purged: {runs.path}/b/x: is not a file of a run" in failed.stderr
    assert set(names_in(runs.path)) == {"b", "other", "latest", "file"}
