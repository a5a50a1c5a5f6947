"""`HiCacheStore`: the class that SGLang loads for `--hicache-storage-backend dynamic`.

SGLang calls its methods in several threads (cache_controller.py, hybrid_cache_controller.py). One
thread asks what exists, one reads, and one writes. The scheduler's thread attaches, clears, closes
and asks for statistics. After the registration of the pools, no method raises. In `get_stats`, an
exception would even end the server.
"""

from __future__ import annotations

import functools
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransferResult,
)

from hicachectl.backends.sglang.calls import Call
from hicachectl.backends.sglang.context import read_context, weight_version
from hicachectl.backends.sglang.counters import Moved
from hicachectl.backends.sglang.log import logger
from hicachectl.backends.sglang.pools import ThisRankError, served_pool
from hicachectl.backends.sglang.settings import parse_settings
from hicachectl.backends.sglang.status_file import StatusFile, first_status
from hicachectl.backends.sglang.store_list import open_stores
from hicachectl.formats.restorable import ALL_PAGES, PoolPages, restorable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicachectl.backends.sglang.page_store import ServedPool

Method = TypeVar("Method", bound="Callable[..., Any]")

# Most pages in a call of SGLang that reads or writes (cache_controller.py :: STORAGE_BATCH_SIZE).
# A call that writes pools other than kv may have more pages, because it has all pages of a node of
# SGLang's prefix tree.
_BATCH = 128
# Pages in the first question to the stores. While all pages exist, each further question has twice
# as many pages as the question before.
_FIRST_ASKED = _BATCH
_MOST_FAILED = 1 << 18  # most pages remembered because a sidecar failed


def _never_raises(default: Callable[..., Any]) -> Callable[[Method], Method]:
    """Make a method log an exception and return default(*arguments), instead of raising.

    If `default` raises as well, the method returns None, which SGLang takes for a failed call.
    """

    def guard(method: Method) -> Method:
        @functools.wraps(method)
        def guarded(self: HiCacheStore, *arguments: Any, **named: Any) -> Any:
            try:
                return method(self, *arguments, **named)
            except Exception as error:
                self._counters.failed("error", f"{method.__name__}: {error!r}")
                logger.debug("%s", method.__name__, exc_info=True)
                with suppress(Exception):
                    return default(*arguments, **named)
                return None

        return guarded  # type: ignore[return-value]

    return guard


def _no_pages(keys: Sequence[str] | None, *_: Any, **__: Any) -> list[bool]:
    return [False] * len(keys or ())


def _no_pages_of(_pool: object, keys: Sequence[str] | None, *_: Any) -> list[bool]:
    return _no_pages(keys)


def _no_transfers(transfers: Sequence[Any] | None, *_: Any, **__: Any) -> dict[Any, list[bool]]:
    return {transfer.name: _no_pages(transfer.keys) for transfer in transfers or ()}


