"""A small file system, and one different from the tests' own."""

from __future__ import annotations

import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.skips import missing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def small_file_system(directory: Path, size: int | str) -> Iterator[Path]:
    """Mount a tmpfs of a size at a directory; skip if mounting fails."""
    directory.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        missing("the right to mount a tmpfs", "run the tests as root, with CAP_SYS_ADMIN")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


@pytest.fixture
def other_file_system(tmp_path: Path) -> Iterator[Path]:
    """Return a directory on another file system than tmp_path, so renames between them fail."""
    with small_file_system(tmp_path / "other-file-system", "64m") as directory:
        yield directory
