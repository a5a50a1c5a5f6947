"""Parameters and examples of tests that `make test-fast` or `make test` leaves out.

HICACHECTL_TEST_ALL=1 runs everything: all parameters, and the tests that are marked `weekly`.
HICACHECTL_ATTACK_ROUNDS multiplies the kills and recoveries of each test, and 0 kills at each step
where a test can. HICACHECTL_TEST_SEED repeats the random choices of a failed test, which prints it.
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, TypeVar

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from _pytest.mark import ParameterSet

Value = TypeVar("Value")
ALL = os.environ.get("HICACHECTL_TEST_ALL") == "1"
ROUNDS = int(os.environ.get("HICACHECTL_ATTACK_ROUNDS") or 1)


def seed_of_run() -> int:
    """Return HICACHECTL_TEST_SEED to repeat a run, else a new seed; print it."""
    seed = int(os.environ.get("HICACHECTL_TEST_SEED") or random.randrange(1 << 32))
    print(f"HICACHECTL_TEST_SEED={seed}")
    return seed


def chance_of_run() -> tuple[random.Random, str]:
    """Return a source of random numbers, and words that repeat it."""
    seed = seed_of_run()
    return random.Random(seed), f"HICACHECTL_TEST_SEED={seed}"


def some(every: Iterable[Value], *chosen: Value) -> list[Value]:
    """Return the chosen values, each of which occurs in `every`; all values in a whole run."""
    values = list(every)
    assert all(value in values for value in chosen)
    return values if ALL else list(chosen)


def slow(*values: object) -> ParameterSet:
    """Mark one set of parameters as slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def examples(count: int) -> settings:
    """Set the number of examples; a profile with fewer than 100 reduces it in proportion."""
    return settings(max_examples=max(1, count * settings().max_examples // 100))
