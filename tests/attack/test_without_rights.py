"""An operator who lacks rights or room: not root, no home, no inodes, little shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.attack.children import NOBODY, as_nobody, as_user
from tests.move.migrations import PAGES, demo_store, profile_file
from tests.skips import missing, needs_root
from tests.stores import contents

if TYPE_CHECKING:
    from collections.abc import Iterator


FOUND = (
    "verify",
    "prewarm from",
    "doctor",
    "report",
)  # commands that end with 4 for a damaged page


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a separate process."""
    return subprocess.run(
        [sys.executable, "-m", "hicachectl", *map(str, arguments)],
        env={**os.environ, **environment}, capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip


def test_a_migration_needs_no_home(tmp_path: Path) -> None:
    source = demo_store(tmp_path / "source")
    done = run("migrate", source, tmp_path / "new", "--format", "json", HOME="/dev/null/home")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["pages"] == PAGES
    assert "; set XDG_STATE_HOME to a writable directory, or use hicachectl rm" in done.stderr


@pytest.mark.parametrize("kind", ["link", "FIFO", "another user's"])
def test_a_mark_is_a_file_of_the_users_own(tmp_path: Path, kind: str) -> None:
    """A mark decides which temporary files are removed."""
    source, victim = demo_store(tmp_path / "source"), tmp_path / "victim"
    victim.write_text("0123456789abcdef")
    arguments = ("migrate", source, tmp_path / "new")
    options = {"XDG_STATE_HOME": str(tmp_path / "state")}
    # The name of the mark, from a run that is killed.
    preload = "import os; from hicachectl.move import migration; "
    preload += "migration.carry_out = lambda *a, **o: os.kill(os.getpid(), 9); "
    preload += "from hicachectl.__main__ import main; main()"
    command = [sys.executable, "-c", preload, *map(str, arguments)]
    subprocess.run(command, env={**os.environ, **options}, check=False)
    (mark,) = (tmp_path / "state/hicachectl/marks").iterdir()
    mark.unlink()
    if kind == "link":
        mark.symlink_to(victim)
    elif kind == "FIFO":
        os.mkfifo(mark)
    else:
        mark.write_text("0123456789abcdef")
        os.chown(mark, NOBODY, NOBODY)
    done = run(*arguments, **options)
    assert done.returncode == 3
    assert str(mark) in done.stderr
    assert victim.read_text() == "0123456789abcdef"


@pytest.fixture
def few_inodes(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for eight more files or directories."""
    folder = tmp_path / "small"
    folder.mkdir()
    options = "size=64m,nr_inodes=9"
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        missing("the right to mount a tmpfs", "run the tests as root, with CAP_SYS_ADMIN")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_file_system_without_inodes_keeps_whole_pages(tmp_path: Path, few_inodes: Path) -> None:
    source, target = demo_store(tmp_path / "source"), few_inodes / "new"
    done = run("migrate", source, target, "--format", "json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["stopped_by"]) == (4, "destination full"), done.stderr
    names = {path.name for path in target.glob("*.bin")}
    pages = {name[:64] for name in names}
    assert len(pages) == document["pages"]
    assert names == {path.name for path in source.glob("*.bin") if path.name[:64] in pages}
    assert "Traceback" not in done.stderr


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that everybody may enter, with a profile and a home for the other user."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        place = Path(name)
        place.chmod(0o755)
        (place / "home").mkdir()
        os.chown(place / "home", NOBODY, NOBODY)
        profile_file(place / "p.toml").chmod(0o644)
        yield place


def given(path: Path, user: int, group: int, directory: int, file: int) -> Path:
    """Give a store to a user and a group, with these modes."""
    for found in (path, *path.rglob("*")):
        os.chown(found, user, group)
        found.chmod(directory if found.is_dir() else file)
    return path


def damaged_store(path: Path) -> str:
    """Write a store with a cut object in one old page; return that page."""
    demo_store(path)
    broken = min(file for file in path.glob("*.bin") if ".mamba" not in file.name)
    os.truncate(broken, 100)
    for file in path.glob(f"{broken.name[:64]}*"):
        os.utime(file, (1, 1))
    return broken.name[:64]


def changing(place: Path, store: Path) -> dict[str, list[object]]:
    """Return the commands that change the store."""
    profile = place / "p.toml"
    return {
        "stamp": ["verify", store, "--profile", profile, "--stamp", "--fail-on", "never"],
        "repair": ["verify", store, "--profile", profile, "--repair", "quarantine", "--yes"],
        "rm": ["rm", store, "--model", "demo/hybrid-1b", "--yes"],
        "migrate": ["migrate", place / "source", store],
        "prewarm": ["prewarm", store, "--from", place / "source", "--all", "--profile", profile],
        "lock": ["rm", store, "--model", "none", "--yes", "--lock", store / "l.lock"],
        "pack": ["migrate", place / "source", f"pack://{store}/a.hcpack"],
    }


def looking(place: Path, store: Path, page: str) -> dict[str, list[object]]:
    """Return the commands that only read the store, by name."""
    profile, target = place / "p.toml", place / "home"
    return {
        "ls": ["ls", store],
        "show": ["show", store, page],
        "verify": ["verify", store, "--profile", profile],
        "hits": ["hits", store, "--profile", profile, "--token-ids", place / "ids.jsonl"],
        "from": ["migrate", store, target / "copied"],
        "pack from": ["migrate", store, f"pack://{target}/b.hcpack"],
        "prewarm from": ["prewarm", target / "warm", "--from", store, "--all",
                         "--profile", profile],
        "pack info": ["pack", "info", target / "b.hcpack"],
        "doctor": ["doctor", store],
        "report": ["report", store, "-o", target / "page.html"],
        "profile": ["profile", store],
        "simulate": ["simulate", store, "--trace", place / "ids.jsonl", "--profile", profile],
    }  # fmt: skip


@needs_root
@pytest.mark.parametrize("kind", ["read only", "closed"])
def test_another_user_changes_nothing_of_a_store_of_root(place: Path, kind: str) -> None:
    store = place / "store"
    page = damaged_store(store)
    given(store, 0, 0, *((0o755, 0o644) if kind == "read only" else (0o700, 0o600)))
    demo_store(place / "source", PAGES + 2)
    (place / "ids.jsonl").write_text(json.dumps(list(range(65))))
    before = contents(store)
    commands = looking(place, store, page) | changing(place, store)
    answers = dict(zip(commands, as_nobody([*commands.values()], place / "home"), strict=True))
    assert contents(store) == before
    assert sorted(path.name for path in store.iterdir()) == sorted(before)
    for name, answer in answers.items():
        assert "Traceback" not in answer.stderr, name
        assert "please report" not in answer.stderr, name
    refused = {name: answers[name] for name in changing(place, store)}
    if kind == "closed":
        refused |= {name: answers[name] for name in ("ls", "show", "verify", "hits", "from")}
        assert "Permission denied; run as the server's user" in answers["ls"].stderr
    else:
        status = {name: answers[name].status for name in looking(place, store, page)}
        assert status == dict.fromkeys(status, 0) | dict.fromkeys(FOUND, 4)
        (copied,) = (place / "home").glob("copied")
        assert len({path.name[:64] for path in copied.glob("*.bin")}) == PAGES - 1
    for name, answer in refused.items():
        expected = {"lock": (2,), "migrate": (3, 4), "prewarm": (3, 4)}.get(name, (3,))
        assert answer.status in expected, (name, answer)
        lines = answer.stderr.strip().splitlines()
        assert lines, name
        if answer.status in (2, 3):
            assert len([line for line in lines if "ermission denied" in line]) == 1, (name, answer)


@needs_root
@pytest.mark.parametrize("kind", ["own", "group"])
def test_another_user_does_all_with_a_store_of_their_own_or_their_group(
    place: Path, kind: str
) -> None:
    store = place / "store"
    page = damaged_store(store)
    owner = NOBODY if kind == "own" else 0
    given(store, owner, NOBODY, 0o775, 0o664)
    demo_store(place / "source", PAGES + 2)
    before = contents(store)
    change = changing(place, store)
    quarantine = store / ".hicachectl" / "quarantine"
    commands: list[list[object]] = [
        change["stamp"],
        change["repair"],
        ["restore", quarantine, store, "--yes"],
        ["show", store, page],
        change["lock"],
        change["pack"],
        ["pack", "info", store / "a.hcpack"],
        ["pack", "repair", store / "a.hcpack"],
        ["verify", f"pack://{store}/a.hcpack", "--profile", place / "p.toml"],
        change["prewarm"],
    ]
    answers = as_nobody(commands, place / "home")
    status = [answer.status for answer in answers]
    assert status == [0, 4, 0, 0, 0, 0, 0, 0, 0, 4], answers  # 4: damage; then a conflict
    kept = contents(store)
    assert {name: kept[name][0] for name in before} == {n: b for n, (b, _) in before.items()}
    assert len({name[:64] for name in kept if name.endswith(".bin")}) == PAGES + 2
    (gone,) = as_nobody([change["rm"]], place / "home")
    assert gone.status == 0, gone.stderr
    assert not list(store.glob("*.bin"))


@needs_root
def test_the_owner_of_a_store_undoes_the_repair_of_a_group_member(place: Path) -> None:
    """Whatever the umask of the member, here 022."""
    store, owner, member = place / "store", NOBODY - 1, NOBODY
    page = damaged_store(store)
    given(store, owner, NOBODY, 0o2775, 0o664)
    repair = ["verify", store, "--profile", place / "p.toml", "--repair", "quarantine", "--yes"]
    quarantine = store / ".hicachectl" / "quarantine"
    first, second = (as_user(repair, place / "home", member) for _ in range(2))
    assert (first.status, second.status) == (4, 0), (first, second)
    folders = [store, *(path for path in store.rglob("*") if path.is_dir())]
    assert {path.stat().st_mode & 0o7777 for path in folders} == {0o2775}
    restored = as_user(["restore", quarantine, store, "--yes"], place / "home", owner)
    assert restored.status == 0, restored
    assert list(store.glob(f"{page}*"))
    again = as_user(repair, place / "home", member)
    assert again.status == 4, again
    purged = as_user(
        ["quarantine", "purge", quarantine, "--before", "0s", "--yes"], place / "home", owner
    )
    assert purged.status == 0, purged
    assert not list(quarantine.iterdir())


READING = (
    "show", "verify", "from", "pack from", "prewarm from", "report", "stamp", "repair", "move",
)  # commands that read objects of the store  # fmt: skip


@needs_root
def test_objects_that_a_user_may_not_read_are_not_damaged(place: Path) -> None:
    """A member of the group may write to the directory, but not read the files of umask 077."""
    store = demo_store(place / "store")
    page = min(store.glob("*.bin")).name[:64]
    for file in store.glob("*.bin"):
        os.utime(file, (1, 1))  # old enough for a repair
    given(store, 0, NOBODY, 0o2775, 0o600)
    demo_store(place / "source", PAGES + 2)
    before = contents(store)
    change = changing(place, store)
    commands = looking(place, store, page) | {name: change[name] for name in ("stamp", "repair")}
    commands["move"] = ["migrate", store, place / "home/moved", "--move", "--yes"]
    asked = [commands[name] for name in (*READING, "doctor", "ls")]
    *answers, doctor, listed = as_nobody(asked, place / "home")
    assert contents(store) == before
    for name, answer in zip(READING, answers, strict=True):
        assert answer.status == 3, (name, answer)
        line = answer.stderr.strip().splitlines()[-1]
        assert "…: cannot read: Permission denied; run as the server's user" in line, name
        assert not answer.stdout, name
    assert (doctor.status, listed.status) == (4, 0), (doctor, listed)
    assert b"readable   " in doctor.stdout
    assert b"cannot read: Permission denied" in doctor.stdout
    assert b"structure" not in doctor.stdout


@needs_root
def test_trailers_in_place_keep_owner_group_and_mode_or_are_not_written(place: Path) -> None:
    """A file of the operator's own might not be evicted by the server, or not be read."""
    store = demo_store(place / "store")
    given(store, NOBODY, NOBODY, 0o777, 0o644)
    theirs = min(store.glob("*_0_2.bin"))
    os.chown(theirs, NOBODY + 1, NOBODY)
    before = {path.name: path.stat() for path in store.glob("*.bin")}
    adopt = ["migrate", store, store, "--profile", place / "p.toml", "--weights", 32 * "a"]
    adopt += ["--trailers", "write", "--format", "json"]
    (ended,) = as_nobody([adopt], place / "home")
    document = json.loads(ended.stdout)
    assert (ended.status, document["pages"], document["failed"]) == (4, PAGES - 1, 1)
    assert f"{theirs.name}: its owner, group or mode cannot be kept" in ended.stderr
    assert theirs.stat().st_ino == before[theirs.name].st_ino
    done = run(*adopt)  # as root
    assert json.loads(done.stdout)["pages"] == 1, done.stderr
    for path in store.glob("*.bin"):
        now, earlier = path.stat(), before[path.name]
        assert now.st_size == earlier.st_size + 128
        assert (now.st_uid, now.st_gid, now.st_mode) == (
            earlier.st_uid,
            earlier.st_gid,
            earlier.st_mode,
        )
