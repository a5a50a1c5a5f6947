"""Read the output of strace: system calls as changes to some directory trees.

The kernel resolves paths (`strace -y`), so names relative to a directory handle are understood. A
call that might change a tree in an unknown way raises `NotUnderstood`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from tests.power.changes import (
    Event,
    Inode,
    Names,
    Output,
    Resize,
    SetTime,
    Sync,
    SyncBegins,
    Trees,
    Write,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_CHANGES = (
    "open openat openat2 creat mkdir mkdirat mknod mknodat rename renameat renameat2 link linkat "
    "symlink symlinkat unlink unlinkat rmdir write pwrite64 writev pwritev pwritev2 "
    "copy_file_range sendfile splice truncate ftruncate fallocate mmap utimensat ioctl"
)
_SYNCS = "fsync fdatasync syncfs sync"
_OTHERS = "lseek dup dup2 dup3 fcntl clone clone3 fork vfork sendto sendmsg"
_REFUSED = frozenset({"symlink", "symlinkat", "mknod", "mknodat", "splice", "fallocate"})
_FICLONE = "FICLONE"
CALLS = f"{_CHANGES} {_SYNCS} {_OTHERS}".split()

_LINE = re.compile(r"(\d+) +(.*)")
_RESUMED = re.compile(r"<\.\.\. (\w+) resumed>(.*)")
_CALL = re.compile(r"(\w+)\((.*)\) += (-?\d+)(?:<(.*)>)?.*", re.DOTALL)
_UNFINISHED = " <unfinished ...>"
_STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"(\.\.\.)?')
_HANDLE = re.compile(r"\b(\d+|AT_FDCWD)<((?:\\x[0-9a-f]{2}|[^<>\\])*)>")


class NotUnderstood(Exception):
    """A call that the file-system model does not cover."""


def calls_in(text: str) -> Iterator[tuple[str, str, int]]:
    """Yield the name, the arguments and the result of each call, as it ends."""
    pending: dict[str, str] = {}
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match is None or match[2].startswith(("+++", "---")):
            continue
        thread, call = match[1], match[2]
        if call.endswith(_UNFINISHED):
            pending[thread] = call.removesuffix(_UNFINISHED)
            continue
        if (resumed := _RESUMED.fullmatch(call)) is not None:
            call = pending.pop(thread) + resumed[2]
        if (found := _CALL.fullmatch(call)) is not None:
            yield found[1], found[2], int(found[3])


def find(trees: Trees, tops: Mapping[str, Inode], path: str) -> Inode | None:
    """Return the inode of a path in trees; None if it is missing or outside."""
    for root, top in tops.items():
        if path == root:
            return top
        if path.startswith(root + "/"):
            at: Inode | None = top
            for name in path[len(root) + 1 :].split("/"):
                at = trees.names[at].get(name) if at is not None and at.is_directory else None
            return at
    return None


@dataclass(slots=True)
class Handle:
    number: int
    path: str


class TraceReader:
    """Converter from the text of strace to events."""

    def __init__(self, trees: Trees, tops: dict[str, Inode]) -> None:
        self._trees = trees
        self._tops = tops
        self._numbers = count(1 << 62)  # no file system uses these
        self._groups: dict[int, int] = {}  # process of each thread
        self._positions: dict[tuple[int, int], int] = {}
        self._appends: set[tuple[int, int]] = set()
        self._pending: dict[int, tuple[str, Sync | None]] = {}
        self._group = 0

    def read(self, text: str) -> Iterator[Event]:
        lines = text.splitlines()
        self._read_groups(lines)
        for line in lines:
            match = _LINE.fullmatch(line)
            if match is None:
                raise NotUnderstood(line[:300])
            thread, rest = int(match[1]), match[2]
            self._group = self._groups.get(thread, thread)
            if not rest.startswith(("+++", "---")):
                yield from self._line(thread, rest)

    def _line(self, thread: int, text: str) -> Iterator[Event]:
        """Read the begin or end of a call, or both, from a line. Changes come when a call ends."""
        if text.endswith(_UNFINISHED):
            begun = text.removesuffix(_UNFINISHED)
            sync = self._sync(begun)
            self._pending[thread] = begun, sync
            if sync is not None:
                yield SyncBegins(sync)
            return
        sync, resumed = None, _RESUMED.fullmatch(text)
        if resumed is not None:
            begun, sync = self._pending.pop(thread)
            text = begun + resumed[2]
        call = _CALL.fullmatch(text)
        if call is None or int(call[3]) < 0:
            return
        if sync is None and (sync := self._sync(text)) is not None:
            yield SyncBegins(sync)
        if sync is not None:
            yield sync
            return
        for event in self._events(call[1], call[2], int(call[3]), call[4]):
            if isinstance(event, (Write, Resize, SetTime, Names)):
                self._trees.apply(event)
            yield event

    def _read_groups(self, lines: Sequence[str]) -> None:
        """Record the process of each thread."""
        flags: dict[str, str] = {}
        for line in lines:
            match = _LINE.fullmatch(line)
            if match is None or not re.search(r"\b(clone3?|v?fork)\b", match[2][:40]):
                continue
            thread, rest = match[1], match[2]
            if rest.endswith(_UNFINISHED):
                flags[thread] = rest
                continue
            whole = flags.pop(thread, "") + rest
            made = re.search(r"= (\d+)$", whole)
            if made is not None and "CLONE_THREAD" in whole:
                self._groups[int(made[1])] = self._groups.get(int(thread), int(thread))

    def _sync(self, text: str) -> Sync | None:
        """Return the sync of the trees that a call makes, or None."""
        name, _, arguments = text.partition("(")
        if name == "sync":
            return Sync(name, "", None, None)
        if name not in _SYNCS.split():
            return None
        handle = handles_in(arguments)[0]
        inode = self._at(handle.path)
        if inode is None:
            return None
        if name == "syncfs":
            return Sync(name, handle.path, None, inode.device)
        return Sync(name, handle.path, inode, inode.device)

    def _at(self, path: str) -> Inode | None:
        return find(self._trees, self._tops, os.path.normpath(path))

    def _is_inside(self, path: str) -> bool:
        return any(path == top or path.startswith(top + "/") for top in self._tops)

    def _place(self, path: str) -> tuple[Inode, str] | None:
        """Return the directory and the name of a path inside the trees."""
        path = os.path.normpath(path)
        folder = self._at(os.path.dirname(path))  # noqa: PTH120 - text
        if folder is None:
            if self._is_inside(path) and path not in self._tops:
                raise NotUnderstood(f"{path}: its directory is not known")
            return None
        return folder, os.path.basename(path)  # noqa: PTH119

    def _events(self, name: str, arguments: str, result: int, made: str | None) -> Iterator[Event]:
        handler = getattr(self, f"_do_{name}", None)
        if handler is not None:
            yield from handler(arguments, result, made)
        elif name in _REFUSED:
            inside = [h.path for h in handles_in(arguments)] + paths_in(arguments)
            if any(map(self._is_inside, inside)):
                raise NotUnderstood(f"{name}({arguments[:300]})")

    # names

    def _do_openat(self, arguments: str, result: int, made: str | None) -> Iterator[Event]:
        flags = arguments.rpartition('"')[2]
        path = os.fsdecode(decoded(made or ""))
        key = self._group, result
        self._positions[key] = 0
        self._appends.discard(key)
        if "O_APPEND" in flags:
            self._appends.add(key)
        if "O_TMPFILE" in flags and self._is_inside(path):
            raise NotUnderstood(f"open({arguments[:300]})")
        place = self._place(path) if "O_CREAT" in flags or "O_TRUNC" in flags else None
        if place is None:
            return
        inode = self._trees.names[place[0]].get(place[1])
        if inode is None:
            yield self._create(place, is_directory=False)
        elif "O_TRUNC" in flags and self._trees.bytes.get(inode):
            yield Resize(inode, 0)

    _do_open = _do_openat2 = _do_openat

    def _do_creat(self, arguments: str, result: int, made: str | None) -> Iterator[Event]:
        return self._do_openat(f"{arguments} O_CREAT|O_TRUNC", result, made)

    def _create(self, place: tuple[Inode, str], *, is_directory: bool) -> Names:
        folder, name = place
        inode = Inode(next(self._numbers), folder.device, is_directory)
        if not is_directory:
            self._trees.bytes[inode] = b""
        return Names(folder, {name: inode})

    def _do_mkdir(self, arguments: str, result: int, made: str | None) -> Iterator[Event]:
        place = self._place(paths_in(arguments)[0])
        if place is not None:
            yield self._create(place, is_directory=True)

    _do_mkdirat = _do_mkdir

    def _do_unlink(self, arguments: str, result: int, made: str | None) -> Iterator[Event]:
        place = self._place(paths_in(arguments)[0])
        if place is not None:
            yield Names(place[0], {place[1]: None})

    _do_unlinkat = _do_rmdir = _do_unlink

    def _do_rename(self, arguments: str, result: int, made: str | None) -> Iterator[Event]:
        old, new = (self._place(path) for path in paths_in(arguments))
        if (old is None) != (new is None):
            raise NotUnderstood(f"rename({arguments[:300]}): into or out of the trees")
        if old is None or new is None:
            return
        inode = self._trees.names[old[0]].get(old[1])
        if inode is None:
            raise NotUnderstood(f"rename: {old[1]} is not known")
        if "RENAME_EXCHANGE" in arguments:
            if old[0] != new[0]:
                raise NotUnderstood(f"rename({arguments[:300]}): between two directories")
            other = self._trees.names[new[0]].get(new[1])
            yield Names(old[0], {old[1]: other, new[1]: inode})
            return
        if old[0] == new[0]:
            yield Names(old[0], {old[1]: None, new[1]: inode})
            return
        leaves, comes = Names(old[0], {old[1]: None}), Names(new[0], {new[1]: inode})
        leaves.other, comes.other = comes, leaves
        yield comes
        yield leaves

    _do_renameat = _do_renameat2 = _do_rename

    def _do_link(self, arguments: str, result: int, made: str | None) -> Iterator[Event]:
        old, new = paths_in(arguments)
        place = self._place(new)
        if place is None:
            return
        inode = self._at(old)
        if inode is None:
            raise NotUnderstood(f"link({arguments[:300]})")
        yield Names(place[0], {place[1]: inode})

    _do_linkat = _do_link

    # contents

    def _do_write(self, arguments: str, result: int, made: str | None) -> Iterator[Event]:
        handle = handles_in(arguments)[0]
        data = _strings(arguments)[:result]
        inode = self._at(handle.path)
        if inode is None:
            if handle.number in (1, 2) or "socket" in handle.path:
                yield Output(handle.number, data)
            return
        yield Write(inode, self._advance(handle, inode, result), data)

    _do_writev = _do_write

    def _advance(self, handle: Handle, inode: Inode, nbytes: int) -> int:
        """Move a file's position past a write; return where the write begins."""
        key = self._group, handle.number
        at = self._positions.get(key)
        if key in self._appends:
            at = len(self._trees.bytes.get(inode, b""))
        if at is None:
            raise NotUnderstood(f"{handle.path}: its position is not known")
        self._positions[key] = at + nbytes
        return at

    def _do_pwrite64(self, arguments: str, result: int, made: str | None) -> Iterator[Event]:
        inode = self._at(handles_in(arguments)[0].path)
        if inode is not None:
            after = re.split(r", ", arguments.rpartition('"')[2].rpartition("]")[2])
            numbers = [int(n) for n in after if n.isdigit()]
            # pwrite64: count, offset; pwritev: count of buffers, offset
            yield Write(inode, numbers[1], _strings(arguments)[:result])

    _do_pwritev = _do_pwritev2 = _do_pwrite64

    def _do_copy_file_range(self, arguments: str, result: int, made: str | None) -> Iterator[Event]:
        source, target = handles_in(arguments)[:2]
        offsets = re.findall(r">, (NULL|\[\d+\](?: => \[\d+\])?)", arguments)
        inode = self._at(target.path)
        if inode is None or not result:
            return
        begins = [None if text == "NULL" else int(re.findall(r"\d+", text)[0]) for text in offsets]
        yield self._copied(source, begins[0], inode, target, begins[1], result)

    def _do_sendfile(self, arguments: str, result: int, made: str | None) -> Iterator[Event]:
        target, source = handles_in(arguments)[:2]
        inode = self._at(target.path)
        if inode is None or not result:
            return
        begin = re.search(r">, \[(\d+)\]", arguments)
        yield self._copied(source, int(begin[1]) if begin else None, inode, target, None, result)

    def _copied(
        self,
        source: Handle,
        begin: int | None,
        inode: Inode,
        target: Handle,
        at: int | None,
        nbytes: int,
    ) -> Write:
        origin = self._at(source.path)
        if origin is None:
            raise NotUnderstood(f"{source.path}: copied from outside of the trees")
        if begin is None:
            begin = self._advance(source, origin, nbytes)
        if at is None:
            at = self._advance(target, inode, nbytes)
        return Write(inode, at, self._trees.bytes[origin][begin : begin + nbytes])

    def _do_ftruncate(self, arguments: str, result: int, made: str | None) -> Iterator[Event]:
        inode = self._at(handles_in(arguments)[0].path)
        if inode is not None:
            yield Resize(inode, int(arguments.rpartition(", ")[2]))

    def _do_truncate(self, arguments: str, result: int, made: str | None) -> Iterator[Event]:
        inode = self._at(paths_in(arguments)[0])
        if inode is not None:
            yield Resize(inode, int(arguments.rpartition(", ")[2]))

    def _do_utimensat(self, arguments: str, result: int, made: str | None) -> Iterator[Event]:
        paths = paths_in(arguments) or [handle.path for handle in handles_in(arguments)]
        inode = self._at(paths[0])
        if inode is not None and not inode.is_directory:
            times = re.findall(r"tv_sec=(\d+), tv_nsec=(\d+)", arguments)
            if len(times) != 2:
                raise NotUnderstood(f"utimensat({arguments[:300]})")
            yield SetTime(inode, int(times[1][0]) * 10**9 + int(times[1][1]))

    def _do_mmap(self, arguments: str, result: int, made: str | None) -> Iterator[Event]:
        shared = "MAP_SHARED" in arguments and "PROT_WRITE" in arguments
        if shared and any(self._at(handle.path) for handle in handles_in(arguments)):
            raise NotUnderstood(f"mmap({arguments[:300]}): writes through memory are not seen")
        yield from ()

    def _do_ioctl(self, arguments: str, result: int, made: str | None) -> Iterator[Event]:
        if _FICLONE in arguments and self._is_inside(handles_in(arguments)[0].path):
            raise NotUnderstood(f"ioctl({arguments[:300]})")
        yield from ()

    def _do_lseek(self, arguments: str, result: int, made: str | None) -> Iterator[Event]:
        self._positions[self._group, handles_in(arguments)[0].number] = result
        yield from ()

    def _do_dup(self, arguments: str, result: int, made: str | None) -> Iterator[Event]:
        old = self._group, handles_in(arguments)[0].number
        self._positions[self._group, result] = self._positions.get(old, 0)
        yield from ()

    _do_dup2 = _do_dup3 = _do_dup

    def _do_fcntl(self, arguments: str, result: int, made: str | None) -> Iterator[Event]:
        return self._do_dup(arguments, result, made) if "F_DUPFD" in arguments else iter(())

    def _do_sendto(self, arguments: str, result: int, made: str | None) -> Iterator[Event]:
        yield Output(handles_in(arguments)[0].number, _strings(arguments)[:result])

    _do_sendmsg = _do_sendto


