"""Time prompts that a live server computes, and prompts that it restores from the store.

A prompt of random tokens is sent with a new cache_salt. The server computes it, and stores its
pages. With another salt, the same pages have other hashes (`formats.hashing.namespace_seed`).
After the objects are copied to these hashes, the server restores the prompt with the second salt,
although its memory has the prompt with the first salt. So its memory need not be flushed.
"""

from __future__ import annotations

import random
import secrets
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from hicachectl.backends.arena import ALIGNMENT, Arena, place
from hicachectl.backends.base import Status, attached, batch_spans
from hicachectl.backends.capabilities import Trailed
from hicachectl.bench.writes import removed
from hicachectl.formats.errors import UsageError
from hicachectl.formats.hashing import tokens_to_restore
from hicachectl.formats.restorable import least_tokens
from hicachectl.io.interrupts import deferred
from hicachectl.pages.deployments import profiled_deployment
from hicachectl.prewarming.through_server import Prefix, ThroughServer
from hicachectl.requests.chains import Hashing, hex_pages
from hicachectl.requests.forms import Request
from hicachectl.text.units import counted, human_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicachectl.backends.base import Store
    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.formats.profile import Profile

_TOKENS = range(10, 250)  # ids that every vocabulary has
_LONGEST_TOKENS = 1 << 15
_ROUNDS = 7
_HALVINGS = 5  # most lengths that are timed between doubled lengths
_DOUBLING_SHARE = 0.6  # share of the time for doubled lengths
_DECIDED = 0.03  # a smaller gain decides nothing, because repeated prompts differ by as much
_CLOSE = 1.15  # between two lengths with a smaller quotient, no length is timed
_ARENA_BYTES = 64 << 20
_STORED_S = 10.0  # longest wait for the server's writes of a prompt
_PAUSE_S = 0.01


@dataclass(slots=True)
class PromptTimes:
    """Times of prompts of one length.

    tokens: number of tokens in whole pages. Each prompt has one or two more tokens, which are
        always computed.
    computed: seconds of each request that the server computed.
    restored: seconds of each request that the server restored from the store.
    """

    tokens: int
    computed: list[float] = field(default_factory=list)
    restored: list[float] = field(default_factory=list)

    @property
    def gain(self) -> float:
        """Share of the computing time that restoring saves; negative if restoring takes longer.

        The fastest answer of each kind counts, because it waited for no other request.
        """
        return 1 - min(self.restored) / min(self.computed)

    @property
    def restored_faster(self) -> bool | None:
        """Whether restoring is faster; None if the times are about equal.

        The medians must agree with the fastest answers.
        """
        median = 1 - float(np.median(self.restored)) / float(np.median(self.computed))
        if abs(self.gain) < _DECIDED or median * self.gain <= 0:
            return None
        return self.gain > 0


class BreakEven(NamedTuple):
    """Which prompts a server restores faster than it computes them, in tokens of whole pages.

    computed_to: prompts up to this length are computed faster; None if no length is.
    restored_from: prompts from this length on are restored faster; None if no length is.
    Prompts between the two lengths take about as long either way.
    """

    computed_to: int | None = None
    restored_from: int | None = None


def break_even_of(times: Sequence[PromptTimes]) -> BreakEven:
    """Return which lengths are computed faster, and which are restored faster.

    The break-even is the split between two lengths for which the sum of the gains after it, minus
    the sum of the gains before it, is largest. So one length with disturbed times does not decide.
    times: times of different lengths, shortest first.
    """
    gains = np.array([one.gain for one in times])
    sums = [gains[at:].sum() - gains[:at].sum() for at in range(len(gains) + 1)]
    split = int(np.argmax(sums))
    computed = [one.tokens for one in times[:split] if one.restored_faster is False]
    restored = [one.tokens for one in times[split:] if one.restored_faster]
    return BreakEven(max(computed, default=None), min(restored, default=None))


def check_probed(store: Store, profile: Profile) -> None:
    """Raise UsageError unless a server can restore prompts of the bench from a store."""
    traits = store.traits
    if not traits.writes or not traits.deletes or traits.append_only:
        why = f"{store.url}: pages cannot be written and removed again"
    elif not Hashing.of(profile).seeds:
        why = f"SGLang {profile.sglang} gives a prompt the same keys with every salt; releases "
        why += "from 0.5.20 on do not"
    else:
        return
    raise UsageError(f"--probe-server: {why}; leave out --probe-server")


