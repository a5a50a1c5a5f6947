"""The simulated pools and store serve what those of a real server do.

tests/soak/soak_simulate.py compares more: larger pools, other policies and capacities.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hicachectl.formats.eviction import Policy
from hicachectl.simulation.tiers import Tiers
from tests.conformance.cpu_server import DEVICE_TOKENS, HOST_TOKENS
from tests.conformance.served_trace import THRESHOLD, Point, Turns, served, shares, simulated

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conformance.cpu_server import CpuServer

pytestmark = [pytest.mark.conformance, pytest.mark.xdist_group("sglang-server")]


def test_pools_and_store_serve_the_simulated_shares(cpu_server: CpuServer, tmp_path: Path) -> None:
    point = Point(Policy.HICACHEFILE, "write_through", 250)
    point.attach(cpu_server, tmp_path)
    requests = served(cpu_server, Turns(1, documents=40, longest=24), 250)
    assert requests.cached is not None
    assert len(requests.names) * requests.block_tokens > 3 * (DEVICE_TOKENS + HOST_TOKENS)
    found = shares(requests.cached, requests)
    tiers = Tiers(DEVICE_TOKENS, HOST_TOKENS, threshold=THRESHOLD)
    assert found == pytest.approx(shares(simulated(requests, tiers, point), requests), abs=2)
    assert found.min() > 10
