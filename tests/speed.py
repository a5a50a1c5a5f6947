"""What `make test-fast` leaves out of a test: some of its parameters, most of its examples."""

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
    """Ask for a number of examples; a profile with fewer than 100 gets as much smaller a share."""
    return settings(max_examples=max(1, count * settings().max_examples // 100))
