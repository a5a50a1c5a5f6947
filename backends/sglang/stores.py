"""Read and write the pages of one rank in Mooncake, 3FS or a pack.

A store reads into a buffer of our memory. The bytes are copied to the host pool if they have the
right size, and only while the call is open. Writes go through buffers as well. A call that hangs in
the store keeps its buffer.

The objects of these stores have no trailers. What names the deployment depends on the store:

- Mooncake: the tag in the keys (`identity.deployment_tag`)
- a pack: the profile that it records; it also records digests
- 3FS: a file beside the data files
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from msgspec import structs

from hicachectl.backends.arena import ALIGNMENT, Arena, place
from hicachectl.backends.base import SCAN_FIELDS, Result, Status, Store, open_store
from hicachectl.backends.capabilities import Archive, Confirm, Leases, RacyWrites, SingleDeployment
from hicachectl.backends.sglang.log import logger
from hicachectl.backends.sglang.page_store import PageStore
from hicachectl.formats.errors import HicacheError
from hicachectl.formats.identity import deployment_tag, object_identity, unlike
from hicachectl.formats.keys import WHOLE_PAGES, grammar_of
from hicachectl.formats.kinds.pool import pool_name
from hicachectl.formats.objects import ANCHOR, AXES
from hicachectl.formats.spec import object_specs
from hicachectl.formats.wording import reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from hicachectl.backends.sglang.calls import Call, Workers
    from hicachectl.backends.sglang.counters import Counters
    from hicachectl.backends.sglang.page_store import Pieces, ServedPool
    from hicachectl.backends.sglang.settings import Settings
    from hicachectl.backends.urls import StoreUrl
    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.formats.identity import Identity
    from hicachectl.formats.keys.base import Affix
    from hicachectl.formats.plugin_status import Refused
    from hicachectl.formats.profile import Profile
    from hicachectl.formats.spec import ObjectSpec

# Bytes of a buffer, unless one page is larger than this. Larger buffers were no faster.
_BUFFER_BYTES = 8 << 20
_BUFFERS_PER_THREAD = 2  # a buffer for a call, and a buffer for a call that hangs
_OBJECTS_PER_RUN = 128  # most objects of a run (see `_each`); SGLang's batches have 128 pages
_KEYS = pa.schema([SCAN_FIELDS["key"]])
_REASONS: dict[Status, Refused] = {
    Status.SHORT: "damaged",
    Status.OVERSIZED: "damaged",
    Status.DAMAGED: "damaged",
    Status.FULL: "full",
}


class FormObject(NamedTuple):
    """One object of a page.

    nbytes: bytes of the object.
    pieces: the object's slice of the page's pieces.
    """

    affix: Affix
    nbytes: int
    pieces: slice


@dataclass(frozen=True, slots=True)
class PageForm:
    """The objects of each page of a pool.

    A logical anchor (one without bytes) has an object only with the keys of a file store.
    """

    objects: tuple[FormObject, ...]

    def named(self, pages: Sequence[str]) -> tuple[list[bytes], IntArray]:
        """Return the key and the size in bytes of each object, page after page."""
        keys = [
            f"{one.affix[0]}{page}{one.affix[1]}".encode() for page in pages for one in self.objects
        ]
        sizes = np.array([one.nbytes for one in self.objects], dtype=np.int64)
        return keys, np.tile(sizes, len(pages))

    def of_page(self, places: IntArray, page: int) -> list[tuple[FormObject, int]]:
        """Return a page's objects, each with its item of `places`.

        places: an item for each row of `named`.
        page: index of the page in `named`.
        """
        first = page * len(self.objects)
        mine = places[first : first + len(self.objects)].tolist()
        return list(zip(self.objects, mine, strict=True))

    def whole(self, found: BoolArray) -> list[bool]:
        """Return which pages have all their objects.

        found: True for each row of `named` that exists.
        """
        pages: BoolArray = np.all(found.reshape(-1, len(self.objects)), axis=1)
        return list(pages.tolist())

    def any(self, found: BoolArray) -> BoolArray:
        """Return which pages have at least one of the objects in `found`: [pages] bool."""
        pages: BoolArray = np.any(found.reshape(-1, len(self.objects)), axis=1)
        return pages


def page_form(grammar: str, pool: ServedPool, tag: str = "") -> PageForm:
    """Return the objects of a pool's pages in a store whose keys follow a grammar.

    tag: Mooncake's extra_backend_tag.
    Raises UnsupportedByBackend.
    """
    page = pool.page._replace(names=pool.page.names._replace(tag=tag))
    spoken = grammar_of(grammar)
    spoken.check_ranks(page.ranks, page.release)
    objects = []
    for one in spoken.objects(page):
        own = pool.parts[one.parts]
        pieces = slice(own[0].pieces.start, own[-1].pieces.stop) if own else slice(0)
        nbytes = sum(part.nbytes for part in own)
        objects.append(FormObject(spoken.affix(one.coordinate), nbytes, pieces))
    return PageForm(tuple(objects))


def rows_of(keys: Sequence[bytes]) -> Any:
    """Return keys as rows of a scan."""
    return pa.RecordBatch.from_arrays([pa.array(keys, pa.binary())], schema=_KEYS)


def right_sizes(
    store: Store, keys: Sequence[bytes], sizes: IntArray, counters: Counters
) -> BoolArray:
    """Return which objects exist and, if the store tells sizes, have the right size: [n] bool.

    sizes: [n] int64.
    """
    if not _tells_sizes(store):
        return store.exists(rows_of(keys))
    seen = store.look(rows_of(keys), ("nbytes",))
    pairs = zip(seen.column("key").to_pylist(), seen.column("nbytes").to_pylist(), strict=True)
    held = dict(pairs)
    wanted = list(zip(keys, sizes.tolist(), strict=True))
    wrong = [(key, size) for key, size in wanted if held.get(key, size) != size]
    if wrong:
        key, size = wrong[0]
        detail = f"{key.decode()}: {held[key]} bytes instead of {size}"
        counters.refused("damaged", detail, len(wrong))
    return np.array([held.get(key) == size for key, size in wanted], dtype=np.bool_)


def put(
    store: Store, keys: Sequence[bytes], offsets: IntArray, sizes: IntArray, counters: Counters
) -> tuple[BoolArray, BoolArray, Result]:
    """Write absent objects from the arena, and replace objects of wrong size.

    Return which objects the store has now, [n] bool; which objects were written, [n] bool; and the
    result of the first write. An object of wrong size stays if a reader has a lease on it.
    """
    result = store.write_from(rows_of(keys), offsets, sizes, if_absent=True)
    there, new = result.ok, result.ok.copy()
    held = np.flatnonzero(result.statuses == Status.EXISTS)
    if len(held):
        there[held] = right_sizes(store, [keys[n] for n in held.tolist()], sizes[held], counters)
    wrong = held[~there[held]]
    if len(wrong) and _tells_sizes(store):
        removed = store.delete(rows_of([keys[n] for n in wrong.tolist()])).statuses
        wrong = wrong[np.isin(removed, (Status.OK, Status.GONE))]
        again = rows_of([keys[n] for n in wrong.tolist()])
        new[wrong] = store.write_from(again, offsets[wrong], sizes[wrong], if_absent=True).ok
        there |= new
    return there, new, result


def count_failures(
    counters: Counters,
    other: Refused,
    result: Result,
    keys: Sequence[bytes],
    form: PageForm,
    nbytes: IntArray,
) -> None:
    """Count the pages that failed, each with the reason of its first object that failed.

    other: reason for a status without an entry in `_REASONS`.
    nbytes: [n] int64, the bytes of each object; -1 if unknown.
    """
    failed = np.flatnonzero((result.statuses != Status.OK) & (result.statuses != Status.EXISTS))
    _, first = np.unique(failed // len(form.objects), return_index=True)
    for n in failed[first].tolist():
        status = Status(result.statuses[n])
        if status == Status.GONE:
            counters.count("gone", 1)
            continue
        wanted = form.objects[n % len(form.objects)].nbytes
        detail = result.errors.get(n, f"{nbytes[n]} bytes instead of {wanted}")
        counters.refused(_REASONS.get(status, other), f"{keys[n].decode()}: {detail}")


def _tells_sizes(store: Store) -> bool:
    return "nbytes" in store.traits.columns


class NoBufferError(Exception):
    """All staging buffers are held by calls that hang in the store."""


class StagingBuffers:
    """Buffers of equal size in one arena. Stores read into buffers, and write from them.

    A call that hangs in the store keeps its buffer until the call returns. So no other call gets
    memory that the hanging call may still fill.
    """

    def __init__(self, nbytes: int, count: int, *, named: bool = False) -> None:
        """Map `count` buffers of at least `nbytes` bytes; the system allocates memory at first use.

        named: see `Arena`.
        Raises UsageError if the system refuses the memory.
        """
        self.nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
        self.arena = Arena(self.nbytes * count, named=named)
        # The buffer used last is taken first, so buffers that are never needed take no memory.
        self._free = [n * self.nbytes for n in reversed(range(count))]

    @contextmanager
    def hold(self) -> Iterator[int]:
        """Hold a buffer; yield its offset in the arena. Raises NoBufferError if all are held."""
        try:
            offset = self._free.pop()
        except IndexError:
            raise NoBufferError from None
        try:
            yield offset
        finally:
            self._free.append(offset)


def gather(call: Call, pieces: Pieces, address: int) -> None:
    """Copy pieces of the host pool to consecutive bytes of our memory. Raises Ended."""
    for source, nbytes in pieces:
        call.copy(source, [(address, nbytes)])
        address += nbytes


class StorePages(PageStore):
    """Pages in a Mooncake cluster, a 3FS store or a pack."""

    def __init__(
        self,
        url: StoreUrl,
        counters: Counters,
        settings: Settings,
        *,
        writes: bool = True,
        draft_weights: str = "",
    ) -> None:
        """Serve from the store of a mooncake, hf3fs or pack URL. `open` opens the store.

        writes: whether the server writes to the store.
        draft_weights: name of the weights of the deployment's draft, also on ranks without the
            draft; "" if the deployment has no draft.
        """
        super().__init__(counters, settings.threads)
        self._url = url
        self._writes = writes
        self._draft_weights = draft_weights
        self._reads_unstamped = settings.unstamped == "read"
        self._forms: dict[str, PageForm] = {}
        self._store: Store | None = None
        self._buffers: StagingBuffers | None = None
        self._refusal = ""  # why an opened store is not used until the next attach

    # attaching

    def add(self, pool: ServedPool) -> None:
        """Serve a pool. Raises ValueError if keys of the URL's scheme cannot name its objects.

        The content of the store is no reason to raise, because ranks must raise alike and may find
        different content.
        """
        earlier, self._pools = self._pools, {**self._pools, pool.name: pool}
        try:
            if grammar := self._url.kind.grammar:  # "" for a pack, which records its grammar
                page_form(grammar, pool, self._tag)
        except HicacheError as error:
            self._pools = earlier
            raise ValueError(f"{self.counters.place}: {error}") from None

    def _open_now(self) -> None:
        """Open the store, compare its deployment with ours, and give the store memory."""
        if self._refusal:
            return
        store = self._store
        if store is None:
            store = _prepared(open_store(str(self._url), create=self._writes))
            if self._closed:  # `close` was called since, and did not see this store
                store.close()
                return
            self._store = store
        if self._forms.keys() != self._pools.keys():
            self._refusal = self._problem(store)
            if self._refusal:
                self.counters.excluded("other-deployment", self._refusal)
                return
            self._forms = self._named(store)
        if self._buffers is None:
            buffers = self._attached(store)
            if self._closed:  # `close` was called since; `_leave` closes the store
                buffers.arena.close()
                return
            self._buffers = buffers

    def _problem(self, store: Store) -> str:
        """Return why the store's pages are another deployment's; "" if they are ours.

        Raises HicacheError.
        """
        if isinstance(store, Archive):
            pools = self._pools.values()
            return archive_problem(store, pools, reads_unstamped=self._reads_unstamped)
        if not isinstance(store, SingleDeployment):
            # Without a tag in the keys, nothing tells pages of other weights apart.
            return "" if grammar_of(store.grammar).has_tag else "has keys that name no deployment"
        named = bool(self._anchor.identity.weights)
        owner = store.claimed_by(self._tag, writes=self._writes and named)
        if owner in (None, self._tag):
            return ""
        return (
            f"holds pages of another model, weights, dtype or layout (its deployment is {owner}, "
            f"ours is {self._tag}); use other data files and tables, or clear the tables and "
            "remove PREFIX.hicachectl-deployment"
        )

    def _named(self, store: Store) -> dict[str, PageForm]:
        """Return the objects of all pools' pages. If the store needs object sizes, set them.

        Raises HicacheError.
        """
        if isinstance(store, Archive):
            profile = store.recorded_profile()
            grammar, tag = store.grammar, "" if profile is None else profile.tag
        else:
            grammar, tag = store.grammar, self._tag
        forms = {pool.name: page_form(grammar, pool, tag) for pool in self._pools.values()}
        if isinstance(store, SingleDeployment):
            objects = [one for form in forms.values() for one in form.objects]
            store.use_sizes({one.affix: one.nbytes for one in objects})
        return forms

    def _attached(self, store: Store) -> StagingBuffers:
        """Give the store memory for the pools known now. Return the buffers."""
        longest = max((_page_bytes(pool) for pool in self._pools.values()), default=0)
        count = 2 * self._threads * _BUFFERS_PER_THREAD  # for reads and writes
        buffers = StagingBuffers(max(_BUFFER_BYTES, longest), count, named=store.limits.named_arena)
        try:
            store.attach(buffers.arena)
        except BaseException:
            buffers.arena.close()
            raise
        return buffers

    @property
    def _anchor(self) -> ServedPool:
        return self._pools.get(ANCHOR) or next(iter(self._pools.values()))

    @property
    def _tag(self) -> str:
        """Return our deployment's tag."""
        anchor = self._anchor
        others = [one for one in self._pools.values() if one is not anchor]
        return deployment_tag(
            anchor.identity,
            {one.name: one.identity.dtype for one in others if not pool_name(one.name).draft},
            tp_size=None if anchor.shared_anchor else anchor.ranks.tp,
            pp_size=anchor.ranks.pp,
            draft_weights=self._draft_weights,
        )

    # serving

    def exists(self, pool: ServedPool, pages: Sequence[str], call: Call) -> list[bool]:
        """Return which pages have all objects, with the right sizes if the store tells sizes."""

        def ask(opened: _Opened, some: Sequence[int]) -> list[bool]:
            keys, sizes = opened.form.named([pages[n] for n in some])
            return opened.form.whole(right_sizes(opened.store, keys, sizes, self.counters))

        return self._each(self._askers, call, pool, len(pages), ask)

    def read(
        self, pool: ServedPool, pages: Sequence[str], pieces: Sequence[Pieces], call: Call
    ) -> list[bool]:
        """Read pages whose objects have the right size, and the right digest if they have one."""

        def read(opened: _Opened, some: Sequence[int]) -> list[bool]:
            store, form, buffers = opened
            keys, sizes = form.named([pages[n] for n in some])
            read_into = store.read_into
            if isinstance(store, Confirm) and store.confirms:
                read_into = store.read_confirmed
            with buffers.hold() as start:
                offsets = start + place(sizes)[0]
                addresses = buffers.arena.address + offsets
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
        new: list[int] = []  # number of pages that each run has written

        def write(opened: _Opened, some: Sequence[int]) -> list[bool]:
            store, form, buffers = opened
            keys, sizes = form.named([pages[n] for n in some])
            with buffers.hold() as start:
                offsets = start + place(sizes)[0]
                addresses = buffers.arena.address + offsets
                for n, page in enumerate(some):
                    for one, address in form.of_page(addresses, n):
                        gather(call, pieces[page][one.pieces], address)
                there, written, result = put(store, keys, offsets, sizes, self.counters)
            count_failures(self.counters, "unwritable", result, keys, form, sizes)
            whole = np.array(form.whole(there))
            new.append(int((whole & form.any(written)).sum()))
            return list(whole.tolist())

        done = self._each(self._writers, call, pool, len(pages), write)
        self._count_written(pool, sum(new))
        return done

    def clear(self, call: Call) -> None:
        """Log that nothing is cleared, because the store cannot tell old objects from new ones."""
        logger.warning(
            "%s: not cleared, since other servers may use its objects; remove them with "
            "hicachectl rm",
            self.counters.place,
        )

    def _forget(self) -> Callable[[], None] | None:
        store, self._store = self._store, None
        buffers, self._buffers = self._buffers, None
        if store is None:
            return None

        def close() -> None:
            try:
                store.close()
            finally:
                if buffers is not None:
                    buffers.arena.close()

        return close

    def _each(
        self,
        workers: Workers,
        call: Call,
        pool: ServedPool,
        count: int,
        act: Callable[[_Opened, Sequence[int]], list[bool]],
    ) -> list[bool]:
        """Call `act` for runs of consecutive pages. Return which pages it has done: [count].

        count: number of pages. A run that reads or writes fits into a buffer.
        act: takes the open store and the numbers of the run's pages, and returns a flag for each
            page. If `act` raises or is too late, all flags of its run are False.
        """
        most = count if workers is self._askers else _pages_per_run(pool)
        runs = [range(start, min(start + most, count)) for start in range(0, count, most or 1)]

        def work(run: Sequence[int]) -> list[bool]:
            try:
                opened = self._opened(pool, len(run))
                if opened is None:
                    return [False] * len(run)
                return act(opened, run) if opened.form.objects else [True] * len(run)
            except NoBufferError:
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
            self._count_late(done.count(False), paused=paused)
        return done

    def _opened(self, pool: ServedPool, pages: int) -> _Opened | None:
        """Return the open store, the form of the pool's pages, and the buffers.

        If the store cannot serve the pool now, return None, and count misses.
        pages: number of misses to count.
        """
        if self._buffers is None or pool.name not in self._forms:
            self._open()
        store, buffers, form = self._store, self._buffers, self._forms.get(pool.name)
        if self._refusal:
            self.counters.count("other-deployment", pages)
            return None
        if store is None or buffers is None or form is None:
            self.counters.count("unopened", pages)
            return None
        if _page_bytes(pool) > buffers.nbytes:
            detail = f"pool {pool.name}: a page is larger than a buffer; attach again"
            self.counters.refused("unserved", detail, pages)
            return None
        return _Opened(store, form, buffers)


