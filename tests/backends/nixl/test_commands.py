"""The commands on a NIXL store: looking leaves no trace, and nothing of ours lies inside."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.backends.base import open_store
from hicachectl.cli.demo_store import fill
from hicachectl.formats.keys.nixl import route
from tests.backends.nixl.test_store import put_many, url_of
from tests.move.migrations import PAGES, profile_file
from tests.report.page_texts import text_of
from tests.stores import OLD

if TYPE_CHECKING:
    from tests.conftest import Invoke

Traces = dict[str, tuple[int, int, int]]  # by path: size, mtime and ctime in ns


@dataclass(frozen=True, slots=True)
class Demo:
    """The demo's pages in three directories, with one object cut short."""

    folder: Path
    url: str
    profile: Path
    short: Path

    def traces(self) -> Traces:
        found = {}
        for path in (one for name in "abc" for one in (self.folder / name).rglob("*")):
            facts = path.stat()
            found[str(path)] = facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns
        return found


@pytest.fixture
def demo(tmp_path: Path) -> Demo:
    url = url_of(tmp_path)
    with open_store(url, create=True) as store:
        fill(store, PAGES)
    files = sorted(path for path in tmp_path.glob("?/*/*"))
    os.truncate(files[0], 1000)
    for path in files:
        os.utime(path, (OLD, OLD))
    return Demo(tmp_path, url, profile_file(tmp_path / "profile.toml"), files[0])


@pytest.mark.slow
def test_commands_that_look_leave_no_trace(demo: Demo, invoke: Invoke, tmp_path: Path) -> None:
    profile = ("--profile", demo.profile)
    pages = tmp_path / "pages"
    whole = {path.name[:64] for path in tmp_path.glob("?/*/*")} - {demo.short.name[:64]}
    pages.write_text(f'["{min(whole)}"]\n')
    before = demo.traces()
    assert len(invoke("ls", demo.url, *profile, "--format", "jsonl").rows) == PAGES
    invoke("verify", demo.url, *profile, exit_code=4)
    invoke("show", demo.url, demo.short.name[:64], *profile)
    (chain,) = invoke("hits", demo.url, *profile, "--pages", pages, "--format", "jsonl").rows
    assert chain["kv_pages"] == 1
    invoke("rm", demo.url, "--before", "1s", "--dry-run")
    made = tmp_path / "page.html"
    invoke("report", demo.url, *profile, "-o", made, exit_code=4)
    text = text_of(made)
    assert "36 objects, 8 pages, 669.0 KiB: 1 truncated" in text
    assert f"'{demo.url}' --profile {demo.profile} --repair quarantine --quarantine DIR" in text
    assert demo.traces() == before


@pytest.mark.slow
def test_quarantine_and_stamp_lie_outside(demo: Demo, invoke: Invoke, tmp_path: Path) -> None:
    """Proves that a server's `clear` removes no object that a repair has put aside."""
    check = ("verify", demo.url, "--profile", demo.profile)
    before = demo.traces()
    repair = (*check, "--repair", "quarantine", "--yes")
    assert "give --quarantine DIR" in invoke(*repair, exit_code=2).stderr
    for directory, inside in ((tmp_path / "b", "."), (tmp_path / "c", "quarantine")):
        said = invoke(*repair, "--quarantine", directory / inside, exit_code=2).stderr
        assert f"a server's clear removes every file below {directory}" in said
    for option in (("--stamp",), ("--weights-version", "v1")):
        said = invoke(*check, *option, exit_code=2).stderr
        assert said == (
            f"hicachectl: {demo.url}: no directory for a stamp; add side_directory=DIR to the URL, "
            "or leave out --stamp and --weights-version\n"
        )
    assert demo.traces() == before
    outside = tmp_path / "quarantine"
    invoke(*repair, "--quarantine", outside, exit_code=4)  # there were findings
    assert not demo.short.exists()
    invoke(*check)
    invoke("restore", outside, demo.url, "--yes")
    files = {path: facts for path, facts in demo.traces().items() if demo.short.name[:64] in path}
    assert len(files) > 1
    assert {path: facts[:2] for path, facts in files.items()} == {
        path: before[path][:2] for path in files
    }


