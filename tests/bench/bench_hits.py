"""Hits of many chains in many objects, against listing and hashing alone; run by hand.

    python tests/bench/bench_hits.py [--objects 1000000] [--chains 10000] [--pages 100]

The store is a listing in memory of a TP=2 model with an indexer, with some objects missing.
Requests are a file of token ids. Prints seconds, and the time to find hits as a share of listing
the same objects, as `ls` does, and of hashing the same requests. Then the same for a store with all
pages at TP 1: finding the pages that are missing at TP 2 there, and suspecting the hashing of other
requests.
"""

from __future__ import annotations

import json
import random
import resource
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from hicachectl.backends.base import Limits, Store, Traits, scan_schema
from hicachectl.formats.hashing import page_hashes
from hicachectl.formats.profile import parse_profile
from hicachectl.pages.scanning import take_inventory
from hicachectl.requests.chains import Hashing, Requests, hex_pages, requests_of
from hicachectl.requests.elsewhere import find_elsewhere, suspect_hashing
from hicachectl.requests.forms import Request
from hicachectl.requests.hits import find_hits
from hicachectl.requests.reading import Trace
from hicachectl.requests.rows import hit_rows
from tests.bench import runner

if TYPE_CHECKING:
    from collections.abc import Collection, Generator

PAGE_SIZE = 16
SUFFIXES = ("_m_0_2.bin", "_m_1_2.bin", ".mamba_m_0_2.bin", ".mamba_m_1_2.bin")
OTHER_SUFFIXES = ("_m_0_1.bin", ".mamba_m_0_1.bin")
PROFILE = f"""
model = "m"
page_size = {PAGE_SIZE}
tp = 2
[[pools]]
name = "kv"
kind = "opaque"
nbytes = 4096
[[pools]]
name = "mamba"
kind = "opaque"
nbytes = 4096
"""


class Listing(Store):
    """A store that can only be listed."""

    grammar = "file"
    traits = Traits()
    limits = Limits(batch_objects=1, batch_bytes=1, parallel_reads=1, parallel_writes=1)

    def __init__(self, batches: list[pa.RecordBatch]) -> None:
        self.url, self.batches = "memory", batches

    @classmethod
    def from_url(cls, url: Any) -> Any:
        raise NotImplementedError

    def scan(self, columns: Collection[str] = ()) -> Generator[Any, None, None]:
        names = scan_schema(columns).names
        yield from (batch.select(names) for batch in self.batches)

    def look(self, rows: Any, columns: Collection[str] = ()) -> Any:
        raise NotImplementedError

    def read_into(self, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError


def listing(
    pages: np.ndarray[Any, Any], gone: float, suffixes: tuple[str, ...] = SUFFIXES
) -> Listing:
    """Return every page with all objects except a share `gone`."""
    chance = np.random.default_rng(0)
    batches = []
    for suffix in suffixes:
        there = pages[chance.random(len(pages)) >= gone]
        for start in range(0, len(there), 65_536):
            names = hex_pages(np.ascontiguousarray(there[start : start + 65_536]))
            keys = pa.array([name + suffix for name in names.to_pylist()], pa.binary())
            sizes = pa.array(np.full(len(keys), 4096))
            fields = {"key": keys, "nbytes": sizes, "mtime_ns": sizes}
            batches.append(pa.record_batch(fields).cast(scan_schema(("nbytes", "mtime_ns"))))
    return Listing(batches)


def timed(what: str, function: Any) -> tuple[Any, float]:
    """Call, print the seconds, and return both."""
    results: list[Any] = []
    seconds = runner.timed(lambda: results.append(function()))()
    print(f"{what:44} {seconds:7.2f} s")
    return results[0], seconds


def main() -> None:
    """Measure and print."""
    options = runner.options_of(__doc__, objects=1_000_000, chains=10_000, pages=100)
    chance = random.Random(0)
    # Requests share prefixes: they have as many distinct pages as the store.
    stems = max(1, options.objects // len(SUFFIXES) // options.pages)
    tokens = options.pages * PAGE_SIZE + 1
    prompts = [[chance.randrange(150_000) for _ in range(tokens)] for _ in range(stems)]
    stored = np.concatenate([page_hashes(prompt, PAGE_SIZE) for prompt in prompts])
    store = listing(stored, gone=0.001)
    profile = parse_profile(PROFILE)
    with runner.scratch() as folder:
        path = folder / "requests.jsonl"
        with path.open("w") as file:
            for number in range(options.chains):
                file.write(json.dumps(prompts[number % stems]) + "\n")
        print(f"{options.chains} requests of {options.pages} pages, {options.objects} objects")
        chains, hashing = timed(
            "read and hash the requests",
            lambda: Trace([str(path)]).requests(Hashing.of(profile)),
        )
    inventory, listed = timed("list the store", lambda: take_inventory(store, profile))
    hits, found = timed("find hits", lambda: find_hits(inventory, 0, chains))
    _, _ = timed("make rows", lambda: hit_rows(hits, PAGE_SIZE, 256))
    check(chains, hits)
    wide = take_inventory(listing(stored, 0.0, OTHER_SUFFIXES), profile, only_others=True)
    missed = find_hits(wide, 0, chains)
    elsewhere, _ = timed("find missing pages elsewhere", lambda: find_elsewhere(wide, missed))
    assert len(elsewhere[0].pages) == len(missed.page_names)
    strange = requests_of(
        [Request("", list(range(PAGE_SIZE * options.pages)))], Hashing(2 * PAGE_SIZE)
    )
    said, _ = timed("suspect the hashing", lambda: suspect_hashing("x", wide, strange))
    assert "no other usual page size" in said
    print(f"find hits / list {found / listed:5.2f}   find hits / hash {found / hashing:5.2f}")
    print(f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


def check(chains: Requests, hits: Any) -> None:
    """Check that the hits are real work, not a shortcut."""
    assert len(hits.usable_pages) == len(chains)
    assert 0 < hits.usable_pages.mean() < np.diff(chains.offsets).mean()


if __name__ == "__main__":
    main()
