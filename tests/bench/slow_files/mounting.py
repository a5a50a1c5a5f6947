"""Mounts that wait before they answer each call, as a server of files does that is some way off.

`slow_files.c` says how they wait. A mount keeps attributes and names for 3 seconds, the least time
of NFS, and lists directories without attributes, as NFS does for large ones. It keeps no contents:
each open of a file reads it again. Closing a file takes no call.
"""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.skips import missing, need_tool
from tests.waiting import alive, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCES = Path(__file__).parent
ATTRIBUTE_SECONDS = 3.0
WORKERS = 4

_OPERATIONS = {
    1: "lookup", 3: "getattr", 4: "setattr", 5: "readlink", 6: "symlink", 8: "mknod", 9: "mkdir",
    10: "unlink", 11: "rmdir", 12: "rename", 13: "link", 14: "open", 15: "read", 16: "write",
    17: "statfs", 20: "fsync", 22: "getxattr", 27: "opendir", 28: "readdir", 30: "fsyncdir",
    35: "create", 43: "fallocate", 44: "readdirplus", 45: "rename", 46: "lseek",
    47: "copy_file_range",
}  # fmt: skip
_DELAY, _MOST_IN_FLIGHT, _CALLS, _NUMBERS = 0, 2, 3, 3 + 64


def built(source: str, folder: Path, *options: str) -> Path:
    """Compile a C file of this folder into another folder; skip without a compiler or libfuse 3."""
    program = folder / Path(source).stem
    flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-pthread"]
    command = [need_tool("gcc"), *flags, "-o", str(program), str(SOURCES / source), *options]
    if not program.exists():
        subprocess.run(command, check=True)
    return program


def fuse_options() -> list[str]:
    """Return the compiler's options for libfuse 3; skip if it is not installed."""
    found = subprocess.run(
        [need_tool("pkg-config"), "--cflags", "--libs", "fuse3 >= 3.12"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if found.returncode:
        missing("libfuse 3.12", "`apt-get install libfuse3-dev` installs it")
    return found.stdout.split()


class SlowMount:
    """A mounted directory, and numbers that its server shares.

    path: where it is mounted.
    pid: process that serves it.
    """

    def __init__(self, path: Path, pid: int, numbers: mmap.mmap) -> None:
        self.path, self.pid, self._numbers = path, pid, numbers

    @property
    def delay_ms(self) -> float:
        """Milliseconds that each call waits; it can be changed at any time."""
        return self._number(_DELAY) / 1e6

    @delay_ms.setter
    def delay_ms(self, delay_ms: float) -> None:
        struct.pack_into("<Q", self._numbers, 8 * _DELAY, round(delay_ms * 1e6))

    @property
    def most_in_flight(self) -> int:
        """Most calls that have been in flight at once since `forget_calls`."""
        return self._number(_MOST_IN_FLIGHT)

    def calls(self) -> dict[str, int]:
        """Return the number of calls of each kind since `forget_calls`; only calls that waited."""
        counts: dict[str, int] = {}
        for operation, name in _OPERATIONS.items():
            if count := self._number(_CALLS + operation):
                counts[name] = counts.get(name, 0) + count
        return counts

    def forget_calls(self) -> None:
        """Set the counts to zero."""
        for place in range(_MOST_IN_FLIGHT, _NUMBERS):
            struct.pack_into("<Q", self._numbers, 8 * place, 0)

    def _number(self, place: int) -> int:
        number: int = struct.unpack_from("<Q", self._numbers, 8 * place)[0]
        return number


@contextmanager
def slow_mount(
    directory: Path,
    mount: Path,
    delay_ms: float,
    *,
    with_attributes: bool = False,
    attribute_seconds: float = ATTRIBUTE_SECONDS,
) -> Iterator[SlowMount]:
    """Mount a directory so that each call waits; skip where that cannot be done.

    The program and the file of its numbers lie beside `mount`, and are removed with it.
    with_attributes: directories are listed with attributes.
    attribute_seconds: time for which the kernel trusts attributes and names.
    """
    beside = mount.with_name(f"{mount.name}.slow_files")
    beside.mkdir(parents=True)
    mount.mkdir()
    try:
        program = built("slow_files.c", beside, *fuse_options())
        control = beside / "control"
        control.write_bytes(bytes(8 * _NUMBERS))
        with control.open("r+b") as file:
            numbers = mmap.mmap(file.fileno(), 0)
        words = [
            program,
            directory,
            mount,
            control,
            attribute_seconds,
            int(with_attributes),
            WORKERS,
        ]
        process = subprocess.Popen(list(map(str, words)))
        try:
            wait_until(lambda: mount.is_mount() or not alive(process.pid))
            if not mount.is_mount():
                missing("the right to mount with FUSE", "run as root, with /dev/fuse")
            slow = SlowMount(mount, process.pid, numbers)
            slow.forget_calls()
            slow.delay_ms = delay_ms
            yield slow
        finally:
            subprocess.run(["umount", "-l", mount], check=False)
            process.kill()
            process.wait()
    finally:
        mount.rmdir()
        shutil.rmtree(beside)