@pytest.mark.slow
def test_side_files_lie_in_the_directory_that_the_url_names(
    demo: Demo, invoke: Invoke, tmp_path: Path
) -> None:
    """Proves that one parameter gives stamp and quarantine a place that no `clear` empties."""
    side = tmp_path / "side" / "prod"
    demo.short.unlink()
    url, profile = f"{demo.url}&side_directory={side}", ("--profile", demo.profile)
    before = demo.traces()
    check = ("verify", url, *profile, "--grace", "0s")
    invoke(*check, exit_code=4)
    assert not side.exists()  # looking makes no directory
    stamp = side / "stamps" / "demo-hybrid-1b.json"
    said = invoke(*check, "--stamp", "--weights-version", "v1", exit_code=4).stderr
    assert f"Stamped the store: {stamp}" in said
    assert json.loads(stamp.read_text())["weights_version"] == "v1"
    invoke(*check, "--weights-version", "v1", exit_code=4)
    repair = (*check, "--repair", "quarantine")
    assert demo.traces() == before
    invoke(*repair, "--yes", exit_code=4)
    left = demo.traces()
    assert len(left) < len(before)
    invoke(*check)
    (run,) = (side / "quarantine").iterdir()
    listed = invoke("quarantine", "list", url, "--format", "json").document
    assert listed["quarantine"] == str(side / "quarantine")
    invoke("restore", url, url, "--yes")
    assert not run.exists()
    now, then = (
        {path: facts[:2] for path, facts in traces.items() if Path(path).is_file()}
        for traces in (demo.traces(), before)
    )
    assert now == then


@pytest.mark.slow
def test_readers_of_stamps_find_them_outside_the_store(
    demo: Demo, invoke: Invoke, tmp_path: Path
) -> None:
    config = tmp_path / "config.toml"
    url = f"{demo.url}&side_directory={tmp_path / 'side'}"
    config.write_text(f'[stores.prod]\nurl = "{url}"\nprofile = "{demo.profile}"\n')
    prod = ("--config", config)
    check = (*prod, "verify", "prod:", "--format", "json")
    invoke(*check, "--stamp", "--weights-version", "v1", exit_code=4)
    changed = ("--weights-version", "v2")

    def mismatches(document: dict[str, Any]) -> list[str]:
        return [f["detail"] for f in document["findings"] if f["code"] == "stamp-mismatch"]

    found = ["weights_version: stamped 'v1', now 'v2'"]
    assert mismatches(invoke(*check, *changed, exit_code=4).document) == found
    run = ("--run", tmp_path / "run")
    for part in ("0/2", "1/2"):
        invoke(*prod, "verify", "prod:", *changed, "--shard", part, *run)
    assert mismatches(invoke("merge", tmp_path / "run", "--format", "json", exit_code=4).document)
    other = tmp_path / "other.toml"
    other.write_text(demo.profile.read_text().replace('"bfloat16"', '"float16"', 1))
    page = tmp_path / "page.html"
    invoke(*prod, "report", "prod:", "--profile", other, "-o", page, exit_code=4)
    assert "stamp-mismatch" in text_of(page)
    pages = tmp_path / "pages"
    pages.write_text(f'["{demo.short.name[:64]}"]\n')
    files = tmp_path / "files"
    invoke("migrate", demo.url, files, "--profile", other, "--grace", "0s")
    asked = ("prewarm", "prod:", "--from", files, "--profile", other, "--pages", pages)
    assert "the stamp names another deployment" in invoke(*prod, *asked, "--dry-run").stderr
    # Without the parameter, as before a stamp was made, nothing is compared.
    bare = ("verify", demo.url, "--profile", other, "--format", "json")
    assert not mismatches(invoke(*bare, exit_code=4).document)


def test_a_side_directory_inside_the_store_is_refused(
    demo: Demo, invoke: Invoke, tmp_path: Path
) -> None:
    before = demo.traces()
    (tmp_path / "link").symlink_to(tmp_path / "b")
    for place in (tmp_path / "b" / "side", tmp_path / "link"):
        said = invoke("ls", f"{demo.url}&side_directory={place}", exit_code=2).stderr
        assert f"side_directory: a server's clear removes every file below {tmp_path}/b" in said
        assert said.count("\n") == 1
    said = invoke("ls", f"{demo.url}&side_directory=side", exit_code=2).stderr
    assert "side_directory: give an absolute path" in said
    assert demo.traces() == before


