"""Tests of backends.http with services that misbehave."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import pytest

from hicachectl.backends import http as http_service
from hicachectl.backends.http import HttpService, Reply
from hicachectl.formats.errors import StoreUnavailable
from tests.backends.http_scripts import SOON_S, Call, reply, serving
from tests.skips import missing, need_tool

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.backends.http_scripts import Script

SHORT_S = 0.1
LONG_HEAD = b"HTTP/1.1 200 OK\r\nX: " + b"y" * 999


@pytest.fixture(autouse=True)
def _brief_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_service, "_PAUSE_S", 0.01)


@contextmanager
def client_of(script: Script, timeout_s: float = 10.0) -> Iterator[HttpService]:
    with serving(script) as address, closing(_client(address, timeout_s)) as client:
        yield client


def _client(address: str, timeout_s: float = 10.0) -> HttpService:
    host, _, port = address.rpartition(":")
    return HttpService(host, int(port), who="Example", hint="try another port", timeout_s=timeout_s)


def test_a_reply_is_given_whatever_its_status() -> None:
    with client_of(lambda call: call.answer(call.path.encode(), 418)) as client:
        assert client.get("/pot?a=%20b") == Reply(418, b"/pot?a=%20b")


def test_one_connection_serves_consecutive_requests() -> None:
    with client_of(lambda call: call.answer(b"%d.%d" % (call.number, call.turn))) as client:
        assert [client.get("/").body for _ in range(3)] == [b"0.0", b"0.1", b"0.2"]
        assert b"".join(client.stream("/")) == b"0.3"
        assert client.get("/").body == b"0.4"


def test_threads_have_connections_of_their_own() -> None:
    together = threading.Barrier(2, timeout=10)

    def script(call: Call) -> None:
        if call.path == "/refuse":
            return call.answer(b"", 500)
        together.wait()  # passes only with both requests
        return call.answer(call.path.encode())

    with client_of(script) as client, ThreadPoolExecutor(2) as pool:
        for _ in range(2):  # a refused stream returns its connection once
            with pytest.raises(StoreUnavailable):
                list(client.stream("/refuse"))
            replies = pool.map(client.get, ["/a", "/b"])
            assert [found.body for found in replies] == [b"/a", b"/b"]


def test_a_connection_that_the_service_has_closed_is_opened_again() -> None:
    def script(call: Call) -> None:
        call.answer(b"%d" % call.number)
        call.close()

    with client_of(script) as client:
        assert [client.get("/").body for _ in range(3)] == [b"0", b"1", b"2"]


@pytest.mark.parametrize("resets", [1, 2])
def test_a_passing_reset_is_tried_again(resets: int) -> None:
    def script(call: Call) -> None:
        if call.number < resets:
            call.reset()
        else:
            call.answer(b"well")

    with client_of(script) as client:
        assert client.get("/").body == b"well"
    with client_of(script) as client:
        assert list(client.stream("/")) == [b"well"]


def test_a_body_is_posted_and_the_reply_given_whatever_its_status() -> None:
    with client_of(lambda call: call.answer(call.body[::-1], 500)) as client:
        assert client.post("/", b"abc", repeatable=False) == Reply(500, b"cba")
        assert client.post("/", b"", repeatable=True) == Reply(500, b"")


@pytest.mark.parametrize(("repeatable", "sent"), [(True, [0, 1, 2]), (False, [0])])
def test_only_a_repeatable_post_is_sent_again(repeatable: bool, sent: list[int]) -> None:
    seen: list[int] = []

    def script(call: Call) -> None:
        seen.append(call.number)
        call.reset()

    with client_of(script) as client, pytest.raises(StoreUnavailable, match="without an answer"):
        client.post("/", b"{}", repeatable=repeatable)
    assert seen == sent


def test_a_kept_connection_that_has_died_does_not_fail_what_is_sent_once() -> None:
    def script(call: Call) -> None:
        if call.turn:
            call.reset()
        call.answer(b"well")

    with client_of(script) as client:
        for _ in range(3):
            assert client.post("/", b"{}", repeatable=False).body == b"well"


def test_resets_are_not_tried_again_for_ever() -> None:
    seen: list[int] = []

    def script(call: Call) -> None:
        seen.append(call.number)
        call.reset()

    with (
        client_of(script) as client,
        pytest.raises(
            StoreUnavailable,
            match=r"^Example 127\.0\.0\.1:\d+: the connection was closed without an answer; "
            "try another port$",
        ),
    ):
        client.get("/")
    assert seen == [0, 1, 2]


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(lambda call: call.hang(), id="nothing"),
        pytest.param(lambda call: call.trickle(LONG_HEAD, 0.02), id="head trickles"),
        pytest.param(lambda call: call.trickle(reply(b"y" * 999), 0.02), id="body trickles"),
        pytest.param(lambda call: (call.send(reply(b"yy")[:-1]), call.hang()), id="byte missing"),
    ],
)  # fmt: skip
def test_a_service_that_hangs_or_trickles_is_given_up_in_time(script: Script) -> None:
    with client_of(script, timeout_s=SHORT_S) as client:
        start = time.monotonic()
        with pytest.raises(StoreUnavailable, match=r"no answer within 0\.1 s; check the network"):
            client.get("/")
        assert SHORT_S <= time.monotonic() - start < SOON_S


@pytest.mark.slow
def test_a_service_that_takes_no_request_is_given_up_in_time() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,  # never accepts or reads
        closing(_client("{}:{}".format(*listener.getsockname()), SHORT_S)) as client,
        pytest.raises(StoreUnavailable, match="no answer"),
    ):
        client.get("/" + "x" * (16 << 20))


@pytest.mark.slow
def test_a_stream_that_stops_is_given_up_though_it_may_last_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_service, "_BLOCK_BYTES", 1)

    def script(call: Call) -> None:
        call.send(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n")
        call.trickle(come, 0.05)
        call.hang()

    come, block_timeout_s = bytes(range(50)), 2.0
    blocks: list[bytes] = []
    with client_of(script, timeout_s=block_timeout_s) as client:
        start = time.monotonic()
        with pytest.raises(StoreUnavailable, match="no answer within"):
            blocks.extend(client.stream("/"))  # keeps the blocks before the error
        assert 2 * block_timeout_s < time.monotonic() - start < 2 * block_timeout_s + SOON_S
    assert b"".join(blocks) == come


@pytest.mark.parametrize("length", [0, 1, 6, 7, 8, 15])
def test_a_stream_is_the_body_in_blocks(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setattr(http_service, "_BLOCK_BYTES", 7)
    body = bytes(range(length))
    with client_of(lambda call: call.answer(body)) as client:
        blocks = list(client.stream("/"))
    assert b"".join(blocks) == body
    assert all(0 < len(block) <= 7 for block in blocks)


def test_a_chunked_body_is_read_whole() -> None:
    raw = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    with client_of(lambda call: call.send(raw)) as client:
        assert client.get("/").body == b"abcde"
        assert b"".join(client.stream("/")) == b"abcde"


CUT_SHORT = [
    pytest.param(reply(b"abcdef")[:-1], id="by its length"),
    pytest.param(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nabc", id="in a chunk"),
]


@pytest.mark.parametrize("raw", CUT_SHORT)
def test_a_body_that_ends_early_is_an_error(raw: bytes) -> None:
    def script(call: Call) -> None:
        call.send(raw)
        call.close()

    with client_of(script) as client:
        with pytest.raises(StoreUnavailable, match="ended early"):
            client.get("/")
        with pytest.raises(StoreUnavailable, match="ended early"):
            list(client.stream("/"))


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.0 200 OK\r\n\r\nhow long?",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000 + b"\r\n\r\n",
    ],
)
def test_what_is_not_http_is_named_as_such(raw: bytes) -> None:
    def script(call: Call) -> None:
        call.send(raw)
        call.close()

    with client_of(script) as client, pytest.raises(StoreUnavailable, match="not valid HTTP"):
        client.get("/")


@pytest.mark.parametrize("chunked", [False, True])
def test_an_absurd_reply_is_refused(monkeypatch: pytest.MonkeyPatch, chunked: bool) -> None:
    monkeypatch.setattr(http_service, "MAX_REPLY_BYTES", 1000)
    monkeypatch.setattr(http_service, "_BLOCK_BYTES", 100)
    endless = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"64\r\n%s\r\n" % (
        b"y" * 100
    )

    def script(call: Call) -> None:
        if not chunked:
            call.send(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999\r\n\r\n" + b"y" * 2000)
            call.hang()
        call.send(endless)
        while True:
            call.send(b"64\r\n%s\r\n" % (b"y" * 100))

    with client_of(script) as client, pytest.raises(StoreUnavailable, match="larger than 1000"):
        client.get("/")


def test_a_listing_given_up_early_does_not_spoil_the_next_request() -> None:
    with client_of(lambda call: call.answer(b"x" * (4 << 20))) as client:
        stream = client.stream("/")
        next(stream)
        stream.close()
        assert len(client.get("/").body) == 4 << 20


def test_close_ends_what_other_threads_wait_for() -> None:
    arrived = threading.Event()

    def script(call: Call) -> None:
        arrived.set()
        call.hang()

    with client_of(script, timeout_s=60) as client, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.get, "/")
        assert arrived.wait(30)
        client.close()
        with pytest.raises(StoreUnavailable, match="closed without an answer"):
            waiting.result(SOON_S)


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (404, b"no", r"has no endpoint /get; try another port$"),
        (500, b"Failed\n to", r"/get failed with HTTP 500: Failed  to; check its log$"),
        (503, b"", r"/get failed with HTTP 503; check its log$"),
        (500, b"\x1b[31m\xff" + b"y" * 999, r"HTTP 500: \[31m\S{195}; check its log$"),
    ],
)
def test_a_refusal_says_what_the_service_said(status: int, body: bytes, message: str) -> None:
    with (
        client_of(lambda call: call.answer(body, status)) as client,
        pytest.raises(StoreUnavailable, match=message),
    ):
        list(client.stream("/get?x=1"))


def test_nobody_there_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = "{}:{}".format(*listener.getsockname())
    with pytest.raises(StoreUnavailable, match="refused: no service listens there; try another"):
        _client(address).get("/")


def test_an_unknown_host_is_one_clear_line() -> None:
    with pytest.raises(StoreUnavailable, match=r"^Example nowhere\.invalid:1: unknown host name"):
        _client("nowhere.invalid:1").get("/")


def test_an_ipv6_host_is_reached_and_shown_in_brackets() -> None:
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError as error:
        missing("IPv6", f"enable it on the loopback interface ({error})")
    port = listener.getsockname()[1]
    listener.close()
    with pytest.raises(StoreUnavailable, match=rf"^Example \[::1\]:{port}: connection refused"):
        HttpService("::1", port, who="Example", hint="").get("/")


# --- over TLS ---


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a self-signed certificate of localhost, with its key."""
    need_tool("openssl")
    file = tmp_path_factory.mktemp("tls") / "both.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
         "-keyout", file, "-out", file.with_suffix(".crt")],
        check=True,
        capture_output=True,
    )  # fmt: skip
    file.write_bytes(file.read_bytes() + file.with_suffix(".crt").read_bytes())
    return file


