"""Simulate caches of several capacities and policies on requests."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from hicachectl.formats.errors import UsageError
from hicachectl.formats.eviction import Policy
from hicachectl.formats.profile import PREFETCH_THRESHOLD
from hicachectl.formats.restorable import leading_runs, least_tokens
from hicachectl.formats.wording import not_one_of
from hicachectl.requests.chains import Hashing
from hicachectl.requests.grouping import everyone, grouping_of
from hicachectl.results import Result
from hicachectl.simulation.caches import LEASE_S, cache_of
from hicachectl.simulation.changes import changed, changes_text
from hicachectl.simulation.losses import Today, look_at
from hicachectl.simulation.replay import replay
from hicachectl.simulation.shares import (
    Capacity,
    CapacityRow,
    Counting,
    LossRow,
    Served,
    answer,
    chosen_row,
    curve_for_people,
    denominators,
    groups_for_people,
    losses_for_people,
    prompt_tokens,
    room_texts,
    rows_table,
    served_text,
)
from hicachectl.simulation.sizes import PageSizes
from hicachectl.simulation.starts import start_from_plan
from hicachectl.simulation.tiers import Tiers, filtered, replay_behind
from hicachectl.text.tables import table_lines
from hicachectl.text.units import counted
from hicachectl.text.vocabulary import WRITE_POLICIES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from hicachectl.backends.base import Store
    from hicachectl.formats.arrays import IntArray
    from hicachectl.formats.profile import Profile
    from hicachectl.prewarming.ranking import PlannedPages
    from hicachectl.requests.chains import Requests
    from hicachectl.simulation.caches import Start
    from hicachectl.simulation.replay import Runs, Seconds
    from hicachectl.simulation.tiers import Filtered
    from hicachectl.text.tables import Screen

EVICTION_RATIO = 0.9
"""Default of HiCacheFile's eviction_ratio."""

_DEFAULT_CAPACITIES = 12
_MOST_CAPACITIES = 1000
_ROWS = "capacities"
COLD, STORE, PLAN = "cold", "store", "plan"


class SimulateDocument(msgspec.Struct, kw_only=True):
    """Document of `simulate`."""

    store: str | None
    profile: str | None
    page_bytes: int | None
    page_tokens: int
    distinct_pages: int
    threshold: int
    eviction_ratio: float
    warm_up_requests: int
    hours: float | None
    most_share: float | None
    today_bytes: int | None
    free_bytes: int | None
    served_tokens: int | None
    losses: list[LossRow] | None
    capacities: list[CapacityRow] | UnsetType = UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateRequest:
    """Requests to simulate, and settings of the servers and caches.

    profile: profile of the servers; None if capacities count pages.
    capacities: sizes of the whole store, in bytes; in pages if there is no profile. If empty,
        powers of two are used. With a store, the bytes that it holds, half of them and twice as
        many are always added.
    policies: names of `Policy`. If empty, the policy of the store is used (`lru` without a store).
        The policy `optimal` is then added if all caches get the same requests (`Tiers.filters`).
    eviction_ratio: eviction_ratio of HiCacheFile.
    warm_up: share of the requests that only warm the caches. The first requests are this share, and
        are not counted.
    by: words of `GROUPINGS`; each adds rows for its groups.
    threshold: prefetch threshold of the servers in tokens. None stands for the profile's threshold,
        or for SGLang's default if the profile has none.
    plan: pages that the caches hold at the start. If None, the caches start with the pages of the
        store, if there is one.
    what_ifs: for each further deployment to simulate, its settings by name: page_size, tp,
        kv_cache_dtype and layout. The caches of these deployments are empty at the start.
    reread: function that reads the requests with another hashing. A what-if needs this function if
        its page size is no multiple of the tokens of a block.
    l1: device memory for pages of one server, for all its ranks, in the unit of `capacities`; None
        to simulate no memory of servers, so that every hit is a hit in the store.
    l2: host memory for pages of one server, for all its ranks, in the unit of `capacities`; None if
        `l1` is None.
    write_policy: --hicache-write-policy of the servers.
    servers: number of servers that share the store.
    cold: whether to begin with empty caches.
    allow_empty: whether to accept a store without pages.
    """

    requests: Requests
    profile: Profile | None = None
    capacities: tuple[int, ...] = ()
    policies: tuple[str, ...] = ()
    eviction_ratio: float = EVICTION_RATIO
    warm_up: float = 0.0
    by: tuple[str, ...] = ()
    threshold: int | None = None
    plan: PlannedPages | None = None
    what_ifs: tuple[Mapping[str, str], ...] = ()
    reread: Callable[[Hashing], Requests] | None = None
    l1: int | None = None
    l2: int | None = None
    write_policy: str = WRITE_POLICIES[0]
    servers: int = 1
    cold: bool = False
    allow_empty: bool = False

    def __post_init__(self) -> None:
        """Raise UsageError for a value out of its range."""
        for name in self.policies:
            if name not in tuple(Policy):
                raise UsageError(not_one_of("policies", name, tuple(Policy)))
        if any(capacity < 1 for capacity in self.capacities):
            raise UsageError("capacities: a capacity is less than 1; give positive numbers")
        if len(self.capacities) > _MOST_CAPACITIES:
            raise UsageError(f"capacities: give at most {_MOST_CAPACITIES}")
        if not 0 < self.eviction_ratio <= 1:
            raise UsageError(
                f"eviction_ratio: {self.eviction_ratio:g} is out of range; give more than 0 and at "
                "most 1, such as 0.9"
            )
        if (self.l1 is None) != (self.l2 is None):
            raise UsageError("l1, l2: only one of them is given; give both")
        if self.write_policy not in WRITE_POLICIES:
            raise UsageError(not_one_of("write_policy", self.write_policy, WRITE_POLICIES))
        if not 0 <= self.warm_up < 1:
            raise UsageError(f"warm_up: {self.warm_up:g} leaves no request; give less than 1")

    @property
    def prefetch_threshold(self) -> int:
        """Prefetch threshold of the servers, in tokens."""
        if self.threshold is not None:
            return self.threshold
        return PREFETCH_THRESHOLD if self.profile is None else self.profile.prefetch_threshold

    @property
    def trailing(self) -> bool:
        """Whether the profile has a trailing pool, needed only at the end of a prefix."""
        return self.profile is not None and self.profile.trailing

    @property
    def least_tokens(self) -> int:
        """Least number of tokens that servers take from a store for a request."""
        return least_tokens(self.prefetch_threshold, trailing=self.trailing)


