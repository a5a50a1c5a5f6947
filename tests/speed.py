"""Parameters and examples of tests that `make test-fast` leaves out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from _pytest.mark import ParameterSet


def slow(*values: object) -> ParameterSet:
    """Mark one set of parameters as slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def examples(count: int) -> settings:
    """Set the number of examples; a profile with fewer than 100 reduces it in proportion."""
    return settings(max_examples=max(1, count * settings().max_examples // 100))
