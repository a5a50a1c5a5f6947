"""A file system that can stop answering, like a mount from a dead server."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.skips import missing, need_tool
from tests.waiting import alive, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def freezable_mount(source: Path, mount: Path) -> Iterator[int]:
    """Mount a directory with FUSE. Yield the pid of the process that serves it, to be stopped."""
    need_tool("bindfs")
    unmount = need_tool("fusermount3", "fuse3")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        missing("access to /dev/fuse", "load the module fuse, and pass the device to a container")
    mount.mkdir()
    process = subprocess.Popen(["bindfs", "-f", "--no-allow-other", source, mount])
    try:
        wait_until(lambda: mount.is_mount() or not alive(process.pid))
        if not mount.is_mount():
            missing("the right to mount with FUSE", "run the tests as root, with CAP_SYS_ADMIN")
        yield process.pid
    finally:
        subprocess.run([unmount, "-u", "-z", mount], check=False)
        process.kill()
        process.wait()
