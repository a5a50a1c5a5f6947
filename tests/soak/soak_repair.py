"""Kill repairs, removals and restores at random points, fifty times each; run by hand.

    python -m pytest tests/soak/soak_repair.py

HICACHECTL_TEST_SEED repeats a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.hicachectl.test_repair import (
    check_kills,
    check_removal,
    check_restore,
    check_taking_back,
    other_file_system,
)

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

KILLS = 50

__all__ = ["other_file_system"]


def test_repairs(tmp_path: Path) -> None:
    check_kills(tmp_path, KILLS, None)


def test_repairs_with_copies(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    check_kills(tmp_path, KILLS, str(request.getfixturevalue("other_file_system") / "q"))


def test_taking_repairs_back(tmp_path: Path) -> None:
    check_taking_back(tmp_path, KILLS)


def test_removals(tmp_path: Path) -> None:
    check_removal(tmp_path, KILLS)


def test_restores(tmp_path: Path) -> None:
    check_restore(tmp_path, KILLS)
