"""What `doctor` makes of the counters and processes of a real SGLang server."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from hicachectl.backends.base import open_store
from hicachectl.doctor.exposition import BACKUPED, FOUND, REQUESTS, Look, growth, look_at
from hicachectl.doctor.live import live_checks
from hicachectl.doctor.live_server import LiveServer, ask_server
from hicachectl.doctor.request import DoctorRequest
from hicachectl.doctor.same_store import same_store_checks, started_of
from hicachectl.profiles.server import API_KEY_VARIABLE, server_service
from tests.conformance.cpu_server import PAGE_SIZE, CpuServer, page_files, prompt
from tests.conformance.plugin_site import plugin_config
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hicachectl.doctor.checks import Check
    from tests.conformance.cpu_server import Answer

pytestmark = [pytest.mark.conformance, pytest.mark.xdist_group("sglang-server")]

PROMPT = prompt(5)
TOKENS = len(PROMPT) // PAGE_SIZE * PAGE_SIZE
NOWHERE = "http://192.0.2.1:30000"  # an address for documentation


@pytest.fixture(scope="module")
def shared_cpu_server(module_cpu_server: CpuServer) -> CpuServer:
    return module_cpu_server


def look(server: CpuServer) -> Look:
    service, base = server_service(server.url, "--server", timeout_s=60)
    with closing(service):
        return look_at(service, base)


def grown(server: CpuServer, first: Look, counter: str, tokens: int) -> Look:
    """Return a look at a counter that has grown by so much since the first: they lag behind."""
    now = first

    def has_grown() -> bool:
        nonlocal now
        now = look(server)
        growth_now = growth(first, now)
        assert growth_now is not None
        return growth_now.value(counter) >= tokens

    wait_until(has_grown)
    return now


def asked(monkeypatch: pytest.MonkeyPatch, server: CpuServer) -> LiveServer:
    monkeypatch.setenv(API_KEY_VARIABLE, "tests")
    return ask_server(server.url, DoctorRequest())


def stored(server: CpuServer, directory: Path, tokens: Sequence[int] = PROMPT) -> Answer:
    """Answer a prompt and wait until its pages are in the store; then flush the server."""
    answer = server.generate(tokens)
    wait_until(lambda: all(path.exists() for path in page_files(directory, tokens)))
    server.flush()
    return answer


def by_status(checks: Sequence[Check]) -> dict[str, str]:
    return {check.name: check.status for check in checks}


def test_a_restored_prompt_is_healthy(
    cpu_server: CpuServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counters have the tokens of the answer; nothing warns, also where a prompt is written."""
    cpu_server.attach("file", {"file_storage_path": str(tmp_path)})
    server = asked(monkeypatch, cpu_server)
    before = look(cpu_server)
    stored(cpu_server, tmp_path)
    cold = grown(cpu_server, before, BACKUPED, TOKENS)
    assert {"warn", "fail"}.isdisjoint(by_status(live_checks(server, before, cold)).values())
    assert cpu_server.generate(PROMPT).storage == TOKENS
    warm = grown(cpu_server, cold, REQUESTS, 1)
    checks = live_checks(server, cold, warm)
    assert {"metrics": "ok", "found": "ok"}.items() <= by_status(checks).items()
    assert {"warn", "fail"}.isdisjoint(by_status(checks).values())
    (found,) = [check for check in checks if check.name == "found"]
    assert f"{TOKENS} tokens were found in the store, and {TOKENS} tokens were" in found.detail
    assert f"{TOKENS} tokens of {len(PROMPT)} tokens of prompts" in found.evidence


