"""An HTTP service that misbehaves as scripted, over real sockets."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator

    Script = Callable[["Call"], None]

SOON_S = 15.0  # limit for a test that must end, even on a slow machine
PATIENCE_S = 4 * SOON_S  # longer than any test waits


def reply(body: bytes, status: int = 200, header: str = "") -> bytes:
    """Return a reply with its length. header: another header, as `Name: value`."""
    more = f"{header}\r\n".encode() if header else b""
    return b"HTTP/1.1 %d X\r\n%sContent-Length: %d\r\n\r\n%s" % (status, more, len(body), body)


class Call:
    """One request, and the possible replies. Header names are lower case.

    number: of the connection, from 0. turn: of the request on that connection, from 0.
    """

    def __init__(
        self,
        peer: socket.socket,
        path: str,
        headers: dict[str, str],
        body: bytes,
        number: int,
        turn: int,
        over: threading.Event,
    ) -> None:
        self.path = path
        self.headers = headers
        self.body = body
        self.number = number
        self.turn = turn
        self._peer = peer
        self._over = over

    def answer(self, body: bytes, status: int = 200, header: str = "") -> None:
        self.send(reply(body, status, header))

    def send(self, raw: bytes) -> None:
        self._peer.sendall(raw)

    def trickle(self, raw: bytes, pause_s: float) -> None:
        """Send a byte at a time, until the test is over."""
        for byte in raw:
            self.send(bytes([byte]))
            if self._over.wait(pause_s):
                return

    def hang(self) -> None:
        """Send nothing until the test is over; close the connection after PATIENCE_S."""
        if not self._over.wait(PATIENCE_S):
            self.close()

    def close(self) -> None:
        self._peer.shutdown(socket.SHUT_RDWR)

    def reset(self) -> None:
        """Reset the connection, as a process that dies with unread data does."""
        self._peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        socket.close(self._peer.detach())


@contextmanager
def serving(script: Script, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Serve on loopback; yield host:port."""
    over = threading.Event()
    peers: list[socket.socket] = []
    threads: list[threading.Thread] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = listener.accept()
                if tls is not None:
                    try:
                        peer = tls.wrap_socket(peer, server_side=True)
                    except OSError:  # the client refuses the certificate
                        peer.close()
                        continue
                peers.append(peer)
                serve = threading.Thread(target=_serve, args=(peer, len(peers) - 1, script, over))
                threads.append(serve)
                serve.start()

    accepting = threading.Thread(target=accept)
    accepting.start()
    try:
        yield "{}:{}".format(*listener.getsockname())
    finally:
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        accepting.join()
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        for peer in peers:
            peer.close()


def _serve(peer: socket.socket, number: int, script: Script, over: threading.Event) -> None:
    with contextlib.suppress(OSError), peer.makefile("rb") as stream:
        turn = 0
        while first := stream.readline():
            headers = {}
            while header := stream.readline().strip():
                name, _, value = header.decode().partition(":")
                headers[name.lower()] = value.strip()
            path = first.split()[1].decode()
            length = int(headers.get("content-length", 0))
            body = stream.read(length)
            if len(body) < length:  # the client closed within a request
                return
            script(Call(peer, path, headers, body, number, turn, over))
            turn += 1
