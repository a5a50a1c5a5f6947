"""No byte of a wrong file reaches SGLang's host pools as a success (inject_faults.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conformance.conftest import SglangSession

pytestmark = pytest.mark.conformance

# Some ten thousand. A tenth is enough for each kind of fault in each pool.
PARTS = (
    ("gqa_tp2", "read", 4000),
    ("mha_draft", "refuse", 3000),
    ("swa", "read", 2000),
    ("zaya", "refuse", 1000),
)
KINDS = 15  # of faults


def check_faults(
    session: SglangSession, folder: Path, case: str, seed: int, faults: int, **request: Any
) -> dict[str, Any]:
    """Inject faults into a store of two ranks; every page is right, or a miss."""
    directory = folder / "store"
    whole = {"case": case, "seed": seed, "faults": faults, "directory": str(directory), **request}
    report: dict[str, Any] = session.ask("inject_faults", whole)
    assert report["wrong"] == report["accepted"] == report["missed"] == [], (case, seed, report)
    assert report["faults"] >= faults
    return report


@pytest.mark.parametrize(("case", "unranked", "faults"), PARTS)
def test_wrong_files_are_misses(
    sglang_session: SglangSession, tmp_path: Path, case: str, unranked: str, faults: int
) -> None:
    """Swapped, flipped, torn, cut off, foreign and old; right files beside them are read."""
    settings = {"unranked": unranked}
    report = check_faults(sglang_session, tmp_path, case, 0, faults, settings=settings)
    assert len(report["kinds"]) == KINDS
    assert report["read"] > faults / 4


@pytest.mark.parametrize("case", ["mla_indexer", "hybrid_mamba", "pp2"])
def test_every_file_in_place_of_every_other(
    sglang_session: SglangSession, tmp_path: Path, case: str
) -> None:
    """Of three pages, all ranks and pools; also of shared pages, states and pipeline stages."""
    report = check_faults(sglang_session, tmp_path, case, 0, 1, pages=1)
    assert report["kinds"]["swapped"] >= 30
