"""Links, FIFOs and strangers' files in place of the tool's own files are never followed."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.backends.disk.directory import Directory
from hicachectl.backends.file.store import FileStore
from hicachectl.backends.runs import open_run
from hicachectl.formats.errors import StoreUnavailable, UntrustedError
from hicachectl.move import restore
from hicachectl.move.restore import restore_groups
from tests import stores
from tests.move.repairs import default_quarantine, dsa_store, indexer, kv, repaired, shorten
from tests.skips import needs_root
from tests.stores import contents

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.conftest import Invoke

RUN = "20260101T000000Z-abcdef"
STRANGER = 64_321

State = dict[str, tuple[int, bytes | str]]


def state(directory: Path) -> State:
    """Return everything below a directory: kind and mode, and bytes or target."""
    found: State = {}
    for path in sorted(directory.rglob("*")):
        mode = path.lstat().st_mode
        value: bytes | str = ""
        if stat.S_ISLNK(mode):
            value = str(path.readlink())
        elif stat.S_ISREG(mode):
            value = path.read_bytes()
        found[str(path.relative_to(directory))] = mode, value
    return found


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A directory outside the store that looks like a quarantine's run."""
    directory = tmp_path / "victim"
    (directory / ".hicachectl" / "plugin").mkdir(parents=True)
    (directory / "empty").mkdir()
    for name in (".hicachectl/findings.jsonl", "report.txt", "notes.tmp", kv(1), "17"):
        (directory / name).write_text(f"precious {name}")
    return directory


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with one damaged page, and a profile beside it."""
    directory = dsa_store(tmp_path / "store", 4)
    shorten(directory / indexer(1))
    (tmp_path / "profile.toml").write_text(stores.DSA)
    return directory


@pytest.fixture
def shared(store: Path) -> Iterator[Path]:
    """The store, in a place that other users can reach; pytest's directories belong to root."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        shutil.copy2(store.parent / "profile.toml", place)
        yield Path(shutil.copytree(store, Path(place, store.name)))


def writers(store: Path) -> dict[str, tuple[object, ...]]:
    profile = store.parent / "profile.toml"
    repair = ("--profile", profile, "--repair", "quarantine", "--yes", "--checks", "groups,sizes",
              "--fail-on", "never")  # fmt: skip
    return {
        "rm": ("rm", store, "--model", "x-dsa", "--yes"),
        "repair": ("verify", store, *repair),
        "restore": ("restore", default_quarantine(store), store, "--yes"),
    }


def made_run(store: Path) -> Path:
    """Repair the store; return the run."""
    repaired(store)
    (run,) = default_quarantine(store).iterdir()
    return run


# attacks: each returns the name of the entry that the refusal must name


def link_run(store: Path, victim: Path) -> str:
    default_quarantine(store).mkdir(parents=True)
    (default_quarantine(store) / RUN).symlink_to(victim)
    return RUN


def link_side_of_run(store: Path, victim: Path) -> str:
    side = made_run(store) / ".hicachectl"
    shutil.rmtree(victim / ".hicachectl")
    side.rename(victim / ".hicachectl")
    side.symlink_to(victim / ".hicachectl")
    return ".hicachectl"


def link_side(store: Path, victim: Path) -> str:
    (victim / "quarantine" / RUN / ".hicachectl").mkdir(parents=True)
    (store / ".hicachectl").symlink_to(victim)
    return ".hicachectl"


def link_quarantine(store: Path, victim: Path) -> str:
    (victim / RUN).mkdir()
    (store / ".hicachectl").mkdir()
    default_quarantine(store).symlink_to(victim)
    return "quarantine"


def link_form(store: Path, victim: Path) -> str:
    path = made_run(store) / ".hicachectl" / "run.json"
    path.rename(victim / "17")
    path.symlink_to(victim / "17")
    return "run.json"


def link_findings(store: Path, victim: Path) -> str:
    path = made_run(store) / ".hicachectl" / "findings.jsonl"
    path.unlink()
    path.symlink_to(victim / "17")
    return "findings.jsonl"


def fifo_run(store: Path, _: Path) -> str:
    default_quarantine(store).mkdir(parents=True)
    os.mkfifo(default_quarantine(store) / RUN)
    return RUN


