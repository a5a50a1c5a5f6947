"""Measure `simulate` on a trace of 100 million references, beside the simulators of others.

    python -m tests.bench.bench_simulate                        # all of it, 1 GB in $TMPDIR
    python -m tests.bench.bench_simulate --references 10000000  # a shorter trace
    python -m tests.bench.bench_simulate --lmcache DIR          # also beside LMCache's simulator

`pip install --no-deps --target DIR lmcache==0.5.6` makes DIR; kvcache-simulator is a development
dependency. `--trace FILE` keeps the trace, and reads it again if it exists.

The trace has requests of sessions whose prompts grow by turns, after system prompts of Zipf's law,
and of single prompts. Every process reads the trace itself, and all its seconds count, imports
and numba's compilations included. Others replay the first `--cut` references: kvcache-simulator's
C++ core LRU that evicts leaves first, LMCache's simulator LRU that evicts heads first. Their hit
tokens must equal ours. Ratios compare processor time a reference and capacity.
"""

from __future__ import annotations

import heapq
import json
import os
import random
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hicachectl.requests.reading import Trace
from hicachectl.simulation.replay import replay_files, replay_lru, replay_optimal
from tests.bench.runner import options_of, scratch
from tests.simulation.peers import hit_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hicachectl.requests.chains import Requests
    from hicachectl.simulation.replay import Runs

    Found = dict[str, Any]

BLOCK_TOKENS = 512
PROMPTS = 2000  # system prompts
STARTS_A_SECOND = 25  # sessions that begin
FILE_RATIO = 0.9  # HiCacheFile's default


def main() -> None:
    # `way`, `points` and `capacities` are for the processes that this one starts.
    arguments = options_of(
        __doc__,
        references=100_000_000,
        cut=3_000_000,
        trace=Path,
        lmcache=Path,
        way="",
        points=0,
        capacities="",
    )
    if arguments.way:
        asked = arguments.points or [int(size) for size in arguments.capacities.split(",")]
        if arguments.way in OTHERS:
            found = OTHERS[arguments.way](arguments.trace, asked)
        else:
            found = ours(arguments.trace, asked, *arguments.way.split(","))
        print(json.dumps(found))
        return
    with scratch() as folder:
        trace = arguments.trace or folder / "trace.jsonl"
        if not trace.exists():
            write_trace(trace, arguments.references)
        for way, points in (("lru,hicachefile", 20), ("optimal", 5)):
            print_shares(in_process(way, trace, points, None))
        measure_others(trace, folder, arguments.cut, arguments.lmcache)


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


class Stages:
    """Seconds of the stages of a process, by the clock and of processor time."""

    def __init__(self) -> None:
        self.seconds: dict[str, tuple[float, float]] = {}
        self._begun = time.perf_counter(), 0.0  # processor time includes the imports

    def done(self, stage: str) -> None:
        """End a stage, and begin the next."""
        times = os.times()
        # Processes that this one has started and awaited count as well.
        now = time.perf_counter(), sum(times[:4])
        wall, cpu = (after - before for after, before in zip(now, self._begun, strict=True))
        self.seconds[stage] = wall, cpu
        self._begun = now


