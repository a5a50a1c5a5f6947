"""Measure `simulate` on a trace of 100 million references, beside the simulators of others.

    python -m tests.bench.bench_simulate                        # all of it, 1 GB in $TMPDIR
    python -m tests.bench.bench_simulate --references 10000000  # a shorter trace
    python -m tests.bench.bench_simulate --lmcache DIR          # also beside LMCache's simulator

`pip install --no-deps --target DIR lmcache==0.5.6` makes DIR; kvcache-simulator is a development
dependency. `--trace FILE` keeps the trace, and reads it again if it exists.

The trace has requests of sessions whose prompts grow by turns, after system prompts of Zipf's law,
and of single prompts. All seconds of a process count: start, reading, numba's compilations.

Others replay the first `--cut` references at the same capacities: kvcache-simulator's C++ core LRU
that evicts leaves first, as `lru`; LMCache's simulator LRU that evicts heads first, as
`hicachefile` with an eviction ratio of 1. Their hit tokens must equal ours.
"""

from __future__ import annotations

import heapq
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tests.bench.runner import HICACHECTL, Command, options_of, scratch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Peer = Callable[[Path, Sequence[int]], list[int]]

BLOCK_TOKENS = 512
PROMPTS = 2000  # system prompts
STARTS_A_SECOND = 25  # sessions that begin
LONGEST = 424  # blocks of a request


def main() -> None:
    # `peer`, `capacities` and `output` are for the processes that this one starts.
    arguments = options_of(
        __doc__,
        references=100_000_000,
        cut=3_000_000,
        trace=Path,
        lmcache=Path,
        peer="",
        capacities="",
        output=Path,
    )
    if arguments.peer:
        capacities = [int(capacity) for capacity in arguments.capacities.split(",")]
        hits = PEERS[arguments.peer](arguments.trace, capacities)
        arguments.output.write_text(json.dumps(hits))
        return
    with scratch() as folder:
        trace = arguments.trace or folder / "trace.jsonl"
        if not trace.exists():
            write_trace(trace, arguments.references)
        simulated(trace, capacities_of(arguments.references, 20), "lru,hicachefile")
        simulated(trace, capacities_of(arguments.references, 5), "optimal")
        measure_peers(trace, folder, arguments.cut, arguments.lmcache)


def capacities_of(references: int, count: int) -> list[int]:
    """Return capacities that hold the longest request, up to a sixteenth of the references."""
    capacities: list[int] = np.geomspace(LONGEST, references / 16, count).astype(int).tolist()
    return capacities


def write_trace(path: Path, references: int) -> None:
    """Write requests until they have so many references, holding only the open sessions."""
    begun = time.perf_counter()
    written = requests = 0
    with path.open("w") as file:
        for milliseconds, blocks, ids in sessions():
            file.write(
                f'{{"timestamp": {milliseconds}, "input_length": {blocks * BLOCK_TOKENS}, '
                f'"output_length": 256, "hash_ids": [{ids}]}}\n'
            )
            written += blocks
            requests += 1
            if written >= references:
                break
    seconds = time.perf_counter() - begun
    size = path.stat().st_size / 1e6
    print(f"{requests:,} requests, {written:,} references, {size:,.0f} MB, made in {seconds:.0f} s")


def sessions() -> Iterator[tuple[int, int, str]]:
    """Yield requests in the order of time: milliseconds, number of blocks, ids.

    Two in three sessions go on with four turns in five, after half a minute in the median. Ids are
    kept as text, since a session's next prompt begins with all of them.
    """
    chance = random.Random(7)
    fresh = 0

    def more(count: int) -> str:
        nonlocal fresh
        fresh += count
        return ",".join(map(str, range(fresh - count, fresh)))

    prompts = [(count, more(count)) for count in chance.choices(range(4, 41), k=PROMPTS)]
    weights = np.cumsum(1 / np.arange(1, PROMPTS + 1)).tolist()
    waiting: list[tuple[float, int, int, str]] = [(0.0, 0, 0, "")]
    number = 0
    while True:
        now, key, blocks, ids = heapq.heappop(waiting)
        goes_on = chance.random() < 0.8
        if not blocks:  # the start of a session, and of the next one later
            number += 1
            start = now + chance.expovariate(STARTS_A_SECOND / 1000)
            heapq.heappush(waiting, (start, number, 0, ""))
            blocks, ids = chance.choices(prompts, cum_weights=weights)[0]
            goes_on = key % 3 > 0
        added = chance.randint(1, 24) if goes_on or key % 3 else chance.randint(40, 200)
        blocks, ids = blocks + added, f"{ids},{more(added)}"
        yield int(now), blocks, ids
        if goes_on and blocks < 400:
            pause = chance.lognormvariate(10.3, 1.5)
            heapq.heappush(waiting, (now + pause, key, blocks, ids))


