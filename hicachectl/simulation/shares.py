"""Rows of `simulate`: the share of tokens that each capacity and policy serves, by group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import numpy as np
import pyarrow as pa

from hicachectl.text.jsontext import schema_of
from hicachectl.text.units import counted, human_size, unit_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.requests.chains import Requests
    from hicachectl.requests.grouping import Grouping

_TIB = 1 << 40
_BAR = 24
_ROOM = 0.1  # with more free space than this share of its size, a store may be below its limit
_ENOUGH = 0.9  # a curve counts as flat from the row that has this share of the best possible hits


class CapacityRow(TypedDict):
    """Row for one capacity, one policy and one group of requests."""

    what_if: str | None
    by: str | None
    group: str | None
    capacity_bytes: int | None
    capacity_pages: int
    policy: str
    start: str
    requests: int
    tokens: int
    hit_tokens: int
    device_tokens: int | None
    host_tokens: int | None
    hit_share: float | None
    tokens_saved_per_hour: float | None
    gain_per_tib: float | None
    limit_bytes: int | None


_SCHEMA = schema_of(CapacityRow)


class LossRow(TypedDict):
    """Row for one cause of lost hits."""

    cause: str
    tokens: int
    share: float


class Capacity(NamedTuple):
    """A capacity of a store under a policy.

    pages: number of pages that the store holds.
    nbytes: bytes of the whole store; None if the bytes of a page are unknown.
    limit: bytes of one rank or table, if the store's settings limit ranks or tables; else None.
    """

    pages: int
    nbytes: int | None = None
    limit: int | None = None


class Served(NamedTuple):
    """Tokens that caches of one policy serve.

    capacities: capacities of the store, ascending.
    tokens: [capacities, requests] tokens that the store serves.
    device: tokens that devices serve, with the shape of `tokens`, or [1, requests] if all
        capacities have the same values; None if L1 is not simulated.
    host: tokens that hosts serve, with the shape of `device`; None if L2 is not simulated.
    """

    policy: str
    capacities: Sequence[Capacity]
    tokens: IntArray
    device: IntArray | None = None
    host: IntArray | None = None


def prompt_tokens(requests: Requests) -> IntArray:
    """Return the number of tokens of each prompt. If it is unknown, count the prompt's blocks."""
    blocks = requests.prompt_blocks * requests.block_tokens
    return np.where(requests.tokens < 0, blocks, requests.tokens)


@dataclass(frozen=True, eq=False, slots=True)
class Counting:
    """Which requests count in the shares, and how many tokens their prompts have.

    counted: [requests] whether the request counts; False if it only warms the caches.
    tokens: [requests] number of prompt tokens.
    hours: hours between the first and the last counted request; None if unknown.
    """

    counted: BoolArray
    tokens: IntArray
    hours: float | None

    @classmethod
    def of(cls, requests: Requests, warm_up: float) -> Counting:
        """Return a counting without the first requests. warm_up: share of requests to leave out."""
        counted = np.arange(len(requests)) >= int(len(requests) * warm_up)
        times, unit = requests.times, requests.seconds_per_unit
        hours = None
        if times is not None and unit is not None and counted.any():
            hours = float(np.ptp(times[counted])) * unit / 3600 or None
        return cls(counted, prompt_tokens(requests), hours)

    @property
    def requests(self) -> int:
        """Number of requests that count."""
        return int(np.count_nonzero(self.counted))

    @property
    def total(self) -> int:
        """Number of prompt tokens that count."""
        return int(self.tokens[self.counted].sum())

    def share(self, hits: IntArray) -> float | None:
        """Return the share of hits in the counted tokens; None if no token counts.

        hits: [requests] tokens that were hit.
        """
        return int(hits[self.counted].sum()) / self.total if self.total else None

    def rows(
        self,
        served: Sequence[Served],
        grouping: Grouping,
        *,
        start: str,
        what_if: str | None = None,
    ) -> Iterator[CapacityRow]:
        """Yield the rows of all groups, policies and capacities."""
        ids, count = grouping.ids[self.counted], len(grouping.names)
        requests = np.bincount(ids, minlength=count)
        tokens = self._sums(self.tokens[None], ids, count)[0]
        sums = [
            [
                None if values is None else self._sums(values, ids, count)
                for values in (one.tokens, one.device, one.host)
            ]
            for one in served
        ]
        for number in np.flatnonzero(requests).tolist():
            head = {
                "what_if": what_if,
                "by": grouping.by,
                "group": grouping.names[number],
                "start": start,
                "requests": int(requests[number]),
                "tokens": int(tokens[number]),
            }
            for one, found in zip(served, sums, strict=True):
                before: CapacityRow | None = None
                for place, capacity in enumerate(one.capacities):
                    hits, device, host = (
                        None if values is None else int(values[place % len(values), number])
                        for values in found
                    )
                    before = self._row(
                        head, one.policy, capacity, (hits or 0, device, host), before
                    )
                    yield before

    def _row(
        self,
        head: Mapping[str, Any],
        policy: str,
        capacity: Capacity,
        served: tuple[int, int | None, int | None],
        before: CapacityRow | None,
    ) -> CapacityRow:
        """Return a row. before: the row of the next smaller capacity; None for the smallest."""
        hits, device, host = served
        share = hits / head["tokens"] if head["tokens"] else None
        gain = None
        if before is not None and share is not None and capacity.nbytes is not None:
            more = capacity.nbytes - (before["capacity_bytes"] or 0)
            gain = (share - (before["hit_share"] or 0.0)) / more * _TIB
        row: Any = {
            **head,
            "capacity_bytes": capacity.nbytes,
            "capacity_pages": capacity.pages,
            "policy": policy,
            "hit_tokens": hits,
            "device_tokens": device,
            "host_tokens": host,
            "hit_share": share,
            "tokens_saved_per_hour": hits / self.hours if self.hours else None,
            "gain_per_tib": gain,
            "limit_bytes": capacity.limit,
        }
        return {name: row[name] for name in _SCHEMA.names}  # type: ignore[return-value]

    def _sums(self, values: IntArray, ids: IntArray, count: int) -> IntArray:
        """Sum each row of values over the counted requests of each group: [rows, groups]."""
        return np.stack(
            [
                np.bincount(ids, weights=row[self.counted], minlength=count).astype(np.int64)
                for row in values
            ]
        )


