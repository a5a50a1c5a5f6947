"""Pages of one rank in Mooncake, 3FS or a pack.

Stores read into memory of ours, whose slots a call that hangs keeps; the bytes reach the host pool
when they have the right size, and while the call is open. They are written from there, too.

Nothing of an object is in its bytes here. On Mooncake the tag in its key names the deployment
(`identity.deployment_tag`), a pack records its profile and digests, and 3FS has neither.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hicachectl.backends.arena import place
from hicachectl.backends.base import Store, open_store
from hicachectl.backends.capabilities import (
    Archive,
    Claimed,
    Confirm,
    Leases,
    PageSized,
    RacyWrites,
)
from hicachectl.backends.sglang.archives import archive_problem
from hicachectl.backends.sglang.calls import Call, Workers
from hicachectl.backends.sglang.objects import (
    PageForm,
    count_failures,
    page_form,
    put,
    right_sizes,
    rows_of,
)
from hicachectl.backends.sglang.served import PageStore
from hicachectl.backends.sglang.slots import NoSlotError, Slots, gather
from hicachectl.formats.errors import HicacheError
from hicachectl.formats.identity import deployment_tag
from hicachectl.formats.kinds.pool import pool_name
from hicachectl.formats.wording import reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicachectl.backends.sglang.counters import Counters
    from hicachectl.backends.sglang.served import Pieces, ServedPool
    from hicachectl.backends.urls import StoreUrl

logger = logging.getLogger("hicachectl.sglang")

_GRAMMARS = {"mooncake": "mooncake", "hf3fs": "hf3fs"}  # by scheme; a pack states its own
_ANCHOR = "kv"
_SLOT_BYTES = 8 << 20  # or those of one page; larger ones were no faster
_SLOTS_PER_THREAD = 2  # one for a call, one for a call that hangs
_OPEN_SECONDS, _CLOSE_SECONDS = 5.0, 3.0
_SECONDS_BETWEEN_OPENS = 5.0
_OBJECTS_PER_RUN = 128  # as SGLang's batches


class StorePages(PageStore):
    """Pages in a store of this package other than a directory."""

    def __init__(
        self,
        url: StoreUrl,
        counters: Counters,
        *,
        writes: bool = True,
        draft_weights: str = "",
        reads_unstamped: bool = False,
        threads: int = 2,
    ) -> None:
        """Serve from the store of a mooncake, hf3fs or pack URL, which `open` opens.

        writes: the store is the first of its list. draft_weights: of the deployment's draft, also
        on ranks without it; "" without one. reads_unstamped: use packs that do not name weights.
        threads: that read, and that write.
        """
        self._url = url
        self.counters = counters
        self._writes = writes
        self._draft_weights = draft_weights
        self._reads_unstamped = reads_unstamped
        self._threads = threads
        self._askers = Workers(threads, "hicachectl-exists")
        self._readers = Workers(threads, "hicachectl-read")
        self._writers = Workers(threads, "hicachectl-write")
        self._pools: dict[str, ServedPool] = {}
        self._forms: dict[str, PageForm] = {}
        self._opening = threading.Lock()
        self._open_again_at = 0.0
        self._closed = False
        self._store: Store | None = None
        self._slots: Slots | None = None
        self._refusal = ""  # why an opened store is not used

    # attaching

    def add(self, pool: ServedPool) -> None:
        """Serve a pool; open a pack, to compare its deployment with ours.

        A rank that cannot name its weights does not compare, since it could refuse alone.
        """
        self._pools[pool.name] = pool
        try:
            if self._url.scheme in _GRAMMARS:
                self._forms[pool.name] = self._form(pool, _GRAMMARS[self._url.scheme])
            elif not pool.identity.weights:
                return
            elif isinstance(self._store, Archive):
                self._admit(self._store, pool)
        except HicacheError as error:
            raise ValueError(f"{self.counters.place}: {error}") from None
        if self._url.scheme not in _GRAMMARS and self._store is None:
            with Call(_OPEN_SECONDS) as call:
                self._askers.map(call, self._open, [(False,)])
        if self._refusal:
            raise ValueError(self._refusal)

    def open(self, call: Call) -> None:
        """Open the store, and give it memory for the pools known now."""
        self._askers.map(call, self._open, [(True,)])

    def _open(self, with_memory: bool) -> None:
        """Open the store, unless another thread does so, or it failed just before."""
        if time.monotonic() < self._open_again_at or not self._opening.acquire(blocking=False):
            return
        try:
            if self._store is None:
                self._store = self._prepared(open_store(str(self._url), create=self._writes))
            if with_memory and self._slots is None and not self._refusal:
                self._slots = self._attached(self._store)
        except Exception as error:  # of any kind: a rank that raised would hang the others
            self._open_again_at = time.monotonic() + _SECONDS_BETWEEN_OPENS
            self.counters.refused("unopened", reason_of(error))
        finally:
            self._opening.release()
            if self._closed:  # meanwhile; nobody else has used the store
                self._leave(in_use=False)

    def _prepared(self, store: Store) -> Store:
        """Set a store up for a server's calls, which must be short."""
        if isinstance(store, Leases):
            store.lease_wait_seconds = 0.0
        if isinstance(store, RacyWrites):
            store.confirms_writes = False  # another writer's bytes are as good
        if isinstance(store, Archive):
            for pool in self._pools.values():
                self._admit(store, pool)
        return store

    def _admit(self, archive: Archive, pool: ServedPool) -> None:
        """Compare an archive's deployment with ours. Raises HicacheError."""
        unstamped = self._reads_unstamped
        problem = archive_problem(archive, pool, reads_unstamped=unstamped)
        self._refusal = self._refusal or problem or ""
        profile = archive.recorded_profile()
        tag = "" if profile is None else profile.tag
        if not problem:
            self._forms[pool.name] = self._form(pool, archive.grammar, tag)

    def _attached(self, store: Store) -> Slots:
        """Give the store memory for all pools, whose keys have a tag that names them."""
        if self._url.scheme in _GRAMMARS:
            for name, pool in self._pools.items():
                self._forms[name] = self._form(pool, _GRAMMARS[self._url.scheme])
        if isinstance(store, Claimed):
            named = bool(self._anchor.identity.weights)
            owner = store.claimed_by(self._tag, writes=self._writes and named)
            if owner not in (None, self._tag):
                self._refusal = (
                    f"{self.counters.place}: holds pages of another model, weights, dtype or "
                    f"layout ({owner}, ours is {self._tag}); use other data files and tables, or "
                    "clear the tables and remove PREFIX.hicachectl-deployment"
                )
        if isinstance(store, PageSized):
            forms = self._forms.values()
            store.use_sizes({one.affix: one.nbytes for form in forms for one in form.objects})
        longest = max((_page_bytes(pool) for pool in self._pools.values()), default=0)
        count = 2 * self._threads * _SLOTS_PER_THREAD  # for reads and writes
        slots = Slots(max(_SLOT_BYTES, longest), count, named=store.limits.named_arena)
        try:
            store.attach(slots.arena)
        except BaseException:
            slots.arena.close()
            raise
        return slots

    def _form(self, pool: ServedPool, grammar: str, tag: str | None = None) -> PageForm:
        """Return the objects of a pool's pages. tag: None for our deployment's."""
        shared = self._anchor.coordinate.shard.tp_rank is None
        tag = self._tag if tag is None else tag
        return page_form(grammar, pool, shared_anchor=shared, tag=tag)

    @property
    def _anchor(self) -> ServedPool:
        return self._pools.get(_ANCHOR) or next(iter(self._pools.values()))

    @property
    def _tag(self) -> str:
        """Return our deployment's tag."""
        anchor = self._anchor
        shard = anchor.coordinate.shard
        others = [one for one in self._pools.values() if one is not anchor]
        return deployment_tag(
            anchor.identity,
            {one.name: one.identity.dtype for one in others if not pool_name(one.name).draft},
            tp_size=shard.tp_size,
            pp_size=shard.pp_size or 1,
            draft_weights=self._draft_weights,
        )

    # serving

    def exists(self, pool: ServedPool, pages: Sequence[str], call: Call) -> list[bool]:
        """Return which pages have all objects, of the right size where the store tells sizes."""

        def ask(opened: _Opened, some: Sequence[int]) -> list[bool]:
            keys, sizes = opened.form.named([pages[n] for n in some])
            return opened.form.whole(right_sizes(opened.store, keys, sizes, self.counters))

        return self._each(self._askers, call, pool, len(pages), ask)

    def read(
        self, pool: ServedPool, pages: Sequence[str], pieces: Sequence[Pieces], call: Call
    ) -> list[bool]:
        """Read pages whose objects have the right size, and the store's digest if it has one."""

        def read(opened: _Opened, some: Sequence[int]) -> list[bool]:
            store, form, slots = opened
            keys, sizes = form.named([pages[n] for n in some])
            read_into = store.read_into
            if isinstance(store, Confirm) and store.confirms:
                read_into = store.read_confirmed
            with slots.slot() as start:
                offsets = start + place(sizes)[0]
                addresses = slots.arena.address + offsets
                result = read_into(rows_of(keys), offsets, sizes, identify=False)
                done = form.whole(result.ok)
                count_failures(self.counters, "unreadable", result, keys, form, result.nbytes)
                for n, page in enumerate(some):
                    if done[n]:
                        for one, address in form.of_page(addresses, n):
                            call.copy(address, pieces[page][one.pieces])
            return done

        return self._each(self._readers, call, pool, len(pages), read)

    def write(
        self, pool: ServedPool, pages: Sequence[str], pieces: Sequence[Pieces], call: Call
    ) -> list[bool]:
        """Write pages; replace an object of wrong size, unless a reader has a lease on it."""

        def write(opened: _Opened, some: Sequence[int]) -> list[bool]:
            store, form, slots = opened
            keys, sizes = form.named([pages[n] for n in some])
            with slots.slot() as start:
                offsets = start + place(sizes)[0]
                addresses = slots.arena.address + offsets
                for n, page in enumerate(some):
                    for one, address in form.of_page(addresses, n):
                        gather(call, pieces[page][one.pieces], address)
                there, result = put(store, keys, offsets, sizes, self.counters)
            count_failures(self.counters, "unwritable", result, keys, form, sizes)
            return form.whole(there)

        return self._each(self._writers, call, pool, len(pages), write)

    def clear(self, call: Call) -> None:
        """Say that the store keeps its objects: it does not tell older ones from newer ones."""
        logger.warning(
            "%s: not cleared, since other servers may use its objects; remove them with "
            "hicachectl rm",
            self.counters.place,
        )

    def close(self) -> None:
        """End the threads, and leave the store; what hangs in it keeps its memory."""
        workers = (self._askers, self._readers, self._writers)
        for each in workers:
            each.close()
        self._open_again_at = float("inf")
        self._closed = True
        closer = Workers(1, "hicachectl-close")
        with Call(_CLOSE_SECONDS) as call:
            closer.map(call, self._leave, [(any(each.hanging for each in workers),)])
        closer.close()

    def _leave(self, in_use: bool) -> None:
        """Close the store, unless a thread hangs in it: a client that is used must stay."""
        store, self._store = self._store, None
        slots, self._slots = self._slots, None
        if in_use:
            return
        if store is None or not (slots is None or slots.unused):
            return
        store.close()
        if slots is not None:
            slots.arena.close()

    def _each(
        self,
        workers: Workers,
        call: Call,
        pool: ServedPool,
        count: int,
        act: Callable[[_Opened, Sequence[int]], list[bool]],
    ) -> list[bool]:
        """Return act(store, pages) for runs of pages; False for pages that fail or come too late.

        count: of pages. Runs for memory fit into a slot.
        """
        most = count if workers is self._askers else _pages_per_run(pool)
        runs = [range(start, min(start + most, count)) for start in range(0, count, most or 1)]

        def work(run: Sequence[int]) -> list[bool]:
            try:
                opened = self._opened(pool)
                if opened is None:
                    return [False] * len(run)
                return act(opened, run) if opened.form.objects else [True] * len(run)
            except NoSlotError:
                self.counters.refused("timeout", "calls that hang hold all memory", len(run))
            except (HicacheError, OSError) as error:
                self.counters.refused("unreachable", reason_of(error), len(run))
            return [False] * len(run)

        paused = workers.paused
        found = workers.map(call, work, [(run,) for run in runs])
        done = [
            ok
            for run, answer in zip(runs, found, strict=True)
            for ok in answer or [False] * len(run)
        ]
        if call.ended:
            why = "a pause after a call that timed out" if paused else "no answer in time"
            self.counters.refused("timeout", why, done.count(False))
        return done

    def _opened(self, pool: ServedPool) -> _Opened | None:
        """Return the store, the form of the pool's pages and memory; None if there is none."""
        if self._slots is None:
            self._open(True)
        store, slots, form = self._store, self._slots, self._forms.get(pool.name)
        if self._refusal:
            self.counters.refused("other-deployment", self._refusal)
        if store is None or slots is None or form is None or self._refusal:
            return None
        if _page_bytes(pool) > slots.nbytes:
            self.counters.refused("unserved", f"{pool.name}: came later than the attach")
            return None
        return _Opened(store, form, slots)


class _Opened(NamedTuple):
    store: Store
    form: PageForm
    slots: Slots


def _page_bytes(pool: ServedPool) -> int:
    """Return the bytes of a page in a slot, at most."""
    return place(np.array([part.nbytes for part in pool.parts], dtype=np.int64))[1]


def _pages_per_run(pool: ServedPool) -> int:
    """Return how many pages are handled together: at most a slot, and a batch of the store."""
    fitting = _SLOT_BYTES // max(1, _page_bytes(pool))
    return max(1, min(fitting, _OBJECTS_PER_RUN // max(1, len(pool.parts))))
