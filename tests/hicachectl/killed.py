"""Run a repair or a restore that is killed at its n-th step: `killed.py STEP VERB JSON`.

VERB is a function of this module, JSON its arguments. Steps are the calls that change or open
something on disk. SIGKILL comes right before step STEP (counted from 1) is done; without one
(STEP 0) the number of steps is printed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hicachectl.backends import durable
from hicachectl.backends.file import FileStore
from hicachectl.planning import plan_removal
from hicachectl.repair import run_repair
from hicachectl.restoring import restore_groups
from tests.hicachectl.repairs import repaired, scanned

if TYPE_CHECKING:
    from collections.abc import Callable

_EVENTS = frozenset(
    {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.utime", "open"}
)


def repair(directory: str, mode: str, quarantine: str | None = None) -> None:
    """Repair the errors of a store."""
    repaired(Path(directory), mode=mode, quarantine=quarantine)


def remove(directory: str) -> None:
    """Remove every page of a store."""
    with FileStore(directory) as store:
        inventory, groups = scanned(store)
        plan = plan_removal(groups, groups.deployment_ids * 0 + range(len(groups)), "test")
        run_repair(store, inventory, groups, plan, mode="delete")


def restore(directory: str, quarantine: str) -> None:
    """Put all of a quarantine back."""
    with FileStore(directory) as store:
        restore_groups(store, Path(quarantine))


VERBS: dict[str, Callable[..., None]] = {"repair": repair, "remove": remove, "restore": restore}


def run(step: int, verb: str, **arguments: Any) -> int:
    """Run a verb in a process of its own; the number of its steps, -1 when it was killed."""
    command = [sys.executable, "-m", "tests.hicachectl.killed", str(step), verb]
    done = subprocess.run(
        [*command, json.dumps(arguments)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return -1 if done.returncode else int(done.stdout)


def random_steps(steps: int, count: int) -> tuple[list[int], str]:
    """Steps to be killed at, and the words for a failure that name their seed."""
    seed = int(os.environ.get("HICACHECTL_TEST_SEED") or random.randrange(1 << 32))
    print(f"HICACHECTL_TEST_SEED={seed}")
    chance = random.Random(seed)
    return [chance.randint(1, steps) for _ in range(count)], f"HICACHECTL_TEST_SEED={seed}"


class _Counter:
    def __init__(self, fatal: int) -> None:
        self.steps = 0
        self._fatal = fatal

    def step(self) -> None:
        self.steps += 1
        if self.steps == self._fatal:
            os.kill(os.getpid(), signal.SIGKILL)


def _count_steps(counter: _Counter) -> None:
    """Count what Python audits, and the two calls that it does not."""

    def audit(event: str, _: tuple[object, ...]) -> None:
        if event in _EVENTS:
            counter.step()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            counter.step()
            return function(*arguments)

        return call

    sys.addaudithook(audit)
    os.fsync = counted(os.fsync)
    durable.rename_noreplace = counted(durable.rename_noreplace)


if __name__ == "__main__":
    counter_ = _Counter(int(sys.argv[1]))
    _count_steps(counter_)
    VERBS[sys.argv[2]](**json.loads(sys.argv[3]))
    print(counter_.steps)
