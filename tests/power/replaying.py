"""Replay a recording: check every crash state, and recover from some of them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from tests.power.crash_states import crash_states, distinct
from tests.speed import ROUNDS, seed_of_run

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.power.crash_states import Kind, State
    from tests.power.recording import Recording
    from tests.power.writers import Writer

RECOVERIES = 40 * ROUNDS  # each runs a command


def found_by_looking(
    writer: Writer, recording: Recording, seed: int, without: Sequence[Kind] = ()
) -> Iterator[str]:
    """Yield what is wrong with the crash states, from their files alone."""
    states = crash_states(recording, seed=seed, without=without)
    for state in distinct(states, lambda s: (s.content, s.printed, s.sent)):
        for violation in writer.violations(state):
            yield f"{state.what}: {violation}"


def missed_without_syncs(writer: Writer, recording: Recording) -> list[str]:
    """Return the kinds of required syncs whose absence no check finds."""
    seed = seed_of_run()
    return [
        name
        for name, kind in writer.kinds.items()
        if not any(found_by_looking(writer, recording, seed, [kind]))
    ]


def found_by_recovering(writer: Writer, recording: Recording, seed: int) -> list[str]:
    """Recover from some crash states; return the faults that remain."""
    states = list(distinct(crash_states(recording, seed=seed), lambda s: s.content))
    if len(states) > RECOVERIES:
        states = _sample(states, RECOVERIES, random.Random(seed))
    found = []
    for state in states:
        state.materialise(recording.roots)
        found += [f"{state.what}: {violation}" for violation in writer.recover(state)]
    return found


def _sample(states: list[State], count: int, chance: random.Random) -> list[State]:
    """Sample states: half of those that lost everything, half of the others."""
    plain = [state for state in states if state.what.endswith("all lost")]
    chosen = chance.sample(plain, min(len(plain), count // 2))
    others = [state for state in states if not state.what.endswith("all lost")]
    return chosen + chance.sample(others, min(len(others), count - len(chosen)))
