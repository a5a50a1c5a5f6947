"""Parts in processes that SIGKILL ends at random times are completed when they are run again.

The processes are those of two hosts: with other homes, and with clocks two hours apart. They start
together, and two of them do the same part at once. Part 0 lists for all, whoever is killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.move.migrations import damaged_stores, demo_store, profile_file
from tests.parts.disturbed import Hosts
from tests.parts.test_verify_parts import comparable
from tests.prewarming.test_cli import prompts
from tests.speed import ROUNDS, chance_of_run, some
from tests.stores import contents
from tests.verification.damages import at_once

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from tests.conftest import Invoke

pytestmark = pytest.mark.slow

# Kills of each command.
KILLS = 5 * ROUNDS
MOVE = ("--move", "--yes")
PARTS = 4
AT_ONCE = PARTS  # processes, so that part 0 is among them
MOST_S = 120
HOSTS = ({"host": "a", "ahead": "3600"}, {"host": "b", "ahead": "-3600"})


class Processes:
    """Processes of the parts of one run, killed at random."""

    def __init__(self, folder: Path, chance: random.Random, hosts: Hosts) -> None:
        self._folder = folder
        self._chance = chance
        self._hosts = hosts
        self._started = 0
        self._running: dict[int, tuple[int, Path]] = {}  # part and stderr of each pid

    def start(self, part: int, command: list[object]) -> None:
        """Start a part on any host."""
        number = self._chance.randrange(len(HOSTS))
        home = self._folder / f"home-{number}"
        home.mkdir(exist_ok=True)
        said = self._folder / f"said-{self._started}"
        self._started += 1
        words = [*map(str, command), "--shard", f"{part}/{PARTS}"]
        environment = {"HOME": str(home), "TZ": f"UTC{number:+}"}
        pid = self._hosts.start(words, said, environment, HOSTS[number], listing=0.2)
        self._running[pid] = part, said

    def finish(self, command: list[object], kills: int) -> int:
        """Do all parts, and kill processes meanwhile; return the number of kills."""
        todo = self._chance.sample(range(PARTS), PARTS)
        todo.append(self._chance.randrange(PARTS))  # a second attempt
        done = 0
        deadline = time.monotonic() + MOST_S
        next_kill = time.monotonic() + self._chance.uniform(0.1, 1.0)
        while todo or self._running:
            assert time.monotonic() < deadline, "the parts do not end"
            while todo and len(self._running) < AT_ONCE:
                self.start(todo.pop(0), command)
            time.sleep(0.02)
            for pid in list(self._running):
                if (status := self._hosts.status(pid)) is None:
                    continue
                part, path = self._running.pop(pid)
                if status == -signal.SIGSEGV:  # A fork beside native threads may end like a kill.
                    todo.insert(0, part)
                    continue
                said = path.read_text()
                assert status == 0 or "is finished; give a new --run" in said, said
            if done < kills and self._running and time.monotonic() > next_kill:
                pid = self._chance.choice(list(self._running))
                part, _ = self._running.pop(pid)
                self._hosts.kill(pid)
                todo.insert(0, part)  # if it is part 0, the others wait for it
                done += 1
                next_kill = time.monotonic() + self._chance.uniform(0.1, 1.0)
        return done

    def end(self) -> None:
        """Kill what still runs."""
        for pid in self._running:
            self._hosts.kill(pid)


KilledRun = Callable[[Path, list[object], int], int]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Start the process that forks the parts."""
    with Hosts() as started:
        yield started


@pytest.fixture
def killed_run(tmp_path: Path, hosts: Hosts) -> Iterator[KilledRun]:
    """Return a function that does a run with kills, and returns their number."""
    processes = Processes(tmp_path, chance_of_run()[0], hosts)

    def finish(run: Path, command: list[object], kills: int) -> int:
        done = processes.finish([*command, "--run", run], kills)
        assert len(list(run.glob("listing-*"))) == 1
        assert len(list(run.glob("parts/*.json"))) == PARTS
        return done

    yield finish
    processes.end()


def test_verify(invoke: Invoke, tmp_path: Path, killed_run: KilledRun) -> None:
    store = demo_store(tmp_path / "store", 24)
    at_once(store)
    # All times are old, since no clock of a host is right.
    for path in store.iterdir():
        os.utime(path, (1.6e9, 1.6e9))
    catalog = tmp_path / "catalog.parquet"
    options: list[object] = ["--profile", profile_file(tmp_path / "p.toml"), "--catalog", catalog]
    options += ["--update-catalog"]
    command = ["verify", store, *options, "--bwlimit", "3MiB"]
    done = rounds = 0
    first: dict[str, Any] = {}
    while done < KILLS:
        rounds += 1
        run = tmp_path / f"run-{rounds}"
        done += killed_run(run, command, min(4, KILLS - done))
        merged = invoke("merge", run, "--format", "json", exit_code=4).document
        if not first:
            first = invoke("verify", store, *options, "--format", "json", exit_code=4).document
            catalog.unlink()
        assert comparable(merged) == comparable(first)


@pytest.mark.parametrize("options", some(((), MOVE), ()), ids=" ".join)
def test_copies_and_moves(
    invoke: Invoke, tmp_path: Path, killed_run: KilledRun, options: tuple[str, ...]
) -> None:
    source, target = damaged_stores(tmp_path / "stores")
    given = ("--profile", profile_file(tmp_path / "p.toml"), "--include-partial", *options)
    whole = shutil.copytree(target, tmp_path / "whole")
    whole_source = shutil.copytree(source, tmp_path / "whole-source")
    wanted = invoke("migrate", whole_source, whole, *given, "--format", "json", exit_code=4)
    done = rounds = 0
    while done < KILLS:
        rounds += 1
        own = tmp_path / f"round-{rounds}"
        own.mkdir()
        own_source = shutil.copytree(source, own / "source")
        own_target = shutil.copytree(target, own / "target")
        command = ["migrate", own_source, own_target, *given, "--bwlimit", "600KiB"]
        done += killed_run(own / "run", command, min(4, KILLS - done))
        merged = invoke("merge", own / "run", "--format", "json", exit_code=4).document
        for name in ("conflicts", "failed", "complete"):
            assert merged[name] == wanted.document[name], name
        for name in ("pages", "objects"):  # a killed attempt does not say what it did
            assert merged[name] <= wanted.document[name], name
        assert contents(own_target) == contents(whole)
        assert contents(own_source) == contents(whole_source)


def test_prewarm(invoke: Invoke, tmp_path: Path, killed_run: KilledRun) -> None:
    """Parts that start together plan once, and finish the run; other tests kill them."""
    source, targets = demo_store(tmp_path / "source", 12), (tmp_path / "parts", tmp_path / "whole")
    profile, asked = profile_file(tmp_path / "p.toml"), prompts(tmp_path / "asked.jsonl", 12)
    given = ("--from", source, "--profile", profile, "--token-ids", asked)
    killed_run(tmp_path / "run", ["prewarm", targets[0], *given], 0)
    merged = invoke("merge", tmp_path / "run", "--format", "json").document
    whole = invoke("prewarm", targets[1], *given).document
    assert merged["complete"]
    assert merged["usable_tokens"] == whole["usable_tokens"] > 0
    parts, alone = (
        {name: content for name, (content, _) in contents(target).items()} for target in targets
    )
    assert parts == alone