def rows_table(rows: Sequence[CapacityRow]) -> pa.Table:
    """Return the rows as the table of a document."""
    return pa.Table.from_pylist(list(rows), schema=_SCHEMA)


def curve_for_people(rows: Sequence[CapacityRow]) -> pa.Table:
    """Return text columns of the rows of all requests, with a bar for each share.

    The gain is the gain for one more TiB, or for one more unit of the largest capacity if this unit
    is smaller. A capacity below a sixteenth of the unit shows no gain, because the gain of so few
    bytes says little about a whole unit.
    """
    largest = max((row["capacity_bytes"] or 0 for row in rows), default=0)
    unit, scale = unit_of(min(largest, _TIB))
    columns: dict[str, list[str | None]] = {
        "what if": [row["what_if"] for row in rows],
        "policy": [row["policy"] for row in rows],
        ">capacity": [_capacity_text(row) for row in rows],
        ">l1+l2": [
            f"{(row['device_tokens'] + (row['host_tokens'] or 0)) / row['tokens']:.1%}"
            if row["device_tokens"] is not None and row["tokens"]
            else None
            for row in rows
        ],
        **_shares(rows),
        f">gain/{unit}": [
            f"{row['gain_per_tib'] * 100 * scale / _TIB:+.3g}"
            if row["gain_per_tib"] is not None and (row["capacity_bytes"] or 0) * 16 >= scale
            else None
            for row in rows
        ],
    }
    return _texts({name: cells for name, cells in columns.items() if any(cells)})


def groups_for_people(rows: Sequence[CapacityRow], by: str, chosen: CapacityRow) -> pa.Table:
    """Return text columns of the groups of one word of --by, the group with most tokens first.

    chosen: row with the capacity and policy to show.
    """
    found = [
        row
        for row in rows
        if row["by"] == by and _are_alike(row, chosen, "capacity_pages", "policy", "what_if")
    ]
    found.sort(key=lambda row: -row["tokens"])
    return _texts(
        {
            by: [row["group"] for row in found],
            ">requests": [str(row["requests"]) for row in found],
            ">tokens": [str(row["tokens"]) for row in found],
            **_shares(found),
        }
    )


def _shares(rows: Sequence[CapacityRow]) -> dict[str, list[str | None]]:
    return {
        ">hits": [None if row["hit_share"] is None else f"{row['hit_share']:.1%}" for row in rows],
        "curve": ["█" * round((row["hit_share"] or 0) * _BAR) for row in rows],
    }


def _texts(columns: Mapping[str, Sequence[str | None]]) -> pa.Table:
    return pa.table({name: pa.array(cells, pa.string()) for name, cells in columns.items()})


