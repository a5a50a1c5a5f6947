"""`prewarm --open-after`: a gate tries again, and opens when its time is over, whatever happens."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.cli.demo_store import PROFILE
from hicachectl.cli.gate import Gate
from hicachectl.formats.errors import StoreUnavailable
from hicachectl.prewarming.outcome import nothing_copied
from tests.cli.test_lock_held import held
from tests.freezable_mount import freezable_mount
from tests.paused import paused
from tests.prewarming.test_cli import prompts
from tests.prewarming.test_prewarm import HASHES
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hicachectl.results import Result
    from tests.conftest import Invoke

Words = list[object]
ALL_TOKENS = 8 * PROFILE.page_size


@pytest.fixture
def gate(source: Path, target: Path, profile: Path, tmp_path: Path) -> Words:
    """Return a prewarm that asks for all tokens of the source's eight pages."""
    asked = prompts(tmp_path / "asked.jsonl", 8)
    return ["prewarm", target, "--from", source, "--profile", profile, "--token-ids", asked,
            "--min-usable", 1]  # fmt: skip


class Waiting:
    """A process that waits at a gate."""

    def __init__(self, *words: object, hanging_seconds: float = 60) -> None:
        program = (
            "import hicachectl.cli.gate as gate; from hicachectl.__main__ import main;"
            f"gate._HANGING_SECONDS = {hanging_seconds}; main()"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said = ""

    def hear(self, text: str) -> None:
        """Wait until a line on stderr has a text."""
        assert self._process.stderr is not None
        while text not in self.said:
            line = self._process.stderr.readline()
            assert line, self.said
            self.said += line

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def ended(self) -> tuple[int, dict[str, Any]]:
        """Return the exit status and the document."""
        stdout, stderr = self._process.communicate(timeout=PATIENCE_S)
        self.said += stderr
        return self._process.returncode, json.loads(stdout) if stdout else {}


def lacking_a_page(source: Path) -> Path:
    """Move an object of the first page out of the source; return its file."""
    path = min(path for path in source.iterdir() if path.name.startswith(HASHES[0]))
    return path.rename(source.parent / path.name)


def numbers_of(metrics: Path) -> dict[str, float]:
    """Return the values of a metrics file of prewarm by name."""
    lines = [line for line in metrics.read_text().splitlines() if line[0] != "#"]
    return {line.partition("{")[0][19:]: float(line.rpartition(" ")[2]) for line in lines}


def test_a_gate_that_succeeds_at_once_says_so(invoke: Invoke, gate: Words, tmp_path: Path) -> None:
    metrics = tmp_path / "gate.prom"
    output = invoke(*gate, "--open-after", "1h", "--metrics-file", metrics)
    document = output.document
    assert (document["attempts"], document["opened_anyway"]) == (1, False)
    assert document["usable_tokens"] == ALL_TOKENS
    assert document["complete"] is True
    assert "opens" not in output.stderr
    numbers = numbers_of(metrics)
    assert (numbers["succeeded"], numbers["attempts"], numbers["opened_anyway"]) == (1, 1, 0)
    assert "attempts" not in invoke(*gate).document


@pytest.mark.parametrize("quiet", [(), ("-q",)], ids=["", "quiet"])
def test_a_cold_gate_opens_after_its_time_and_says_so_loudly(
    invoke: Invoke, gate: Words, source: Path, tmp_path: Path, quiet: tuple[str, ...]
) -> None:
    lacking_a_page(source)
    metrics = tmp_path / "gate.prom"
    output = invoke(*quiet, *gate, "--open-after", "0.1s", "--metrics-file", metrics)
    assert output.document["opened_anyway"] is True
    assert output.document["attempts"] == 1
    assert output.document["usable_tokens"] < ALL_TOKENS
    (said,) = [line for line in output.stderr.splitlines() if "OPENED ANYWAY" in line]
    assert said.startswith(
        "hicachectl: --open-after: OPENED ANYWAY after 0s and 1 failed attempt; the store is not "
        "warm: --min-usable 1: "
    )
    said_of_source = f"file://{source} cannot restore 8 requested pages, so no further run copies "
    assert said_of_source in said
    assert output.document["complete"] is False
    numbers = numbers_of(metrics)
    assert (numbers["succeeded"], numbers["opened_anyway"], numbers["complete"]) == (0, 1, 0)
    assert numbers["usable_tokens"] == output.document["usable_tokens"]


def test_without_the_option_a_cold_gate_stays_closed(
    invoke: Invoke, gate: Words, source: Path
) -> None:
    lacking_a_page(source)
    assert "opened_anyway" not in invoke(*gate, exit_code=4).document


@pytest.mark.parametrize("cause", ["no source", "no requests", "no profile", "no destination"])
def test_a_gate_opens_whatever_is_missing(
    invoke: Invoke, gate: Words, source: Path, target: Path, profile: Path, tmp_path: Path,
    cause: str,
) -> None:  # fmt: skip
    causes: dict[str, Callable[[], object]] = {
        "no source": lambda: shutil.rmtree(source),
        "no requests": (tmp_path / "asked.jsonl").unlink,
        "no profile": profile.unlink,
        "no destination": lambda: target.write_text("a file"),
    }
    causes[cause]()
    document = invoke(*gate, "--open-after", "0.1s").document
    assert document["opened_anyway"] is True
    assert (document["copied_pages"], document["complete"]) == (0, False)
    assert document["destination"].endswith("/target")


@pytest.mark.slow
@pytest.mark.parametrize("cause", ["no store yet", "a page comes later", "locked"])
def test_a_gate_tries_again_until_the_store_is_warm(
    gate: Words, source: Path, tmp_path: Path, cause: str
) -> None:
    mend: Callable[[], object]
    lock = tmp_path / "lock"
    with held(lock):
        if cause == "locked":
            waiting = Waiting(*gate, "--open-after", "1h", "--lock", lock)
        elif cause == "no store yet":
            there = source.rename(tmp_path / "later")
            mend = lambda: there.rename(source)  # noqa: E731
            waiting = Waiting(*gate, "--open-after", "1h")
        else:
            page = lacking_a_page(source)
            mend = lambda: page.rename(source / page.name)  # noqa: E731
            waiting = Waiting(*gate, "--open-after", "1h")
        waiting.hear("--open-after: attempt 1 failed: ")
        if cause != "locked":
            mend()
    status, document = waiting.ended()
    assert status == 0
    assert document["opened_anyway"] is False
    assert document["attempts"] >= 2
    assert document["usable_tokens"] == ALL_TOKENS
    assert "the gate opens in 59m at the latest" in waiting.said


def test_a_gate_starts_no_copy_after_its_time(
    invoke: Invoke, gate: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []
    from hicachectl.prewarming import prewarm as prewarming

    whole = prewarming.prewarm

    def noted(source: Any, target: Any, request: Any, **rest: Any) -> Any:
        limits.append(request.deadline_seconds)
        return whole(source, target, request, **rest)

    monkeypatch.setattr(prewarming, "prewarm", noted)
    invoke(*gate, "--open-after", "1h")
    invoke(*gate, "--open-after", "1h", "--deadline", "20m")
    invoke(*gate, "--open-after", "1h", "--deadline", "2h")
    assert [round(limit / 60) for limit in limits] == [60, 20, 60]


def test_a_process_that_is_started_again_goes_on_counting(
    invoke: Invoke, gate: Words, source: Path, tmp_path: Path
) -> None:
    lacking_a_page(source)
    since = tmp_path / "since"
    since.touch()
    os.utime(since, (time.time() - 1300, time.time() - 1300))
    words = [*gate, "--open-since", since, "--open-after"]
    document = invoke(*words, "20m").document
    assert (document["attempts"], document["opened_anyway"]) == (0, True)
    assert not since.exists()
    assert invoke(*words, "0.1s").document["attempts"] == 1  # a new file: counted from now
    assert not since.exists()


@pytest.mark.slow
def test_a_killed_gate_leaves_its_time_and_a_terminated_one_ends(
    gate: Words, source: Path, tmp_path: Path
) -> None:
    lacking_a_page(source)
    since = tmp_path / "since"
    for number, status in ((signal.SIGKILL, -9), (signal.SIGTERM, 143)):
        made = since.stat().st_mtime_ns if since.exists() else None
        waiting = Waiting(*gate, "--open-after", "1h", "--open-since", since)
        waiting.hear("attempt 1 failed")
        waiting.send(number)
        assert waiting.ended() == (status, {})
        assert made in (None, since.stat().st_mtime_ns)


@pytest.mark.slow
def test_a_gate_announces_no_attempt_that_its_time_has_no_room_for() -> None:
    said: list[str] = []
    gate = Gate(1.5, nothing_copied(None, "file:///x").result(), said.append, lambda result: None)

    def attempt(left: float) -> Result:
        raise StoreUnavailable(f"file:///x: lost {left > 1}")

    result = gate.passed(attempt, waited=0.0)
    assert said == ["--open-after: attempt 1 failed: file:///x: lost True; the gate opens in 1s"]
    assert (result.excused, result.document["attempts"]) == (True, 1)


@pytest.mark.slow
def test_a_gate_that_is_terminated_while_it_copies_does_not_try_again(
    gate: Words, tmp_path: Path
) -> None:
    since = tmp_path / "since"
    more = ("--jobs", 1, "--buffer-bytes", "300KiB", "--open-after", "1h", "--open-since", since)
    copy = "hicachectl.backends.file.store:FileStore.copy_from"
    with paused(tmp_path / "paused", copy, 2, *map(str, (*gate, *more))) as run:
        run.send(signal.SIGTERM)
        ended = run.resumed()
    assert ended.code == 143
    document = json.loads(ended.stdout)
    assert (document["stopped_by"], document["attempts"]) == ("terminated", 1)
    assert document["opened_anyway"] is False
    assert "OPENED" not in ended.stderr
    assert since.exists()


def test_a_link_is_no_file_for_the_time(invoke: Invoke, gate: Words, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.touch()
    (tmp_path / "since").symlink_to(elsewhere)
    words = (*gate, "--open-after", "1h", "--open-since")
    assert "symbolic link" in invoke(*words, tmp_path / "since", exit_code=3).stderr
    assert elsewhere.exists()
    missing = invoke(*words, tmp_path / "nowhere" / "since", exit_code=2).stderr
    assert "nowhere/since: cannot make the file" in missing


def test_a_file_with_content_is_never_removed(invoke: Invoke, gate: Words, source: Path) -> None:
    """A wrong path may name anything, such as an object of the store."""
    before = sorted(source.iterdir())
    precious = next(source.glob("*.bin"))
    words = (*gate, "--open-after", "1h", "--open-since", precious)
    assert "so it is no file of a gate" in invoke(*words, exit_code=2).stderr
    assert sorted(source.iterdir()) == before


@pytest.mark.slow
def test_a_gate_opens_while_an_attempt_hangs(
    gate: Words, source: Path, target: Path, tmp_path: Path
) -> None:
    """The source's file system answers nothing, as one of a dead server."""
    with freezable_mount(source, tmp_path / "mount") as server:
        os.kill(server, signal.SIGSTOP)
        try:
            words = [tmp_path / "mount" if word is source else word for word in gate]
            metrics = tmp_path / "gate.prom"
            words += ["--open-after", "1s", "--metrics-file", metrics]
            waiting = Waiting(*words, hanging_seconds=0.5)
            status, document = waiting.ended()
        finally:
            os.kill(server, signal.SIGCONT)
    assert status == 0
    assert (document["attempts"], document["opened_anyway"]) == (1, True)
    assert (
        "OPENED ANYWAY after 1s and 1 failed attempt; the store is not warm: attempt 1 hangs"
        in (waiting.said)
    )
    assert numbers_of(metrics)["opened_anyway"] == 1


def test_a_gate_opens_although_its_metrics_cannot_be_written(
    invoke: Invoke, gate: Words, tmp_path: Path
) -> None:
    since, metrics = tmp_path / "since", tmp_path / "nowhere" / "gate.prom"
    more = ("--open-after", "1h", "--open-since", since, "--metrics-file", metrics)
    said = invoke(*gate, *more).stderr
    assert "nowhere/gate.prom: cannot write" in said
    assert "The gate opens all the same" in said
    assert not since.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--dry-run",), "--open-after cannot be combined with --dry-run"),
        (("--shard", "0/2", "--run", "run"), "--open-after cannot be combined with --shard"),
        (("--token-ids", "-"), "give a file instead of -"),
    ],
)
def test_a_gate_refuses(
    invoke: Invoke, target: Path, source: Path, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    asked = () if "--token-ids" in words else ("--all",)
    line = ("prewarm", target, "--from", source, *asked, "--min-usable", 1, "--open-after", "1h")
    assert said in invoke(*line, *words, exit_code=2).stderr
    assert not target.exists()


def test_a_gate_needs_a_share(invoke: Invoke, target: Path, source: Path) -> None:
    line = ("prewarm", target, "--from", source, "--all", "--open-after", "1h")
    assert "--open-after needs --min-usable SHARE" in invoke(*line, exit_code=2).stderr