@pytest.mark.slow
def test_a_stamp_is_no_more_readable_than_the_store(
    demo: Demo, invoke: Invoke, tmp_path: Path
) -> None:
    side = tmp_path / "side"
    side.mkdir(mode=0o755)
    for name in "abc":
        (tmp_path / name).chmod(0o700)
    url = f"{demo.url}&side_directory={side}"
    invoke("verify", url, "--profile", demo.profile, "--stamp", exit_code=4)
    for path in (side / "stamps", side / "stamps" / "demo-hybrid-1b.json"):
        assert path.stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_links_below_a_side_directory_are_not_followed(
    demo: Demo, invoke: Invoke, tmp_path: Path
) -> None:
    """Proves that the directory itself may be a link, and nothing below it."""
    real, elsewhere = tmp_path / "real", tmp_path / "elsewhere"
    real.mkdir()
    elsewhere.mkdir()
    (tmp_path / "side").symlink_to(real)
    url = f"{demo.url}&side_directory={tmp_path / 'side'}"
    check = ("verify", url, "--profile", demo.profile)
    (real / "stamps").symlink_to(elsewhere)
    assert "is a symbolic link" in invoke(*check, "--stamp", exit_code=3).stderr
    assert "The stamp was not compared" in invoke(*check, exit_code=4).stderr
    (real / "stamps").unlink()
    invoke(*check, "--stamp", exit_code=4)
    assert not list(elsewhere.iterdir())
    assert len(list((real / "stamps").iterdir())) == 1


@pytest.mark.slow
def test_every_command_refuses_a_part_of_the_directories(
    demo: Demo, invoke: Invoke, tmp_path: Path
) -> None:
    """Proves that commands that look up single keys, or only write, refuse them too."""
    put_many(tmp_path, "abc")
    pages, files = tmp_path / "pages", tmp_path / "files"
    pages.write_text(f'["{"0" * 64}"]\n')
    part, profile = url_of(tmp_path, "a"), ("--profile", demo.profile)
    before = demo.traces()
    for command in (
        ("ls", part),
        ("show", part, demo.short.name[:64], *profile),
        ("verify", part, *profile),
        ("hits", part, *profile, "--pages", pages),
        ("rm", part, "--pages", pages, "--yes"),
        ("migrate", part, files, *profile),
        ("migrate", demo.url, part, *profile),
        ("prewarm", part, "--from", demo.url, *profile, "--pages", pages),
    ):
        said = invoke(*command, exit_code=2).stderr
        assert f"{tmp_path}/a: has the objects of one of 3 directories" in said
    assert demo.traces() == before


@pytest.mark.slow
def test_pages_of_dropped_directories_move_into_the_remaining_one(
    demo: Demo, invoke: Invoke, tmp_path: Path
) -> None:
    """Proves that all pages are whole where servers look now, and that --move cannot remove them.

    The other way, into more directories, works the same.
    """
    profile, grace = ("--profile", demo.profile), ("--grace", "0s")
    for path in tmp_path.glob(f"?/*/{demo.short.name[:64]}*"):
        path.unlink()
    before = demo.traces()
    left = url_of(tmp_path, "a", "&high_watermark=100&directories=1")
    for source, destination in ((demo.url, left), (left, demo.url)):
        refused = invoke("migrate", source, destination, "--move", "--yes", exit_code=2).stderr
        assert "which --move would remove; leave out --move" in refused
    assert demo.traces() == before
    invoke("verify", left, *profile, *grace, exit_code=4)
    invoke("migrate", demo.url, left, *profile, *grace)
    invoke("verify", left, *profile, *grace)
    shutil.rmtree(tmp_path / "b")
    invoke("migrate", left, url_of(tmp_path, "ab"), *profile, *grace)
    grown = ("verify", url_of(tmp_path, "ab"), *profile, *grace, "--format", "json")
    counts = invoke(*grown, exit_code=4).document["counts"]
    assert counts.keys() == {"misplaced-object"}  # the files that a had for b