class HiCacheStore(HiCacheStorage):  # type: ignore[misc]
    """SGLang's storage backend over stores of this package."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        """Check the configuration. Raises ValueError if it is wrong, on every rank alike.

        storage_config: SGLang's HiCacheStorageConfig.
        kwargs: an empty dictionary from SGLang's controller; unused.
        """
        self._config = storage_config
        self._settings = parse_settings(storage_config.extra_config)
        self._context = read_context(self._settings)
        self._stores = open_stores(self._settings, self._context.draft_weights)
        self._counters = self._stores.counters
        self._pools: dict[str, ServedPool] = {}
        self._complete = False  # True once all pools of the attachment are registered
        # Pages of which a sidecar was not written. Each stays here until its kv has been refused,
        # or until SGLang writes its sidecars again.
        self._failed: OrderedDict[str, None] = OrderedDict()
        self._reads, self._writes = Moved(), Moved()
        # Whether SGLang reads other pools after each batch of the anchor's pages.
        self._has_derived = False
        # The pages of the anchor's last batch, and how many of the leading pages were read. None
        # after these pages have been counted.
        self._anchored: tuple[Sequence[str], int] | None = None
        self._status_file: StatusFile | None = None
        self._counters.tally.begin(self._rank)

    # attaching, in the scheduler's thread

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Register the host pool of the anchor. Raises ValueError if it cannot be served."""
        super().register_mem_pool_host(mem_pool_host)
        self._add(PoolName.KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Register any host pool. Raises ValueError if it cannot be served, on all ranks alike."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if str(host_pool_name) not in self._pools:
            self._add(host_pool_name, host_pool)

    def _add(self, name: Any, host_pool: Any) -> None:
        """Serve a pool. If the pool cannot be served, raise, or make all pages misses.

        Raises ValueError only for a reason that all ranks see, and only until SGLang has registered
        all pools. If one rank raised alone, the other ranks would wait for it. An example is a
        reason in a draft pool that only the last pipeline stage has.
        """
        others_lack_it = name != PoolName.KV and self._config.pp_size > 1
        try:
            pool = served_pool(str(name), host_pool, self._config, self._context)
            self._stores.add(pool)
        except Exception as error:
            alone = others_lack_it or self._complete or isinstance(error, ThisRankError)
            if not alone:
                raise
            self._counters.excluded("unserved", str(error))
            return
        self._pools[pool.name] = pool

    @_never_raises(lambda: None)
    def on_host_pools_registered(self) -> None:
        """Open the stores, unless all pages are misses anyway. Begin to write the status."""
        self._complete = True
        try:
            self._open()
        finally:
            self._report()

    def _open(self) -> None:
        if self._context.unreadable:
            self._counters.excluded("unnamed-weights", self._context.unreadable)
        if self._context.unreadable or str(PoolName.KV) not in self._pools:
            return
        logger.info(
            "%s: serves %s of %s; weights %s, page size %d, layout %s",
            self._counters.place,
            ", ".join(sorted(self._pools)),
            self._config.model_name,
            self._context.weights or "unknown",
            self._context.page_size,
            self._pools[str(PoolName.KV)].identity.layout,
        )
        if not self._stores.writes:
            logger.info("%s: nothing is written, because packs are only read", self._counters.place)
        with self._call() as call:
            self._stores.open(call)

    @_never_raises(lambda: None)
    def clear(self) -> None:
        """Make all objects of this rank misses, unless `on_clear` is "refuse"."""
        if self._settings.on_clear == "refuse":
            logger.warning('%s: not cleared, because on_clear is "refuse"', self._counters.place)
            return
        with self._call() as call:
            self._stores.clear(call)

    @_never_raises(lambda: None)
    def close(self) -> None:
        """Release everything; later calls are misses."""
        self._count_anchored()
        try:
            self._stores.close()
        finally:
            if self._status_file is not None:
                self._status_file.close()

    @property
    def _rank(self) -> tuple[int, ...]:
        """This rank's values of `exported.LABELS`."""
        config = self._config
        return config.tp_rank, config.dp_rank, config.pp_rank, config.attn_cp_rank

    def _report(self) -> None:
        """Begin to write this rank's status into the first store, if that is a directory."""
        first = self._settings.stores[0]
        if first.kind.directory and self._status_file is None:
            status = first_status(self._config, self._context, self._settings, self._pools)
            self._status_file = StatusFile(first.path, status, self._counters)

    def get_stats(self) -> Any:
        """Return SGLang's StorageMetrics of the reads and writes since the last call.

        Return None if there were none.
        """
        reads, writes = self._reads.take(), self._writes.take()
        return _metrics(reads, writes) if reads or writes else None

    # asking

    @_never_raises(lambda *_, **__: False)
    def exists(self, key: str) -> bool:
        """Return whether a page's anchor can be read."""
        return self.batch_exists([key]) == 1

    @_never_raises(lambda *_, **__: 0)
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return how many leading pages have an anchor that can be read."""
        return int(self.batch_exists_v2(keys).kv_hit_pages)

    @_never_raises(lambda *_, **__: PoolTransferResult.empty())
    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: Sequence[Any] | None = None,
        extra_info: Any = None,
    ) -> Any:
        """Return SGLang's PoolTransferResult for a prefix.

        It has the number of leading pages that can be restored from all pools, that number for
        each pool, and all lengths of the prefix that can be restored.
        """
        transfers = [t for t in pool_transfers or () if _gates(t)]
        asked = [self._pools.get(str(PoolName.KV)), *(self._pool_of(one) for one in transfers)]
        pools = [pool for pool in asked if pool is not None]
        tokens = self._context.page_size
        self._counters.moved("asked", len(keys) * tokens)
        self._has_derived = any(t.indices_from_pool == PoolName.KV for t in transfers)
        if len(pools) < len(asked):
            self._counters.count("unserved", len(keys))
            return PoolTransferResult.empty()
        if not keys or not self._is_current(len(keys)):
            return PoolTransferResult.empty()
        found = self._present(pools, keys)
        windows = [ALL_PAGES, *(_window(transfer) for transfer in transfers)]
        pages = [PoolPages(row, window) for row, window in zip(found, windows, strict=True)]
        result = _result([pool.name for pool in pools], pages)
        self._counters.moved("found", result.kv_hit_pages * tokens)
        return result

    def _present(self, pools: Sequence[ServedPool], keys: list[str]) -> Any:
        """Return which pages of each pool can be read: [pools, pages] bool.

        The stores are asked about more and more pages, until an anchor is missing. The remaining
        pages count as absent without a question, because no prefix reaches them.
        """
        present = np.zeros((len(pools), len(keys)), dtype=np.bool_)
        start, length = 0, _FIRST_ASKED
        with self._call() as call:
            while start < len(keys):
                asked = slice(start, start + length)
                present[:, asked] = self._stores.exists(pools, keys[asked], call)
                if not present[0, asked].all():
                    break
                start, length = start + length, length * 2
        return present

    # reading

    @_never_raises(_no_pages)
    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Read pages of the anchor's pool into host memory. Return which pages were read whole."""
        with self._call() as call:
            read = self._read(self._pools.get(str(PoolName.KV)), keys, host_indices, call)
        self._count_anchored()
        if self._has_derived:
            self._anchored = keys, _leading(read)
        else:
            self._counters.moved("restored", _leading(read) * self._context.page_size)
        return read

    @_never_raises(_no_transfers)
    def batch_get_v2(
        self, transfers: Sequence[Any], extra_info: Any = None
    ) -> dict[Any, list[bool]]:
        """Read pages of other pools, all within the time of one call.

        Return which pages were read whole, by the name of each transfer.
        """
        with self._call() as call:
            results = {
                t.name: self._read(self._pool_of(t), t.keys or [], t.host_indices, call)
                for t in transfers
            }
        self._count_anchored(transfers, results)
        return results

    def _count_anchored(
        self, transfers: Sequence[Any] = (), results: Mapping[Any, Sequence[bool]] | None = None
    ) -> None:
        """Count, as restored, the pages that SGLang takes of the anchor's last batch.

        SGLang takes the leading pages that were read for the anchor and for every pool that it
        reads for the same batch (cache_controller.py :: _page_transfer_kv_batch).

        results: flags of each transfer's pages, True if the page was read, by the transfer's name.
        """
        anchored, self._anchored = self._anchored, None
        if anchored is None:
            return
        keys, pages = anchored
        derived = [(results or {})[t.name] for t in transfers if t.keys == keys]
        pages = min([pages, *map(_leading, derived)])
        self._counters.moved("restored", pages * self._context.page_size)

    @_never_raises(_no_pages_of)  # a pool that fails costs its own pages only
    def _read(
        self, pool: ServedPool | None, keys: list[str], host_indices: Any, call: Call
    ) -> list[bool]:
        if pool is None:
            self._counters.count("unserved", len(keys))
        if pool is None or not keys or not self._is_current(len(keys)):
            return [False] * len(keys)
        begun = time.perf_counter()
        pieces = pool.host.pieces(_first_indices(pool, keys, host_indices))
        read = self._stores.read(pool, keys, pieces, call)
        self._count(self._reads, sum(read), pool, begun)
        return read

    # writing

    @_never_raises(_no_pages)
    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Write pages of the anchor's pool, except pages of which a sidecar was not written."""
        failed = [key in self._failed for key in keys]
        for key in keys:
            self._failed.pop(key, None)
        if any(failed):
            self._counters.refused("half", "kv is not written where a sidecar failed", sum(failed))
        return self._write(self._pools.get(str(PoolName.KV)), keys, host_indices, failed)

    @_never_raises(_no_transfers)
    def batch_set_v2(
        self, transfers: Sequence[Any], extra_info: Any = None
    ) -> dict[Any, list[bool]]:
        """Write pages of other pools. Remember the pages of which a needed pool was not written.

        First, forget earlier failures of these pages, because SGLang passes all pools that a page
        needs in one call. `batch_set_v1` may not have forgotten these failures, because SGLang
        writes no kv of the pages behind a page that failed.

        Each batch of a node has the time of a whole call, because SGLang waits for writes before it
        stops the thread that writes (scheduler.py :: is_fully_idle).
        """
        for key in {key for transfer in transfers if _is_needed(transfer) for key in transfer.keys}:
            self._failed.pop(key, None)
        results = {}
        for transfer in transfers:
            keys = transfer.keys or []
            written = self._write(self._pool_of(transfer), keys, transfer.host_indices)
            results[transfer.name] = written
            if self._stores.writes and _is_needed(transfer):
                self._remember(key for key, ok in zip(keys, written, strict=True) if not ok)
        return results

    # After an exception, all pages count as failed, so that `batch_set_v2` remembers them.
    @_never_raises(_no_pages_of)
    def _write(
        self, pool: ServedPool | None, keys: list[str], host_indices: Any, skip: Sequence[bool] = ()
    ) -> list[bool]:
        if pool is None:
            self._counters.count("unserved", len(keys))
        if pool is None or not pool.writes or not keys or not self._is_current(len(keys)):
            return [False] * len(keys)
        wanted = [index for index in range(len(keys)) if not (skip and skip[index])]
        written = [False] * len(keys)
        begun = time.perf_counter()
        pieces = pool.host.pieces(_first_indices(pool, keys, host_indices))
        for start in range(0, len(wanted), _BATCH):
            some = wanted[start : start + _BATCH]
            with self._call() as call:
                done = self._stores.write(
                    pool, [keys[n] for n in some], [pieces[n] for n in some], call
                )
            for index, ok in zip(some, done, strict=True):
                written[index] = ok
        self._count(self._writes, sum(written), pool, begun)
        return written

    def _pool_of(self, transfer: Any) -> ServedPool | None:
        """Return the pool that a transfer moves, or None if it is not served."""
        pool = self._pools.get(str(transfer.name))
        return pool and as_transferred(pool, transfer)

    def _remember(self, pages: Any) -> None:
        for page in pages:
            self._failed[page] = None
        while len(self._failed) > _MOST_FAILED:
            self._failed.popitem(last=False)

    def _count(self, moved: Moved, pages: int, pool: ServedPool, begun: float) -> None:
        """Count pages for SGLang's metrics. SGLang takes them only if metrics are enabled."""
        if pages and self._config.enable_storage_metrics:
            moved.add(pages, pool.nbytes, time.perf_counter() - begun)

    def _call(self) -> Call:
        return Call(self._settings.op_timeout)

    def _is_current(self, pages: int) -> bool:
        """Return whether the weights have a name, and have not changed since the attachment.

        pages: number of pages to count as refused if the result is False.
        """
        if self._context.unreadable:
            self._counters.refused("unnamed-weights", self._context.unreadable, pages)
            return False
        version = weight_version()
        if version != self._context.weight_version:
            detail = f"the server's weight version is now {version!r}; attach again"
            self._counters.refused("new-weights", detail, pages)
            self._counters.tally.excluded["new-weights"] = detail
            return False
        return True

    def get(self, *_: Any, **__: Any) -> None:
        """Return None. SGLang calls this only without `interface_v1`, which is required."""

    batch_get = set = batch_set = get


def _gates(transfer: Any) -> bool:
    """Return whether a transfer's pool limits how many pages can be restored.

    Pools with the policy BLOCK_GROUPS never do (hicache_storage.py :: PoolHitPolicy).
    """
    return transfer.hit_policy in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES)


