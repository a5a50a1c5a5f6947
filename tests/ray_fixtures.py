"""Fixtures of a Ray cluster; tests/conftest.py imports them for every test.

Tests that use them are in the xdist group "ray", so that one worker starts the cluster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.parts.connected import Connected
from tests.parts.ray_cluster import RayCluster

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def shared_ray_cluster() -> Iterator[RayCluster]:
    """Start one cluster for all tests."""
    with RayCluster() as cluster:
        yield cluster


@pytest.fixture
def ray_cluster(shared_ray_cluster: RayCluster) -> RayCluster:
    """Return a cluster of two nodes. A test may remove any node but the head."""
    shared_ray_cluster.fill()
    return shared_ray_cluster


@pytest.fixture(scope="session")
def shared_ray_driver(shared_ray_cluster: RayCluster) -> Iterator[Connected]:
    """Start one driver that stays connected, for all tests."""
    with Connected(shared_ray_cluster.address) as driver:
        yield driver


@pytest.fixture
def ray_driver(ray_cluster: RayCluster, shared_ray_driver: Connected) -> Connected:
    """Return a connected driver of two nodes."""
    return shared_ray_driver
