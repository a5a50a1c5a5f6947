"""Compare our page hashing with SGLang's native function; run by hand.

    python tests/bench/bench_hashing.py

SGLang's interpreter is HICACHECTL_SGLANG_PYTHON, else .venv-sglang/bin/python of the checkout. Both
sides hash the same chain of 64-bit tokens to hex text, in turns, each in one thread.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from array import array
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

TOKENS = 1_000_000
PAGE_SIZES = (1, 16, 64)
ROUNDS = 5
VOCABULARY = 151_936
CHECKOUT = Path(__file__).resolve().parents[2]


def main() -> None:
    from hicachectl.formats.hashing import page_hashes_hex

    interpreter = os.environ.get("HICACHECTL_SGLANG_PYTHON")
    chain = token_chain()
    with subprocess.Popen(
        [interpreter or CHECKOUT / ".venv-sglang/bin/python", __file__, "--sglang"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as sglang:
        assert sglang.stdin is not None
        assert sglang.stdout is not None
        print(f"{TOKENS:,} tokens, best of {ROUNDS}; million tokens a second")
        print("page size      ours    SGLang  ours/SGLang")
        for page_size in PAGE_SIZES:
            ours, theirs = [], []
            for _ in range(ROUNDS):
                seconds, last = timed(partial(page_hashes_hex, chain, page_size))
                ours.append(seconds)
                print(page_size, file=sglang.stdin, flush=True)
                their_seconds, their_last = json.loads(sglang.stdout.readline())
                theirs.append(their_seconds)
                assert last == their_last
            rates = [TOKENS / min(side) / 1e6 for side in (ours, theirs)]
            print(f"{page_size:9}{rates[0]:10.2f}{rates[1]:10.2f}{rates[0] / rates[1]:13.2f}")


def serve_sglang() -> None:
    """Time one page size per line of stdin; runs in SGLang's environment."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from sglang.srt.mem_cache.utils import get_hash_str

    chain = array("q", token_chain())
    for line in sys.stdin:
        page_size = int(line)
        seconds, last = timed(partial(get_hash_str, chain, None, page_size))
        print(json.dumps([seconds, last]), file=answers, flush=True)


def token_chain() -> array[int]:
    return array("q", (index * 7919 % VOCABULARY for index in range(TOKENS)))


def timed(hash_pages: Callable[[], list[str]]) -> tuple[float, str]:
    start = time.perf_counter()
    hashes = hash_pages()
    return time.perf_counter() - start, hashes[-1]


if __name__ == "__main__":
    serve_sglang() if "--sglang" in sys.argv else main()