def ours(trace: Path, asked: int | Sequence[int], *replays: str) -> Found:
    """Read a trace, and replay it at some capacities, or so many."""
    stages = Stages()
    requests = Trace([str(trace)]).requests(None)
    stages.done("read")
    distinct = len(requests.names)
    capacities = [] if isinstance(asked, int) else list(asked)
    if isinstance(asked, int):
        least = max(distinct / 10_000, int(np.diff(requests.offsets).max()))
        capacities = np.geomspace(least, distinct / 4, asked).astype(int).tolist()
    served, later = {}, {}
    for name in replays:
        runs = REPLAYS[name](requests, capacities)
        stages.done(name)
        hits = [hit_tokens(requests, run) for run in runs]
        served[name] = [int(hit.sum()) for hit in hits]
        later[name] = [int(hit[len(requests) // 2 :].sum()) for hit in hits]
    print(f"{len(requests.blocks):,} references, {distinct:,} distinct")
    tokens = int(requests.tokens.sum())
    counts = {"served": served, "later": later, "tokens": tokens}
    return {"stages": stages.seconds, "capacities": capacities, **counts}


def kvcache(trace: Path, capacities: Sequence[int]) -> Found:
    """Replay LRU by kvcache-simulator's C++ core, which counts the later half of the requests."""
    from kvcache_sim.cpp_backend import ensure_cpp_simulator, run_cpp_sweep
    from kvcache_sim.trace import parse_trace_file

    ensure_cpp_simulator()  # its first run compiles; these seconds do not count
    stages = Stages()
    requests = parse_trace_file(trace, block_size=BLOCK_TOKENS)
    stages.done("read")
    found = run_cpp_sweep(
        requests,
        capacities=list(capacities),
        policies=["lru"],
        warmup_requests=requests.request_count // 2,
    )
    stages.done("lru")
    later = [found.results["lru", capacity].hitTokens for capacity in capacities]
    return {"stages": stages.seconds, "later": {"lru": later}}


def lmcache(trace: Path, capacities: Sequence[int]) -> Found:
    """Replay a lookup log by LMCache's simulator."""
    from lmcache.tools.cache_simulator.simulator import load_lookup_events, simulate

    stages = Stages()
    events = load_lookup_events([trace])
    stages.done("read")
    served = [simulate(events, size, 1, fast=True)["total_hit_tokens"] for size in capacities]
    stages.done("heads first")
    return {"stages": stages.seconds, "served": {"heads first": served}}


REPLAYS: dict[str, Callable[[Requests, Sequence[int]], Runs]] = {
    "lru": partial(replay_lru, leaves_first=True),
    "heads first": partial(replay_lru, leaves_first=False),
    "hicachefile": partial(replay_files, ratio=FILE_RATIO),
    "optimal": replay_optimal,
}
OTHERS: dict[str, Callable[[Path, Sequence[int]], Found]] = {
    "kvcache-simulator": kvcache,
    "LMCache": lmcache,
}


def in_process(way: str, trace: Path, asked: int | Sequence[int], packages: Path | None) -> Found:
    """Run replays of ours or another's simulator in a process; print its seconds and memory.

    packages: folder of further packages to import.
    """
    words = [sys.executable, "-m", "tests.bench.bench_simulate", "--way", way]
    words += ["--trace", str(trace)]
    if isinstance(asked, int):
        words += ["--points", str(asked)]
    else:
        words += ["--capacities", ",".join(map(str, asked))]
    paths = [os.environ.get("PYTHONPATH", ""), "" if packages is None else str(packages)]
    env = {**os.environ, "PYTHONPATH": ":".join(filter(None, paths))}
    begun = time.perf_counter()
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    *remarks, last = process.stdout.read().splitlines()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, words
    found: Found = json.loads(last)
    found["cpu"] = sum(stage[1] for stage in found["stages"].values())
    stages = [f"{name} {wall:.1f} ({cpu:.1f})" for name, (wall, cpu) in found["stages"].items()]
    print(
        *remarks,
        f"{way}: {time.perf_counter() - begun:.1f} s ({found['cpu']:.1f} of processor time), "
        f"{usage.ru_maxrss / (1 << 20):.2f} GiB: {', '.join(stages)}",
        sep="\n",
        flush=True,
    )
    return found


def print_shares(found: Found) -> None:
    """Print the share of the tokens that each capacity serves."""
    for name, served in found["served"].items():
        shares = [f"{hit / found['tokens']:.3f}" for hit in served]
        print(f"{name:>12}", *shares)


def measure_others(trace: Path, folder: Path, references: int, packages: Path | None) -> None:
    """Replay the beginning of a trace by others and by ours, and compare their processor time."""
    cut, lookups = folder / "cut.jsonl", folder / "lookup_hashes_cut.jsonl"
    cut_trace(trace, cut, lookups, references)
    ways = [("kvcache-simulator", "lru", cut, "later")]
    if packages is not None:
        ways.append(("LMCache", "heads first", lookups, "served"))
    for other, replay, path, counted in ways:
        ours = in_process(replay, cut, 20, None)
        theirs = in_process(other, path, ours["capacities"], packages)
        assert theirs[counted][replay] == ours[counted][replay], other
        print(f"{other}: {theirs['cpu'] / ours['cpu']:.1f} times our processor time, equal hits")


if __name__ == "__main__":
    main()
