"""Changes of directory trees, and what else a command does, in the order in which it does it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Inode:
    """A file or a directory. device: number of the file system that holds it.

    version: the hexadecimal version of an object as hicachectl records it, for what was there
    before the recording.
    """

    number: int
    device: int
    is_directory: bool
    version: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """Bytes of a file are replaced."""

    inode: Inode
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Resize:
    """A file gets another size."""

    inode: Inode
    size: int


@dataclass(frozen=True, slots=True, eq=False)
class SetTime:
    """A file gets a modification time."""

    inode: Inode
    mtime_ns: int


@dataclass(slots=True, eq=False)
class Names:
    """Names of one directory change, at once. other: the other half of a rename between two."""

    inode: Inode
    entries: dict[str, Inode | None]
    other: Names | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SyncBegins:
    """A sync begins: it covers what was done before."""

    sync: Sync


@dataclass(frozen=True, slots=True, eq=False)
class Sync:
    """A sync has ended. inode: whose; None for a whole file system. path: what was named."""

    call: str
    path: str
    inode: Inode | None
    device: int | None


@dataclass(frozen=True, slots=True)
class Output:
    """Bytes were printed, or sent to a server. handle: 1 for stdout."""

    handle: int
    data: bytes


Change = Write | Resize | SetTime | Names
Event = Change | SyncBegins | Sync | Output


@dataclass(slots=True)
class Trees:
    """Directory trees in memory: names of each directory, bytes and time of each file."""

    names: dict[Inode, dict[str, Inode]] = field(default_factory=lambda: defaultdict(dict))
    bytes: dict[Inode, bytes] = field(default_factory=dict)
    times: dict[Inode, int | None] = field(default_factory=dict)

    def apply(self, change: Change) -> None:
        """Do what a change does."""
        if isinstance(change, Names):
            names = self.names[change.inode]
            for name, inode in change.entries.items():
                if inode is None:
                    names.pop(name, None)
                else:
                    names[name] = inode
        elif isinstance(change, SetTime):
            self.times[change.inode] = change.mtime_ns
        else:
            self.bytes[change.inode] = changed(self.bytes.get(change.inode, b""), change)
            self.times[change.inode] = None

    def copy(self) -> Trees:
        """Copy, so that changes do not reach the original."""
        names: dict[Inode, dict[str, Inode]] = defaultdict(dict)
        names.update({inode: dict(entries) for inode, entries in self.names.items()})
        return Trees(names, dict(self.bytes), dict(self.times))


def changed(before: bytes, change: Write | Resize) -> bytes:
    """Return the bytes of a file after a change."""
    if isinstance(change, Resize):
        return before[: change.size].ljust(change.size, b"\0")
    return (
        before[: change.offset].ljust(change.offset, b"\0")
        + change.data
        + before[change.offset + len(change.data) :]
    )
