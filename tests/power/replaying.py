"""Replay a recording: look at every crash state, and recover from some of them."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

from tests.power.crash_states import crash_states, distinct

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.power.crash_states import Kind, State
    from tests.power.recording import Recording
    from tests.power.writers import Writer

RECOVERIES = 40


def seed_of_run() -> int:
    """Return the seed: a new one each time, unless HICACHECTL_TEST_SEED repeats a run."""
    seed = int(os.environ.get("HICACHECTL_TEST_SEED") or random.randrange(1 << 32))
    print(f"HICACHECTL_TEST_SEED={seed}")
    return seed


def found_by_looking(
    writer: Writer, recording: Recording, seed: int, without: Sequence[Kind] = ()
) -> list[str]:
    """Name what is wrong with the crash states, by their files alone."""
    states = crash_states(recording, seed=seed, without=without)
    return [
        f"{state.what}: {violation}"
        for state in distinct(states, lambda s: (s.content, s.printed, s.sent))
        for violation in writer.violations(state)
    ]


def missed_without_syncs(writer: Writer, recording: Recording) -> list[str]:
    """Leave out each kind of sync that a writer needs; name those that nothing notices."""
    seed = seed_of_run()
    return [
        name
        for name, kind in writer.kinds.items()
        if not found_by_looking(writer, recording, seed, [kind])
    ]


def found_by_recovering(
    writer: Writer, recording: Recording, seed: int, recoveries: int | None = RECOVERIES
) -> list[str]:
    """Recover from a sample of the crash states, or from all of them, and name what is wrong."""
    states = list(distinct(crash_states(recording, seed=seed), lambda s: s.content))
    if recoveries is not None and len(states) > recoveries:
        states = _sample(states, recoveries, random.Random(seed))
    found = []
    for state in states:
        state.materialise(recording.roots)
        found += [f"{state.what}: {violation}" for violation in writer.recover(state)]
    return found


def _sample(states: list[State], count: int, chance: random.Random) -> list[State]:
    """Choose half among the states that lost everything, half among the others."""
    plain = [state for state in states if state.what.endswith("all lost")]
    chosen = chance.sample(plain, min(len(plain), count // 2))
    others = [state for state in states if not state.what.endswith("all lost")]
    return chosen + chance.sample(others, min(len(others), count - len(chosen)))