def simulate(
    request: SimulateRequest,
    store: Store | None = None,
    *,
    today: Today | None = None,
    on_listed: Callable[[int], None] = lambda objects: None,
) -> Result:
    """Return the share of the prompt tokens that caches of each capacity and policy serve.

    A request hits its leading pages that the cache holds, unless these have fewer tokens than the
    prefetch threshold.

    store: store of the profile's deployment. The caches begin with the store's pages, unless the
        request has a plan or `cold`. The result also says why tokens of the requests are misses in
        the store.
    today: state of the store; None to list the store.
    on_listed: takes the number of objects of each batch of the listing.
    Raises ProfileError, EmptyStore and StoreUnavailable. Raises UsageError if the requests do not
    state the tokens of a block or the groups, if their blocks do not fit the profile, or if a store
    is given without a profile.
    """
    case = _Case.of(request)
    requests, counting = case.requests, Counting.of(case.requests, request.warm_up)
    for by in request.by:
        grouping_of(requests, by)  # raise now, before the long work, if the input lacks the groups
    if store is not None and today is None:
        requests.refuse_block_ids("give token ids, or leave out STORE")
        if request.profile is None or request.profile.inferred:
            raise UsageError(f"{store.url}: the pages of a store need a profile; give one")
        today = look_at(
            store,
            request.profile,
            requests,
            request.prefetch_threshold,
            counted=counting.counted,
            allow_empty=request.allow_empty,
            on_listed=on_listed,
        )
    case = replace(case, start=_start(request, requests, today))
    sizes = case.sizes(Policy.LRU)
    capacities = _capacities(request, len(requests.names), sizes, today)
    policies = [Policy(name) for name in request.policies]
    if not policies:
        replayed = case.tiers is None or case.tiers.filters
        own = Policy.LRU if store is None else store.eviction()
        policies = [own, *([Policy.OPTIMAL] if replayed else [])]
    rows = [
        row
        for one in (case, *(case.what_if(changes) for changes in request.what_ifs))
        for row in one.rows(policies, capacities)
    ]
    most = case.hit_tokens(case.most_pages())
    document: dict[str, Any] = msgspec.to_builtins(
        SimulateDocument(
            store=None if store is None else store.url,
            profile=None if request.profile is None else request.profile.model,
            page_bytes=sizes.page_bytes if sizes.known else None,
            page_tokens=requests.block_tokens,
            distinct_pages=len(requests.names),
            threshold=request.prefetch_threshold,
            eviction_ratio=request.eviction_ratio,
            warm_up_requests=len(requests) - counting.requests,
            hours=counting.hours,
            most_share=counting.share(most),
            today_bytes=None if today is None else today.nbytes,
            free_bytes=None if today is None else today.free_bytes,
            served_tokens=None if today is None else today.losses.served_tokens,
            losses=None if today is None else today.losses.rows,
        )
    )
    return Result(
        document={**document, _ROWS: None},
        rows=rows_table(rows),
        rows_name=_ROWS,
        lines=lambda _, screen, shown: _lines(rows, document, screen),
        remarks=[
            denominators(rows, document, request.least_tokens),
            *case.remarks,
            *room_texts(document),
            *(() if today is None else today.remarks),
        ],
    )


