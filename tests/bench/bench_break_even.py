"""What `bench --probe-server` says of a server, beside the server's own times; run by hand.

    python -m tests.bench.bench_break_even --pages 16,64,256 --runs 11

Starts a real SGLang server of a tiny model on the CPU for each page size, with SGLang's file
backend, and asks `bench --probe-server` from which length on restoring is faster. Then prompts of
several lengths around that one are computed, and restored after the server's memory was flushed,
in turn. A sentence is right if the fastest answer of each kind agrees with it at every length;
lengths within a tenth of the one that is named prove nothing, and neither do times that differ by
less than 3 %.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.formats.hashing import page_hashes_hex
from hicachectl.profiles.server import API_KEY_VARIABLE
from tests.bench.runner import options_of, scratch
from tests.conformance.cpu_server import KEY, ROOT, CpuServer
from tests.conformance.tiny_llama import VOCABULARY, write_model
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_TOKENS = 8192  # of the model's context, and of the device pool
_LONGEST = 7168
_SHARES = (0.35, 0.5, 0.7, 0.85, 1.2, 1.5, 2.0, 4.0)
_CLOSE, _EQUAL = 0.1, 0.03


def random_tokens(rng: np.random.Generator, count: int) -> list[int]:
    return [int(token) for token in rng.integers(3, VOCABULARY, count)]


def answer_seconds(server: CpuServer, tokens: Sequence[int], restored: int) -> float:
    """Return the duration of a request whose prompt is restored so far."""
    began = time.perf_counter()
    answer = server.generate(tokens, 1)
    seconds = time.perf_counter() - began
    assert (answer.device, answer.host, answer.storage) == (0, 0, restored), answer
    return seconds


def await_stored(store: Path, tokens: Sequence[int], page: int) -> None:
    files = [store / f"{one}_tiny_0_1.bin" for one in page_hashes_hex(list(tokens), page)]
    wait_until(lambda: all(file.exists() for file in files))


def said(server: CpuServer, store: Path, page: int, time_limit: str) -> int | None:
    """Return the tokens that `bench --probe-server` names."""
    words = [sys.executable, "-m", "hicachectl", "bench", store, "--server", server.url]
    words += ["--probe-server", "--prefetch-threshold", page, "--time-limit", time_limit]
    done = subprocess.run(
        [*map(str, words), "--format", "json"],
        env={**os.environ, API_KEY_VARIABLE: KEY},
        stdout=subprocess.PIPE,
        check=True,
    )
    document = json.loads(done.stdout)
    print(document["verdicts"][-1].partition(": ")[2], flush=True)
    first: int | None = document["restored_faster_from_tokens"]
    return first


def measure(server: CpuServer, store: Path, page: int, runs: int, time_limit: str) -> bool:
    """Print a table for a page size; return whether the sentence is right."""
    rng = np.random.default_rng(page)
    server.attach("file", {"file_storage_path": str(store), "prefetch_threshold": page})
    filling = random_tokens(rng, 1024 + 1)
    server.generate(filling)
    await_stored(store, filling, page)
    first = said(server, store, page, time_limit)
    around = _LONGEST // 2 if first is None else first
    pages = sorted({round(share * around / page) for share in _SHARES} - {0})
    lengths = [number * page for number in pages if number * page <= _LONGEST]
    stored = {tokens: random_tokens(rng, tokens + 1) for tokens in lengths}
    for tokens in stored.values():
        server.flush()
        server.generate(tokens, 1)
        await_stored(store, tokens, page)
    seconds = np.zeros((runs, len(lengths), 2))
    for run in range(runs):
        for at, (count, tokens) in enumerate(stored.items()):
            server.flush()
            seconds[run, at, 1] = answer_seconds(server, tokens, count)
            seconds[run, at, 0] = answer_seconds(server, random_tokens(rng, count + 1), 0)
    print(
        "| page size | tokens | computed, ms | restored, ms | faster | said |\n"
        "|---|---|---|---|---|---|"
    )
    right = True
    for at, count in enumerate(lengths):
        computed, restored = (float(one) for one in seconds[:, at].min(axis=0) * 1e3)
        faster, expected = restored < computed, first is not None and count >= first
        close = first is not None and abs(count - first) <= _CLOSE * first
        equal = abs(restored - computed) <= _EQUAL * computed
        right &= close or equal or faster == expected
        names = {True: "restoring", False: "computing"}
        won = "neither" if equal else names[faster]
        print(
            f"| {page} | {count:,} | {computed:.1f} | {restored:.1f} | {won} | "
            f"{names[expected]}{' (close)' if close else ''} |"
        )
    server.detach()
    return right


def main() -> None:
    """Measure and print."""
    options = options_of(__doc__, pages="16,64,256", runs=11, time_limit="60s")
    for page in map(int, options.pages.split(",")):
        with scratch() as folder:
            write_model(folder / "model", seed=7)
            pools = ("--page-size", str(page), "--max-total-tokens", str(_TOKENS))
            python = ROOT / ".venv-sglang" / "bin" / "python"
            with CpuServer(python, folder / "model", folder / "log", *pools) as server:
                right = measure(server, folder / "store", page, options.runs, options.time_limit)
        print("right" if right else "WRONG", flush=True)


if __name__ == "__main__":
    main()
