"""What `bench --probe-server` says of a server, beside the server's own times; run by hand.

    python -m tests.bench.bench_break_even --pages 16,64,256 --runs 11

Starts a real SGLang server of a tiny model on the CPU for each page size, with SGLang's file
backend, and asks `bench --probe-server` which lengths are restored faster and slower. Then prompts
of several lengths around these are computed, and restored after the server's memory was flushed,
in turn. A sentence is wrong if the other way is faster by 3 % or more at a length of which it
speaks, in the fastest answers and in the medians; or if the lengths of which it does not speak
reach from one to more than twice it, although the times differ by more than 10 % at one of them.
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
_SHARES = (0.35, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 4.0)
_EQUAL, _UNEQUAL, _NARROW = 0.03, 0.1, 2


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


def said(server: CpuServer, store: Path, page: int, time_limit: str) -> tuple[float, float]:
    """Return up to which length computing is faster, and from which restoring, as `bench` says."""
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
    return (
        document["computed_faster_to_tokens"] or 0,
        document["restored_faster_from_tokens"] or float("inf"),
    )


def measure(server: CpuServer, store: Path, page: int, runs: int, time_limit: str) -> bool:
    """Print a table for a page size; return whether the sentence is right."""
    rng = np.random.default_rng(page)
    server.attach("file", {"file_storage_path": str(store), "prefetch_threshold": page})
    filling = random_tokens(rng, 1024 + 1)
    server.generate(filling)
    await_stored(store, filling, page)
    computed_to, restored_from = said(server, store, page, time_limit)
    ends = {end for end in (computed_to, restored_from) if 0 < end < _LONGEST} or {_LONGEST // 4}
    around = np.exp(np.mean(np.log(sorted(ends))))
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
    right, differs = True, False
    for at, count in enumerate(lengths):
        computed, restored = (float(one) for one in seconds[:, at].min(axis=0) * 1e3)
        gain = 1 - restored / computed
        median = 1 - np.divide(*np.median(seconds[:, at], axis=0)[::-1])
        sure = abs(gain) >= _EQUAL and gain * median > 0
        won = ("restoring" if gain > 0 else "computing") if sure else "neither"
        expected = "nothing"
        if count >= restored_from:
            expected = "restoring"
        elif count <= computed_to:
            expected = "computing"
        else:
            differs |= abs(gain) > _UNEQUAL
        right &= {won, expected} != {"restoring", "computing"}
        print(f"| {page} | {count:,} | {computed:.1f} | {restored:.1f} | {won} | {expected} |")
    right &= not differs or restored_from <= _NARROW * max(computed_to, page)
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
