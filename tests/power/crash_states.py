"""States of the disk after a power failure, at each point of a recording.

The model (of CrashMonkey and ALICE, and the promises of POSIX):

- Contents, size and time of a file are durable once an fsync or fdatasync of the file, or a syncfs
or sync of its file system, has begun after the change and ended.
- Names (create, rename, link, unlink) are durable once an fsync of their directory, or a syncfs or
sync, has ended. An fsync of a file does not make its name durable.
- A rename within a directory is atomic. A rename between two directories is atomic until one of
them is synced; after that, the half in the other directory can be lost alone.
- Any part of the changes that are not durable can be lost, in any order. Journalled file systems
keep more.

Crash states of a point: nothing lost (a kill); all lost; each change lost alone; all contents lost
with all names kept, as empty files and as files of zeros; and seeded subsets, in which writes can
also be torn into sectors of 512 bytes, with some of them kept.
"""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from tests.power.changes import (
    Change,
    Inode,
    Names,
    Output,
    Resize,
    SetTime,
    Sync,
    SyncBegins,
    Trees,
    Write,
    changed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from tests.power.recording import Recording

SUBSETS = 20
_SECTOR = 512


@dataclass(frozen=True, slots=True)
class Kind:
    """Syncs to leave out: those of one call, with a path that matches a shell pattern.

    first, last: only some of these, as in a slice.
    """

    call: str
    path: str
    first: int | None = None
    last: int | None = None

    def of(self, recording: Recording) -> list[Sync]:
        """Return the syncs of this kind."""
        found = [
            event
            for event in recording.events
            if isinstance(event, Sync)
            and event.call == self.call
            and fnmatchcase(event.path, self.path)
        ]
        return found[self.first : self.last]


@dataclass(frozen=True, slots=True)
class State:
    """Trees after a power failure. what: how the state arose.

    printed: stdout until then. sent: bytes sent to servers.
    """

    what: str
    printed: bytes
    sent: tuple[bytes, ...]
    files: dict[str, bytes]
    folders: frozenset[str]
    times: dict[str, int | None] = field(repr=False)
    inodes: dict[str, Inode] = field(repr=False)

    @property
    def content(self) -> object:
        """The value by which two states are compared."""
        return frozenset(self.files.items()), self.folders

    def below(self, folder: Path) -> dict[str, bytes]:
        """Return the files in a directory and below, by relative path."""
        prefix = f"{folder}/"
        return {p.removeprefix(prefix): b for p, b in self.files.items() if p.startswith(prefix)}

    def directly_in(self, folder: Path) -> dict[str, bytes]:
        """Return the files of a directory by name."""
        return {name: data for name, data in self.below(folder).items() if "/" not in name}

    def materialise(self, roots: Collection[str]) -> None:
        """Write this state's trees to disk.

        Objects get new inodes. Records of an object's inode and change time are adapted, unless the
        object had been renamed.
        """
        for root in roots:
            for entry in os.scandir(root):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    os.unlink(entry.path)  # noqa: PTH108 - thousands of them
        for folder in sorted(self.folders - set(roots)):
            os.mkdir(folder)  # noqa: PTH102
        made: dict[Inode, str] = {}
        for path in self.files:
            inode = self.inodes[path]
            if inode in made:
                os.link(made[inode], path)
                continue
            made[inode] = path
            _write(path, self.files[path], self.times[path])
        self._translate(made)

    def _translate(self, made: dict[Inode, str]) -> None:
        from hicachectl.backends.disk.names import version_of

        versions = {
            inode.version.encode(): version_of(os.stat(path)).hex().encode()  # noqa: PTH116
            for inode, path in made.items()
            if inode.version and list(self.inodes.values()).count(inode) == 1
        }
        for path, data in self.files.items():
            if b'"version"' in data:
                for old, new in versions.items():
                    data = data.replace(old, new)  # noqa: PLW2901
                if data != self.files[path]:
                    _write(path, data, self.times[path])


def _write(path: str, data: bytes, mtime_ns: int | None) -> None:
    Path(path).write_bytes(data)
    if mtime_ns is not None:
        os.utime(path, ns=(mtime_ns, mtime_ns))


def crash_states(
    recording: Recording, *, seed: int = 0, without: Sequence[Kind] = ()
) -> Iterator[State]:
    """Yield the states of every point of a recording.

    without: syncs to ignore, as if the code did not make them; the recording must contain each.
    """
    disk = _Disk(recording)
    printed = b""
    sent: tuple[bytes, ...] = ()
    left_out = [sync for kind in without for sync in kind.of(recording)]
    assert bool(left_out) == bool(without), f"the command makes no such sync: {without}"
    for number, event in enumerate(recording.events):
        if isinstance(event, Output):
            if event.handle == 1:
                printed += event.data
            elif event.handle == 2:
                continue
            else:
                sent = (*sent, event.data)
        elif isinstance(event, (Sync, SyncBegins)):
            sync = event.sync if isinstance(event, SyncBegins) else event
            if sync in left_out:
                continue
            if isinstance(event, SyncBegins):
                disk.sync_begins(event.sync)
                continue  # nothing has changed yet
            disk.sync_ends(event)
        else:
            disk.change(event)
        half = isinstance(event, Names) and event.other is not None and event.entries
        if half and None not in event.entries.values():  # type: ignore[union-attr]
            continue  # the other half of the rename follows, in the same call
        for what, lost in _losses(disk.pending, random.Random(seed * 1_000_003 + number)):
            state = disk.without(lost)
            yield replace(state, what=f"event {number}: {what}", printed=printed, sent=sent)


@dataclass(frozen=True, slots=True)
class _Loss:
    """Lost changes, and torn writes with the sectors kept. zeros: sizes are kept."""

    changes: frozenset[Change]
    torn: tuple[tuple[Change, frozenset[int]], ...] = ()
    zeros: bool = False


def _losses(pending: Sequence[Change], chance: random.Random) -> Iterator[tuple[str, _Loss]]:
    units = _units(pending)
    yield "nothing lost", _Loss(frozenset())
    if not units:
        return
    yield "all lost", _Loss(frozenset(pending))
    for unit in units:
        yield f"lost {_said(unit[0])}", _Loss(frozenset(unit))
    contents = frozenset(c for c in pending if isinstance(c, (Write, Resize)))
    if contents:
        yield "names without data", _Loss(contents)
        yield "names with zeros", _Loss(contents, zeros=True)
    for number in range(SUBSETS):
        lost: set[Change] = set()
        torn: list[tuple[Change, frozenset[int]]] = []
        for unit in units:
            if chance.random() < 0.5:
                first = unit[0]
                if isinstance(first, Write) and len(first.data) > _SECTOR and chance.random() < 0.5:
                    sectors = range(-(-len(first.data) // _SECTOR))
                    kept = frozenset(n for n in sectors if chance.random() < 0.5)
                    torn.append((first, kept))
                else:
                    lost.update(unit)
        yield f"subset {number}", _Loss(frozenset(lost), tuple(torn))


def _units(pending: Sequence[Change]) -> list[tuple[Change, ...]]:
    """Return the changes, the halves of a rename joined while neither is durable."""
    there = set(pending)
    units: list[tuple[Change, ...]] = []
    for change in pending:
        if isinstance(change, Names) and change.other in there:
            if None not in change.entries.values():
                units.append((change, change.other))
        else:
            units.append((change,))
    return units


def _said(change: Change) -> str:
    if isinstance(change, Names):
        return f"names {sorted(change.entries)}"
    return f"{type(change).__name__} of {change.inode.number}"


class _Disk:
    """The durable state, and the changes that are not yet durable, in order."""

    def __init__(self, recording: Recording) -> None:
        self._roots = recording.roots
        self._durable = recording.before.copy()
        self.pending: list[Change] = []
        self._covered: dict[Sync, int] = {}  # number of changes when the sync began
        self._made = 0
        self._order: dict[Change, int] = {}
        self._bytes: dict[tuple[Inode, tuple[object, ...]], bytes] = {}
        self._steps = 0

    def change(self, change: Change) -> None:
        self._order[change] = self._made
        self._made += 1
        self.pending.append(change)

    def sync_begins(self, sync: Sync) -> None:
        self._covered[sync] = self._made

    def sync_ends(self, sync: Sync) -> None:
        end = self._covered.pop(sync)
        rest = []
        for change in self.pending:
            if self._order[change] < end and _covers(sync, change):
                self._durable.apply(change)
            else:
                rest.append(change)
        self.pending = rest
        self._bytes.clear()

    def without(self, loss: _Loss) -> State:
        """Return the state after a loss."""
        trees = Trees(self._durable.names, self._durable.bytes, self._durable.times)
        kept = [change for change in self.pending if change not in loss.changes]
        torn = dict(loss.torn)
        trees = replace_names(trees, [c for c in kept if isinstance(c, Names)])
        contents, times = dict(trees.bytes), dict(trees.times)
        of_inode: dict[Inode, list[Write | Resize]] = {}
        for change in self.pending if loss.zeros else kept:
            if isinstance(change, (Write, Resize)):
                of_inode.setdefault(change.inode, []).append(change)
        for inode, changes in of_inode.items():
            key = inode, (loss.zeros, *((id(c), torn.get(c)) for c in changes))
            if key not in self._bytes:
                data = contents.get(inode, b"")
                for each in changes:
                    for part in _kept(each, torn.get(each), zeros=loss.zeros):
                        data = changed(data, part)
                self._bytes[key] = data
            contents[inode] = self._bytes[key]
            times[inode] = None
        times.update({c.inode: c.mtime_ns for c in kept if isinstance(c, SetTime)})
        return _state(self._roots, trees.names, contents, times)


def _kept(
    change: Write | Resize, sectors: Collection[int] | None, *, zeros: bool
) -> Iterator[Write | Resize]:
    """Yield the parts of a change that reach the disk. sectors: those kept of a torn write."""
    if isinstance(change, Write) and zeros:
        yield replace(change, data=bytes(len(change.data)))
    elif isinstance(change, Write) and sectors is not None:
        for sector in sorted(sectors):
            begin = sector * _SECTOR
            yield replace(
                change,
                offset=change.offset + begin,
                data=change.data[begin : begin + _SECTOR],
            )
    else:
        yield change


def replace_names(trees: Trees, changes: Sequence[Names]) -> Trees:
    """Return trees with some names changed; the given trees stay unchanged."""
    names = dict(trees.names)
    for folder in {change.inode for change in changes}:
        names[folder] = dict(names.get(folder, {}))
    changed_trees = Trees(names, trees.bytes, trees.times)
    for change in changes:
        changed_trees.apply(change)
    return changed_trees


def _covers(sync: Sync, change: Change) -> bool:
    if sync.inode is not None:
        return change.inode == sync.inode
    return sync.device in (None, change.inode.device)


def _state(
    roots: dict[str, Inode],
    names: dict[Inode, dict[str, Inode]],
    contents: dict[Inode, bytes],
    times: dict[Inode, int | None],
) -> State:
    files: dict[str, bytes] = {}
    inodes: dict[str, Inode] = {}
    mtimes: dict[str, int | None] = {}
    folders = set(roots)
    waiting = list(roots.items())
    while waiting:
        path, folder = waiting.pop()
        for name, inode in names.get(folder, {}).items():
            place = f"{path}/{name}"
            inodes[place] = inode
            if inode.is_directory:
                folders.add(place)
                waiting.append((place, inode))
            else:
                files[place] = contents.get(inode, b"")
                mtimes[place] = times.get(inode)
    return State("", b"", (), files, frozenset(folders), mtimes, inodes)


def distinct(states: Iterator[State], key: Callable[[State], object]) -> Iterator[State]:
    """Yield states, except those that equal an earlier one."""
    seen = set()
    for state in states:
        what = key(state)
        if what not in seen:
            seen.add(what)
            yield state
