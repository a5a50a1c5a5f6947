"""Close the ports of a Mooncake client, which answers anybody who reaches them.

With protocol tcp, `setup` listens at two ports of all addresses. Without authentication, a peer
learns at the first port which memory the package shares, and reads and writes that memory at the
second port. No variable binds the ports to one address. No other process needs the ports, because a
guest (a client that contributes no memory) has no segment.
Source: Mooncake mooncake-transfer-engine/src/transfer_metadata_plugin.cpp :: findAvailableTcpPort,
src/transport/tcp_transport/tcp_transport_session_impl.h :: TcpContext, src/config.cpp ::
ValidatePortRange; tried on mooncake-transfer-engine 0.3.13.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Set

_PORTS = {"MIN": 15000, "MAX": 17000}  # Mooncake's default range
_EPHEMERAL = range(32768, 61000)  # ports of other programs, which Mooncake refuses
_SO_ATTACH_FILTER = 26
# One instruction of linux/filter.h: BPF_RET | BPF_K with 0 bytes to keep, which drops a packet.
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)


def names_of_sockets() -> frozenset[str]:
    """Return the kernel's names of this process's sockets."""
    return frozenset(name for _, name in _sockets())


def close_ports(before: Set[str]) -> list[int]:
    """Drop all packets to the listeners that a new client has opened; end their connections.

    before: result of `names_of_sockets` before the client was set up.
    Only listeners within Mooncake's range of ports count, because other threads of a server may
    have begun to listen since. Returns the ports that stay open. There are such ports only if the
    kernel has no socket filters.
    """
    ours, ports, left = _range_of_ports(), set(), []
    fresh = [number for number, name in _sockets() if name not in before]
    for opened in _opened(fresh):
        port = _port_of(opened)
        if _listens(opened) and port in ours:
            ports.add(port)
            left += [] if _drops_all(opened) else [port]
    for opened in _opened(fresh):
        if not _listens(opened) and _port_of(opened) in ports:
            opened.shutdown(socket.SHUT_RDWR)
    return left


def _range_of_ports() -> range:
    """Return the range in which Mooncake looks for a free port, as its variables state it.

    Like Mooncake, take the default range if the variables do not state a possible range.
    """
    first, last = (_stated_port(end, default) for end, default in _PORTS.items())
    if not 1024 <= first <= last <= 65535 or {first, last} & {*_EPHEMERAL}:
        first, last = _PORTS.values()
    return range(first, last + 1)


def _stated_port(end: str, default: int) -> int:
    # Mooncake reads both spellings of the name.
    names = (f"MC_{end}_RPC_PORT", f"MC_{end}_PRC_PORT")
    text = next((os.environ[name] for name in names if name in os.environ), str(default))
    return int(text) if text.isdecimal() else 0


def _sockets() -> Iterator[tuple[int, str]]:
    """Yield the descriptor and the name of each socket of this process."""
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            name = str(path.readlink())
            if name.startswith("socket:"):
                yield int(path.name), name


def _opened(descriptors: list[int]) -> Iterator[socket.socket]:
    """Yield copies of the TCP sockets among some descriptors. Close each before the next."""
    for descriptor in descriptors:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as opened:
            if opened.family in (socket.AF_INET, socket.AF_INET6):
                yield opened


def _listens(opened: socket.socket) -> bool:
    return bool(opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _port_of(opened: socket.socket) -> int:
    port: int = opened.getsockname()[1]
    return port


def _drops_all(listener: socket.socket) -> bool:
    """Attach a filter that drops all packets. Return False if the kernel has no filters."""
    program = ctypes.create_string_buffer(_DROP, len(_DROP))
    filters = struct.pack("HP", 1, ctypes.addressof(program))
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filters)
    except OSError:  # some kernels have no filters, such as gVisor's
        return False
    return True
