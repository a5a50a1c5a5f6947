"""Kill repairs, removals and restores at random points, fifty times each; run by hand.

    python -m pytest tests/soak/soak_repair.py

HICACHECTL_TEST_SEED repeats a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.move.repairs import default_quarantine
from tests.move.test_repair_kills import (
    check_kills,
    check_removal,
    check_restore,
    check_taking_back,
    commands,
    runner,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.move.test_repair_kills import Commands

KILLS = 50

__all__ = ["commands", "runner"]


def test_repairs(commands: Commands) -> None:
    check_kills(commands, KILLS, default_quarantine(commands.store))


def test_repairs_with_copies(commands: Commands, other_file_system: Path) -> None:
    check_kills(commands, KILLS, other_file_system / "q")


def test_taking_repairs_back(commands: Commands) -> None:
    check_taking_back(commands, KILLS)


def test_removals(commands: Commands) -> None:
    check_removal(commands, KILLS)


def test_restores(commands: Commands) -> None:
    check_restore(commands, KILLS)
