"""Parameters and examples of tests that `make test-fast` or `make test` leaves out.

HICACHECTL_TEST_ALL=1 runs everything: all parameters, and the tests that are marked `weekly`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from _pytest.mark import ParameterSet

Value = TypeVar("Value")
ALL = os.environ.get("HICACHECTL_TEST_ALL") == "1"


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