@pytest.mark.slow
def test_directories_in_the_wrong_order_are_named_without_a_listing(
    demo: Demo, invoke: Invoke, tmp_path: Path
) -> None:
    pages = tmp_path / "pages"
    pages.write_text(f'["{demo.short.name[:64]}"]\n')
    wrong, profile = url_of(tmp_path, "acb"), ("--profile", demo.profile)
    source = tmp_path / "source"
    with open_store(str(source), create=True) as store:
        fill(store, PAGES)
    for code, command in (
        (0, ("show", wrong, demo.short.name[:64], *profile)),
        (0, ("hits", wrong, *profile, "--pages", pages)),
        # The object that was cut short is a conflict.
        (4, ("migrate", source, wrong, *profile, "--grace", "0s", "--dry-run")),
        (0, ("prewarm", wrong, "--from", source, *profile, "--pages", pages, "--dry-run")),
    ):
        said = invoke(*command, exit_code=code).stderr
        assert "files outside the folders of their keys" in said


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["pp", "cp"])
def test_ranks_with_the_same_keys_are_a_finding_and_no_destination(
    demo: Demo, invoke: Invoke, tmp_path: Path, axis: str
) -> None:
    """Proves that looking goes on, as without a profile, and that nothing is written or removed."""
    stages = tmp_path / "stages.toml"
    text = demo.profile.read_text()
    stages.write_text(text.replace("tp = 2", f"tp = 2\n{axis} = 2", 1))
    profile = ("--profile", stages)
    why = f"{axis} 2: NIXL keys do not name the {axis} rank, so ranks overwrite each other's"
    before = demo.traces()
    checked = invoke("verify", demo.url, *profile, "--format", "json", exit_code=4)
    alone = invoke("verify", demo.url, "--format", "json", exit_code=4).document
    (collision,) = (one for one in checked.document["findings"] if one["code"] == "colliding-keys")
    assert (collision["severity"], collision["key"]) == ("error", None)
    assert why in collision["detail"]
    assert [f for f in checked.document["findings"] if f != collision] == alone["findings"]
    assert "values" in checked.document["skipped_checks"]
    listed = invoke("ls", demo.url, *profile, "--format", "jsonl")
    assert len(listed.rows) == PAGES
    shown = invoke("show", demo.url, demo.short.name[:64], *profile)
    for run in (listed, shown):
        assert why in run.stderr
    to_stages = ("--profile", demo.profile, "--to-pp", 2) if axis == "pp" else profile
    for command in (
        ("migrate", tmp_path, demo.url, *profile),
        ("migrate", tmp_path, demo.url, *to_stages),
        ("verify", demo.url, *profile, "--repair", "delete", "--yes"),
        ("hits", demo.url, *profile, "--pages", stages),
    ):
        assert why in invoke(*command, exit_code=2).stderr
    assert demo.traces() == before


@pytest.mark.slow
def test_misplaced_objects_are_a_finding_in_one_process_and_in_parts(
    demo: Demo, invoke: Invoke, tmp_path: Path
) -> None:
    """Proves that directories in the wrong order, and files that moved, do not verify as clean."""
    (tmp_path / "a" / "README").write_text("not an object")
    wrong = url_of(tmp_path, "acb")
    command = ("verify", wrong, "--format", "json")
    checked = invoke(*command, exit_code=4)
    (found,) = (f for f in checked.document["findings"] if f["code"] == "misplaced-object")
    assert found["severity"] == "warning"
    assert "number and order of the directories" in found["detail"]
    assert checked.stderr.count("files outside the folders") == 0  # said once, as a finding
    assert "ignored 1 files that are no objects" in checked.stderr
    assert "files outside the folders" in invoke("ls", wrong).stderr
    run = ("--run", tmp_path / "run")
    for part in ("0/2", "1/2"):
        invoke("verify", wrong, "--shard", part, *run)
    merged = invoke("merge", tmp_path / "run", "--format", "json", exit_code=4).document
    assert merged["findings"] == checked.document["findings"]


def test_a_misplaced_name_that_is_not_utf8_is_a_finding(invoke: Invoke, tmp_path: Path) -> None:
    """Proves that a stranger's file cannot end a verification."""
    folder = tmp_path / "a" / "00"
    folder.mkdir(parents=True)
    name = b"0" * 64 + b"_m\xff\x1b[31m_0_1"
    (folder / os.fsdecode(name)).touch()
    store = url_of(tmp_path, "a")
    command = ("verify", store, "--allow-empty", "--format", "json", "--grace", "0s")
    assert route(name, 1)[1] != b"00"
    (found,) = invoke(*command, exit_code=4).document["findings"]
    assert found["code"] == "misplaced-object"
    assert r"_m\xff" in found["detail"]
