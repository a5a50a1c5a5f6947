"""Let system calls below a directory wait or fail, as on a store that hangs or is broken.

Runs inside the SGLang environment, in every process of a server. HICACHECTL_HELD_CALLS names the
switch, a file that need not exist. While it does, it holds JSON {"below": directory, "calls":
names in `os`, "errno": number}. It concerns these calls on paths and descriptors below the
directory. With errno 0 a call waits until the switch is gone, and is then made; else it fails. The
file SWITCH.log gets a line for each such call: its name, and `-name` after it was made.
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
        held = _switch(switch)
        if held is None or not _concerned(held, name, arguments, options):
            return call(*arguments, **options)
        _log(switch, name)
        if held["errno"]:
            raise OSError(held["errno"], os.strerror(held["errno"]))
        while _switch(switch) is not None:
            time.sleep(_PAUSE_S)
        try:
            return call(*arguments, **options)
        finally:
            _log(switch, f"-{name}")

    return wrapper


def _switch(path: str) -> dict[str, Any] | None:
    try:
        _stat(path)  # costs less than the read
        held: dict[str, Any] = json.loads(Path(path).read_text())
    except FileNotFoundError:
        return None
    return held


def _concerned(
    held: dict[str, Any], name: str, arguments: tuple[Any, ...], options: dict[str, Any]
) -> bool:
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


def _log(switch: str, line: str) -> None:
    with Path(f"{switch}.log").open("a") as log:
        log.write(f"{line}\n")
