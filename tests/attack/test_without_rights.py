"""An operator without rights or room: not root, no home, no inodes, little shared memory."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

import pytest

from hicachectl.formats.errors import UsageError
from hicachectl.migrating.journal import journal_path
from tests.hicachectl.migrations import PAGES, demo_store
from tests.skips import missing, needs_root

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NOBODY = 65534


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "hicachectl", *map(str, arguments)],
        env={**os.environ, **environment}, capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of temporary files, an empty one."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_without_a_home_the_journal_lies_in_a_directory_of_the_users_alone(
    tmp_path: Path,
) -> None:
    source, temporary = demo_store(tmp_path / "source"), tmp_path / "tmp"
    temporary.mkdir()
    options = {"HOME": "/dev/null/home", "TMPDIR": str(temporary)}
    done = run("migrate", source, tmp_path / "new", "--format", "json", **options)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["pages"] == PAGES
    own = temporary / f"hicachectl-{os.geteuid()}"
    assert f"the journal is in {own}; XDG_STATE_HOME changes that" in done.stderr
    assert stat.S_IMODE(own.stat().st_mode) == 0o700


@pytest.mark.parametrize("attack", ["link", "shared", "file"])
def test_a_directory_that_others_can_write_to_keeps_no_journal(
    temporary: Path, tmp_path: Path, attack: str
) -> None:
    own, victim = temporary / f"hicachectl-{os.geteuid()}", tmp_path / "victim"
    victim.mkdir(0o700)
    if attack == "link":
        own.symlink_to(victim)
    elif attack == "shared":
        own.mkdir()
        own.chmod(0o777)
    else:
        own.write_text("")
    with pytest.raises(UsageError, match="not a directory of yours alone; set XDG_STATE_HOME"):
        journal_path({"a": 1}, {"HOME": "/dev/null/home"})
    assert list(victim.iterdir()) == []


@needs_root
def test_a_directory_of_somebody_else_keeps_no_journal(temporary: Path) -> None:
    own = temporary / f"hicachectl-{os.geteuid()}"
    own.mkdir(0o700)
    os.chown(own, NOBODY, NOBODY)
    with pytest.raises(UsageError, match="not a directory of yours alone"):
        journal_path({"a": 1}, {"HOME": "/dev/null/home"})


def test_the_state_directory_comes_before_the_fallback(tmp_path: Path) -> None:
    for environ in ({"XDG_STATE_HOME": str(tmp_path / "s")}, {"HOME": str(tmp_path)}):
        path, remark = journal_path({"a": 1}, environ)
        assert path.is_relative_to(tmp_path)
        assert remark == ""


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
