"""The deployment whose pages a 3FS store holds, in a small file beside the data files.

Keys name neither model nor weights, so servers of another deployment would read its pages as their
own. SGLang ignores the file, which is named PREFIX.hicachectl-deployment.
"""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress

from hicachectl.backends.disk.durable import new_file
from hicachectl.backends.disk.io import write_all
from hicachectl.formats.errors import StoreUnavailable
from hicachectl.formats.wording import failed

_TAG = re.compile(rb"[0-9a-f]{32}")
_LONGEST = 64
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
    """Create the file, whole from the first moment, unless there is one."""
    if os.path.lexists(path):
        return
    with suppress(FileExistsError), new_file(path, _MODE, replaces=False) as descriptor:
        write_all(descriptor, (tag.encode(),))


def _read(path: str) -> str | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        text = os.read(descriptor, _LONGEST) if regular else b""
    finally:
        os.close(descriptor)
    if not _TAG.fullmatch(text):
        raise StoreUnavailable(f"{path}: is no deployment's tag; remove it")
    return text.decode()
