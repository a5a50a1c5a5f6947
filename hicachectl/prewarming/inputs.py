"""Read the chains or pages to warm, and the requests to send to servers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hicachectl.formats.errors import UsageError
from hicachectl.formats.keys.labels import label_text
from hicachectl.requests.chain_options import asked_chains, asked_hashing, asked_requests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

    from hicachectl.formats.profile import Profile
    from hicachectl.prewarming.page_plan import PrewarmRequest
    from hicachectl.prewarming.ranking import Rank
    from hicachectl.requests.chains import Chains
    from hicachectl.requests.files import Request

    IntArray = npt.NDArray[np.int64]
    Numbered = Callable[[], Iterable[tuple[int, Request]]]


@dataclass(frozen=True, slots=True, eq=False)
class WarmingInputs:
    """Chains or pages to warm; `PrewarmRequest` describes the first four fields.

    starts: [chains] byte offset of each line in the trace file; None without a trace.
    """

    chains: Chains | None = None
    rank: Rank | None = None
    pages: pa.StringArray | None = None
    in_others: pa.StringArray | None = None
    starts: IntArray | None = None

    def asked_in(self, request: PrewarmRequest) -> PrewarmRequest:
        """Return the request for these chains or pages."""
        return replace(
            request,
            chains=self.chains,
            rank=self.rank,
            pages=self.pages,
            in_others=self.in_others,
        )


def read_wanted(profile: Profile, grammar: str, options: Mapping[str, Any]) -> WarmingInputs:
    """Read the chains or pages that the options name. Raises UsageError and FormatError.

    grammar: of the source's keys.
    """
    from hicachectl.requests.chains import hex_pages

    if options["all_"]:
        return WarmingInputs()
    if options["pages"]:
        return _listed_pages(profile, grammar, options)
    wanted = _read_chains(profile, options)
    assert wanted.chains is not None
    lone = bool((wanted.chains.offsets[1:] - wanted.chains.offsets[:-1] < 2).all())
    if lone and options["plan"]:
        # The plan names single pages; the pages before them are unknown.
        return WarmingInputs(pages=hex_pages(wanted.chains.pages))
    return wanted


def _listed_pages(profile: Profile, grammar: str, options: Mapping[str, Any]) -> WarmingInputs:
    import pyarrow as pa

    from hicachectl.formats.keys.base import codec_for
    from hicachectl.pages.deployments import profiled_deployment
    from hicachectl.prewarming.ranking import Ranker
    from hicachectl.requests.chains import chains_of_pages
    from hicachectl.requests.files import read_page_list
    from hicachectl.text.units import counted

    listed = read_page_list(options["pages"], requests=True)
    label = profiled_deployment(profile, codec_for(grammar)).label(codec_for(grammar))
    in_others = listed.only_in_others(label)
    if not listed.is_chained:
        pages, others = (pa.array(names, pa.string()) for names in (listed.pages, in_others))
        return WarmingInputs(pages=pages, in_others=others)
    if in_others:
        raise UsageError(
            f"{listed.source}: {counted(len(in_others), 'row')} of other deployments than the "
            f"profile's ({label_text(label)}); remove such rows from a file with chains"
        )
    return WarmingInputs(chains_of_pages(listed.chains(), profile.page_size), Ranker())


def _read_chains(profile: Profile, options: Mapping[str, Any]) -> WarmingInputs:
    from hicachectl.prewarming.plan_file import read_plan
    from hicachectl.prewarming.ranking import Ranker, chains_of_plan

    hashing = asked_hashing(profile, options)
    assert hashing is not None  # the profile is not inferred
    if options["plan"]:
        return WarmingInputs(*chains_of_plan(read_plan(options["plan"]), profile.page_size))
    if not options["trace"]:
        return WarmingInputs(asked_chains(options, hashing), Ranker())
    return wanted_of_trace(options["trace"], profile)


def wanted_of_trace(
    path: Path,
    profile: Profile,
    *,
    instead: str = "record token ids, or give --dry-run without DST and --from",
) -> WarmingInputs:
    """Read the chains of a trace. Raises UsageError and FormatError.

    profile: must not be inferred. instead: the remedy for a trace of block ids.
    """
    from hicachectl.prewarming.ranking import Ranker, chains_of_trace
    from hicachectl.prewarming.trace import read_trace
    from hicachectl.requests.chains import Hashing

    trace = read_trace(path, profile)
    if not trace.forest.hashed:
        raise UsageError(f"{path}: has block ids, which do not give the keys of pages; {instead}")
    ranker = Ranker(trace.times, trace.output_tokens)
    return WarmingInputs(chains_of_trace(trace, Hashing.of(profile)), ranker, starts=trace.starts)


def requests_for_servers(
    wanted: WarmingInputs, usable_pages: IntArray, profile: Profile, options: Mapping[str, Any]
) -> Numbered:
    """Return a function that yields the numbered requests anew at each call.

    From a trace: each usable prefix once, most valuable first. From other files: all requests.
    """
    if wanted.starts is None:
        listed = list(enumerate(asked_requests(options)))
        return lambda: listed
    from hicachectl.prewarming.ranking import prefixes_worth_asking
    from hicachectl.prewarming.trace import read_requests

    assert wanted.chains is not None
    assert wanted.rank is not None
    # A trailing pool also has states inside longer prefixes; only a request that ends at
    # a state restores it.
    longest_only = not any(pool.trailing for pool in profile.pools)
    chosen = prefixes_worth_asking(
        wanted.chains, usable_pages, wanted.rank, longest_only=longest_only
    )
    path, starts = options["trace"], wanted.starts[chosen]
    return lambda: zip(chosen.tolist(), read_requests(path, starts), strict=True)