def as_transferred(pool: ServedPool, transfer: Any) -> ServedPool:
    """Return a pool with `trailing` set by SGLang's transfer.

    The name of the pool does not decide `trailing`, because draft_swa is stored either with each
    window of the target or with every page (hybrid_pool_assembler.py :: build_swa_draft_pools,
    _mtp_swa_sidecar_specs).
    """
    return replace(pool, trailing=transfer.hit_policy != PoolHitPolicy.ALL_PAGES)


def _is_needed(transfer: Any) -> bool:
    """Return whether a page needs the transfer's pool to be whole."""
    return transfer.hit_policy == PoolHitPolicy.ALL_PAGES and bool(transfer.keys)


def _window(transfer: Any) -> int:
    """Return how many last pages of a prefix need the pool, or ALL_PAGES."""
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return ALL_PAGES
    return max(1, len(transfer.keys or ()))


def _result(names: Sequence[str], pools: Sequence[PoolPages]) -> Any:
    """Return SGLang's result from the pages of each pool, the anchor's first."""
    offsets = np.array([0, len(pools[0].present)], dtype=np.int64)
    lengths = np.flatnonzero(restorable(pools, offsets)) + 1
    hits = {}
    for name, pool in zip(names, pools, strict=True):
        alone = [pools[0]] if pool is pools[0] else [pools[0], pool]
        own = np.flatnonzero(restorable(alone, offsets)) + 1
        if len(own):
            hits[PoolName(name)] = int(own[-1])
    return PoolTransferResult(int(lengths[-1]) if len(lengths) else 0, hits, lengths.tolist())


def _leading(pages: Sequence[bool]) -> int:
    """Return how many leading flags are True."""
    return pages.index(False) if False in pages else len(pages)


def _first_indices(pool: ServedPool, keys: Sequence[str], host_indices: Any) -> list[int]:
    """Return the first host index of each page.

    host_indices: int64 tensor, contiguous within a page.
    Raises ValueError for a wrong number of indices.
    """
    count = 0 if host_indices is None else int(host_indices.numel())
    if count != len(keys) * pool.page_indices:
        raise ValueError(f"{pool.name}: {count} host indices for {len(keys)} pages")
    indices: list[int] = host_indices[:: pool.page_indices].tolist()
    return indices


def _metrics(reads: Sequence[tuple[int, float]], writes: Sequence[tuple[int, float]]) -> Any:
    """Return SGLang's StorageMetrics.

    reads, writes: pages and GB/s of each call.
    """
    from sglang.srt.observability.metrics_collector import StorageMetrics

    metrics = StorageMetrics()
    for pages, rate in reads:
        metrics.prefetch_pgs.append(pages)
        metrics.prefetch_bandwidth.append(rate)
    for pages, rate in writes:
        metrics.backup_pgs.append(pages)
        metrics.backup_bandwidth.append(rate)
    return metrics