def cut_trace(trace: Path, cut: Path, lookups: Path, references: int) -> None:
    """Copy the first requests until they have so many references, also as LMCache's lookup log."""
    with trace.open() as source, cut.open("w") as file, lookups.open("w") as log:
        for line in source:
            file.write(line)
            request = json.loads(line)
            event = {
                "timestamp": request["timestamp"] / 1000,
                "seq_len": request["input_length"],
                "chunk_size": BLOCK_TOKENS,
                "chunk_hashes": [f"{block:#x}" for block in request["hash_ids"]],
            }
            log.write(json.dumps(event) + "\n")
            references -= len(request["hash_ids"])
            if references <= 0:
                break


def kvcache_simulator(trace: Path, capacities: Sequence[int]) -> list[int]:
    """Return the hit tokens of kvcache-simulator's C++ core, in the later half of the requests."""
    from kvcache_sim.cpp_backend import run_cpp_sweep
    from kvcache_sim.trace import parse_trace_file

    requests = parse_trace_file(trace, block_size=BLOCK_TOKENS)
    found = run_cpp_sweep(
        requests,
        capacities=list(capacities),
        policies=["lru"],
        warmup_requests=requests.request_count // 2,
    )
    return [found.results["lru", capacity].hitTokens for capacity in capacities]


def lmcache(trace: Path, capacities: Sequence[int]) -> list[int]:
    """Return the hit tokens of LMCache's simulator."""
    from lmcache.tools.cache_simulator.simulator import load_lookup_events, simulate

    events = load_lookup_events([trace])
    return [simulate(events, size, 1, fast=True)["total_hit_tokens"] for size in capacities]


PEERS: dict[str, Peer] = {"kvcache-simulator": kvcache_simulator, "LMCache": lmcache}


def measure_peers(trace: Path, folder: Path, references: int, packages: Path | None) -> None:
    """Replay the beginning of a trace by others and by ours, and compare their processor time.

    packages: folder of LMCache; None to leave it out.
    """
    from kvcache_sim.cpp_backend import ensure_cpp_simulator

    ensure_cpp_simulator()  # it compiles at its first use; these seconds do not count
    cut, lookups = folder / "cut.jsonl", folder / "lookup_hashes_cut.jsonl"
    cut_trace(trace, cut, lookups, references)
    capacities = capacities_of(references, 20)
    ways = [("kvcache-simulator", cut, ("lru", "--warm-up", "0.5"))]
    if packages is not None:
        ways.append(("LMCache", lookups, ("hicachefile", "--eviction-ratio", "1")))
    for peer, path, policy in ways:
        ours, our_seconds = simulated(cut, capacities, *policy)
        output = folder / "hits.json"
        words = ["--peer", peer, "--trace", path, "--output", output]
        words += ["--capacities", ",".join(map(str, capacities))]
        paths = [os.environ.get("PYTHONPATH", ""), str(packages or "")]
        command = Command(
            sys.executable,
            *("-m", "tests.bench.bench_simulate"),
            *words,
            env={**os.environ, "PYTHONPATH": ":".join(filter(None, paths))},
        )
        seconds = printed(f"{peer}, {len(capacities)} capacities", command)
        assert json.loads(output.read_text()) == ours, peer
        print(f"{peer}: {seconds / our_seconds:.1f} times our processor time, equal hits")


def simulated(
    trace: Path, capacities: Sequence[int], policies: str, *options: str
) -> tuple[list[int], float]:
    """Run `simulate`; return the hit tokens of each row, and the seconds of processor time."""
    with scratch() as folder:
        output = folder / "rows.json"
        asked = ",".join(map(str, capacities))
        words = ["--policy", policies, "--capacity", asked, *options, "--format", "json"]
        command = Command(*HICACHECTL, "simulate", "--trace", trace, *words, "-o", output)
        seconds = printed(f"{policies}, {len(capacities)} capacities", command)
        rows = json.loads(output.read_text())["capacities"]
    for policy in dict.fromkeys(row["policy"] for row in rows):
        print(f"{policy:>12}", *(f"{r['hit_share']:.3f}" for r in rows if r["policy"] == policy))
    return [row["hit_tokens"] for row in rows], seconds


def printed(name: str, command: Command) -> float:
    """Run a command, and print its seconds and its most memory; return those of the processor."""
    wall = command()
    print(
        f"{name}: {wall:.1f} s, {command.processor_s:.1f} s of processor time, "
        f"{command.peak_mb / 1024:.2f} GiB",
        flush=True,
    )
    return command.processor_s


if __name__ == "__main__":
    main()
