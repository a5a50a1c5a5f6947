"""`hicachectl doctor` as a command: formats, order, quiet runs, terminals and interruption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

import hicachectl
from hicachectl.cli.exit_codes import INTERRUPTED
from hicachectl.doctor.checks import FAIL, OK, SERVER, STATUSES, UNKNOWN, WARN, Check
from hicachectl.doctor.text import check_lines, verdict_text
from hicachectl.text.tables import NO_SCREEN, Screen
from tests.backends.http_scripts import serving
from tests.doctor.replies import answering, info
from tests.move.migrations import profile_file

if TYPE_CHECKING:
    from pathlib import Path

    from tests.backends.http_scripts import Call
    from tests.conftest import Invoke

METRICS = b'sglang:num_requests_total{model_name="x"} 1.0\n'


def check(status: str, name: str = "name", **more: str) -> Check:
    return Check(name, status, f"Detail of {name}", group=SERVER, **more)


def test_the_worst_is_first_and_named_last() -> None:
    """Checks of one status keep the order of causes; the verdict has the first cause's command."""
    given = [check(OK, "a"), check(WARN, "b"), check(FAIL, "c", next="do this"), check(FAIL, "d")]
    lines = list(check_lines(given, NO_SCREEN))
    assert [line.split()[2] for line in lines if line[:1] not in " "][:4] == ["c", "d", "b", "a"]
    assert lines[-1] == "fail: Detail of c; next: do this"
    assert lines[1] == "      next: do this"


@pytest.mark.parametrize(
    ("statuses", "words"),
    [
        ([OK, OK], "ok: 2 checks found no cause of lost hits"),
        ([OK, UNKNOWN], "No cause found, but not all is known: Detail of name"),
        ([WARN, UNKNOWN], "warn: Detail of name"),
        ([], "ok: 0 checks found no cause of lost hits"),
    ],
)
def test_the_verdict_is_one_sentence(statuses: list[str], words: str) -> None:
    """The worst status decides about the sentence."""
    assert verdict_text([check(status) for status in statuses]) == words


def test_a_verdict_without_a_cause_names_what_was_not_checked(
    invoke: Invoke, store: Path, tmp_path: Path
) -> None:
    """The options that make doctor check it stand beside it. Other verdicts have a next step."""
    profile = profile_file(tmp_path / "profile.toml")
    pages = "the values and the deployment of the pages (--profile), "
    for words, unchecked in (
        ((), f"servers (--server), {pages}requests (--trace)"),
        (("--profile", profile), "servers (--server), requests (--trace)"),
    ):
        last = invoke("doctor", store, *words).stdout.splitlines()[-1]
        assert last.startswith("ok: "), last
        assert last.endswith(f" found no cause of lost hits. Not checked: {unchecked}")
    assert verdict_text([check(FAIL)], ["servers (--server)"]) == "fail: Detail of name"


def test_a_terminal_wraps_at_words_and_shows_no_controls() -> None:
    """Continued lines are indented, commands stay in one line, and controls are escaped."""
    long = "word " * 30
    bad = Check("n", FAIL, f"{long}\x1b[2J", group=SERVER, next=f"hicachectl {long}\x1b[2J")
    lines = list(check_lines([bad], Screen(colour=True, width=80)))
    assert lines[0].startswith("\x1b[31mfail\x1b[0m  server  n  word")
    command, _ = lines[-2:]
    assert command.strip() == f"next: hicachectl {long}\\x1b[2J"
    assert all(len(line) <= 80 for line in lines[1:-2])
    assert lines[1].startswith(" " * 17 + "word")
    assert not any("\x1b[2J" in line for line in lines)


def test_formats_have_the_same_checks(invoke: Invoke, store: Path, tmp_path: Path) -> None:
    """All formats have a row for each check in the same order; JSON also has the verdict."""
    profile = profile_file(tmp_path / "profile.toml")
    document = invoke.document("doctor", store, "--profile", profile)
    assert list(document) == ["schema", "version", "checks", "verdict"]
    assert document["verdict"] in STATUSES
    rows = invoke("doctor", store, "--profile", profile, "--format", "jsonl").rows
    assert [row["name"] for row in rows] == [row["name"] for row in document["checks"]]
    assert list(rows[0]) == ["name", "group", "server", "status", "detail", "evidence", "next"]
    with hicachectl.open_store(str(store)) as opened:
        found = hicachectl.examine(opened, hicachectl.DoctorRequest())
    assert [row["group"] for row in found.rows.to_pylist()] == ["store"] * len(found.rows)


