"""One process at a time has a claim, whatever happens to processes, hosts and clocks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.backends.disk.directory import Directory
from hicachectl.parts import claims
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
NEVER = 1000.0  # seconds; a claim is not stale before
STALE = 0.8


class Claimants:
    """Processes that want one claim. log: what they did, a line [what, attempt, pid] each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._log = folder.parent / "log"
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, **settings: Any) -> subprocess.Popen[str]:
        """Start a process that wants the claim."""
        given = [f"{name}={value}" for name, value in settings.items()]
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.parts.claimant", self.folder, self._log, *given],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        return process

    def holder(self, **settings: Any) -> subprocess.Popen[str]:
        """Start a process, and wait until it has the claim."""
        process = self.start(**settings)
        wait_until(lambda: self.attempt_of(process) is not None, "it gets no claim")
        return process

    @property
    def log(self) -> list[tuple[str, int, int]]:
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [(what, int(k), int(pid)) for what, k, pid in (line.split() for line in lines)]

    def attempt_of(self, process: subprocess.Popen[str]) -> int | None:
        found = [k for what, k, pid in self.log if (what, pid) == ("begin", process.pid)]
        return found[0] if found else None

    def stop(self) -> None:
        """Tell all processes that the work is done, and wait for them."""
        self._log.with_suffix(".stop").touch()
        for process in self._processes:
            process.communicate(timeout=60)

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


@pytest.fixture
def claimants(tmp_path: Path) -> Iterator[Claimants]:
    (tmp_path / "run").mkdir()
    found = Claimants(tmp_path / "run")
    yield found
    found.end()


def test_a_dead_process_of_this_host_is_noticed_at_once(claimants: Claimants) -> None:
    first = claimants.holder(stale=NEVER)
    first.kill()
    first.wait()
    assert claimants.attempt_of(claimants.holder(stale=NEVER)) == 1


def test_a_released_claim_is_taken_at_once_on_any_host(claimants: Claimants) -> None:
    claimants.holder(stale=NEVER, host="a", hold=0).wait()
    assert claimants.attempt_of(claimants.holder(stale=NEVER, host="b")) == 1


@pytest.mark.parametrize("ahead", [3600, -3600])
def test_a_silent_host_is_waited_for_by_ones_own_clock(claimants: Claimants, ahead: int) -> None:
    first = claimants.holder(host="a", ahead=ahead)
    first.kill()
    first.wait()
    wrong = time.time() - ahead  # a file system may take times from the client
    os.utime(claimants.folder / "claim.0", (wrong, wrong))
    started = time.monotonic()
    assert claimants.attempt_of(claimants.holder(host="b", stale=STALE)) == 1
    assert time.monotonic() - started > STALE


@pytest.mark.slow
def test_a_living_holder_keeps_its_claim(claimants: Claimants) -> None:
    """Of three processes, with clocks an hour apart, only the holder works."""
    first = claimants.holder(host="a")
    second = claimants.start(host="b", stale=STALE, ahead=3600)
    third = claimants.start(host="a", stale=STALE, ahead=-3600)
    time.sleep(3 * STALE)
    claimants.stop()
    assert claimants.log[-3:].count(("end", 0, first.pid)) == 1
    assert ("done", -1, second.pid) in claimants.log
    assert ("done", -1, third.pid) in claimants.log


@pytest.mark.slow
def test_of_many_takers_one_wins(claimants: Claimants) -> None:
    """Each of six processes gets the claim once, and no two at the same time."""
    first = claimants.holder(host="a")
    takers = [claimants.start(host="b", hold=0.05, stale=NEVER if n else STALE) for n in range(6)]
    time.sleep(0.5)
    first.kill()
    wait_until(lambda: sum(what == "end" for what, _, _ in claimants.log) == 6, "some wait on")
    log = claimants.log[1:]
    assert [what for what, _, _ in log] == ["begin", "end"] * 6
    assert [attempt for _, attempt, _ in log[::2]] == list(range(1, 7))
    assert {pid for _, _, pid in log} == {taker.pid for taker in takers}


def test_a_stopped_holder_ends_with_one_line(claimants: Claimants) -> None:
    first = claimants.holder(host="a")
    first.send_signal(signal.SIGSTOP)
    second = claimants.holder(host="b", stale=STALE)
    first.send_signal(signal.SIGCONT)
    _, said = first.communicate(timeout=60)
    assert said.count("\n") == 1
    assert "run/claim.0: another process has taken over this work, " in said
    assert said.endswith("; nothing is left to do here\n")
    assert claimants.attempt_of(second) == 1
    assert ("lost", 0, first.pid) in claimants.log
    assert "end" not in {what for what, _, _ in claimants.log}


def test_a_claim_on_another_mount_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers of one host may mount a directory apart; a lock then says nothing."""
    with Directory.named(str(tmp_path), writes=True) as directory:
        descriptor = directory.publish_locked(
            "claim.0",
            claims._text(
                claims.Holder(
                    owner="0" * 16,
                    host="a",
                    boot=claims.host_identity().boot,
                    device=tmp_path.stat().st_dev + 1,
                    beat=0,
                    released=False,
                )
            ),
        )
        assert descriptor is not None
        os.close(descriptor)
        monkeypatch.setattr(claims, "STALE_SECONDS", 0.5)
        monkeypatch.setattr(claims, "LOOK_SECONDS", 0.01)
        started = time.monotonic()
        with claims.Claim.take(directory, "claim", done=lambda: False) as claim:  # type: ignore[union-attr]
            assert claim.attempt == 1
        assert time.monotonic() - started > 0.5


@pytest.mark.parametrize("content", [b"", b"\0" * 1024, b"{}", b'{"owner": 3}'])
def test_a_torn_claim_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    (tmp_path / "claim.0").write_bytes(content)
    monkeypatch.setattr(claims, "STALE_SECONDS", 0.3)
    monkeypatch.setattr(claims, "LOOK_SECONDS", 0.01)
    said: list[str] = []
    started = time.monotonic()
    with Directory.named(str(tmp_path), writes=True) as directory:
        claim = claims.Claim.take(directory, "claim", done=lambda: False, on_wait=said.append)
        assert claim is not None
        claim.release()
    assert time.monotonic() - started > 0.3
    assert said == ["another process"]