class _Opened(NamedTuple):
    store: Store
    form: PageForm
    buffers: StagingBuffers


def _prepared(store: Store) -> Store:
    """Prepare a store for a server's calls, which must be short, and return it."""
    if isinstance(store, Leases):
        store.lease_wait_seconds = 0.0
    if isinstance(store, RacyWrites):
        # A page that another writer stored serves as well, so nothing is read back.
        store.confirms_writes = False
    return store


def _page_bytes(pool: ServedPool) -> int:
    """Return the most bytes that a page takes in a buffer."""
    return place(np.array([part.nbytes for part in pool.parts], dtype=np.int64))[1]


def _pages_per_run(pool: ServedPool) -> int:
    """Return the number of pages of a run, limited by the buffer and by _OBJECTS_PER_RUN."""
    fitting = _BUFFER_BYTES // max(1, _page_bytes(pool))
    return max(1, min(fitting, _OBJECTS_PER_RUN // max(1, len(pool.parts))))


def archive_problem(
    archive: Archive, pools: Iterable[ServedPool], *, reads_unstamped: bool = False
) -> str:
    """Return why a server cannot use an archive's pages; "" if it can.

    A pool that the archive lacks is no reason, because its pages are just misses.

    reads_unstamped: use an archive whose profile does not name the weights.
    Raises ProfileError, UnsupportedByBackend.
    """
    profile = archive.recorded_profile()
    if profile is None or profile.inferred:
        return (
            "does not record its deployment; pack the pages again with --profile, which "
            "`hicachectl profile --server URL` writes"
        )
    if not (profile.weights or reads_unstamped):
        return (
            "does not name the weights of its pages; pack them again with a profile that does, or "
            'give "unstamped": "read"'
        )
    if not (grammar := grammar_of(archive.grammar)).served:
        return (
            f"has the keys of a {grammar.title} store, which servers cannot read; migrate the pack "
            "to a file store, and that store to a pack"
        )
    specs = object_specs(profile, WHOLE_PAGES)
    for pool in pools:
        files = [spec for spec in specs if spec.pool == pool.name]
        if files and (different := _differences(profile, files, pool)):
            return (
                f"its pages of {pool.name} have {', '.join(different)}; attach a pack of this "
                "deployment, or convert the pack with hicachectl migrate"
            )
    return ""


def _differences(profile: Profile, files: list[ObjectSpec], pool: ServedPool) -> list[str]:
    """Return texts for the fields of a pool's pages that differ between a pack and this server."""
    held, shard = files[0].coordinate.shard, pool.coordinate.shard
    theirs: dict[str, object] = {"model": profile.key_model}
    ours: dict[str, object] = {"model": pool.identity.model}
    theirs |= dict(zip(AXES, held.sizes, strict=False))
    ours |= dict(zip(AXES, shard.sizes, strict=False))
    mine = next((spec for spec in files if spec.coordinate.shard == shard), None)
    if mine is not None:
        theirs["bytes"], ours["bytes"] = mine.nbytes, pool.nbytes
        identity = _identity(profile, mine, pool.identity)
        if identity is not None:
            theirs |= structs.asdict(identity)
            ours |= structs.asdict(pool.identity)
    return unlike(theirs, ours)


def _identity(profile: Profile, spec: ObjectSpec, ours: Identity) -> Identity | None:
    """Return the identity of an archive's objects, with our weights if the archive names none."""
    if not profile.weights:
        draft = ours.draft_weights or ours.weights
        profile = structs.replace(profile, weights=ours.weights, draft_weights=draft)
    return object_identity(profile, spec)
