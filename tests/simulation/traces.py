"""Traces of prefixes for tests of replays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hicachectl.requests.chains import Requests

if TYPE_CHECKING:
    from collections.abc import Sequence


class Trace:
    """Requests of random prefixes: each chain is a path of one tree."""

    def __init__(self, prefixes: Sequence[Sequence[int]], reaches: Sequence[int] = ()) -> None:
        numbers: dict[tuple[int, ...], int] = {}
        self.chains: list[list[int]] = []
        for prefix in prefixes:
            paths = [tuple(prefix[: end + 1]) for end in range(len(prefix))]
            self.chains.append([numbers.setdefault(path, len(numbers)) for path in paths])
        self.parents = [numbers.get(path[:-1], -1) for path in numbers]
        reaches = reaches or [99] * len(prefixes)
        self.reach = [min(reach, len(c)) for reach, c in zip(reaches, self.chains, strict=True)]
        lengths = np.array([len(chain) for chain in self.chains], np.int64)
        self.requests = Requests(
            names=np.arange(len(numbers)),
            blocks=np.array([page for chain in self.chains for page in chain], np.int32),
            offsets=np.concatenate([[0], np.cumsum(lengths)]),
            tokens=lengths,
            reach=np.array(self.reach, np.int64),
            output_tokens=np.full(len(lengths), -1, np.int64),
            prompt_blocks=lengths,
        )

    def hits(self, row: int, held: Any) -> int:
        """Count the leading pages of a request that are held."""
        chain = self.chains[row]
        return next((n for n in range(self.reach[row]) if chain[n] not in held), self.reach[row])


def conversations(seed: int, requests: int, turn: int = 12) -> Trace:
    """A trace in the shape of Mooncake's conversations: talks of growing length, interleaved.

    turn: mean number of pages that a request adds.
    """
    random = np.random.default_rng(seed)
    prefixes: list[list[int]] = []
    talks: list[list[int]] = []
    for number in range(requests):
        if talks and random.random() < 0.4:
            prefix = talks[int(len(talks) * random.beta(5, 1))]
        else:
            prefix = [0] * int(random.integers(1, 4))
            talks.append(prefix)
        prefix += (1000 + number * 64 + np.arange(random.geometric(1 / turn))).tolist()
        prefixes.append([*prefix])
    return Trace(prefixes)
