"""Find what a command does to files and to the network, from its system calls."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.power.traces import calls_in, decoded, handles_in, paths_in
from tests.skips import need_tool

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ROOT = Path(__file__).parents[1]
_OPENS = ("open", "openat", "openat2", "creat")
_WRITES = (
    *("mkdir", "mkdirat", "mknod", "mknodat", "link", "linkat", "symlink", "symlinkat"),
    *("truncate", "ftruncate", "fallocate", "utime", "utimes", "utimensat"),
    *("chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "fchownat", "lchown"),
    *("setxattr", "lsetxattr", "fsetxattr", "removexattr", "lremovexattr", "fremovexattr"),
)
_RENAMES = ("rename", "renameat", "renameat2")
_REMOVES = ("unlink", "unlinkat", "rmdir")
_NETWORK = ("connect", "bind", "listen")
_STARTS = ("execve", "execveat")
_CALLS = (*_OPENS, *_WRITES, *_RENAMES, *_REMOVES, *_NETWORK, *_STARTS)
_WRITABLE = re.compile("O_WRONLY|O_RDWR|O_CREAT|O_TRUNC")
_ADDRESS = re.compile(
    r'port=htons\((\d+)\).*?(?:inet_addr\(|inet_pton\(AF_INET6, )"((?:\\x[0-9a-f]{2})*)"'
)


class Effect(NamedTuple):
    """One thing that a command did.

    verb: reads, writes, removes, runs, connects or listens.
    object: a path, or an address with its port.
    """

    verb: str
    object: str


class Traced(NamedTuple):
    """A command that has ended, and its effects."""

    status: int
    stdout: str
    stderr: str
    effects: frozenset[Effect]


def traced(arguments: Sequence[object], environment: Mapping[str, str], trace: Path) -> Traced:
    """Run the command line in a process of its own.

    environment: whole environment of the process.
    trace: path of a new file for the trace.
    """
    options = ["-f", "--seccomp-bpf", "-qq", "-y", "-xx", "-s", "4096", "-o", str(trace)]
    options += ["-e", "signal=none", "-e", f"trace={','.join(f'?{call}' for call in _CALLS)}"]
    done = subprocess.run(
        [
            *(need_tool("strace"), *options, sys.executable, "-m", "hicachectl"),
            *map(str, arguments),
        ],
        cwd=ROOT,
        env=dict(environment),
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=120,
    )
    text = trace.read_text()
    trace.unlink()
    return Traced(done.returncode, done.stdout, done.stderr, frozenset(_effects(text)))


def _effects(text: str) -> Iterator[Effect]:
    """Yield the effects of calls. It is no effect if a command removes what it made itself."""
    made: set[str] = set()
    bound: dict[str, str] = {}
    for name, arguments, result in calls_in(text):
        if name in _NETWORK:
            yield from _of_network(name, arguments, result, bound)
        elif result >= 0:
            yield from _of_files(name, arguments, made)


def _of_network(name: str, arguments: str, result: int, bound: dict[str, str]) -> Iterator[Effect]:
    """Yield the effects of a call.

    bound: address of each socket, by its path.
    """
    address = _address(arguments)
    if name == "connect" and address:
        yield Effect("connects", address)
    elif name == "bind" and address and not result:
        bound[_handle(arguments)] = address
    elif name == "listen" and not result:
        yield Effect("listens", bound.get(_handle(arguments), "another address"))


def _of_files(name: str, arguments: str, made: set[str]) -> Iterator[Effect]:
    """Yield the effects of a call that succeeded.

    made: paths that the command has made so far.
    """
    *_, path = _paths(arguments) or [_handle(arguments)]
    if name in _STARTS:
        yield Effect("runs", _paths(arguments)[0])
    elif name in _REMOVES:
        yield from [] if path in made else [Effect("removes", path)]
    elif name in _RENAMES:
        old, _ = _paths(arguments)
        yield from [] if old in made else [Effect("removes", old)]
        yield Effect("writes", path)
        made.add(path)
    elif name in _OPENS and name != "creat" and not _WRITABLE.search(arguments):
        yield Effect("reads", path)
    else:
        if "O_EXCL" in arguments or name.startswith(("mkdir", "link")):
            made.add(path)
        yield Effect("writes", path)


def _paths(arguments: str) -> list[str]:
    """Return the paths in the arguments of a call. Commands stay in ROOT, their first directory."""
    return [os.path.normpath(ROOT / path) for path in paths_in(arguments)]


def _handle(arguments: str) -> str:
    """Return the path of a call's first descriptor."""
    return handles_in(arguments)[0].path


def _address(arguments: str) -> str:
    """Return the address and the port of an internet socket; "" for another socket."""
    found = _ADDRESS.search(arguments)
    return f"{decoded(found[2]).decode()}:{found[1]}" if found else ""
