"""A /dev/shm of 64 KiB, as containers have small ones: verify and migrate need none of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.hicachectl.migrations import PAGES, demo_store, profile_file
from tests.skips import missing, need_tool

if TYPE_CHECKING:
    from pathlib import Path


def run(*arguments: object, home: Path) -> subprocess.CompletedProcess[str]:
    """Run the command line where /dev/shm holds 64 KiB."""
    own = [need_tool("unshare", "util-linux"), "--mount", "sh", "-c"]
    mount = "mount -t tmpfs -o size=64k tmpfs /dev/shm"
    if subprocess.run([*own, mount], capture_output=True, check=False).returncode:
        missing("the right to mount a tmpfs", "run the tests as root, with CAP_SYS_ADMIN")
    command = [sys.executable, "-m", "hicachectl", *map(str, arguments)]
    return subprocess.run(
        [*own, f'{mount} && exec "$@"', "sh", *command],
        env={**os.environ, "HOME": str(home)}, capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip


def test_pages_are_verified_and_copied(tmp_path: Path) -> None:
    store, profile = demo_store(tmp_path / "store"), profile_file(tmp_path / "p.toml")
    options = ("--profile", profile, "--format", "json")
    verified = run("verify", store, *options, home=tmp_path)
    assert verified.returncode == 0, verified.stderr
    assert json.loads(verified.stdout)["bytes_read"] > 64 << 10
    copied = run("migrate", store, tmp_path / "new", "--verify", *options, home=tmp_path)
    assert json.loads(copied.stdout)["pages"] == PAGES, copied.stderr
