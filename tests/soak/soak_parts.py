"""Kill the parts of verifications and moves at random times, fifty times each; run by hand.

    python -m pytest tests/soak/soak_parts.py

HICACHECTL_TEST_SEED repeats a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.parts.test_killed_parts import check_migrate, check_verify, killed_run

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke
    from tests.parts.test_killed_parts import KilledRun

KILLS = 50

__all__ = ["killed_run"]


def test_verify(invoke: Invoke, tmp_path: Path, killed_run: KilledRun) -> None:
    check_verify(invoke, tmp_path, killed_run, KILLS)


def test_copies(invoke: Invoke, tmp_path: Path, killed_run: KilledRun) -> None:
    check_migrate(invoke, tmp_path, killed_run, KILLS)


def test_moves(invoke: Invoke, tmp_path: Path, killed_run: KilledRun) -> None:
    check_migrate(invoke, tmp_path, killed_run, KILLS, "--move", "--yes")
