"""Open a store for a block.

This module imports no operation, because commands that only read must start quickly.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from hicachectl.backends.base import open_store as opened
from hicachectl.backends.capabilities import Leases, Spreads
from hicachectl.backends.urls import Config, load_config
from hicachectl.io.interrupts import deferred

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hicachectl.backends.base import Store


@contextmanager
def open_store(
    url: str,
    *,
    config: Config | str | Path | None = None,
    create: bool = False,
    allow_leases: bool = False,
    lease_wait: float | None = None,
    jobs: int | None = None,
) -> Iterator[Store]:
    """Open a store, and close it after the block.

    url: STORE argument, such as "file:///mnt/hicache" or "prod:".
    config: file that names stores; None for the user's config file.
    create: whether to make a missing directory or pack.
    allow_leases: whether look-ups on Mooncake may grant leases.
    lease_wait: seconds to wait for leases before a Mooncake object is replaced; None for the
        store's default.
    jobs: number of calls that a store of files makes at once; None to find the number while
        running.
    Raises UsageError, FormatError and StoreUnavailable.
    """
    if not isinstance(config, Config):
        config = load_config(None if config is None else str(config))
    store = opened(url, config=config, create=create)
    try:
        if isinstance(store, Leases):
            store.allow_leases = allow_leases
            if lease_wait is not None:
                store.lease_wait_seconds = lease_wait
        if isinstance(store, Spreads) and jobs is not None:
            store.concurrency.limit(jobs)
        yield store
    finally:
        with deferred():  # close() writes the index of a pack
            store.close()