def _start(request: SimulateRequest, requests: Requests, today: Today | None) -> Start | None:
    if request.cold:
        return None
    if request.plan is not None:
        requests.refuse_block_ids("give token ids, or leave out the plan")
        return start_from_plan(request.plan, requests)
    return None if today is None else today.start


@dataclass(frozen=True, eq=False)
class _Case:
    """One deployment to simulate, with the requests divided into its pages.

    pages_of_block: number of pages of the deployment in a block of the requests.
    start: pages that the caches hold at the start.
    changes: settings that differ from the request's profile; None for the profile itself.
    refused: numbers of requests that no server took, one number from each replay with `tiers`.
    """

    request: SimulateRequest
    profile: Profile | None
    requests: Requests
    pages_of_block: int
    start: Start | None = None
    changes: Mapping[str, str] | None = None
    refused: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, request: SimulateRequest) -> _Case:
        """Return the case of the request's own deployment."""
        requests = request.requests.in_time_order()
        return cls(request, request.profile, *in_pages(requests, request.profile))

    def what_if(self, changes: Mapping[str, str]) -> _Case:
        """Return the case of a deployment with other settings. Its caches are empty at the start.

        Raises UsageError, and ProfileError for settings that no deployment can have.
        """
        if self.profile is None:
            raise UsageError("what_if: other settings need a profile; give one")
        profile, request = changed(self.profile, changes), self.request
        size, requests = profile.page_size, request.requests
        # Requests without a sample have only hashes, so reading them again would give no tokens.
        if requests.sample and size % requests.block_tokens and request.reread is not None:
            requests = request.reread(Hashing.of(profile))
        return _Case(request, profile, *in_pages(requests.in_time_order(), profile), None, changes)

    def sizes(self, policy: Policy) -> PageSizes:
        """Return the sizes of a block in a store with an eviction policy.

        Raises as `object_specs` does.
        """
        return PageSizes.of(self.profile, policy).in_blocks(self.pages_of_block)

    @property
    def tiers(self) -> Tiers | None:
        """The memory of the servers, in tokens; None if it is not simulated."""
        request = self.request
        if request.l1 is None or request.l2 is None:
            return None
        tokens, pages = self.requests.block_tokens, self.sizes(Policy.LRU).pages
        return Tiers(
            pages(request.l1) * tokens,
            pages(request.l2) * tokens,
            request.write_policy,
            request.servers,
            request.prefetch_threshold,
            trailing=request.trailing,
        )

    def rows(self, policies: Sequence[Policy], capacities: Sequence[int]) -> Iterator[CapacityRow]:
        """Yield the rows of all requests, then the rows of their groups."""
        start = COLD if self.start is None else STORE if self.request.plan is None else PLAN
        counting = Counting.of(self.requests, self.request.warm_up)
        served = [self._served(policy, capacities) for policy in policies]
        by = (grouping_of(self.requests, by) for by in self.request.by)
        text = None if self.changes is None else changes_text(self.changes)
        for grouping in (everyone(self.requests), *by):
            yield from counting.rows(served, grouping, start=start, what_if=text)

    def _served(self, policy: Policy, capacities: Sequence[int]) -> Served:
        """Return the tokens that caches of a policy serve."""
        sizes, tiers = self.sizes(policy), self.tiers
        limited = policy.limit != "store" and sizes.known
        found = [
            Capacity(
                sizes.pages(size),
                size if sizes.known else None,
                size // sizes.limits if limited else None,
            )
            for size in capacities
        ]
        if tiers is None or tiers.filters:
            front = None if tiers is None else self._filtered
            runs = replay(
                policy,
                self.requests if front is None else front.requests,
                capacities,
                sizes,
                ratio=self.request.eviction_ratio,
                least=self._least_pages,
                start=self.start,
                seconds=self._seconds,
            )
            if front is None:
                return Served(policy, found, self.hit_tokens(runs))
            self.refused.add(front.refused)
            rest = prompt_tokens(self.requests) - front.device - front.host
            tokens = np.minimum(self.hit_tokens(runs), rest)
            return Served(policy, found, tokens, front.device[None], front.host[None])
        behind = []
        for size in capacities:
            cache = cache_of(
                policy,
                size,
                sizes,
                parents=self.requests.forest.parents if policy is Policy.LRU else None,
                ratio=self.request.eviction_ratio,
                lease=0.0 if self._seconds is None else LEASE_S,
                start=self.start,
            )
            behind.append(replay_behind(self.requests, tiers, cache, seconds=self._seconds))
            self.refused.add(behind[-1].refused)
        by_tier = (
            np.stack(tokens)
            for tokens in zip(*((b.storage, b.device, b.host) for b in behind), strict=True)
        )
        return Served(policy, found, *by_tier)

    @cached_property
    def _filtered(self) -> Filtered:
        assert self.tiers is not None
        return filtered(self.requests, self.tiers)

    @property
    def remarks(self) -> Iterator[str]:
        """Messages about requests that no server takes."""
        if count := max(self.refused, default=0):
            yield f"{counted(count, 'request')}: longer than L1, so no server takes them"

    @property
    def _seconds(self) -> Seconds | None:
        times, unit = self.requests.times, self.requests.seconds_per_unit
        return None if times is None or unit is None else times * unit

    @property
    def _least_pages(self) -> int:
        """Least number of leading pages that servers read."""
        return -(-self.request.least_tokens // self.requests.block_tokens)

    def hit_tokens(self, runs: IntArray | Runs) -> IntArray:
        """Return the number of prompt tokens in leading pages: [..., requests].

        runs: [..., requests] number of leading pages.
        """
        size = self.requests.block_tokens
        return np.minimum(runs.astype(np.int64) * size, prompt_tokens(self.requests))

    def most_pages(self) -> IntArray:
        """Return how many leading pages of each request the best cache could serve: [requests].

        These are pages that earlier requests used, and pages that the caches hold at the start.
        """
        requests = self.requests
        numbers = np.arange(len(requests.blocks), dtype=np.int32)
        first = np.zeros(len(requests.names), np.int32)
        first[requests.blocks[::-1]] = numbers[::-1]
        known = first[requests.blocks] != numbers
        if self.start is not None:
            known |= np.isin(requests.blocks, self.start.pages)
        runs = np.minimum(leading_runs(known, requests.offsets), requests.reach)
        return np.where(runs >= self._least_pages, runs, 0)


def in_pages(requests: Requests, profile: Profile | None) -> tuple[Requests, int]:
    """Return the requests in pages of a profile, and the number of pages in a block.

    Several blocks are merged into one page. Blocks stay as they are if a block has several pages,
    or if there is no profile.
    Raises UsageError if the tokens of a block are unknown, or if neither the block size nor the
    page size divides the other.
    """
    block, size = requests.block_tokens, 0 if profile is None else profile.page_size
    if not block:
        raise UsageError(
            f"{requests.source}: does not tell the tokens of a block; give --block-size"
        )
    if not size:
        return requests, 1
    requests = _full_blocks(requests)
    if size % block == 0:
        return requests.merged(size // block), 1
    if not requests.hashed and block % size == 0:
        return requests, block // size
    what = "pages" if requests.hashed else "blocks"
    raise UsageError(
        f"{requests.source}: has {what} of {block} tokens, which do not fit the profile's page "
        f"size {size}; give token ids"
    )


def _full_blocks(requests: Requests) -> Requests:
    """Remove the last block of each prompt if it is not full, because such a block is no page.

    The page of a prompt's last token is out of reach, because servers always compute that token.
    """
    if requests.hashed:
        return requests
    size, tokens, lengths = requests.block_tokens, requests.tokens, np.diff(requests.offsets)
    cut = (tokens >= 0) & (requests.prompt_blocks == lengths)
    requests = requests.cut(np.where(cut, np.minimum(tokens // size, lengths), lengths))
    last = np.where(tokens > 0, (tokens - 1) // size, requests.reach)
    return replace(requests, reach=np.minimum(requests.reach, last))


def _capacities(
    request: SimulateRequest, distinct: int, sizes: PageSizes, today: Today | None
) -> list[int]:
    """Return the capacities, ascending, in bytes; in pages if the bytes are unknown."""
    found = set(request.capacities)
    if not found:
        page = sizes.page_bytes
        last = max(distinct * page - 1, 1).bit_length()
        first = max(last - _DEFAULT_CAPACITIES + 1, (page - 1).bit_length())
        found = {1 << power for power in range(min(first, last), last + 1)}
    if today is not None and today.nbytes:
        found |= {today.nbytes // 2, today.nbytes, today.nbytes * 2}
    return sorted(found)


def _lines(rows: list[CapacityRow], document: Mapping[str, Any], screen: Screen) -> Iterator[str]:
    whole = [row for row in rows if row["by"] is None]
    tables = [curve_for_people(whole)]
    chosen = chosen_row(rows, document)
    for by in dict.fromkeys(row["by"] for row in rows if row["by"]):
        tables.append(groups_for_people(rows, by, chosen))
    if document["losses"] is not None:
        tables.append(losses_for_people(document["losses"]))
    for table in tables:
        yield from table_lines(table, screen)
        yield ""
    yield from served_text(document)
    yield answer(rows, document)
