"""The plug-in under SGLang's controller for longer, and in all deployments; run by hand.

    python -m pytest tests/soak/soak_plugin.py

HICACHECTL_SOAK_SECONDS: seconds of load, 600 by default.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from tests.conformance.conftest import sglang_session
from tests.conformance.test_plugin_ranks import PAGES, serve, trailing_of, whole
from tests.conformance.test_rank_faults import check_kills, check_load, run

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conformance.store_cases import LAYOUTS, PLUGIN_CASES, PLUGIN_REFUSES
    from tests.conformance.test_plugin_ranks import Serve
    from tests.conformance.test_rank_faults import Run
else:
    from store_cases import LAYOUTS, PLUGIN_CASES, PLUGIN_REFUSES

KILLS = 100
LOAD_S = float(os.environ.get("HICACHECTL_SOAK_SECONDS", "600"))
WARM = 5  # samples of memory before which it may grow
GROWTH = 0.02  # of resident memory after that
# Layouts that SGLang's host pools assert against, or for which they name no memory.
UNSUPPORTED = {
    "mla": ("page_head",),
    "mamba": ("layer_first", "page_head"),
    "dsa_indexer": ("layer_first", "page_head"),
    "dsv4": ("layer_first", "page_head"),
}

# SGLang stores nothing of the one at its second rank; the other has two models.
LEFT_OUT = (*PLUGIN_REFUSES, "cp2_without_dp", "two_models")

__all__ = ["run", "serve", "sglang_session"]


def _deployments() -> list[tuple[str, str, int]]:
    """Return every case in every layout that SGLang has for its pools, at TP 1, 2 and 4."""
    found = []
    for case in PLUGIN_CASES:
        kinds = [pool["kind"] for pool in PLUGIN_CASES[case].deployments[0].profile["pools"]]
        without = {layout for kind in kinds for layout in UNSUPPORTED.get(kind, ())}
        for layout in LAYOUTS:
            if case not in LEFT_OUT and layout not in without:
                found += [(case, layout, tp) for tp in (1, 2, 4)]
    return found


@pytest.mark.parametrize(("case", "layout", "tp"), _deployments())
def test_every_rank_reads_every_byte(serve: Serve, case: str, layout: str, tp: int) -> None:
    for report in serve(case, "write", "read", profile={"layout": layout, "tp": tp}):
        assert whole(report, 1), report
        assert report["steps"][1]["trailing"] == trailing_of(case)
        assert report["log"] == []


def test_a_rank_of_four_without_a_directory(serve: Serve, tmp_path: Path) -> None:
    serve("gqa_tp2", "write", profile={"tp": 4})
    (tmp_path / "file").touch()
    blocked: dict[str, Any] = {"0.0.3": {"store": f"file://{tmp_path}/file"}}
    for report in serve("gqa_tp2", "read", profile={"tp": 4}, ranks=blocked):
        assert whole(report, 0, 0)
    for report in serve("gqa_tp2", "read", profile={"tp": 4}):
        assert whole(report, 0, PAGES)


def test_kills(run: Run, tmp_path: Path) -> None:
    check_kills(run, tmp_path, KILLS)


def test_load_without_growth(run: Run) -> None:
    samples = check_load(run, LOAD_S)["samples"][WARM:]
    _, resident, descriptors, threads = zip(*samples, strict=True)
    assert max(resident) < resident[0] * (1 + GROWTH), resident
    assert max(descriptors) <= descriptors[0] + 4, descriptors
    assert max(threads) <= threads[0] + 2, threads