def timed_prompts(
    store: Store, profile: Profile, url: str, *, most_bytes: int, seconds: float
) -> Probed:
    """Time prompts of doubled lengths, then of lengths between these that narrow the break-even.

    url: a server that has the store attached.
    most_bytes: limit on the bytes of a prompt's pages and of their copies.
    seconds: time after which no prompt is sent, except the first.
    The pages are removed from the store, also after an interrupt. Raises UsageError if the shortest
    prompt needs more bytes, and StoreUnavailable.
    """
    prompts = _Prompts(store, profile, url, most_bytes)
    found: dict[int, PromptTimes] = {}
    began = time.monotonic()
    doubled, ends = began + _DOUBLING_SHARE * seconds, began + seconds
    with Arena(prompts.largest) as arena, attached(arena, store):
        pages = prompts.least
        # The first request of its kind takes longer.
        goes_on = prompts.once(pages) is not None
        while goes_on and pages <= prompts.most:
            goes_on = prompts.time(found, pages, doubled)
            pages *= 2
        for _ in range(_HALVINGS):
            between = _between([found[pages] for pages in sorted(found)], profile.page_size)
            if between is None or not prompts.time(found, between, ends):
                break
    times = [found[pages] for pages in sorted(found)]
    if prompts.late:
        prompts.remarks.append(
            f"{url}: the time of --time-limit is too short for prompts longer than "
            f"{times[-1].tokens:,} tokens, or for more lengths near the break-even"
        )
    return Probed(times, prompts.remarks, prompts.undone)


