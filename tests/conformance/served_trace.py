"""Requests that a real server answers one after another, and what `simulate` says of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hicachectl.formats.eviction import Policy
from hicachectl.formats.trailer import TRAILER_BYTES
from hicachectl.requests.chains import Columns, Hashing
from hicachectl.requests.forms import Request
from hicachectl.simulation.caches import cache_of
from hicachectl.simulation.replay import replay
from hicachectl.simulation.sizes import PageFile, PageSizes, Room
from hicachectl.simulation.tiers import filtered, replay_behind
from tests.conformance.cpu_server import PAGE_SIZE
from tests.conformance.plugin_site import PAGE_BYTES, plugin_config
from tests.conformance.tiny_llama import VOCABULARY

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    from hicachectl.requests.chains import Requests
    from hicachectl.simulation.tiers import Tiers
    from tests.conformance.cpu_server import CpuServer

THRESHOLD = 256


class Turn(NamedTuple):
    """A prompt, and the number of tokens to generate after it.

    tokens: the prompt.
    outputs: number of tokens to generate.
    continues: number of the conversation that it goes on with; -1 for a new one.
    """

    tokens: list[int]
    outputs: int
    continues: int


class Turns:
    """Seeded prompts of conversations and about documents, with few system prompts.

    Popular documents come often. A conversation goes on with what the server answered.
    """

    def __init__(self, seed: int, documents: int, longest: int) -> None:
        """longest: most pages of a prompt."""
        self._random = np.random.default_rng(seed)
        self._longest = longest * PAGE_SIZE
        systems = [self._fresh(2 * PAGE_SIZE, 6 * PAGE_SIZE) for _ in range(4)]
        self._documents = [
            systems[number % 4] + self._fresh(4 * PAGE_SIZE, longest * PAGE_SIZE // 2)
            for number in range(documents)
        ]
        weights = np.arange(1, documents + 1) ** -0.7
        self._weights = weights / weights.sum()
        self._open: list[list[int]] = []

    def next(self) -> Turn:
        """Return the next prompt."""
        random = self._random
        count = int(random.integers(64, 100)) if random.random() < 0.03 else 1
        if self._open and random.random() < 0.35:
            number = int(random.integers(len(self._open)))
            return Turn(self._open[number] + self._fresh(20, 140), count, number)
        document = self._documents[random.choice(len(self._documents), p=self._weights)]
        return Turn(document + self._fresh(10, 110), count, -1)

    def answered(self, turn: Turn, answer: list[int]) -> None:
        """Take an answer, which the conversation goes on with."""
        chain = turn.tokens + answer
        if turn.continues < 0:
            self._open = [*self._open[-39:], chain]
        elif len(chain) < self._longest - 6 * PAGE_SIZE:
            self._open[turn.continues] = chain
        else:
            del self._open[turn.continues]

    def _fresh(self, least: int, most: int) -> list[int]:
        count = int(self._random.integers(least, most))
        return [int(token) for token in self._random.integers(3, VOCABULARY, count)]


class Point(NamedTuple):
    """A store of one size behind a server.

    pages: pages that the store's limit holds.
    """

    policy: Policy
    write_policy: str
    pages: int

    @property
    def capacity(self) -> int:
        """Bytes of the store's limit."""
        trailer = TRAILER_BYTES if self.policy is Policy.PLUGIN else 0
        return self.pages * (PAGE_BYTES + trailer)

    def attach(self, server: CpuServer, directory: Path) -> None:
        """Attach the store to a server."""
        limit = {"max_size": self.capacity, "prefetch_threshold": THRESHOLD}
        if self.policy is Policy.PLUGIN:
            server.attach("dynamic", plugin_config(directory, **limit), self.write_policy)
        else:
            config = {"file_storage_path": str(directory), **limit}
            server.attach("file", config, self.write_policy)


def served(server: CpuServer, turns: Turns, count: int) -> Requests:
    """Answer prompts one after another; return the requests, with what each pool served."""

    columns = Columns(Hashing(PAGE_SIZE), outputs=True)
    for number in range(count):
        turn = turns.next()
        answer = server.generate(turn.tokens, turn.outputs)
        turns.answered(turn, answer.tokens)
        request = Request(
            str(number),
            turn.tokens,
            output_tokens=turn.outputs,
            output_ids=answer.tokens,
            cached=(answer.device, answer.host, answer.storage),
        )
        columns.add(request)
    return columns.finished("server")


def simulated(requests: Requests, tiers: Tiers, point: Point) -> npt.NDArray[np.int64]:
    """Return the tokens that device, host and storage serve of each request: [requests, 3]."""
    sizes = PageSizes((Room((PageFile("kv", PAGE_BYTES),)),), known=True)
    if tiers.filters:
        front = filtered(requests, tiers)
        runs = replay(
            point.policy, front.requests, [point.capacity], sizes, least=THRESHOLD // PAGE_SIZE
        )
        return np.stack([front.device, front.host, runs[0].astype(np.int64) * PAGE_SIZE], axis=1)
    behind = replay_behind(requests, tiers, cache_of(point.policy, point.capacity, sizes))
    return np.stack([behind.device, behind.host, behind.storage], axis=1)


def shares(tokens: npt.NDArray[np.int64], requests: Requests) -> npt.NDArray[np.float64]:
    """Return percents of the prompt tokens."""
    found: npt.NDArray[np.float64] = 100 * tokens.sum(axis=0) / requests.tokens.sum()
    return found