def handles_in(arguments: str) -> list[Handle]:
    """Return the descriptors in a call's arguments, with their paths."""
    found = []
    for match in _HANDLE.finditer(arguments):
        number = -1 if match[1] == "AT_FDCWD" else int(match[1])
        found.append(Handle(number, os.fsdecode(decoded(match[2]))))
    return found


def paths_in(arguments: str) -> list[str]:
    """Return the paths in a call's arguments, each joined to the handle before it."""
    paths: list[str] = []
    base = ""
    for part in re.finditer(f"{_HANDLE.pattern}|{_STRING.pattern}", arguments):
        if part[1] is not None:
            base = os.fsdecode(decoded(part[2]))
        else:
            paths.append(os.path.join(base, os.fsdecode(decoded(part[3]))))  # noqa: PTH118
    return paths


def decoded(text: str) -> bytes:
    """Return the bytes that strace writes as \\xNN."""
    if "\\" not in text:
        return text.encode()
    return bytes.fromhex(text.replace("\\x", ""))


def _strings(arguments: str) -> bytes:
    """Join the byte strings of a call's arguments."""
    parts = []
    for match in _STRING.finditer(arguments):
        if match[2]:
            raise NotUnderstood("more bytes in one call than are recorded")
        parts.append(decoded(match[1]))
    return b"".join(parts)
