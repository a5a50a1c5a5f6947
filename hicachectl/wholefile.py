"""Write a file whole or not at all: under a name of its own, then renamed."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from hicachectl.backends.file_system import sync_names
from hicachectl.backends.permissions import Permissions, as_umask_says
from hicachectl.formats.errors import HicacheError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def whole_file(
    path: Path,
    mode: Literal["wb", "w"] = "wb",
    *,
    durable: bool = False,
    permissions: int | None = None,
    readable_by: Permissions | None = None,
    refusal: type[HicacheError] = UsageError,
) -> Iterator[IO[Any]]:
    """Give a stream whose bytes replace a file once the block ends without an exception.

    A symbolic link is followed. What is no regular file (a device, a pipe) is written directly.
    mode: "w" writes UTF-8. durable: the bytes are on the disk before the name is.
    permissions: of the file; else those of the file that is replaced, or as the umask says.
    readable_by: a new file is no more readable than this.
    Raises `refusal` where the file cannot be written; a closed pipe stays a BrokenPipeError.
    """
    try:
        found = _found(path)
        if found is not None and not stat.S_ISREG(found.st_mode):
            with _opened(path, mode) as stream:
                yield stream
            return
        if permissions is None and found is not None:
            permissions = stat.S_IMODE(found.st_mode)
        if permissions is None and readable_by is not None:
            permissions = as_umask_says(readable_by, os.getegid())
        with _replacing(Path(os.path.realpath(path)), mode, durable, permissions) as stream:
            yield stream
    except BrokenPipeError:
        raise
    except OSError as error:
        raise refusal(f"cannot write {path}: {error.strerror or error}") from error


@contextmanager
def _replacing(
    target: Path, mode: str, durable: bool, permissions: int | None
) -> Iterator[IO[Any]]:
    # Not made of the target's name, which may be as long as a name can be.
    partial = target.with_name(f".hicachectl-{os.getpid()}-{secrets.token_hex(8)}.tmp")
    try:
        with _opened(partial, mode.replace("w", "x"), permissions) as stream:
            yield stream
            stream.flush()
            if permissions is not None:
                os.fchmod(stream.fileno(), permissions)
            if durable:
                os.fsync(stream.fileno())
        partial.replace(target)
    except BaseException:
        with suppress(OSError):  # the first error is the one to tell
            partial.unlink(missing_ok=True)
        raise
    if durable:
        sync_names(target.parent)


def _found(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _opened(path: Path, mode: str, permissions: int | None = None) -> IO[Any]:
    def opener(name: str, flags: int) -> int:
        # Never more readable than it will be.
        return os.open(name, flags, 0o666 if permissions is None else permissions & 0o666)

    return open(path, mode, encoding=None if "b" in mode else "utf-8", opener=opener)
