"""Recover from every crash state of the commands that write; run by hand.

    python -m pytest tests/soak/soak_power.py

HICACHECTL_TEST_SEED repeats a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.power.replaying import found_by_recovering, seed_of_run
from tests.power.test_crash_states import recorded

if TYPE_CHECKING:
    from tests.power.test_crash_states import Recorded

__all__ = ["recorded"]


def test_the_next_run_completes_the_work(recorded: Recorded) -> None:
    assert found_by_recovering(*recorded, seed_of_run(), None) == []
