"""A million wrong files in place of pages, in pieces with seeds of their own; run by hand.

    python -m pytest -s tests/soak/soak_faults.py

HICACHECTL_SOAK_FAULTS: number of faults, 1,000,000 by default. Each piece prints its faults, the
pages that were read, and its seconds.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from tests.conformance.conftest import sglang_session
from tests.conformance.test_injected_faults import check_faults

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conformance.conftest import SglangSession

FAULTS = int(os.environ.get("HICACHECTL_SOAK_FAULTS", "1000000"))
PIECE = 20_000
FIRST_SEED = 1000  # no piece repeats the faults of test_injected_faults.py
# Pages of a few kilobytes: MHA, with a draft, with windows, of two stages, and with states.
CASES = ("gqa_tp2", "mha_draft", "swa", "pp2", "zaya")

__all__ = ["sglang_session"]


@pytest.mark.parametrize("piece", range(-(-FAULTS // PIECE)))
def test_a_piece(sglang_session: SglangSession, tmp_path: Path, piece: int) -> None:
    settings = {"unranked": ("read", "refuse")[piece % 2]}
    case, begun = CASES[piece % len(CASES)], time.monotonic()
    done = check_faults(
        sglang_session, tmp_path, case, FIRST_SEED + piece, PIECE, settings=settings
    )
    seconds = time.monotonic() - begun
    counts = f"{done['faults']} faults, {done['read']} pages"
    print(f"\npiece {piece}: {case}: {counts}, {seconds:.0f} s")