def test_a_store_of_the_config_file_keeps_its_name(
    invoke: Invoke, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NAME: brings its profile, and suggested commands say NAME:, which brings it again."""
    profile_file(tmp_path / "prod.toml")
    config = tmp_path / "config.toml"
    config.write_text(f'[stores.prod]\nurl = "file://{store}"\nprofile = "prod.toml"\n')
    monkeypatch.setenv("HICACHECTL_CONFIG", str(config))
    with answering(info(tp_size=4)) as url:
        document = invoke.document("doctor", "prod:", "--server", url, exit_code=4)
        command = document["checks"][0]["next"]
        assert command == f"hicachectl --config {config} migrate prod: prod: --to-tp 4"
        invoke(*command.split()[1:])
        document = invoke.document("doctor", "prod:", "--server", url)
    assert document["verdict"] != "fail"


def test_quiet_prints_only_failures(invoke: Invoke, store: Path) -> None:
    """A probe is silent while nothing fails, and says why it fails."""
    assert invoke("-q", "doctor", store, "--sample", 0) == ("", "")
    failed = invoke("-q", "doctor", store / "missing", exit_code=4)
    assert failed.stdout.startswith("fail  store  reachable")


def test_usage_is_checked_before_any_question(invoke: Invoke, store: Path) -> None:
    """Two sources of requests, a bad URL and a missing profile end with 2 and no document."""
    for words in (
        ("--trace", "a", "--token-ids", "b"),
        ("--server", "ftp://host"),
        ("--profile", "/no/such/profile.toml"),
        ("--sample", "-1"),
    ):
        assert invoke("doctor", store, *words, exit_code=2).stdout == ""


def test_requests_need_the_page_size(invoke: Invoke, store: Path, tmp_path: Path) -> None:
    """Without a server and a profile the hashes are unknown: the option to give is named."""
    tokens = tmp_path / "tokens.jsonl"
    tokens.write_text(f"{list(range(100))}\n")
    rows = invoke("doctor", store, "--token-ids", tokens, "--format", "jsonl").rows
    (hashing,) = (row for row in rows if row["group"] == "requests")
    assert (hashing["status"], "--page-size" in hashing["next"]) == ("unknown", True)
    given = ("--token-ids", tokens, "--page-size", 16)
    rows = invoke("doctor", store, *given, "--format", "jsonl", exit_code=4).rows
    assert "hashing" not in {row["name"] for row in rows}


def test_an_interrupt_ends_the_wait_at_once(store: Path) -> None:
    """Ctrl-C while the counters are watched ends with 130; the store is as it was."""
    before = {path: path.stat() for path in store.rglob("*")}
    with answering(info(), metrics=METRICS) as url:
        command = (sys.executable, "-m", "hicachectl", "doctor", str(store), "--server", url)
        with subprocess.Popen(
            [*command, "--watch", "10m"],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=dict(os.environ),
        ) as process:
            assert process.stderr is not None
            assert "Watching" in process.stderr.readline()
            process.send_signal(signal.SIGINT)
            began = time.monotonic()
            assert process.wait(30) == INTERRUPTED
    assert time.monotonic() - began < 10
    after = {path: path.stat() for path in store.rglob("*")}
    assert {path: stat.st_mtime_ns for path, stat in after.items()} == {
        path: stat.st_mtime_ns for path, stat in before.items()
    }


def test_servers_are_asked_at_once(invoke: Invoke, store: Path) -> None:
    """Each answers only when all have been asked, so that one that hangs delays no other."""
    barrier = threading.Barrier(3)

    def script(call: Call) -> None:
        if call.path == "/server_info":
            barrier.wait(timeout=8)
            call.answer(json.dumps(info()).encode())
        else:
            call.answer(b"{}", 404)

    with ExitStack() as held:
        places = [held.enter_context(serving(script)) for _ in range(3)]
        servers = [word for place in places for word in ("--server", f"http://{place}")]
        document = invoke.document("doctor", store, *servers)
    answered = [check for check in document["checks"] if check["name"] == "reachable"]
    assert [check["status"] for check in answered if check["server"]] == [OK] * 3
