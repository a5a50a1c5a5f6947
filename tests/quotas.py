"""The command line with a quota below a directory.

Kernels without CONFIG_QFMT_V2 cannot mount a file system with quotas, so EDQUOT is injected into
the calls of `os` that create or write a file below the directory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.attack.children import run

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

# Bytes and new files that are left below a directory; writes are cut short as in a kernel.
_LIMITS = """
import errno, os, threading
lock = threading.Lock()
def used_up():
    return OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
def grant(descriptor, wanted):
    global nbytes
    if not os.readlink(f"/proc/self/fd/{descriptor}").startswith(folder):
        return wanted
    with lock:
        granted = min(wanted, nbytes)
        nbytes -= granted
    if wanted and not granted:
        raise used_up()
    return granted
def bounded(write):
    def bounded_write(descriptor, data, *place):
        data = memoryview(data).cast("B")
        return write(descriptor, data[: grant(descriptor, len(data))], *place)
    return bounded_write
def bounded_vector(write):
    def bounded_write(descriptor, buffers, *place):
        data = memoryview(b"".join(buffers))
        return write(descriptor, [data[: grant(descriptor, len(data))]], *place)
    return bounded_write
def bounded_copy(copy):
    def bounded_copying(source, target, count, *places):
        return copy(source, target, grant(target, count), *places)
    return bounded_copying
def bounded_open(opening):
    def bounded_opening(path, flags, mode=0o777, *, dir_fd=None):
        global files
        base = "" if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
        if flags & os.O_CREAT and os.path.join(base, os.fsdecode(path)).startswith(folder):
            with lock:
                files -= 1
                if files < 0:
                    raise used_up()
        return opening(path, flags, mode, dir_fd=dir_fd)
    return bounded_opening
os.write, os.pwrite = bounded(os.write), bounded(os.pwrite)
os.writev, os.pwritev = bounded_vector(os.writev), bounded_vector(os.pwritev)
os.copy_file_range, os.open = bounded_copy(os.copy_file_range), bounded_open(os.open)
"""
PLENTY = 1 << 40


def run_limited(
    folder: Path, nbytes: int, files: int, *arguments: object, home: Path
) -> subprocess.CompletedProcess[str]:
    """Run the command line with a limit of new bytes and files below a folder."""
    before = f"folder, nbytes, files = {str(folder)!r}, {nbytes}, {files}\n{_LIMITS}"
    return run(*arguments, home=home, before=before)
