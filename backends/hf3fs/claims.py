"""The deployment whose pages a 3FS store holds, in a small file beside the data files.

Keys name neither model nor weights, so servers of another deployment would read its pages as their
own. SGLang ignores the file, which is named PREFIX.hicachectl-deployment.
"""

from __future__ import annotations

import os
import re
import stat
import time
from contextlib import suppress

from hicachectl.formats.errors import StoreUnavailable
from hicachectl.formats.wording import failed

_TAG = re.compile(rb"[0-9a-f]{32}")
_LONGEST = 64
_WAIT_SECONDS = (0.0, 0.01, 0.1, 0.4)
_MODE = 0o666  # less the umask, as data files


def claim_path(prefix: str) -> str:
    """Return the path of the file."""
    return f"{prefix}.hicachectl-deployment"


def claimed_by(prefix: str, tag: str, *, writes: bool) -> str | None:
    """Return the tag of the deployment that has claimed the data files; None without one.

    tag: of our deployment, which claims them if `writes` and no other one has.
    Raises StoreUnavailable.
    """
    path = claim_path(prefix)
    try:
        if writes:
            _claim(path, tag)
        return _read(path)
    except OSError as error:
        next_step = "check the mount and the directory's mode"
        raise StoreUnavailable(
            failed(path, "tell which deployment's pages these are", error, next_step)
        ) from error


def _claim(path: str, tag: str) -> None:
    """Create the file, unless there is one."""
    with suppress(FileExistsError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
        try:
            os.write(descriptor, tag.encode())
        finally:
            os.close(descriptor)


def _read(path: str) -> str | None:
    text = b""
    for seconds in _WAIT_SECONDS:  # another process may just have created the file
        time.sleep(seconds)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
            text = os.read(descriptor, _LONGEST) if regular else b""
        finally:
            os.close(descriptor)
        if text or not regular:
            break
    if not _TAG.fullmatch(text):
        raise StoreUnavailable(f"{path}: is no deployment's tag; if it stays so, remove it")
    return text.decode()
