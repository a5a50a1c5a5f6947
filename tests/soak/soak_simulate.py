"""What `simulate` says of a server's pools and store, beside a real server; run by hand.

    python -m pytest -s tests/soak/soak_simulate.py

Each point takes a minute on an idle machine. It prints the shares of the prompt tokens, in percent,
that device, host and storage served, and those that were simulated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from hicachectl.formats.eviction import Policy
from hicachectl.simulation.tiers import Tiers
from tests.conformance.conftest import tiny_model
from tests.conformance.cpu_server import PAGE_SIZE, CpuServer
from tests.conformance.served_trace import THRESHOLD, Point, Turns, served, shares, simulated

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

REQUESTS = 1000
L1_TOKENS = 8192
L2_TOKENS = 12288 + PAGE_SIZE  # 1.5 times L1, and the page that SGLang adds
CAPACITIES = {"write_through": (250, 350, 500), "write_through_selective": (250, 320, 400)}
POINTS = [
    Point(policy, write_policy, pages)
    for write_policy, capacities in CAPACITIES.items()
    for pages in capacities
    for policy in (Policy.HICACHEFILE, Policy.PLUGIN)
]
UNLIMITED = 1 << 30

__all__ = ["tiny_model"]


@pytest.fixture(scope="module")
def server(
    sglang_python: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CpuServer]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    pools = ("--max-total-tokens", str(L1_TOKENS), "--hicache-ratio", "1.5")
    with CpuServer(sglang_python, tiny_model, log, *pools) as started:
        yield started


@pytest.mark.parametrize("point", POINTS, ids=lambda point: "-".join(map(str, point)))
def test_shares_of_a_real_server(server: CpuServer, tmp_path: Path, point: Point) -> None:
    point.attach(server, tmp_path)
    try:
        requests = served(server, Turns(1, documents=60, longest=24), REQUESTS)
    finally:
        server.detach()
    assert requests.cached is not None
    assert len(requests.names) * PAGE_SIZE > 3 * (L1_TOKENS + L2_TOKENS)
    tiers = Tiers(L1_TOKENS, L2_TOKENS, point.write_policy, threshold=THRESHOLD)
    tokens = simulated(requests, tiers, point)
    real, model = shares(requests.cached, requests), shares(tokens, requests)
    other = int(np.any(requests.cached != tokens, axis=1).sum())
    print(f"\n{point.policy} {point.write_policy} {point.pages} | {real} | {model} | {other}")
    ceiling = shares(simulated(requests, tiers, point._replace(pages=UNLIMITED)), requests)[2]
    assert 0.1 * ceiling < real[2] < 0.9 * ceiling
    assert real[2] == pytest.approx(model[2], abs=2)
    assert real[:2] == pytest.approx(model[:2], abs=3)
