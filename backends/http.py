"""Requests to one HTTP service of a store, with kept connections, deadlines and size limits.

`urllib` and `requests` do not suffice. They limit the time of each socket read, but not of a whole
reply. They accept truncated bodies, and headers that arrive byte by byte.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import SplitResult, urlsplit

from hicachectl.formats.errors import StoreUnavailable
from hicachectl.formats.wording import reason_of, with_next

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping

    T = TypeVar("T")

CONNECT_TIMEOUT_S = 5.0
MAX_REPLY_BYTES = 256 << 20
MAX_HEAD_BYTES = 1 << 18  # status, headers and interim replies; 1 KB is usual

_BLOCK_BYTES = 1 << 20
_TRIES = 3
_PAUSE_S = 0.1
_SAID_BYTES = 200  # bytes of a service's error text in a message
# After these errors another try may succeed, because the service may have restarted or closed a
# kept connection.
_PASSING = (ConnectionResetError, ConnectionAbortedError, BrokenPipeError)


def fit(text: str, limit: int = _SAID_BYTES) -> str:
    """Return the start of a service's text, with spaces for unprintable characters."""
    return "".join(char if char.isprintable() else " " for char in text[:limit]).strip()


def service_url(text: str) -> SplitResult | None:
    """Return the parts of a service's URL; None if it is invalid, or has no scheme or host."""
    try:
        parts = urlsplit(text)
        valid = parts.scheme and parts.hostname and parts.port != 0
    except ValueError:  # invalid port, unmatched brackets
        return None
    return parts if valid and text.isprintable() and " " not in text else None


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole reply. retry_after: the Retry-After header; "" without this header."""

    status: int
    body: bytes
    retry_after: str = ""


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    path: str
    body: bytes | None = None
    repeatable: bool = True


class HttpService:
    """One HTTP service, which several threads may call. Failures raise StoreUnavailable.

    who:       the service's name in messages, such as "Mooncake master".
    hint:      next step for the user if no service answers, or if a wrong service answers.
    timeout_s: seconds for a whole reply, or for each block of a streamed reply.
    headers:   headers of every request.
    tls:       use TLS, and check the certificate.
    max_reply_bytes: maximum bytes of a whole reply; None means MAX_REPLY_BYTES.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        who: str,
        hint: str,
        timeout_s: float = 15.0,
        headers: Mapping[str, str] | None = None,
        tls: bool = False,
        max_reply_bytes: int | None = None,
    ) -> None:
        self.hint = hint
        self._max_reply_bytes = max_reply_bytes
        self._name = f"{who} {f'[{host}]' if ':' in host else host}:{port}"
        self._place = (host, port)
        self._timeout_s = timeout_s
        self._headers = dict(headers or {})
        self._tls = _tls_context() if tls else None
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._closed = False

    def close(self) -> None:
        """Close every connection. Pending requests of other threads fail at once."""
        with self._lock:
            self._closed = True
            for connection in self._busy:
                connection.abort()
        self._drop_idle()

    def get(self, path: str) -> Reply:
        """Return the whole reply, whatever its status. Repeat the request after a reset connection.

        path: percent-encoded path.
        """
        return self._reply(_Request("GET", path))

    def post(self, path: str, body: bytes, *, repeatable: bool) -> Reply:
        """Post JSON and return the whole reply, whatever its status.

        path:       percent-encoded path.
        repeatable: whether to repeat the request after a reset connection, although the service may
            have executed the request. If False, send the request once, and on a new connection,
            because the service may have closed a kept connection. After an error, the service may
            have executed the request.
        """
        return self._reply(_Request("POST", path, body, repeatable))

    def stream(self, path: str, kind: str | None = None) -> Generator[bytes, None, None]:
        """Yield the body of a 200 reply in blocks.

        Raises StoreUnavailable. For a truncated body, the error follows the last block.

        kind: content type that the reply must have if it states one; None accepts any type.
        """
        request = _Request("GET", path)
        deadline = time.monotonic() + self._timeout_s
        connection, response = self._tried(lambda: self._ask(request, deadline), deadline, _TRIES)
        try:
            if response.status != http.client.OK:
                raise self.refused(path, Reply(response.status, self._body(response)))
            stated = response.headers.get_content_type()
            if kind not in (None, stated) and "Content-Type" in response.headers:
                raise self.lost(f"{path} returned {fit(stated)} instead of {kind}")
            for block in _blocks(response):
                yield block
                connection.extend(time.monotonic() + self._timeout_s)
        except (OSError, http.client.HTTPException) as error:
            raise self._failed(error) from error
        finally:
            self._put_back(connection, response)

    def lost(self, what: str, remedy: str = "") -> StoreUnavailable:
        """Return the error for a problem with the service. remedy: next step; "" for the hint."""
        return StoreUnavailable(with_next(f"{self._name}: {what}", remedy or self.hint))

    def refused(self, path: str, reply: Reply) -> StoreUnavailable:
        """Return the error for a reply with an unexpected status."""
        endpoint = path.partition("?")[0]
        if reply.status == http.client.NOT_FOUND:
            return self.lost(f"has no endpoint {endpoint}")
        return self.lost(f"{endpoint} failed with {self.said(reply)}", "check its log")

    def said(self, reply: Reply) -> str:
        """Return the status and first words of a reply, without the request's secrets."""
        text = reply.body[: 4 * _SAID_BYTES].decode(errors="replace")
        for value in self._headers.values():
            text = text.replace(value.rpartition(" ")[2], "***")
        return f"HTTP {reply.status}" + (f": {printable}" if (printable := fit(text)) else "")

    def _reply(self, request: _Request) -> Reply:
        deadline = time.monotonic() + self._timeout_s

        def attempt() -> Reply:
            connection, response = self._ask(request, deadline)
            try:
                after = response.getheader("Retry-After", "")
                return Reply(response.status, self._body(response), after)
            finally:
                self._put_back(connection, response)

        return self._tried(attempt, deadline, _TRIES if request.repeatable else 1)

    def _ask(
        self, request: _Request, deadline: float
    ) -> tuple[_Connection, http.client.HTTPResponse]:
        with self._lock:
            if self._closed:
                raise ConnectionAbortedError
            kept = request.repeatable and self._idle
            connection = self._idle.pop() if kept else _Connection(*self._place, self._tls)
            self._busy.add(connection)
        try:
            return connection, connection.ask(request, self._headers, deadline)
        except BaseException:
            self._put_back(connection, None)
            raise

    def _body(self, response: http.client.HTTPResponse) -> bytes:
        body = bytearray()
        for block in _blocks(response):
            body += block
            limit = self._max_reply_bytes or MAX_REPLY_BYTES
            if len(body) > limit:
                raise self.lost(f"a reply is larger than {limit} bytes")
        return bytes(body)

    def _put_back(self, connection: _Connection, response: http.client.HTTPResponse | None) -> None:
        """Keep a connection whose response was read to its end. Close any other connection."""
        reusable = response is not None and response.isclosed() and not response.will_close
        with self._lock:
            self._busy.discard(connection)
            keep = reusable and not self._closed
            if keep:
                self._idle.append(connection)
        if not keep:
            connection.close()

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _tried(self, attempt: Callable[[], T], deadline: float, tries: int) -> T:
        for tries_left in reversed(range(tries)):
            try:
                return attempt()
            except _PASSING as error:
                self._drop_idle()  # other kept connections lead to the same process
                if not tries_left or self._closed or time.monotonic() + _PAUSE_S > deadline:
                    raise self._failed(error) from error
                time.sleep(_PAUSE_S)
            except (OSError, http.client.HTTPException, UnicodeError) as error:
                raise self._failed(error) from error
        raise AssertionError("the last try returns or raises")

    def _failed(self, error: Exception) -> StoreUnavailable:
        known = {
            TimeoutError: (
                f"no answer within {self._timeout_s:g} s",
                "check the network and whether the service is stuck",
            ),
            ConnectionRefusedError: ("connection refused: no service listens there", self.hint),
            http.client.IncompleteRead: (
                "a reply ended early",
                "check whether the service has crashed",
            ),
            ConnectionError: ("the connection was closed without an answer", self.hint),
            http.client.HTTPException: ("the reply is not valid HTTP", self.hint),
            socket.gaierror: ("unknown host name", "check the spelling of the host"),
            UnicodeError: ("invalid host name", "check the spelling of the host"),
            ssl.SSLError: (f"TLS failed: {getattr(error, 'reason', '') or error}", self.hint),
        }
        for kind, (what, remedy) in known.items():
            if isinstance(error, kind):
                return self.lost(what, remedy)
        return self.lost(reason_of(error))


