"""Processes of a server on this machine, and the directories that they see.

Only files of /proc are read. A server in another container is found if its port belongs to this
network namespace.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
import sys
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from hicachectl.backends.disk.statuses import SERVING, process_start_ns, this_host

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicachectl.backends.disk.statuses import RankStatus
    from hicachectl.doctor.live_server import LiveServer
    from hicachectl.formats.plugin_status import PluginStatus

    Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# SGLang srt/managers/scheduler.py :: run_scheduler_process sets this title, and adds the rank.
_SCHEDULER = b"sglang::scheduler"
_LISTEN = "0A"  # state of a socket in proc(5), /proc/net/tcp
_MAX_LINKS = 40  # path_resolution(7)
_MAX_ENVIRONMENT_BYTES = 4 << 20
# Two directories on different devices of these types are never the same directory. But a network or
# FUSE file system can be mounted twice, with a device for each mount.
_LOCAL = frozenset(("bcachefs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs"))


@dataclass(frozen=True, slots=True)
class Processes:
    """Processes of a server.

    schedulers: PIDs of the processes that open the store; empty if they were not found.
    problem: why the processes were not found, in one sentence; empty if they were found.
    """

    schedulers: tuple[int, ...]
    problem: str = ""

    @property
    def started(self) -> float | None:
        """Start of the first scheduler in Unix seconds; None if unknown."""
        starts = [process_start_ns(pid) for pid in self.schedulers]
        return min((start / 1e9 for start in starts if start), default=None)


class Place(NamedTuple):
    """Device and inode of a directory."""

    device: int
    inode: int


def processes_of(url: str) -> Processes:
    """Return the processes of the server that listens at a URL, if it runs on this machine."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        addresses = _addresses(str(parts.hostname))
    except (OSError, UnicodeError):
        return Processes((), "The host of the URL has no address")
    if not any(map(_is_ours, addresses)):
        return Processes((), "The server runs on another machine, or in another network namespace")
    inodes = set(_listening(addresses, port))
    if not inodes:
        return Processes((), f"No process of this network namespace listens on port {port}")
    owners, refused = _owners(inodes)
    if not owners:
        why = "; run hicachectl as the server's user, or as root" if refused else ""
        return Processes((), f"The process that listens on port {port} cannot be seen{why}")
    schedulers = tuple(pid for pid in _with_descendants(owners) if _is_scheduler(pid))
    if not schedulers:
        return Processes((), f"The process that listens on port {port} has no SGLang scheduler")
    return Processes(schedulers)


def own_statuses(server: LiveServer, statuses: Sequence[RankStatus]) -> list[PluginStatus]:
    """Return the statuses of a server's plug-in that are kept up to date.

    If the server's processes are found on this machine, these are the statuses of the processes. If
    the processes have none, these are the statuses of its model from other machines. If no process
    is found, these are all statuses of its model.
    """
    model = server.deployment.flags.model if server.deployment else None
    serving = [
        one.status
        for one in statuses
        if one.standing == SERVING and model in (None, one.status.model)
    ]
    local = [one for one in serving if (one.host, one.pid_namespace) == this_host()]
    schedulers = processes_of(server.url).schedulers if local else ()
    if not schedulers:
        return serving
    own = [one for one in local if one.pid in schedulers]
    return own or [one for one in serving if one not in local]


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment that a process started with. Raises OSError."""
    with Path(f"/proc/{pid}/environ").open("rb") as file:
        data = file.read(_MAX_ENVIRONMENT_BYTES)
    pairs = (pair.partition("=") for pair in os.fsdecode(data).split("\0"))
    return {name: value for name, equals, value in pairs if equals}


def place_of(pid: int, path: str) -> Place:
    """Return the directory that a process sees at a path. Raises OSError.

    path: absolute, or relative to the directory that the process works in.
    """
    found = _within(Path(f"/proc/{pid}"), path).stat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(20, "Not a directory", path)
    return Place(found.st_dev, found.st_ino)


def is_local(pid: int, device: int) -> bool:
    """Return whether a device is a local file system that a process has mounted."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        text = Path(f"/proc/{pid}/mountinfo").read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
            mount, _, source = line.partition(" - ")
            if mount.split(" ")[2:3] == [wanted]:
                return source.split(" ")[0] in _LOCAL
    return False


def _within(process: Path, path: str) -> Path:
    """Follow the links of a path in the mounts of a process.

    The system would follow an absolute link from this process's own root, outside /proc/PID/root.
    """
    if not path.startswith("/"):
        return process / "cwd" / path
    root = current = process / "root"
    left = deque(_parts(path))
    links = 0
    while left:
        part = left.popleft()
        if part == "..":
            current = root if current == root else current.parent
            continue
        current /= part
        if current.is_symlink():
            links += 1
            if links > _MAX_LINKS:
                raise OSError(40, "Too many levels of symbolic links", path)
            target = str(current.readlink())
            current = root if target.startswith("/") else current.parent
            left.extendleft(reversed(_parts(target)))
    return current


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _addresses(host: str) -> set[Address]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return {_plain(str(place[0]).partition("%")[0]) for *_, place in found}


def _plain(text: str) -> Address:
    address = ipaddress.ip_address(text)
    return (address.version == 6 and address.ipv4_mapped) or address


def _is_ours(address: Address) -> bool:
    """Return whether an interface of this network namespace has an address."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return True


def _listening(addresses: set[Address], port: int) -> Iterator[str]:
    """Yield the inodes of the sockets that listen on a port of these addresses."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                address, _, number = fields[1].partition(":")
                if fields[3] == _LISTEN and int(number, 16) == port:
                    bound = _plain(str(_unpacked(address)))
                    if bound.is_unspecified or bound in addresses:
                        yield fields[9]


def _unpacked(text: str) -> Address:
    """Return an address of /proc/net/tcp. It has words of 32 bits in this machine's byte order."""
    data = bytes.fromhex(text)
    if sys.byteorder == "little":
        data = b"".join(data[at : at + 4][::-1] for at in range(0, len(data), 4))
    return ipaddress.ip_address(data)


def _owners(inodes: set[str]) -> tuple[list[int], bool]:
    """Return the processes that hold one of these sockets, and whether some cannot be seen."""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    owners, refused = [], False
    for pid in _pids():
        try:
            with os.scandir(f"/proc/{pid}/fd") as entries:
                held = (_link(entry.path) for entry in entries)
                if any(link in wanted for link in held):
                    owners.append(pid)
        except PermissionError:
            refused = True
        except OSError:  # the process has ended
            continue
    return owners, refused


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def _with_descendants(owners: list[int]) -> list[int]:
    children: dict[int, list[int]] = {}
    for pid in _pids():
        with suppress(OSError, ValueError, IndexError):
            text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
            children.setdefault(int(text.rpartition(")")[2].split()[1]), []).append(pid)
    found = dict.fromkeys(owners)
    left = deque(owners)
    while left:
        for child in children.get(left.popleft(), ()):
            if child not in found:
                found[child] = None
                left.append(child)
    return list(found)


def _is_scheduler(pid: int) -> bool:
    try:
        with Path(f"/proc/{pid}/cmdline").open("rb") as file:
            return file.read(len(_SCHEDULER)) == _SCHEDULER
    except OSError:
        return False
