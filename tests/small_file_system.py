"""Mount small file systems, also one that differs from the file system of the tests."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.skips import lacking, missing, need_tool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import NoReturn


@contextmanager
def small_file_system(directory: Path, size: int | str) -> Iterator[Path]:
    """Mount a tmpfs of a size at a directory. Skip if mounting fails."""

    def skip() -> NoReturn:
        missing("the right to mount a tmpfs", "run the tests as root, with CAP_SYS_ADMIN")

    with _mounted(directory, "-t", "tmpfs", "-o", f"size={size}", "tmpfs", skip=skip):
        yield directory


@contextmanager
def small_ext4(directory: Path, size: int, reserved: int) -> Iterator[Path]:
    """Mount a file with an ext4 at a directory. Skip if mounting fails.

    reserved: percentage of the blocks that only root may use.

    Containers can lack loop devices, which no package installs.
    """
    tool = need_tool("mkfs.ext4", "e2fsprogs")
    image = directory.with_suffix(".img")
    image.touch()
    os.truncate(image, size)
    subprocess.run([tool, "-q", "-m", str(reserved), image], check=True)
    with _mounted(directory, "-o", "loop", str(image), skip=lambda: lacking("a loop device")):
        yield directory


@contextmanager
def _mounted(directory: Path, *arguments: str, skip: Callable[[], NoReturn]) -> Iterator[Path]:
    directory.mkdir(exist_ok=True)
    mount = ["mount", *arguments, str(directory)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        skip()
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


@pytest.fixture
def other_file_system(tmp_path: Path) -> Iterator[Path]:
    """Return a directory on another file system than tmp_path, so renames between them fail."""
    with small_file_system(tmp_path / "other-file-system", "64m") as directory:
        yield directory
