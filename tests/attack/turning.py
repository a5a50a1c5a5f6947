"""A real HTTP service that answers well at first, and badly after some request."""

from __future__ import annotations

import http.client
import json
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.backends.http_scripts import Call

HTML = b"<html><body>\n<h1>Bad gateway</h1>\n</body></html>\n"
JSON = "Content-Type: application/json"
TIMEOUT_S = 30


class Real(NamedTuple):
    """An answer of the real server."""

    status: int
    body: bytes
    headers: str


class Turning:
    """A script for `serving`: passes requests on to `server`, then turns bad.

    server: host:port. good: number of requests answered well. bad: answers the later ones, or only
        the next one (once); it may first let the server obey. requests: number so far.
    """

    def __init__(
        self, server: str, good: int = 0, bad: Bad | None = None, *, once: bool = False
    ) -> None:
        self.requests = 0
        self._server = server
        self._good = good
        self._bad = bad
        self._once = once
        self._lock = threading.Lock()

    def __call__(self, call: Call) -> None:
        with self._lock:
            number, self.requests = self.requests, self.requests + 1
        if self._bad is None or number < self._good or (self._once and number > self._good):
            passed_on(call, self.real(call))
        else:
            self._bad(call, lambda: self.real(call))

    def real(self, call: Call) -> Real:
        """Return the real server's answer."""
        connection = http.client.HTTPConnection(self._server, timeout=TIMEOUT_S)
        try:
            connection.request("POST" if call.body else "GET", call.path, call.body or None)
            reply = connection.getresponse()
            kind = reply.getheader("Content-Type")
            return Real(reply.status, reply.read(), f"Content-Type: {kind}" if kind else "")
        finally:
            connection.close()


def passed_on(call: Call, real: Real) -> None:
    if real.status == http.client.NO_CONTENT:
        call.send(b"HTTP/1.1 204 No Content\r\n\r\n")
    else:
        call.answer(real.body, real.status, real.headers)


if TYPE_CHECKING:
    Bad = Callable[[Call, Callable[[], Real]], None]


def _cut(call: Call, real: Callable[[], Real]) -> None:
    body = real().body or b"{}"
    call.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body[: len(body) // 2])
    call.close()


def _endless(call: Call, _: Callable[[], Real]) -> None:
    call.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:  # until the client closes the connection
        call.send(b"1000\r\n" + b" " * 0x1000 + b"\r\n")


def _obeyed_in_silence(call: Call, real: Callable[[], Real]) -> None:
    real()
    call.reset()


# No client may accept these as an answer.
BROKEN: dict[str, Bad] = {
    "closed": lambda call, _: call.close(),
    "reset": lambda call, _: call.reset(),
    "obeyed and reset": _obeyed_in_silence,
    "cut": _cut,
    "500": lambda call, _: call.answer(b"Internal Server Error", 500),
    "503": lambda call, _: call.answer(HTML, 503, "Content-Type: text/html"),
    "HTML": lambda call, _: call.answer(HTML, 200, "Content-Type: text/html"),
    "no JSON": lambda call, _: call.answer(b'{"exists": [\n', 200, JSON),
    "other JSON": lambda call, _: call.answer(b'{"status": "ok", "indexes": []}\n', 200, JSON),
    "a list": lambda call, _: call.answer(b"[]\n", 200, JSON),
    "null": lambda call, _: call.answer(b"null\n", 200, JSON),
}
SLOW: dict[str, Bad] = {
    "endless": _endless,
    "trickled": lambda call, _: call.trickle(b"HTTP/1.1 200 OK\r\n" * 99, 1.0),
    "hanging": lambda call, _: call.hang(),
}


def altered(change: Callable[[Any], Any]) -> Bad:
    """Return an answer that alters the real JSON, and passes anything else on."""

    def bad(call: Call, real: Callable[[], Real]) -> None:
        answer = real()
        try:
            document = change(json.loads(answer.body))
        except ValueError:
            passed_on(call, answer)
        else:
            call.answer(json.dumps(document).encode(), answer.status, answer.headers)

    return bad


def numbers(value: object) -> Callable[[Any], Any]:
    """Return a change that replaces every integer by a value."""

    def change(document: Any) -> Any:
        if isinstance(document, dict):
            return {key: change(each) for key, each in document.items()}
        if isinstance(document, list):
            return [change(each) for each in document]
        return value if type(document) is int else document

    return change


def lists(resized: Callable[[list[Any]], list[Any]]) -> Callable[[Any], Any]:
    """Return a change that resizes the outermost lists."""
    return lambda document: {
        key: resized(each) if isinstance(each, list) else each for key, each in document.items()
    }


fewer, more = lists(lambda each: each[:-1]), lists(lambda each: each + (each or [True])[:1])