def _between(times: Sequence[PromptTimes], page_tokens: int) -> int | None:
    """Return the number of pages of a prompt that would narrow the break-even.

    Return None if the break-even is narrow enough, or if no length is restored faster.
    """
    shortest, longest = break_even_of(times)
    if longest is None:
        return None
    shortest = times[0].tokens if shortest is None else shortest
    lengths = [one.tokens for one in times if shortest <= one.tokens <= longest]
    if longest < _CLOSE * shortest:
        return None
    gaps = [after / before for before, after in pairwise(lengths)]
    at = int(np.argmax(gaps))
    before, after = (tokens // page_tokens for tokens in lengths[at : at + 2])
    between = (before + after) // 2
    return between if before < between < after else None


class Probed(NamedTuple):
    """Result of the prompts.

    times: times of each length, shortest first.
    remarks: messages on lengths that were not timed.
    undone: messages on pages that stay in the store.
    """

    times: list[PromptTimes]
    remarks: list[str]
    undone: list[str]


class _Objects(NamedTuple):
    """The objects that a prompt's pages can have.

    keys: [n] keys.
    sizes: [n] int64, bytes.
    awaited: [n] bool, objects without which a server restores nothing.
    """

    keys: pa.Array
    sizes: IntArray
    awaited: BoolArray


class _Prompts:
    """Prompts for one server and store.

    least, most: pages of the shortest and the longest prompt.
    largest: bytes of memory that copies need.
    late: whether prompts were not sent because the time was over.
    remarks, undone: see `Probed`.
    """

    def __init__(self, store: Store, profile: Profile, url: str, most_bytes: int) -> None:
        self._hashing = Hashing.of(profile)
        self._store, self._url, self._page_size = store, url, profile.page_size
        specs = profiled_deployment(profile, store.grammar).specs
        # Anchors come first, so that removals remove anchors first.
        self._specs = sorted(
            (spec for spec in specs if spec.listed), key=lambda one: not one.anchor
        )
        self._trailed = False
        threshold = least_tokens(
            profile.prefetch_threshold, trailing=any(spec.trailing for spec in self._specs)
        )
        page_bytes = 2 * sum(spec.nbytes for spec in self._specs)
        self.least = max(1, -(-threshold // self._page_size))
        self.most = min(_LONGEST_TOKENS // self._page_size, most_bytes // max(1, page_bytes))
        if self.most < self.least:
            raise UsageError(
                f"--probe-server: {counted(self.least, 'page')} and their copies have "
                f"{human_size(self.least * page_bytes)}, but may have {human_size(most_bytes)}; "
                "give a larger --most, or free space"
            )
        largest = max(spec.nbytes for spec in self._specs)
        self.largest = max(_ARENA_BYTES, -(-largest // ALIGNMENT) * ALIGNMENT)
        self.late = False
        self.remarks: list[str] = []
        self.undone: list[str] = []

    def time(self, found: dict[int, PromptTimes], pages: int, deadline: float) -> bool:
        """Add the times of prompts of a length; return whether all were sent and restored."""
        times = PromptTimes(pages * self._page_size)
        for _ in range(_ROUNDS):
            if found and time.monotonic() > deadline:
                self.late = True
                break
            if (once := self.once(pages)) is None:
                break
            times.computed.append(once[0])
            times.restored.append(once[1])
        if times.computed:
            found[pages] = times
        return len(times.computed) == _ROUNDS

    def once(self, pages: int) -> tuple[float, float] | None:
        """Let the server compute a prompt, and restore it; return the seconds of both.

        If that fails, return None, and add a message to `remarks`.
        """
        count = tokens_to_restore(pages, self._page_size, bigram=self._hashing.bigram)
        tokens = random.choices(_TOKENS, k=count)
        first, second = (
            Request("a prompt of --probe-server", tokens, cache_salt=secrets.token_hex())
            for _ in range(2)
        )
        written, copies = self._objects(first), self._objects(second)
        until = time.monotonic() + _STORED_S
        try:
            computed, _, why = self._asked(first)
            until = 0.0 if why else time.monotonic() + _STORED_S
            why = why or self._copied(written, copies, until)
            restored, cached, again = (0.0, 0, why) if why else self._asked(second)
            if not (why := again) and cached != pages * self._page_size:
                why = f"the server restored {cached:,} of {pages * self._page_size:,} tokens"
        finally:
            with deferred():
                self._missing(written, until)  # after an interrupt, the server may still write
                for objects in (written, copies):
                    rows = pa.table({"key": objects.keys})
                    self.undone += removed(self._store, rows, "no request asks for them")
        if why:
            self.remarks.append(f"{self._url}: a prompt of {count:,} tokens was not timed: {why}")
            return None
        return computed, restored

    def _objects(self, prompt: Request) -> _Objects:
        pages = hex_pages(self._hashing.hashes(prompt)).to_pylist()
        keys = [f"{before}{page}{after}" for before, after in self._affixes for page in pages]
        sizes = np.array([spec.nbytes for spec in self._specs], dtype=np.int64)
        awaited = np.array([spec.awaited for spec in self._specs])
        return _Objects(
            pa.array([key.encode() for key in keys], pa.binary()),
            np.repeat(sizes, len(pages)),
            np.repeat(awaited, len(pages)),
        )

    @property
    def _affixes(self) -> list[tuple[str, str]]:
        return [spec.affix for spec in self._specs]

    def _asked(self, prompt: Request) -> tuple[float, int, str]:
        """Send a prompt; return the seconds, the cached tokens, and why it failed, or ""."""
        server = ThroughServer(self._url, jobs=1)
        began = time.perf_counter()
        server.pull([Prefix(0, len(prompt.token_ids), prompt)])
        seconds = time.perf_counter() - began
        (answer,) = server.pulled
        return seconds, answer["cached_tokens"], answer["error"] or ""

    def _copied(self, written: _Objects, copies: _Objects, until: float) -> str:
        """Copy the objects of a prompt once they are stored; return why that failed, or ""."""
        if missing := self._missing(written, until):
            return (
                f"{missing:,} of its {int(written.awaited.sum()):,} objects are not in "
                f"{self._store.url}; see hicachectl doctor"
            )
        while why := self._copy(written, copies):  # the server may still be writing an object
            if time.monotonic() > until:
                return why
            time.sleep(_PAUSE_S)
        return ""

    def _missing(self, objects: _Objects, until: float) -> int:
        """Wait until all awaited objects are in the store, or until `until`.

        Return how many awaited objects are missing.
        """
        awaited = pa.table({"key": objects.keys.filter(pa.array(objects.awaited))})
        while missing := len(awaited) - len(self._store.look(awaited, ("nbytes",))):
            if time.monotonic() > until:
                break
            time.sleep(_PAUSE_S)
        return missing

    def _copy(self, written: _Objects, copies: _Objects) -> str:
        """Copy objects within the store; return why an awaited one was not copied, or ""."""
        import pyarrow.compute as pc

        store, limits = self._store, self._store.limits
        present = store.look(pa.table({"key": written.keys}), ("nbytes", "locator"))
        keys = present.column("key").combine_chunks()
        order = pc.index_in(keys, value_set=written.keys).to_numpy(zero_copy_only=False)
        if not self._trailed:
            self._state_trailers(written)
        room = -(-written.sizes[order] // ALIGNMENT) * ALIGNMENT
        most = min(self.largest, limits.batch_bytes)
        for span in batch_spans(room, most, limits.batch_objects):
            some = order[span]
            sizes, offsets = written.sizes[some], place(written.sizes[some])[0]
            read = store.read_into(present[span], offsets, sizes, identify=False)
            good = np.flatnonzero(read.ok)
            if not (read.ok | ~written.awaited[some]).all():
                return next(iter(read.errors.values()), "its objects cannot be read yet")
            rows = pa.table({"key": copies.keys.take(pa.array(some[good]))})
            put = store.write_from(rows, offsets[good], sizes[good], if_absent=True)
            if not np.isin(put.statuses, (Status.OK, Status.EXISTS)).all():
                return next(iter(put.errors.values()), "its copies cannot be written")
        return ""

    def _state_trailers(self, written: _Objects) -> None:
        """Make the store give copies the trailers that the server's own objects have."""
        self._trailed = True
        if not isinstance(self._store, Trailed):
            return
        markers = {marker.identity.hash(): marker for marker in self._store.markers()}
        each = len(written.keys) // len(self._specs)
        rows = pa.table({"key": written.keys[::each]})
        stated = self._store.read_trailers(rows).column("identity").to_pylist()
        own = {
            spec.affix: markers[identity]
            for spec, identity in zip(self._specs, stated, strict=True)
            if identity in markers
        }
        if own:
            digest = next(iter(own.values())).digest
            identities = {affix: marker.identity for affix, marker in own.items()}
            self._store.write_trailers(identities, digest)
