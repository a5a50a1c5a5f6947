"""--healthcheck-url pings a service, which never decides how a run ends."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from hicachectl.cli import healthcheck
from tests.backends.http_scripts import Call, serving
from tests.backends.test_http import certificate  # noqa: F401 - a fixture
from tests.cli.test_lock_held import held
from tests.move.migrations import demo_store, profile_file
from tests.stores import put_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.conftest import Invoke

SECRET = "3f5c-secret-uuid"
OPTION = "--healthcheck-url"


class Service:
    """A service over a real socket that keeps the paths of pings.

    script: function that answers; default: with 200.
    """

    def __init__(self) -> None:
        self.pings: list[str] = []
        self.script: Callable[[Call], None] = lambda call: call.answer(b"OK")
        self.url = ""

    def __call__(self, call: Call) -> None:
        self.pings.append(call.path)
        self.script(call)

    @property
    def ends(self) -> list[str]:
        """Return what the pings have behind the secret."""
        ends = [path.removeprefix(f"/ping/{SECRET}") for path in self.pings]
        self.pings.clear()
        return ends


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    with serving(service) as host:
        service.url = f"http://{host}/ping/{SECRET}"
        yield service


@pytest.fixture
def gate(tmp_path: Path) -> tuple[str, ...]:
    """The words of a prewarm that cannot succeed, since its source is not there."""
    profile, tokens = profile_file(tmp_path / "profile.toml"), tmp_path / "tokens"
    tokens.write_text(json.dumps(list(range(200))))
    places = (tmp_path / "new", "--from", tmp_path / "none", "--token-ids", tokens)
    return ("prewarm", *map(str, places), "--profile", str(profile), "--min-usable", "0.5")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    directory = tmp_path / "store"
    directory.mkdir()
    put_pages(directory, range(3), "_m_0_1")
    return directory


def test_a_run_that_succeeds(invoke: Invoke, service: Service, store: Path) -> None:
    run = invoke("verify", store, OPTION, service.url)
    assert service.ends == ["/start", ""]
    assert SECRET not in run.stdout + run.stderr
    invoke("verify", store, OPTION, f"{service.url}/?create=1&x=a%20b")
    assert service.ends == ["/start?create=1&x=a%20b", "?create=1&x=a%20b"]


def test_runs_that_fail(invoke: Invoke, service: Service, tmp_path: Path) -> None:
    store, profile = demo_store(tmp_path / "store"), profile_file(tmp_path / "profile.toml")
    damaged = next(path for path in sorted(store.glob("*.bin")) if "mamba" not in path.name)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    for words, status in [
        (("verify", store, "--profile", profile, "--grace", "0s"), 4),
        (("verify", store, "--profile", profile, "--grace", "0s", "--fail-on", "never"), 0),
        (("verify", tmp_path / "none"), 3),
        (("verify", store, "--quarantine", "x"), 2),
        (("merge", tmp_path), 2),
        (("rm", tmp_path / "none", "--before", "0s", "--yes"), 3),
    ]:
        invoke(*words, OPTION, service.url, exit_code=status)
        assert service.ends == ["/start", "/fail" if status else ""], words


def test_other_commands_with_the_option(invoke: Invoke, service: Service, tmp_path: Path) -> None:
    store, profile = demo_store(tmp_path / "store"), profile_file(tmp_path / "profile.toml")
    given = ("--profile", profile)
    invoke("prewarm", tmp_path / "new", "--from", store, *given, "--all", OPTION, service.url)
    assert service.ends == ["/start", ""]
    invoke("verify", store, *given, "--shard", "0/2", "--run", tmp_path / "run")
    invoke("merge", tmp_path / "run", OPTION, service.url, exit_code=4)
    assert service.ends == ["/start", "/fail"]
    invoke("verify", store, *given, "--shard", "1/2", "--run", tmp_path / "run")
    invoke("merge", tmp_path / "run", OPTION, service.url)
    assert service.ends == ["/start", ""]
    invoke("rm", store, "--before", "0s", "--yes", OPTION, service.url)
    assert service.ends == ["/start", ""]


def test_nothing_done_is_no_success(invoke: Invoke, service: Service, store: Path) -> None:
    """A held lock, and an operator who declines, end with 0."""
    lock = store.parent / "lock"
    with held(lock):
        invoke("verify", store, "--lock", lock, OPTION, service.url)
    assert service.ends == ["/start"]
    invoke("verify", store, "--lock", lock, OPTION, service.url)
    assert service.ends == ["/start", ""]


def test_a_gate_that_opens_anyway_is_a_failure(
    invoke: Invoke, service: Service, gate: tuple[str, ...]
) -> None:
    assert "OPENED ANYWAY" in invoke(*gate, "--open-after", "0.1s", OPTION, service.url).stderr
    assert service.ends == ["/start", "/fail"]


def test_the_variable_is_for_whole_runs(
    invoke: Invoke, service: Service, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HICACHECTL_HEALTHCHECK_URL", service.url)
    invoke("verify", store)
    assert service.ends == ["/start", ""]
    invoke("ls", store)
    invoke("verify", store, "--repair", "delete", "--dry-run", exit_code=2)
    invoke("verify", store, "--shard", "0/1", "--run", store.parent / "run")
    assert service.ends == []
    part = ("verify", store, "--shard", "0/1", "--run", store.parent / "other")
    said = invoke(*part, OPTION, service.url, exit_code=2).stderr
    assert "give --healthcheck-url to hicachectl merge" in said
    assert SECRET not in said


@pytest.mark.parametrize(
    "url",
    [
        f"ftp://h/{SECRET}",
        f"{SECRET}",
        f"https://user:{SECRET}@h/x",
        f"https://{SECRET}@h/x",
        f"https://h:port/{SECRET}",
        f"https://h/{SECRET}#x",
        f"https://h/{SECRET} x",
    ],
)
def test_a_wrong_url_is_refused_without_showing_it(
    invoke: Invoke, store: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    said = invoke("verify", store, OPTION, url, exit_code=2).stderr
    assert said.startswith(f"hicachectl: {OPTION}: ")
    assert SECRET not in said
    monkeypatch.setenv("HICACHECTL_HEALTHCHECK_URL", url)
    said = invoke("verify", store, exit_code=2).stderr
    assert said.startswith("hicachectl: HICACHECTL_HEALTHCHECK_URL: ")
    assert SECRET not in said


def test_two_urls_are_refused_without_showing_them(invoke: Invoke, store: Path) -> None:
    given = [word for end in "ab" for word in (OPTION, f"https://h/{SECRET}/{end}")]
    said = invoke("verify", store, *given, exit_code=2).stderr
    assert said == (f"hicachectl: {OPTION}: takes one value, but has 2; give only one\n")


FAULTS: dict[str, tuple[Callable[[Call], None], str]] = {
    "not found": (lambda call: call.answer(SECRET.encode(), 404), "HTTP 404"),
    "broken": (lambda call: call.answer(b"", 500), "HTTP 500"),
    "moved": (
        lambda call: call.answer(b"", 302, f"Location: http://127.0.0.1:1/{SECRET}"),
        "HTTP 302: redirects are not followed; give the final URL",
    ),
    "closed": (lambda call: call.close(), "the connection was closed without an answer"),
    "reset": (lambda call: call.reset(), "the connection was closed"),
    "no HTTP": (lambda call: call.send(b"\xff\n\n"), "not valid HTTP"),
    "silent": (lambda call: call.hang(), "no answer within 0.3 s"),
    "slow": (lambda call: call.trickle(b"HTTP/1.1 200 OK\r\n", 0.1), "no answer within 0.3 s"),
    "large": (lambda call: call.answer(b"x" * (2 << 20)), "a reply is larger"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_service_that_fails_does_not_fail_the_run(
    invoke: Invoke, service: Service, store: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    service.script, said = FAULTS[fault]
    monkeypatch.setattr(healthcheck, "_TIMEOUT_S", 0.3)
    run = invoke("-q", "verify", store, OPTION, service.url)
    lines = [line for line in run.stderr.splitlines() if OPTION in line]
    (line,) = lines  # cron mails it each night
    assert line.startswith(f"hicachectl: {OPTION}: begin and success not reported: ")
    assert line.count(said) == 1
    assert SECRET not in run.stdout + run.stderr
    invoke("-q", "verify", store.parent / "none", OPTION, service.url, exit_code=3)


def test_pings_that_fail_differently_are_one_line(
    invoke: Invoke, service: Service, tmp_path: Path
) -> None:
    service.script = lambda call: call.answer(b"", 404 if call.path.endswith("/start") else 500)
    run = invoke("verify", tmp_path / "none", OPTION, service.url, exit_code=3)
    (line,) = (line for line in run.stderr.splitlines() if OPTION in line)
    begin, failure = line.split("; failure not reported: ")
    assert "begin not reported: " in begin
    assert "HTTP 404" in begin
    assert "HTTP 500" in failure


@pytest.mark.parametrize("host", ["127.0.0.1:1", "no-such-host.invalid"])
def test_no_service(invoke: Invoke, store: Path, host: str) -> None:
    said = invoke("verify", store, OPTION, f"https://{host}/{SECRET}").stderr
    assert said.count("begin and success not reported") == said.count(f" {OPTION}: ") == 1
    assert SECRET not in said


@pytest.mark.slow
def test_over_tls_a_certificate_is_needed(
    invoke: Invoke,
    store: Path,
    certificate: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service, context = Service(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with serving(service, context) as host:
        service.url = f"https://{host}/ping/{SECRET}"
        said = invoke("verify", store, OPTION, service.url).stderr
        assert said.count("begin and success not reported") == 1
        assert service.pings == []
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate.with_suffix(".crt")))
        invoke("verify", store, OPTION, service.url)
    assert service.ends == ["/start", ""]


@pytest.mark.slow
def test_a_reader_that_needs_no_more_output_is_no_failure(service: Service, store: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "hicachectl", "verify", str(store), OPTION, service.url]
    try:
        assert subprocess.run(command, stdout=writer, check=False).returncode == 0
    finally:
        os.close(writer)
    assert service.ends == ["/start", ""]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_a_signal_ends_has_failed(
    service: Service, gate: tuple[str, ...], number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "hicachectl", *gate, "--open-after", "1h", OPTION, service.url]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        assert any("attempt 1 failed" in line for line in child.stderr)
        child.send_signal(number)
        assert child.wait(60) == 128 + number
    assert service.ends == ["/start", "/fail"]