def fifo_form(store: Path, _: Path) -> str:
    path = made_run(store) / ".hicachectl" / "run.json"
    path.unlink()
    os.mkfifo(path)
    return "run.json"


ATTACKS = [
    ("rm", link_side),
    ("repair", link_side),
    ("repair", link_quarantine),
    *(
        ("restore", attack)
        for attack in (
            link_run,
            link_side_of_run,
            link_side,
            link_quarantine,
            link_form,
            link_findings,
            fifo_run,
            fifo_form,
        )
    ),
]


@pytest.mark.parametrize(
    ("command", "attack"), ATTACKS, ids=lambda one: getattr(one, "__name__", one)
)
def test_writers_refuse_before_any_change(
    invoke: Invoke, store: Path, victim: Path, command: str, attack: Callable[[Path, Path], str]
) -> None:
    name = attack(store, victim)
    before = state(store.parent)
    outcome = invoke(*writers(store)[command], exit_code=3)
    assert state(store.parent) == before
    assert outcome.stdout == ""
    assert f"/{name}: is a " in outcome.stderr
    assert "Traceback" not in outcome.stderr


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_a_restore_takes_no_object_that_is_no_file(
    invoke: Invoke, store: Path, victim: Path, kind: str
) -> None:
    """It is named, and stays."""
    path = made_run(store) / indexer(1)
    (victim / "17").write_bytes(path.read_bytes())
    path.unlink()
    if kind == "link":
        path.symlink_to(victim / "17")
    else:
        os.mkfifo(path)
    before = state(victim)
    assert "ignored 1 link" in invoke(*writers(store)["restore"]).stderr
    assert state(victim) == before
    assert os.path.lexists(path)
    assert not (store / indexer(1)).exists()


def test_the_named_quarantine_may_be_a_link(invoke: Invoke, store: Path, tmp_path: Path) -> None:
    before = contents(store)
    (tmp_path / "real").mkdir()
    (tmp_path / "named").symlink_to(tmp_path / "real")
    repair = writers(store)["repair"]
    invoke(*repair, "--quarantine", tmp_path / "named")
    assert len(list((tmp_path / "real").glob("*/.hicachectl/run.json"))) == 1
    invoke("restore", tmp_path / "named", store, "--yes")
    assert contents(store) == before


def test_the_store_may_be_named_by_a_link(invoke: Invoke, store: Path, tmp_path: Path) -> None:
    before = contents(store)
    (tmp_path / "named").symlink_to(store)
    invoke("verify", tmp_path / "named", *writers(store)["repair"][2:])
    assert contents(store) != before
    invoke("restore", default_quarantine(tmp_path / "named"), tmp_path / "named", "--yes")
    assert contents(store) == before


# stamps


def stamp_arguments(store: Path) -> tuple[object, ...]:
    return "verify", store, "--profile", store.parent / "profile.toml", "--fail-on", "never"


@pytest.mark.parametrize("kind", ["link", "fifo", "directory link", "side link"])
def test_readers_leave_a_stamp_alone_that_is_no_file(
    invoke: Invoke, store: Path, victim: Path, kind: str
) -> None:
    invoke(*stamp_arguments(store), "--stamp")
    (stamp,) = (store / ".hicachectl" / "stamps").iterdir()
    # A stamp of another deployment: following it would give a finding.
    (victim / stamp.name).write_text(stamp.read_text().replace('"page_size": 4', '"page_size": 8'))
    if kind == "directory link":
        stamp.parent.rename(store.parent / "aside")
        stamp.parent.symlink_to(victim)
    elif kind == "side link":
        (victim / "stamps").mkdir()
        (victim / stamp.name).rename(victim / "stamps" / stamp.name)
        (store / ".hicachectl").rename(store.parent / "aside")
        (store / ".hicachectl").symlink_to(victim)
    else:
        stamp.unlink()
        if kind == "fifo":
            os.mkfifo(stamp)
        else:
            stamp.symlink_to(victim / stamp.name)
    before = state(store.parent)
    outcome = invoke(*stamp_arguments(store), "--format", "json")
    assert "stamp-mismatch" not in outcome.document["counts"]
    assert "The stamp was not compared" in outcome.stderr
    invoke(*stamp_arguments(store), "--stamp", exit_code=3)
    assert state(store.parent) == before