def test_a_page_that_cannot_be_read_is_the_failure(
    cpu_server: CpuServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang finds the page by its name each time, and loses the prompt."""
    cpu_server.attach("file", {"file_storage_path": str(tmp_path)})
    server = asked(monkeypatch, cpu_server)
    stored(cpu_server, tmp_path)
    page_files(tmp_path, PROMPT)[0].write_bytes(b"short")
    first = look(cpu_server)
    assert cpu_server.generate(PROMPT).storage == 0
    second = grown(cpu_server, first, REQUESTS, 1)
    found = by_status(live_checks(server, first, second))
    assert found["storage_transfer"] == "fail"


def test_short_prompts_warn(
    cpu_server: CpuServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang looks up no short prompt, even if the store has it, and writes it each time."""
    cpu_server.attach("file", {"file_storage_path": str(tmp_path), "prefetch_threshold": 256})
    server = asked(monkeypatch, cpu_server)
    prompts = [prompt(seed, pages=1) for seed in range(40, 46)]
    for tokens in prompts:
        stored(cpu_server, tmp_path, tokens)
    first = look(cpu_server)
    for tokens in prompts:
        assert cpu_server.generate(tokens).storage == 0
    second = grown(cpu_server, first, BACKUPED, len(prompts) * PAGE_SIZE)
    assert by_status(live_checks(server, first, second))["found"] == "warn"
    with open_store(str(tmp_path)) as store:
        elsewhere = replace(server, url=NOWHERE)
        (check,) = same_store_checks(elsewhere, store, first, second, 0)
    assert check.status == "unknown"


def test_pages_that_appear_tell_the_store(
    cpu_server: CpuServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a look into the processes, the counters and new pages decide."""
    cpu_server.attach("file", {"file_storage_path": str(tmp_path)})
    server = asked(monkeypatch, cpu_server)
    first = look(cpu_server)
    stored(cpu_server, tmp_path)
    second = growth(first, grown(cpu_server, first, BACKUPED, TOKENS))
    assert second is not None
    first = Look(first.at, {})  # as if the server had started now
    with open_store(str(tmp_path)) as store:
        for new_pages, status in ((5, "ok"), (0, "fail"), (None, "unknown")):
            elsewhere = replace(server, url=NOWHERE)
            (check,) = same_store_checks(elsewhere, store, first, second, new_pages)
            assert check.status == status


def test_the_scheduler_tells_its_directory(
    cpu_server: CpuServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Device and inode decide, whatever the path; the process tells when the server started."""
    used, other = tmp_path / "used", tmp_path / "other"
    used.mkdir()
    other.mkdir()
    (tmp_path / "link").symlink_to(used)
    cpu_server.attach("file", {"file_storage_path": str(tmp_path / "link")})
    server = asked(monkeypatch, cpu_server)
    now = look(cpu_server)
    with open_store(str(used)) as store:
        (same,) = same_store_checks(server, store, now, now, None)
    with open_store(str(other)) as store:
        (different,) = same_store_checks(server, store, now, now, None)
    assert (same.status, different.status) == ("ok", "fail")
    assert str(tmp_path / "link") in different.detail
    assert str(other) in different.detail
    started = started_of(server)
    assert started is not None


def test_selective_writes_are_no_loss(
    cpu_server: CpuServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings tell that a first use is not written; the counters do not blame it."""
    cpu_server.attach("file", {"file_storage_path": str(tmp_path)}, "write_through_selective")
    server = asked(monkeypatch, cpu_server)
    first = look(cpu_server)
    cpu_server.generate(PROMPT)
    second = grown(cpu_server, first, REQUESTS, 1)
    assert not list(tmp_path.iterdir())
    found = by_status(live_checks(server, first, second))
    assert {"warn", "fail"}.isdisjoint(found.values())
    assert FOUND not in {name for name, _ in second.samples or ()} or found["found"] == "unknown"


def test_other_weights_under_the_plugin_are_the_first_failure(
    cpu_server: CpuServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its counters tell, and without metrics the status of its rank; it heals as it is replaced."""
    cpu_server.attach("dynamic", plugin_config(tmp_path, identity="theirs"))
    stored(cpu_server, tmp_path)
    cpu_server.detach()
    cpu_server.attach("dynamic", plugin_config(tmp_path, identity="ours"))
    server = asked(monkeypatch, cpu_server)
    first = look(cpu_server)
    assert cpu_server.generate(PROMPT).storage == 0
    second = grown(cpu_server, first, BACKUPED, TOKENS)
    foreign = next(check for check in live_checks(server, first, second) if check.status == "fail")
    assert foreign.name == "foreign"
    assert f"{TOKENS} tokens of {TOKENS} tokens" in foreign.evidence
    cpu_server.flush()
    assert cpu_server.generate(PROMPT).storage == TOKENS
    third = grown(cpu_server, second, REQUESTS, 1)
    assert {"warn", "fail"}.isdisjoint(by_status(live_checks(server, second, third)).values())