@contextmanager
def tls_client_of(script: Script, certificate: Path, timeout_s: float) -> Iterator[HttpService]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with serving(script, context) as address:
        host, _, port = address.rpartition(":")
        service = HttpService(
            host, int(port), who="Example", hint="try", timeout_s=timeout_s, tls=True
        )
        with closing(service) as client:
            yield client


@pytest.mark.slow
def test_a_certificate_that_nobody_vouches_for_is_refused(certificate: Path) -> None:
    with (
        tls_client_of(lambda call: call.answer(b"x"), certificate, 10) as client,
        pytest.raises(StoreUnavailable, match="TLS failed: CERTIFICATE_VERIFY_FAILED"),
    ):
        client.get("/")


@pytest.mark.slow
def test_a_trusted_service_answers_and_has_deadlines_too(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.with_suffix(".crt")))

    def script(call: Call) -> None:
        if call.path == "/slow":
            call.trickle(b"HTTP/1.1 200 OK\r\nX-Y: " + b"z" * 1000, 0.05)
        call.answer(b"%d" % call.turn)

    with tls_client_of(script, certificate, timeout_s=5) as client:
        assert [client.get("/").body for _ in range(3)] == [b"0", b"1", b"2"]
        started = time.monotonic()
        with pytest.raises(StoreUnavailable, match="no answer within 5 s"):
            client.get("/slow")
        assert time.monotonic() - started < 5 + SOON_S


def test_headers_are_sent_and_retry_after_is_read() -> None:
    def script(call: Call) -> None:
        call.answer(call.headers["x-key"].encode(), 429, "Retry-After: 7")

    with serving(script) as address:
        host, _, port = address.rpartition(":")
        service = HttpService(host, int(port), who="x", hint="y", headers={"X-Key": "secret"})
        with closing(service) as client:
            assert client.get("/") == Reply(429, b"secret", "7")


def test_a_closed_client_asks_nothing_more() -> None:
    calls: list[str] = []

    def script(call: Call) -> None:
        calls.append(call.path)
        call.answer(b"")

    with client_of(script) as client:
        client.get("/before")
        client.close()
        with pytest.raises(StoreUnavailable):
            client.get("/after")
    assert calls == ["/before"]
