"""Hold system calls on a directory, as a store does that hangs.

Runs inside the SGLang environment, in every process of a server. HICACHECTL_HELD_CALLS names the
switch, a file that need not exist. While it does, it holds JSON {"below": directory, "calls":
names in `os`}: such a call on a path or descriptor below the directory waits until the switch is
gone, and is then made. Each call that waits appends a line to the file SWITCH.log: its name when
it starts to wait, `-name` when it was made.
"""

from __future__ import annotations

import functools
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

VARIABLE = "HICACHECTL_HELD_CALLS"
CALLS = (
    *("open", "read", "readv", "pread", "preadv", "write", "writev", "pwrite", "pwritev"),
    *("stat", "lstat", "statvfs", "listdir", "scandir", "mkdir"),
    *("link", "rename", "replace", "unlink", "utime", "fsync", "fdatasync"),
)
_PAUSE_S = 0.005

_stat = os.stat  # not held itself


def install() -> None:
    """Wrap the calls, if the variable is set."""
    switch = os.environ.get(VARIABLE)
    if switch is None:
        return
    for name in CALLS:
        call = getattr(os, name)
        wrapped = _held(name, call, switch)
        for supporting in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            if call in supporting:
                supporting.add(wrapped)
        setattr(os, name, wrapped)


def _held(name: str, call: Callable[..., Any], switch: str) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        if not _concerned(switch, name, arguments, options):
            return call(*arguments, **options)
        _log(switch, name)
        while _exists(switch):
            time.sleep(_PAUSE_S)
        try:
            return call(*arguments, **options)
        finally:
            _log(switch, f"-{name}")

    return wrapper


def _concerned(switch: str, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Return whether the switch holds this call now."""
    if not _exists(switch):
        return False
    try:
        held = json.loads(Path(switch).read_text())
    except FileNotFoundError:
        return False
    if name not in held["calls"] or not arguments:
        return False
    directory = options.get("dir_fd", options.get("src_dir_fd"))
    place = _path(arguments[0])
    if directory is not None:
        place = str(Path(_path(directory), place))
    return Path(place).is_relative_to(held["below"])


def _path(file: Any) -> str:
    """Return the path of a path or descriptor."""
    if not isinstance(file, int):
        return os.fsdecode(file)
    try:
        return str(Path(f"/proc/self/fd/{file}").readlink())
    except FileNotFoundError:
        return ""


def _exists(path: str) -> bool:
    try:
        _stat(path)
    except FileNotFoundError:
        return False
    return True


def _log(switch: str, line: str) -> None:
    with Path(f"{switch}.log").open("a") as log:
        log.write(f"{line}\n")
