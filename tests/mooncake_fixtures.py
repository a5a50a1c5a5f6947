"""Fixtures of the Mooncake cluster; tests/conftest.py imports them for every test."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.mooncake_cluster import Cluster
from tests.mooncake_release import release_of_process
from tests.skips import lacking, need_module

if TYPE_CHECKING:
    from collections.abc import Iterator


PINS = "pins of stored objects (Mooncake before 0.3.14)"


@pytest.fixture(scope="session")
def mooncake_package() -> None:
    """Skip if the package is missing or does not load."""
    module = need_module(
        "mooncake.store",
        "`pip install -e '.[dev]'` and `apt-get install libcurl4 libibverbs1 libnuma1` install it",
    )
    for folder in release_of_process():
        assert Path(module.__file__).is_relative_to(folder)


@pytest.fixture(scope="session")
def shared_mooncake_cluster(mooncake_package: None) -> Iterator[Cluster]:
    """Start one cluster per worker process, since a listing covers the whole store."""
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def mooncake_cluster(shared_mooncake_cluster: Cluster) -> Cluster:
    """Return the worker's cluster, emptied. A test that kills a process starts its own."""
    shared_mooncake_cluster.clear()
    return shared_mooncake_cluster


@pytest.fixture
def pinning_cluster(mooncake_cluster: Cluster) -> Cluster:
    """Return the worker's cluster, emptied, with a master that can pin stored objects."""
    if not mooncake_cluster.can_pin:
        lacking(PINS)
    return mooncake_cluster
