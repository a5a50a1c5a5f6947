"""A file system that is soon full, and another one than the tests' own."""

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
    """Mount a tmpfs of a size at a directory; skips where none can be mounted."""
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
    """A directory that nothing of tmp_path can be renamed into."""
    with small_file_system(tmp_path / "other-file-system", "16m") as directory:
        yield directory
