"""Record the system calls of a command with strace, as changes to some directory trees.

`record` runs a real process with its threads and children, and returns their events in order:
changes of file contents and names, syncs, and bytes printed or sent.
"""

from __future__ import annotations

import os
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.power.changes import Change, Event, Inode, Names, SetTime, Trees, Write
from tests.power.traces import CALLS, TraceReader, find
from tests.skips import need_tool

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

REPOSITORY = Path(__file__).parents[2]
MOST_STRING_BYTES = 1 << 22
_SETTINGS = ("HICACHECTL_", "XDG_")  # environment variables that would lead out of the trees


@dataclass(frozen=True, slots=True)
class Recording:
    """Events of a command. roots: directories by path. exit_code: of the command."""

    roots: dict[str, Inode]
    before: Trees
    events: list[Event]
    exit_code: int
    stderr: str


def record(
    command: Sequence[object],
    roots: Sequence[Path],
    *,
    home: Path,
    inject: str | None = None,
    unsynced: Sequence[Path] = (),
) -> Recording:
    """Run a command and return its events below some directories, its HOME included.

    The model treats each root as a separate file system. inject: a fault, in strace's syntax.
    unsynced: directories with files that another process has just written and never synced.
    """
    tracer = need_tool("strace")
    trees, tops = _snapshot([*roots, home])
    earlier = [event for folder in unsynced for event in _taken_back(trees, tops, folder)]
    trace = home.parent / f"{home.name}.strace"
    options = ["-f", "--seccomp-bpf", "-qq", "-y", "-xx", "-s", str(MOST_STRING_BYTES)]
    options += ["-o", str(trace), "-e", "signal=none"]
    calls = [f"?{call}" for call in CALLS]
    options += ["-e", f"trace={','.join(calls)}"]
    if inject is not None:
        options += ["-e", f"inject={inject}"]
    done = subprocess.run(
        [tracer, *options, *map(str, command)],
        cwd=REPOSITORY,
        env={
            **{n: v for n, v in os.environ.items() if not n.startswith(_SETTINGS)},
            "HOME": str(home),
        },
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert trace.exists() and trace.stat().st_size, done.stderr  # noqa: PT018 - one cause
    now = trees.copy()
    for change in earlier:
        now.apply(change)
    events = [*earlier, *TraceReader(now, tops).read(trace.read_text())]
    trace.unlink()
    return Recording(tops, trees, events, done.returncode, done.stderr)


def _snapshot(roots: Sequence[Path]) -> tuple[Trees, dict[str, Inode]]:
    from hicachectl.backends.disk.names import version_of

    trees = Trees()
    tops: dict[str, Inode] = {}
    for device, root in enumerate(roots):
        links: dict[int, Inode] = {}
        for folder, folders, files in root.walk() if hasattr(root, "walk") else _walk(root):
            path = str(folder)
            top = Inode(folder.stat().st_ino, device, is_directory=True)
            here = tops.setdefault(path, top) if folder == root else find(trees, tops, path)
            assert here is not None
            trees.names[here] = {}
            for name in folders:
                number = (folder / name).lstat().st_ino
                trees.names[here][name] = Inode(number, device, is_directory=True)
            for name in files:
                facts = (folder / name).lstat()
                assert stat.S_ISREG(facts.st_mode), folder / name
                version = version_of(facts).hex()
                inode = links.setdefault(
                    facts.st_ino, Inode(facts.st_ino, device, is_directory=False, version=version)
                )
                trees.names[here][name] = inode
                trees.bytes[inode] = (folder / name).read_bytes()
                trees.times[inode] = facts.st_mtime_ns
    return trees, tops


def _taken_back(trees: Trees, tops: Mapping[str, Inode], folder: Path) -> Iterator[Change]:
    """Remove the files of a directory from some trees; yield the changes that restore them."""
    here = find(trees, tops, str(folder))
    assert here is not None
    for name, inode in trees.names.pop(here).items():
        data, mtime_ns = trees.bytes.pop(inode), trees.times.pop(inode)
        trees.bytes[inode] = b""
        yield Names(here, {name: inode})
        yield Write(inode, 0, data)
        if mtime_ns is not None:
            yield SetTime(inode, mtime_ns)


def _walk(root: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    for folder, folders, files in os.walk(root):
        yield Path(folder), folders, files