def losses_for_people(rows: Sequence[LossRow]) -> pa.Table:
    """Return the text columns of lost hits."""
    return _texts(
        {
            "lost by": [row["cause"] for row in rows],
            ">tokens": [str(row["tokens"]) for row in rows],
            ">share": [f"{row['share']:.1%}" for row in rows],
        }
    )


def denominators(rows: Sequence[CapacityRow], document: Mapping[str, Any], least: int) -> str:
    """Return a message that says which tokens are 100 %.

    document: the document of `simulate`.
    least: least number of tokens that servers take from a store for a request.
    """
    whole, warm = rows[0], document["warm_up_requests"]
    below = f"; hits of fewer than {least} tokens do not count" if least > 1 else ""
    left = f"; the first {counted(warm, 'request')} only warm the caches" if warm else ""
    return (
        f"Shares are of {counted(whole['tokens'], 'prompt token')} of "
        f"{counted(whole['requests'], 'request')}, including the last page of each prompt"
        f"{below}{left}"
    )


def room_texts(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message if a store has so much free space that it can grow beyond today's size.

    document: the document of `simulate`.
    """
    today, free = document["today_bytes"], document["free_bytes"]
    if today and free is not None and free > today * _ROOM:
        yield (
            f"Today's size, {human_size(today)}, may not be the limit of the store, because "
            f"{human_size(free)} are free. If max_size of the servers does not limit the store, it "
            "still grows, and something else removed the pages that count as evicted"
        )


def served_text(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message on the share that a store serves today; nothing if there is no store.

    The message also says why a simulated cache of the store's size can serve another share.
    document: the document of `simulate`.
    """
    if document["losses"] is not None:
        served = document["served_tokens"]
        tokens = served + sum(loss["tokens"] for loss in document["losses"])
        share = f"{served / tokens:.1%}" if tokens else "none"
        yield (
            f"The store as it is serves {share} of {counted(tokens, 'prompt token')}; "
            "simulated caches can serve another share, because requests also change them"
        )


def chosen_row(rows: Sequence[CapacityRow], document: Mapping[str, Any]) -> CapacityRow:
    """Return the row that the summary describes, with the policy of the first row.

    This is the row of today's capacity. Without a store, it is the first row from which the curve
    is flat.
    document: the document of `simulate`.
    """
    curve = [row for row in rows if _are_alike(row, rows[0])]
    enough = _ENOUGH * (document["most_share"] or 0.0)
    found = [row for row in curve if (row["hit_share"] or 0.0) >= enough]
    if today := document["today_bytes"]:
        found = [row for row in curve if row["capacity_bytes"] == today]
    return (found or curve[-1:])[0]


def _are_alike(row: Mapping[str, Any], other: Mapping[str, Any], *names: str) -> bool:
    """Return whether two rows have equal members.

    names: members to compare. Without names, compare the members that identify a curve.
    """
    return all(row[name] == other[name] for name in names or ("policy", "by", "what_if"))


def answer(rows: Sequence[CapacityRow], document: Mapping[str, Any]) -> str:
    """Return the result of the first policy in one line.

    document: the document of `simulate`. If it has today's capacity, there must be rows of this
        capacity, of half of it and of twice as much.
    """
    chosen, today = chosen_row(rows, document), document["today_bytes"]
    now = chosen["hit_share"] or 0.0
    said = [f"{chosen['policy']}: {_capacity_text(chosen)} serve {now:.1%}"]

    def beside(row: CapacityRow) -> str:
        share = row["hit_share"] or 0.0
        return f"{share:.1%} ({(share - now) * 100:+.1f})"

    if today:
        curve = {row["capacity_bytes"]: row for row in rows if _are_alike(row, chosen)}
        less, more = today // 2, today * 2
        said.append(
            f"{human_size(more)} would serve {beside(curve[more])}, {human_size(less)} "
            f"{beside(curve[less])}"
        )
    said += [
        f"with {row['what_if']} {beside(row)}"
        for row in rows
        if row["what_if"]
        and row["by"] is None
        and row["policy"] == chosen["policy"]
        and row["capacity_bytes"] == chosen["capacity_bytes"]
    ]
    most = document["most_share"] or 0.0
    return "; ".join([*said, f"no cache of any size serves more than {most:.1%}"])


def _capacity_text(row: CapacityRow) -> str:
    """Return the capacity of a row, in bytes if they are known."""
    if row["capacity_bytes"] is None:
        return counted(row["capacity_pages"], "page")
    return human_size(row["capacity_bytes"])