class _DeadlineSocket(socket.socket):
    """A socket with one deadline for all reads, instead of a timeout for each.

    head_left: bytes of a reply's head that may still be read; None after the head.
    """

    deadline = 0.0
    head_left: int | None = None

    def recv_into(self, *args: Any, **kwargs: Any) -> int:
        self.settimeout(_time_left(self.deadline))
        count = super().recv_into(*args, **kwargs)
        if self.head_left is not None:
            self.head_left -= count
            if self.head_left < 0:  # for example by endless interim replies
                raise http.client.HTTPException(f"a reply head of more than {MAX_HEAD_BYTES} bytes")
        return count


class _DeadlineTlsSocket(_DeadlineSocket, ssl.SSLSocket):
    """A _DeadlineSocket over TLS."""


def _tls_context() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.sslsocket_class = _DeadlineTlsSocket
    return context


class _Connection(http.client.HTTPConnection):
    """A connection kept between requests."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        super().__init__(host, port)
        self._tls = tls
        self._aborted = False

    def ask(
        self, request: _Request, headers: Mapping[str, str], deadline: float
    ) -> http.client.HTTPResponse:
        """Send a request and read the reply's head."""
        if self.sock is None:
            self.sock = self._opened(min(CONNECT_TIMEOUT_S, _time_left(deadline)))
            if self._aborted:
                raise ConnectionAbortedError
        self.extend(deadline)
        kind = {} if request.body is None else {"Content-Type": "application/json"}
        self.request(request.method, request.path, request.body, {**headers, **kind})
        sock = self.sock  # getresponse drops the socket if the reply ends the connection
        self._bound_head(sock, MAX_HEAD_BYTES)
        try:
            response = self.getresponse()
        finally:
            self._bound_head(sock, None)
        if response.status < http.client.OK:  # http.client skips only the interim reply 100
            raise http.client.HTTPException(f"an interim reply {response.status}")
        return response

    def _opened(self, timeout_s: float) -> socket.socket:
        plain = socket.create_connection((self.host, self.port), timeout_s)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                return self._tls.wrap_socket(plain, server_hostname=self.host)
            return _DeadlineSocket(fileno=plain.detach())
        except BaseException:
            plain.close()
            raise

    @staticmethod
    def _bound_head(sock: socket.socket, limit: int | None) -> None:
        if isinstance(sock, _DeadlineSocket):
            sock.head_left = limit

    def extend(self, deadline: float) -> None:
        """Set the deadline of the current request."""
        # The socket is None after a reply that ends the connection.
        if isinstance(self.sock, _DeadlineSocket):
            self.sock.deadline = deadline
            self.sock.settimeout(_time_left(deadline))

    def abort(self) -> None:
        """Make another thread's pending request fail."""
        self._aborted = True
        sock = self.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def _blocks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Yield a body in blocks. Raises IncompleteRead for a truncated body; `read(n)` does not."""
    if response.length is None and not response.chunked:
        raise http.client.HTTPException("a reply without a length")
    while block := response.read(_BLOCK_BYTES):
        yield block
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)


def _time_left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
