"""Small traces of conversations, some of which continue."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hicachectl.requests.chains import Hashing
from hicachectl.requests.reading import Trace

if TYPE_CHECKING:
    from hicachectl.formats.profile import Profile
    from hicachectl.requests.chains import Requests

BLOCK_TOKENS = 512

Row = dict[str, Any]


def trace_of(rows: list[Row], profile: Profile | None = None) -> Requests:
    """Return the requests of a file of these lines, in the order of their times."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.jsonl")
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return read_file(path, profile).in_time_order()


def read_file(path: Path, profile: Profile | None = None) -> Requests:
    """Return the requests of a file of token ids or block ids."""
    hashing = None if profile is None else Hashing.of(profile)
    with Trace([str(path)]) as trace:
        return trace.requests(hashing)


def conversations(
    seed: int, requests: int, *, going_on: float = 0.6, think: float = 20_000
) -> list[Row]:
    """Draw about one request per second; those with short outputs continue half as often.

    think: mean time between the turns of a conversation, in ms.
    """
    random = np.random.default_rng(seed)
    waiting: list[tuple[float, list[int]]] = []
    rows: list[Row] = []
    clock, fresh = 0.0, 1
    while len(rows) < requests:
        clock += float(random.exponential(1000))
        waiting.sort()
        chain = waiting.pop(0)[1] if waiting and waiting[0][0] <= clock else [0]
        added = int(random.integers(1, 8))
        chain = [*chain, *range(fresh, fresh + added)]
        fresh += added
        full = bool(random.random() < 0.1)
        tokens = BLOCK_TOKENS * len(chain) - (0 if full else int(random.integers(1, BLOCK_TOKENS)))
        output = int(random.choice([3, 400]))
        rows.append(
            {
                "timestamp": int(clock),
                "input_length": tokens,
                "output_length": output,
                "hash_ids": chain,
            }
        )
        if random.random() < (going_on if output == 400 else going_on / 2):
            kept = chain if full else chain[:-1]
            waiting.append((clock + 5_000 + float(random.exponential(think)), kept))
    return rows
