"""Caches of `simulate` hit the pages that SGLang's own stores hit, with the same requests."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.formats.eviction import Policy
from hicachectl.formats.profile import profile_from_mapping
from hicachectl.simulation.caches import LeasedObjects, Rooms
from hicachectl.simulation.replay import replay
from hicachectl.simulation.sizes import PageFile, PageSizes
from tests.conformance.store_cases import CASES
from tests.mooncake_cluster import Cluster
from tests.simulation.traces import conversations
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hicachectl.simulation.replay import Runs
    from tests.conformance.conftest import SglangSession
    from tests.hf3fs_server import MetadataServer

pytestmark = pytest.mark.conformance

TRACE = conversations(3, 60, turn=3)
HASHES = [hashlib.sha256(b"%d" % page).hexdigest() for page in range(len(TRACE.parents))]


def ask(session: SglangSession, case: str, **question: Any) -> list[list[int]]:
    requests = [([HASHES[page] for page in chain], len(chain)) for chain in TRACE.chains]
    deployment = dataclasses.asdict(CASES[case].deployments[0])
    answer: list[list[int]] = session.ask(
        "replay_requests", {"deployment": deployment, "requests": requests, **question}
    )
    return answer


def simulated(
    case: str, policy: Policy, shares: tuple[float, ...], ratio: float = 0.9
) -> tuple[PageSizes, list[int], Runs]:
    """Return the sizes of pages, capacities in bytes, and the hits at each.

    shares: capacities as shares of all pages of the trace.
    """
    sizes = PageSizes.of(profile_from_mapping(CASES[case].deployments[0].profile), policy)
    whole = len(HASHES) * (sizes.page_bytes + sizes.trailing_bytes // 8)
    capacities = [int(whole * share) for share in shares]
    return sizes, capacities, replay(policy, TRACE.requests, capacities, sizes, ratio=ratio)


@pytest.mark.parametrize("case", ["gqa_tp2", "mla_indexer", "hybrid_mamba", "pp2", "swa"])
def test_hicachefile_evicts_as_simulated(
    sglang_session: SglangSession, tmp_path: Path, case: str
) -> None:
    sizes, capacities, runs = simulated(case, Policy.HICACHEFILE, (0.15, 0.4), 0.8)
    places = [tmp_path / str(number) for number in range(len(capacities))]
    limits = {str(n): (size // sizes.limits, 0.8) for n, size in enumerate(capacities)}
    told = ask(sglang_session, case, backend="file", places=[*map(str, places)], limits=limits)
    assert runs.tolist() == told
    assert 0 < sum(told[0]) < sum(told[-1])


@pytest.mark.parametrize("case", ["gqa_tp2", "mla_indexer", "hybrid_mamba"])
def test_the_3fs_metadata_server_evicts_as_simulated(
    sglang_session: SglangSession, metadata_server: MetadataServer, tmp_path: Path, case: str
) -> None:
    sizes, capacities, runs = simulated(case, Policy.HF3FS, (0.4, 0.8))
    told = []
    for number, capacity in enumerate(capacities):
        metadata_server.reset()
        place = tmp_path / str(number)
        (place / "data").mkdir(parents=True)
        config = metadata_server.write_config(place, capacity // sizes.limits)
        told += ask(sglang_session, case, backend="hf3fs", places=[str(config)])
    assert runs.tolist() == told
    assert 0 < sum(told[0]) < sum(told[-1])


@pytest.mark.usefixtures("mooncake_package")
def test_mooncakes_master_evicts_as_simulated() -> None:
    """Each page waits until the master holds as many as simulated; hits tell which ones.

    The master looks every 10 ms, or later on a busy machine. Leases end between two pages. A
    look-up ends at the first missing page here; SGLang asks for all pages at once, which leases
    those behind it, too. The simulation leaves that out.
    """
    segment, nbytes, lease_ms = 16 << 20, 256 << 10, 1
    room = LeasedObjects([PageFile("kv", nbytes)], segment, 0.9, 0.05, lease_ms / 1000)
    cache = Rooms([room])
    hits = 0
    with Cluster(
        segment, lease_ms=lease_ms, eviction_high_watermark_ratio=0.9, eviction_ratio=0.05
    ) as cluster:
        client = cluster.client()

        def held(pages: Sequence[int]) -> list[int]:
            """Return which pages are held; this leases them."""
            codes: list[int] = client.batch_is_exist([HASHES[page] for page in pages])
            return codes

        def simulated() -> int:
            return sum(room.has(page, 0) for page in range(len(HASHES)))

        for chain in TRACE.chains:
            hit = 0
            while hit < len(chain) and held([chain[hit]]) == [1]:
                hit += 1
            assert cache.held(chain) == hit
            hits += hit
            cache.read(chain[:hit], time.monotonic())
            for page in chain[hit:]:
                if held([page]) != [1]:
                    assert client.put(HASHES[page], bytes(nbytes)) == 0
                cache.write([page], time.monotonic())
                time.sleep(0.03)
                wait_until(lambda: len(cluster.list_keys()) == simulated(), "evicts otherwise", 20)
    assert 0 < hits < TRACE.requests.reach.sum()
