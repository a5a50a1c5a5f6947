"""What the options of `prewarm` ask to be warmed, and its requests once more for servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from hicachectl.asking import asked_chains, asked_hashing, asked_requests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

    from hicachectl.chains import Chains
    from hicachectl.formats.profile import Profile
    from hicachectl.prewarming.ranking import Rank
    from hicachectl.requests import Request

    IntArray = npt.NDArray[np.int64]
    Numbered = Callable[[], Iterable[tuple[int, Request]]]


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """What is to be warmed; `prewarm_plan.Request` says what chains, rank and pages are.

    starts: [chains] where in the trace's file the line of each begins; None: of no trace.
    """

    chains: Chains | None = None
    rank: Rank | None = None
    pages: pa.StringArray | None = None
    starts: IntArray | None = None


def read_wanted(profile: Profile, options: Mapping[str, Any]) -> Wanted:
    """Read what is asked for. Raises UsageError and FormatError from the files."""
    from hicachectl.chains import hex_pages

    if options["all_"]:
        return Wanted()
    wanted = _read_chains(profile, options)
    assert wanted.chains is not None
    lone = bool((wanted.chains.offsets[1:] - wanted.chains.offsets[:-1] < 2).all())
    if lone and (options["pages"] or options["plan"]):
        return Wanted(pages=hex_pages(wanted.chains.pages))  # nothing says what precedes them
    return wanted


def _read_chains(profile: Profile, options: Mapping[str, Any]) -> Wanted:
    from hicachectl.prewarming.plan_file import read_plan
    from hicachectl.prewarming.ranking import Ranker, chains_of_plan, chains_of_trace
    from hicachectl.prewarming.trace import read_trace

    hashing = asked_hashing(profile, options)
    assert hashing is not None  # of a profile that is not inferred
    if options["plan"]:
        return Wanted(*chains_of_plan(read_plan(options["plan"]), profile.page_size))
    if not options["trace"]:
        return Wanted(asked_chains(options, hashing), Ranker())
    trace = read_trace(options["trace"], profile)
    if not trace.forest.hashed:
        raise click.UsageError(
            f"{options['trace']}: a trace of block ids cannot be executed, since nothing makes "
            "them into keys; record token ids, or use --dry-run without stores"
        )
    ranker = Ranker(trace.times, trace.output_tokens)
    return Wanted(chains_of_trace(trace, hashing), ranker, starts=trace.starts)


def requests_for_servers(
    wanted: Wanted, usable_pages: IntArray, profile: Profile, options: Mapping[str, Any]
) -> Numbered:
    """Give what yields the requests with their numbers, as often as it is called.

    Of a trace each usable prefix once, the most valuable first; else all requests, in their order.
    """
    if wanted.starts is None:
        listed = list(enumerate(asked_requests(options)))
        return lambda: listed
    from hicachectl.prewarming.ranking import prefixes_worth_asking
    from hicachectl.prewarming.trace import read_requests

    assert wanted.chains is not None
    assert wanted.rank is not None
    # Beside the pages, a trailing pool has states that only the request that ends there restores.
    longest_only = not any(pool.trailing for pool in profile.pools)
    chosen = prefixes_worth_asking(
        wanted.chains, usable_pages, wanted.rank, longest_only=longest_only
    )
    path, starts = options["trace"], wanted.starts[chosen]
    return lambda: zip(chosen.tolist(), read_requests(path, starts), strict=True)
