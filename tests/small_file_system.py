"""A small file system, and one different from the tests' own."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.skips import missing, need_tool

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def small_file_system(directory: Path, size: int | str) -> Iterator[Path]:
    """Mount a tmpfs of a size at a directory; skip if mounting fails."""
    with _mounted(directory, "-t", "tmpfs", "-o", f"size={size}", "tmpfs"):
        yield directory


@contextmanager
def small_ext4(directory: Path, size: int, reserved: int) -> Iterator[Path]:
    """Mount a file with an ext4 at a directory; skip if mounting fails.

    reserved: percentage of the blocks that only root may use.
    """
    tool = need_tool("mkfs.ext4", "e2fsprogs")
    image = directory.with_suffix(".img")
    image.touch()
    os.truncate(image, size)
    subprocess.run([tool, "-q", "-m", str(reserved), image], check=True)
    with _mounted(directory, "-o", "loop", str(image)):
        yield directory


@contextmanager
def _mounted(directory: Path, *arguments: str) -> Iterator[Path]:
    directory.mkdir(exist_ok=True)
    mount = ["mount", *arguments, str(directory)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        missing(f"the right to mount a {arguments[1]}", "run the tests as root, with CAP_SYS_ADMIN")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


@pytest.fixture
def other_file_system(tmp_path: Path) -> Iterator[Path]:
    """Return a directory on another file system than tmp_path, so renames between them fail."""
    with small_file_system(tmp_path / "other-file-system", "64m") as directory:
        yield directory
