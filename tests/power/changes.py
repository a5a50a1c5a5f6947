"""Changes of directory trees, and other actions of a command, in order."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Inode:
    """A file or a directory. device: number of its file system.

    version: hexadecimal version of an object, as hicachectl records it; only of objects that
        existed before the recording.
    """

    number: int
    device: int
    is_directory: bool
    version: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """New bytes in a file."""

    inode: Inode
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Resize:
    """A new size of a file."""

    inode: Inode
    size: int


@dataclass(frozen=True, slots=True, eq=False)
class SetTime:
    """A new modification time of a file."""

    inode: Inode
    mtime_ns: int


@dataclass(slots=True, eq=False)
class Names:
    """An atomic change of names in one directory. other: the other half of a rename between two."""

    inode: Inode
    entries: dict[str, Inode | None]
    other: Names | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SyncBegins:
    """Begin of a sync, which covers all earlier changes."""

    sync: Sync


@dataclass(frozen=True, slots=True, eq=False)
class Sync:
    """End of a sync. inode: of what; None for a whole file system. path: the named path."""

    call: str
    path: str
    inode: Inode | None
    device: int | None


@dataclass(frozen=True, slots=True)
class Output:
    """Bytes that were printed or sent to a server. handle: 1 for stdout."""

    handle: int
    data: bytes


Change = Write | Resize | SetTime | Names
Event = Change | SyncBegins | Sync | Output


@dataclass(slots=True)
class Trees:
    """Directory trees in memory: names in each directory, bytes and time of each file."""

    names: dict[Inode, dict[str, Inode]] = field(default_factory=lambda: defaultdict(dict))
    bytes: dict[Inode, bytes] = field(default_factory=dict)
    times: dict[Inode, int | None] = field(default_factory=dict)

    def apply(self, change: Change) -> None:
        """Apply a change."""
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
        """Return a copy that can be changed without changing the original."""
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