@needs_root
def test_a_stamp_that_the_user_may_not_read_is_said(shared: Path) -> None:
    (shared / ".hicachectl").mkdir(mode=0o700)
    done = as_user(STRANGER, STRANGER, *stamp_arguments(shared))
    assert done.returncode == 0, done.stderr
    assert "The stamp was not compared" in done.stderr
    assert "ermission denied" in done.stderr


# who is trusted


@needs_root
@pytest.mark.parametrize("what", ["run", "run.json", "findings.jsonl", "side of run", "side"])
def test_files_of_strangers_are_refused(invoke: Invoke, store: Path, what: str) -> None:
    run = made_run(store)
    own = run / ".hicachectl"
    place = {"run": run, "side of run": own, "side": store / ".hicachectl"}.get(what, own / what)
    os.chown(place, STRANGER, STRANGER)
    default_quarantine(store).chmod(0o777)
    before = state(store.parent)
    outcome = invoke(*writers(store)["restore"], exit_code=3)
    assert f"{place}: belongs to user {STRANGER}" in outcome.stderr
    assert state(store.parent) == before


@needs_root
def test_root_manages_a_quarantine_elsewhere_whose_runs_belong_to_the_owner_of_the_store(
    invoke: Invoke, store: Path, tmp_path: Path
) -> None:
    for path in (store, *store.rglob("*")):
        os.chown(path, STRANGER, STRANGER)
    store.chmod(0o750)
    before = contents(store)
    (tmp_path / "q").mkdir(mode=0o755)
    invoke(*writers(store)["repair"], "--quarantine", tmp_path / "q")
    (run,) = (tmp_path / "q").iterdir()
    facts = run.stat()
    assert (facts.st_uid, facts.st_gid) == (STRANGER, STRANGER)
    assert stat.S_IMODE(facts.st_mode) == 0o750
    listed = invoke("quarantine", "list", tmp_path / "q", "--format", "json").document
    assert [row["state"] for row in listed["runs"]] == ["kept"]
    invoke("restore", tmp_path / "q", store, "--yes")
    assert contents(store) == before
    assert list((tmp_path / "q").iterdir()) == []


@needs_root
def test_objects_keep_their_owner_in_quarantine_and_back(invoke: Invoke, store: Path) -> None:
    for number in range(4):
        os.chown(store / kv(number), STRANGER, STRANGER)
    before = contents(store)
    invoke(*writers(store)["repair"])
    invoke(*writers(store)["restore"])
    assert contents(store) == before
    assert (store / kv(1)).stat().st_uid == STRANGER


@needs_root
def test_the_owner_of_the_store_is_trusted(invoke: Invoke, store: Path) -> None:
    before = contents(store)
    repaired(store)
    for path in (store, *store.rglob("*")):
        os.chown(path, STRANGER, STRANGER)
    invoke(*writers(store)["restore"])
    assert contents(store) == before


_AS_USER = """
import os, sys
import click, tomllib, numpy, pyarrow, pyarrow.compute, pyarrow.fs
import hicachectl.cli.group, hicachectl.cli.commands.rm, hicachectl.cli.commands.verify
import hicachectl.cli.commands.restore, hicachectl.move.withdrawal
import hicachectl.move.restore, hicachectl.verification.verify
import encodings.utf_8_sig, pwd, importlib.metadata
from hicachectl.__main__ import run
from hicachectl.checks.codes import builtin_codes
builtin_codes()
run(['ls', '/'])
uid, gid, mask = map(int, sys.argv[1:4])
os.setgroups([gid]); os.setgid(gid); os.setuid(uid); os.umask(mask)
os._exit(run(sys.argv[4:]))
"""


