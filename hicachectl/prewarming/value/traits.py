"""Integer codes for the known properties of blocks that wait for a next use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.prewarming.value.hazard import Factor

if TYPE_CHECKING:
    import numpy.typing as npt

    from hicachectl.prewarming.value.uses import Conversations
    from hicachectl.requests.chains import Requests

    Codes = npt.NDArray[np.int64]

_USES = np.array([2, 3, 5, 9, 17])  # a level per doubling from 3 on
_TURNS = np.array([1, 2, 3, 5, 9])
_BLOCKS = np.array([1, 2, 4, 16, 64])
_QUANTILES = 12
_FEW_QUANTILES = 6  # enough for a factor that is also split by age
_USE_FACTOR = Factor("uses", len(_USES) + 1)
_DEPTH_FACTOR = Factor("depth", len(_BLOCKS) + 1)
_TAIL_FACTOR = Factor("tail", 2)  # a prompt's last block, partly filled
_LEFT_FACTOR = Factor("left", 2)  # the conversation continued without the block


@dataclass(frozen=True, eq=False, slots=True)
class RequestFactors:
    """Codes of requests, to be joined with codes of their blocks.

    factors:  in the column order of `codes`.
    requests: [requests, request factors] int64.
    tails:    [requests] int64, depth of a partly filled last block, else -1.
    """

    factors: tuple[Factor, ...]
    requests: Codes
    tails: Codes

    def block_codes(
        self,
        requests: Codes,
        depths: npt.NDArray[np.integer],
        uses: npt.NDArray[np.integer],
        left: npt.NDArray[np.bool_],
    ) -> Codes:
        """Return a small int for each block, from its last request, depth, uses and `left`."""
        use = _by_edges(_USES, uses)
        depth = _by_edges(_BLOCKS, depths)
        tail = self.tails[requests] == depths
        codes: Codes = ((use * _DEPTH_FACTOR.levels + depth) * 2 + tail) * 2 + left
        return codes

    @property
    def block_levels(self) -> int:
        """Number of different block codes."""
        return _USE_FACTOR.levels * _DEPTH_FACTOR.levels * 4

    def codes(self, requests: Codes, block_codes: Codes) -> Codes:
        """Return the codes of all factors: [rows, factors]."""
        use, depth = np.divmod(block_codes // 4, _DEPTH_FACTOR.levels)
        tail, left = block_codes // 2 % 2, block_codes % 2
        return np.column_stack((use, depth, tail, left, self.requests[requests]))


def take_traits(
    requests: Requests, links: Conversations, times: npt.NDArray[np.float64]
) -> RequestFactors:
    """Return each request's codes for the properties that may predict its continuation."""
    lengths = np.diff(requests.offsets)
    going_on = links.source >= 0
    pace = np.where(going_on, times - times[links.source], -1.0)
    habit = np.where(going_on, (times - times[links.first]) / np.maximum(links.turns, 1), -1.0)
    columns = {
        Factor("turns", len(_TURNS) + 1, age_groups=4): _by_edges(_TURNS, links.turns),
        Factor("fresh", len(_BLOCKS) + 1): _by_edges(_BLOCKS, lengths - links.known),
        Factor("added", _QUANTILES + 1): _by_quantile(_added_tokens(requests, links)),
        Factor("pace", _QUANTILES + 1): _by_quantile(pace),
        Factor("habit", _FEW_QUANTILES + 1, age_groups=4): _by_quantile(habit, _FEW_QUANTILES),
        Factor("output", _QUANTILES + 1, age_groups=4): _by_quantile(requests.output_tokens),
    }
    tails = np.full(len(requests), -1, np.int64)
    if requests.block_tokens:
        open_ended = requests.tokens % requests.block_tokens > 0
        tails[open_ended] = lengths[open_ended] - 1
    if requests.hashed:  # only full pages have hashes
        tails[:] = -1
    return RequestFactors(
        (_USE_FACTOR, _DEPTH_FACTOR, _TAIL_FACTOR, _LEFT_FACTOR, *columns),
        np.column_stack(list(columns.values())),
        tails,
    )


def _added_tokens(requests: Requests, links: Conversations) -> Codes:
    """Return the tokens that each prompt adds to the prompt and answer before; -1: unknown."""
    tokens, before = requests.tokens, links.source
    going_on = before >= 0
    so_far = np.where(going_on, tokens[before], 0)
    answered = np.where(going_on, np.maximum(requests.output_tokens[before], 0), 0)
    known = (tokens >= 0) & (so_far >= 0)
    return np.where(known, np.maximum(tokens - so_far - answered, 0), -1)


def _by_edges(edges: Codes, values: npt.NDArray[np.integer]) -> Codes:
    return np.searchsorted(edges, values, side="right").astype(np.int64)


def _by_quantile(
    values: npt.NDArray[np.int64] | npt.NDArray[np.float64], quantiles: int = _QUANTILES
) -> Codes:
    """Return each value's quantile, from 1; 0 for an unknown value, which is negative."""
    known = values[values >= 0]
    if not len(known):
        return np.zeros(len(values), np.int64)
    edges = np.unique(np.quantile(known, np.linspace(0, 1, quantiles + 1)[1:-1]))
    return np.where(values < 0, 0, 1 + np.searchsorted(edges, values, side="right"))
