"""Kill migrations and moves at random points, a hundred times each; run by hand.

    python -m pytest tests/soak/soak_migrate.py

After each kill, another run completes the work. HICACHECTL_TEST_SEED repeats a run.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from tests.move.test_migrate_kills import KINDS, MOVES, check_kills

if TYPE_CHECKING:
    from pathlib import Path

    from tests.places import Places

KILLS = 100


@pytest.mark.parametrize("pair", list(itertools.product(KINDS, KINDS)), ids="-".join)
def test_migrations(places: Places, tmp_path: Path, pair: tuple[str, str]) -> None:
    check_kills(places, tmp_path, pair, KILLS, share=1)


@pytest.mark.parametrize("pair", MOVES, ids="-".join)
def test_moves(places: Places, tmp_path: Path, pair: tuple[str, str]) -> None:
    check_kills(places, tmp_path, pair, KILLS, share=1, move=True)
