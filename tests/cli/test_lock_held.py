"""Commands do nothing if another process holds the lock: exit 0, and the document says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.move.migrations import demo_store, profile_file
from tests.paused import paused
from tests.stores import OLD

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import Invoke

HOLDER = (
    "import fcntl, sys; file = open(sys.argv[1], 'w');"
    "fcntl.flock(file, fcntl.LOCK_EX); fcntl.lockf(file, fcntl.LOCK_EX);"
    "print('held', flush=True); sys.stdin.read()"
)


@contextmanager
def held(lock: Path) -> Iterator[None]:
    """Hold both kinds of lock of a file in another process."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"held\n"
        try:
            yield
        finally:
            process.stdin.close()


def content(folder: Path) -> dict[str, bytes]:
    """Return the bytes of each file below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def arguments_of(command: str, base: Path) -> list[object]:
    """Return the arguments of a command that would change files below a folder."""
    store, quarantine = base / "store", base / "store/.hicachectl/quarantine"
    return {
        "migrate": ["migrate", store, base / "new"],
        "prewarm": ["prewarm", base / "new", "--from", store, "--all"],
        "verify": ["verify", store],
        "repair": ["verify", store, "--repair", "delete", "--yes", "--grace", "0s"],
        "rm": ["rm", store, "--before", "0s", "--yes"],
        "restore": ["restore", quarantine, store, "--yes"],
    }[command]


@pytest.mark.parametrize("command", ["migrate", "prewarm", "verify", "repair", "rm", "restore"])
def test_nothing_is_done_and_the_document_says_why(
    invoke: Invoke, tmp_path: Path, command: str
) -> None:
    store = demo_store(tmp_path / "store")
    profile = profile_file(tmp_path / "profile.toml")
    damaged = next(path for path in sorted(store.glob("*.bin")) if "mamba" not in path.name)
    (store / ".hicachectl/quarantine").mkdir(parents=True)
    arguments = arguments_of(command, tmp_path)
    if command in ("migrate", "prewarm", "verify", "repair"):
        arguments += ["--profile", profile]
    if command == "repair":
        damaged.write_bytes(damaged.read_bytes()[:-1])
        os.utime(damaged, (OLD, OLD))  # repairs watch a store with recent writes for a second
    lock = tmp_path / "lock"
    before = content(store)
    with held(lock):
        output = invoke(*arguments, "--lock", lock, "--format", "json")
        table = invoke(*arguments, "--lock", lock, "--format", "table")
        assert table.stdout
        assert "no quarantined page" not in table.stderr  # the quarantine was not read
    document = output.document
    assert (document["complete"], document["stopped_by"]) == (False, "lock")
    assert f"{lock}: another process holds this lock; nothing was done" in output.stderr
    assert content(store) == before
    assert not (tmp_path / "new").exists()

    status = 4 if command == "repair" else 0
    free = invoke(*arguments, "--lock", lock, "--format", "json", exit_code=status)
    done = free.document
    assert list(done) == list(document)
    assert (done["complete"], done["stopped_by"]) == (True, None)
    sums = [sum(v for v in d.values() if isinstance(v, int)) for d in (done, document)]
    assert sums[0] > sums[1] or command == "restore"
    stores = ("store", "source", "destination")
    assert [done.get(name) for name in stores] == [document.get(name) for name in stores]


@pytest.mark.slow
def test_the_same_migration_twice_at_once_is_done_once(invoke: Invoke, tmp_path: Path) -> None:
    source, target = demo_store(tmp_path / "source"), tmp_path / "target"
    arguments = ("migrate", source, target, "--format", "json")
    point = "hicachectl.move.runs:CopyRun.copy"
    with paused(tmp_path / "run", point, 1, *arguments) as run:
        second = invoke(*arguments)
        assert list(target.glob("*.bin")) == []
        ended = run.resumed()
    document = json.loads(second.stdout)
    assert (document["complete"], document["stopped_by"], document["pages"]) == (False, "lock", 0)
    said = ": another process runs the same command; run again after it has ended\n"
    assert said in second.stderr
    assert ended.code == 0, ended.stderr
    first = json.loads(ended.stdout)
    assert first["complete"]
    assert list(first) == list(document)
    assert first["pages"] > 0