def as_user(
    uid: int, gid: int, *arguments: object, umask: int = 0o022
) -> subprocess.CompletedProcess[str]:
    """Run the command line as another user, after root has imported everything."""
    return subprocess.run(
        [sys.executable, "-c", _AS_USER, *map(str, (uid, gid, umask, *arguments))],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@needs_root
def test_a_group_writable_store_trusts_its_group(shared: Path) -> None:
    """Two users of one group repair and restore in turn."""
    before = contents(shared)
    for path in (shared, *shared.iterdir()):
        os.chown(path, STRANGER, STRANGER)
    shared.chmod(0o2775)
    commands = writers(shared)
    done = as_user(STRANGER + 1, STRANGER, *commands["repair"], umask=0o002)
    assert done.returncode == 0, done.stderr
    assert contents(shared) != before
    (run,) = default_quarantine(shared).iterdir()
    assert run.stat().st_uid == STRANGER + 1
    done = as_user(STRANGER + 2, STRANGER, *commands["restore"], umask=0o002)
    assert done.returncode == 0, done.stderr
    assert contents(shared) == before


@needs_root
def test_a_stranger_in_a_store_that_all_may_write_is_refused(shared: Path) -> None:
    shared.chmod(0o777)
    (shared / ".hicachectl").mkdir()
    os.chown(shared / ".hicachectl", STRANGER, STRANGER)
    done = as_user(STRANGER + 1, STRANGER + 1, *writers(shared)["rm"])
    assert done.returncode == 3, done.stderr
    assert f"belongs to user {STRANGER}" in done.stderr


@needs_root
def test_the_owner_of_a_store_can_use_what_root_made(invoke: Invoke, shared: Path) -> None:
    before = contents(shared)
    for path in (shared, *shared.iterdir()):
        os.chown(path, STRANGER, STRANGER)
    shared.chmod(0o700)
    invoke(*stamp_arguments(shared), "--stamp")
    invoke(*writers(shared)["repair"])
    done = as_user(STRANGER, STRANGER, *stamp_arguments(shared))
    assert done.returncode == 0, done.stderr
    done = as_user(STRANGER, STRANGER, *writers(shared)["restore"])
    assert done.returncode == 0, done.stderr
    assert contents(shared) == before


# locks


@pytest.mark.parametrize("kind", ["link", "dangling link", "fifo", "directory"])
def test_a_lock_that_is_no_file_is_refused(
    invoke: Invoke, store: Path, victim: Path, kind: str
) -> None:
    lock = store.parent / "lock"
    if kind == "fifo":
        os.mkfifo(lock)
    elif kind == "directory":
        lock.mkdir()
    else:
        lock.symlink_to(victim / ("17" if kind == "link" else "new"))
    before = state(store.parent)
    code = 2 if kind == "directory" else 3
    outcome = invoke("rm", store, "--model", "x-dsa", "--yes", "--lock", lock, exit_code=code)
    assert str(lock) in outcome.stderr
    assert state(store.parent) == before


def test_the_parent_of_a_lock_may_be_a_link(invoke: Invoke, store: Path) -> None:
    (store.parent / "locks").mkdir()
    (store.parent / "named").symlink_to(store.parent / "locks")
    invoke("rm", store, "--model", "no", "--yes", "--lock", store.parent / "named" / "lock")
    assert (store.parent / "locks" / "lock").is_file()


@needs_root
def test_the_lock_of_a_stranger_is_refused(invoke: Invoke, store: Path) -> None:
    lock = store.parent / "lock"
    lock.write_text("")
    os.chown(lock, STRANGER, STRANGER)
    outcome = invoke("rm", store, "--model", "no", "--yes", "--lock", lock, exit_code=3)
    assert f"belongs to user {STRANGER}" in outcome.stderr


# swapped between check and use


def test_a_run_swapped_for_a_link_after_the_check_is_not_followed(
    store: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is swapped right after it was opened."""
    run = made_run(store)

    def swapped(*arguments: Any, **options: Any) -> Any:
        found = open_run(*arguments, **options)
        if not run.is_symlink():
            run.rename(store.parent / "aside")
            run.symlink_to(victim)
        return found

    monkeypatch.setattr(restore, "open_run", swapped)
    before = state(victim)
    with FileStore(store) as opened, suppress(UntrustedError, StoreUnavailable):
        restore_groups(opened, default_quarantine(store))
    assert run.is_symlink()
    assert state(victim) == before
    objects = [path for path in store.iterdir() if path.is_file()]
    assert not any(path.read_bytes().startswith(b"precious") for path in objects)


def test_a_race_for_the_side_directory_touches_nothing_outside(store: Path, victim: Path) -> None:
    """A thread swaps directory and link again and again during repairs."""
    side, link = store / ".hicachectl", store.parent / "link"
    link.symlink_to(victim)
    (victim / "quarantine" / RUN / ".hicachectl").mkdir(parents=True)
    (victim / "quarantine" / RUN / ".hicachectl" / "run.json").write_text("{}")
    side.mkdir()
    before = state(victim)
    stopped = threading.Event()

    def swap() -> None:
        aside = store.parent / "aside"
        while not stopped.is_set():
            with suppress(OSError):
                side.rename(aside)
                link.rename(side)
                side.rename(link)
                aside.rename(side)

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        for _ in range(30):
            with suppress(StoreUnavailable):
                repaired(store)
    finally:
        stopped.set()
        swapper.join()
    assert state(victim) == before


def test_a_file_swapped_for_a_link_is_refused_when_it_is_opened(
    tmp_path: Path, victim: Path
) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "x").write_text("mine")
    with Directory.named(str(tmp_path / "d"), writes=False) as directory:
        directory.check("x", directory.entries()["x"])
        (tmp_path / "d" / "x").unlink()
        (tmp_path / "d" / "x").symlink_to(victim / "17")
        with pytest.raises(UntrustedError, match="symbolic link"):
            directory.read("x", 10)


# runs that were altered


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"form": 1, "begin": ' + "9" * 5000 + "}",
        "\x00" * 100,
        '"\\ud800"',
        "null",
        "1e999",
        '{"form": ' * 5000,
    ],
    ids=["deep", "digits", "zeros", "surrogate", "null", "infinite", "objects"],
)
@pytest.mark.parametrize("name", ["run.json", "findings.jsonl"])
def test_text_that_describes_no_run_is_one_line(
    invoke: Invoke, store: Path, name: str, text: str
) -> None:
    path = made_run(store) / ".hicachectl" / name
    path.write_text(text)
    before = state(store)
    outcome = invoke(*writers(store)["restore"], exit_code=2)
    assert outcome.stderr.count("\n") == 1
    assert len(outcome.stderr) < 1000
    assert str(path) in outcome.stderr
    assert "move " in outcome.stderr
    assert state(store) == before


@pytest.mark.parametrize(
    "alteration",
    [
        {"begin": 10**400},
        {"begin": True},
        {"begin": "1.5"},
        {"form": True},
        {"form": 10**400},
        {"form": [[[[]]]] * 1000},
        {"scheme": ["file"]},
        {"grammar": 3},
        {"run": RUN},
        {"store": None},
    ],
    ids=str,
)
def test_an_altered_run_is_one_line_that_says_what_to_do(
    invoke: Invoke, store: Path, alteration: dict[str, Any]
) -> None:
    run = made_run(store)
    path = run / ".hicachectl" / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **alteration}))
    before = state(store)
    outcome = invoke(*writers(store)["restore"], exit_code=2)
    assert outcome.stderr.count("\n") == 1
    assert len(outcome.stderr) < 1000
    assert str(run) in outcome.stderr
    assert "out of the quarantine" in outcome.stderr
    assert state(store) == before
    # The next step in the message works.
    run.rename(store.parent / run.name)
    invoke(*writers(store)["restore"])


def test_a_run_of_a_later_form_is_said(invoke: Invoke, store: Path) -> None:
    path = made_run(store) / ".hicachectl" / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "form": 2}))
    message = invoke(*writers(store)["restore"], exit_code=2).stderr
    assert "form 2, but this version reads form 1" in message


@pytest.mark.parametrize("command", ["ls", "verify", "rm", "migrate"])
def test_a_link_named_like_an_object_is_named_and_left_alone(
    invoke: Invoke, tmp_path: Path, command: str
) -> None:
    store, victim = tmp_path / "store", tmp_path / "victim"
    store.mkdir()
    stores.put_pages(store, range(3), "_m")
    victim.write_bytes(b"not an object")
    link = store / f"{stores.page(7)}_m.bin"
    link.symlink_to(victim)
    os.mkfifo(store / f"{stores.page(8)}_m.bin")
    options = {
        "rm": ("--model", "m", "--yes"),
        "migrate": (tmp_path / "target",),
    }.get(command, ())
    said = invoke(command, store, *options, exit_code=0)
    assert "ignored 2 links, FIFOs" in said.stderr
    assert link.is_symlink()
    assert victim.read_bytes() == b"not an object"
