"""One rank of a server: SGLang's controller with host pools and an attached storage backend.

Runs inside the SGLang environment, after sglang_env.prepare(). The controller, its threads, queues
and collectives are SGLang's own; this module only does the radix tree's part: it passes nodes to
the backup queue, and allocates host pages for the hits of a prefetch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.conformance import host_pages, page_values, prompt_nodes, rank_pools
    from tests.conformance.prompt_nodes import Prompt
    from tests.conformance.rank_pools import Rank, RankPools
    from tests.conformance.store_cases import Deployment
else:
    import host_pages
    import page_values
    import prompt_nodes
    import rank_pools

PATIENCE_S = 30.0  # for an answer of the controller's threads
_PLUGIN = {
    "backend_name": "hicachectl",
    "module_path": "hicachectl.backends.sglang",
    "class_name": "HiCacheStore",
    "interface_v1": 1,
    "identity": "weights of the tests",
}
_UNREAD = 0xA5  # bytes of host pages before a prefetch


@dataclass(slots=True)
class Prefetched:
    """What a prefetch brought, after the agreement of all ranks.

    hit_pages: pages that storage has for all ranks. pages: those that were read. trailing: by pool,
    the last pages that were read. wrong: by pool, the positions whose bytes are wrong.
    operation: SGLang's, with its host indices.
    """

    hit_pages: int = 0
    pages: int = 0
    trailing: dict[str, int] = field(default_factory=dict)
    wrong: dict[str, list[int]] = field(default_factory=dict)
    operation: Any = None


class Groups:
    """The process groups of a rank; None where the rank is alone."""

    def __init__(self, deployment: Deployment, rank: Rank) -> None:
        """Take part in the creation of all groups, which every rank of the deployment does."""
        import torch

        self.tp = self.cp = self.pp = None
        everyone = rank_pools.ranks(deployment.profile)
        if len(everyone) == 1:
            return
        for axis, others in (("tp", ("pp", "cp")), ("cp", ("pp", "tp")), ("pp", ("cp", "tp"))):
            lines: dict[Any, list[int]] = {}
            for number, each in enumerate(everyone):
                lines.setdefault(tuple(getattr(each, name) for name in others), []).append(number)
            for at, members in lines.items():
                group = torch.distributed.new_group(members, backend="gloo")
                if at == tuple(getattr(rank, name) for name in others):
                    setattr(self, axis, group)


class AttachedRank:
    """A rank's controller; `pools` are its own, and new with each instance."""

    def __init__(
        self, deployment: Deployment, rank: Rank, pages: int, groups: Groups | None = None
    ) -> None:
        """Build the pools, with room for at least `pages` pages, and the controller."""
        from sglang.srt.mem_cache.hicache_storage import PoolName
        from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
        from sglang.srt.mem_cache.pool_host import HostPoolGroup, PoolEntry

        self.profile: Mapping[str, Any] = deployment.profile
        self.pools: RankPools = rank_pools.build_pools(deployment, rank, pages)
        entries = [
            PoolEntry(
                name=PoolName(name),
                host_pool=host,
                device_pool=self.pools.device[name],
                layer_mapper=lambda layer: layer,
                is_primary_index_anchor=name == "kv",
            )
            for name, host in self.pools.host.items()
        ]
        groups = groups or SimpleNamespace(tp=None, cp=None, pp=None)  # type: ignore[assignment]
        assert groups is not None
        self.controller = HybridCacheController(
            SimpleNamespace(get_kvcache=lambda: self.pools.device["kv"]),
            HostPoolGroup(entries),
            self.profile["page_size"],
            groups.tp,
            threading.Event(),
            attn_cp_group=groups.cp,
            attn_tp_group=groups.tp,
            pp_group=groups.pp,
            io_backend="kernel",
            enable_storage_metrics=True,
        )
        self._requests = count()

    def attach(self, settings: Mapping[str, Any], backend: str = "dynamic") -> None:
        """Attach a backend as a server does. Raises what the backend refuses.

        settings: its extra_config; for `dynamic`, the plug-in's fixed keys are added.
        """
        config = {**(_PLUGIN if backend == "dynamic" else {}), **settings}
        self.controller.attach_storage_backend(
            backend,
            prefetch_threshold=self.profile["page_size"],
            model_name=self.profile["model"],
            storage_backend_extra_config={k: v for k, v in config.items() if v is not None},
            host_pools=self.controller.mem_pool_host.entries,
        )

    def detach(self) -> None:
        """Detach the backend, which ends the controller's threads."""
        self.controller.detach_storage_backend()

    @contextlib.contextmanager
    def attached(self, settings: Mapping[str, Any], backend: str = "dynamic") -> Iterator[None]:
        """Attach a backend for the duration of a block."""
        self.attach(settings, backend)
        try:
            yield
        finally:
            self.detach()

    def back_up(self, prompt: Prompt) -> list[int]:
        """Back a prompt up node by node; return the pages that each node's operation completed."""
        self.pools.host["kv"].alloc(prompt.page_size)  # shifts page i away from slot i
        operations = list(prompt_nodes.back_up_operations(self.pools, prompt))
        for operation in operations:
            self.write(operation)
        done = [self.written() for _ in operations]
        for operation in operations:
            self.free(operation)
        return [operation.completed_tokens // prompt.page_size for operation in done]

    def write(self, operation: Any, transfers: list[Any] | None = None) -> int:
        """Put a node into the backup queue; return the number of SGLang's operation.

        transfers: in place of the operation's own, which the controller changes.
        """
        number: int = self.controller.write_storage(
            operation.host_indices,
            operation.token_ids,
            hash_value=operation.hash_value,
            prefix_keys=operation.prefix_keys,
            extra_pools=operation.pool_transfers if transfers is None else transfers,
        )
        return number

    def written(self) -> Any:
        """Return the next operation that has left the backup queue."""
        return self.controller.ack_backup_queue.get(timeout=PATIENCE_S)

    def prefetch(self, prompt: Prompt) -> Prefetched:
        """Prefetch a prompt into host pages, and compare them with the prompt's values."""
        found = self.query(prompt)
        operation = found.operation
        if not found.hit_pages:
            return found
        self.place(operation)
        self.spoil(operation)
        self.read(found)
        for name, page, index in prompt_nodes.placed_pages(self.pools, operation):
            position = prompt.pages.index(page)
            read = found.pages
            if name in found.trailing:
                read = found.hit_pages if found.trailing[name] else 0
            if position < read and not self.holds(prompt, name, page, index):
                found.wrong.setdefault(name, []).append(position)
        return found

    def query(self, prompt: Prompt) -> Prefetched:
        """Have the controller ask storage for a prompt, and return the answer."""
        operation = self.ask(prompt)
        answered = self.controller.prefetch_hit_queue.get(timeout=PATIENCE_S)
        assert answered is operation
        return Prefetched(operation.storage_hit_count // prompt.page_size, operation=operation)

    def ask(self, prompt: Prompt) -> Any:
        """Put a prompt into the prefetch queue, which asks storage for it."""
        from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

        return self.controller.prefetch(
            CacheRequestHandle(f"request {next(self._requests)}", 0),
            prompt.tokens,
            extra_pools=prompt_nodes.queries(self.pools),
        )

    def place(self, operation: Any) -> None:
        """Allocate host pages for a hit (unified_radix_cache.py :: _try_alloc_storage_hit)."""
        tokens = operation.storage_hit_count
        pages = tokens // self.profile["page_size"]
        operation.host_indices = self.controller.alloc_prefetch_host_buffers(operation, tokens)
        for transfer in operation.pool_transfers:
            if transfer.indices_from_pool is None:
                host = self.pools.host[transfer.name.value]
                window = min(len(transfer.keys), pages)
                transfer.host_indices = host.alloc(window * host.page_size)
                transfer.keys = operation.hash_value[pages - window : pages]

    def spoil(self, operation: Any, byte: int = _UNREAD) -> None:
        """Fill all host pages of an operation with one byte."""
        for name, _, index in prompt_nodes.placed_pages(self.pools, operation):
            host_pages.spoil(self._view(name, index), byte)

    def is_spoiled(self, operation: Any, byte: int = _UNREAD) -> bool:
        """Return whether all bytes of an operation's host pages are this one."""
        return all(
            host_pages.is_spoiled(self._view(name, index), byte)
            for name, _, index in prompt_nodes.placed_pages(self.pools, operation)
        )

    def read(self, found: Prefetched) -> None:
        """Have the controller read the pages of a hit, and collect its acknowledgements."""
        self.controller.prefetch_buffer.put(found.operation)
        while True:
            ack = self.controller.ack_prefetch_queue.get(timeout=PATIENCE_S)
            if ack.completed_tokens is not None:
                found.pages = ack.completed_tokens // self.profile["page_size"]
            if ack.pool_hits is not None:
                found.trailing = {
                    transfer.name.value: ack.pool_hits.get(transfer.name.value, 0)
                    for transfer in found.operation.pool_transfers
                    if transfer.indices_from_pool is None
                }
            if ack.completed_req:
                return

    def free(self, operation: Any) -> None:
        """Return an operation's host pages to the pools."""
        self.pools.host["kv"].free(operation.host_indices)
        for transfer in operation.pool_transfers or ():
            if transfer.indices_from_pool is None:
                self.pools.host[transfer.name.value].free(transfer.host_indices)

    def holds(self, prompt: Prompt, name: str, page: str, index: int) -> bool:
        """Return whether a host page has the values of a prompt's page."""
        return self.has(name, index, self.values(prompt, name, page))

    def values(self, prompt: Prompt, name: str, page: str) -> page_values.Parts:
        """Return the values of a prompt's page in a pool."""
        return self.pools.values(name, page_values.page_salt(page, name, prompt.seed))

    def has(self, name: str, index: int, values: page_values.Parts) -> bool:
        """Return whether a host page has these values."""
        return host_pages.holds(self._view(name, index), values, self._kind(name))

    def _view(self, name: str, index: int) -> dict[str, Any]:
        return host_pages.page_view(self.pools.host[name], self._kind(name), index)

    def _kind(self, name: str) -> str:
        kind: str = next(p["kind"] for p in self.profile["pools"] if p["name"] == name)
        return kind


@contextlib.contextmanager
def sole_rank(deployment: Deployment, pages: int) -> Iterator[AttachedRank]:
    """Make this process the only rank of a deployment."""
    rank = rank_pools.Rank(0, 0, 0)
    with rank_pools.parallel(deployment, rank), server_arguments(deployment):
        yield AttachedRank(deployment, rank, pages)


@contextlib.contextmanager
def server_arguments(deployment: Deployment, **more: Any) -> Iterator[None]:
    """Publish SGLang's configuration of a server, as far as storage backends look at it."""
    from sglang.srt.runtime_context import get_context

    profile = deployment.profile
    fields = {
        "served_model_name": profile["model"],
        "page_size": profile["page_size"],
        "hicache_mem_layout": profile["layout"],
        "hicache_storage_backend": "dynamic",
        "speculative_algorithm": profile.get("speculative_algorithm"),
        **more,
    }
    stages = ",".join(map(str, profile.get("pp_partition", ())))
    division = {"SGLANG_PP_LAYER_PARTITION": stages} if stages else {}
    with get_context().override_server_args(**fields), mock.patch.dict(os.environ, division):
        yield


class Warnings(logging.Handler):
    """Keeps the warnings of a logger."""

    def __init__(self, logger: str) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger(logger).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a warning."""
        self.texts.append(record.getMessage())
