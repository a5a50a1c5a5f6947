"""The thresholds below which a server computes tokens that the store has."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hicachectl.formats.hashing import page_hashes_hex
from hicachectl.formats.models.server_info import flags_from_server_info
from tests.conformance.cpu_server import MODEL, PAGE_SIZE, CpuServer
from tests.conformance.tiny_llama import VOCABULARY
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conformance.conftest import SglangSession
    from tests.conftest import Invoke

pytestmark = [pytest.mark.conformance, pytest.mark.xdist_group("sglang-server")]

STATED = (None, "{}", '{"prefetch_threshold": 64}')
SMALL_PAGE = 2  # five pages have as many tokens as the load-back threshold


def test_the_threshold_is_what_sglang_reads(sglang_session: SglangSession) -> None:
    info = {"model_path": "m", "tp_size": 1, "page_size": 16}
    found = [
        flags_from_server_info({**info, "hicache_storage_backend_extra_config": stated})
        for stated in STATED
    ]
    read = sglang_session.ask("read_thresholds", STATED)
    assert [one.flags.prefetch_threshold for one in found] == read


@pytest.fixture(scope="module")
def small_pages(
    tmp_path_factory: pytest.TempPathFactory, sglang_python: Path, tiny_model: Path
) -> Iterator[CpuServer]:
    """A server with pages so small that the load-back threshold matters."""
    log = tmp_path_factory.mktemp("small-pages") / "server.log"
    with CpuServer(sglang_python, tiny_model, log, "--page-size", str(SMALL_PAGE)) as server:
        yield server


@pytest.mark.parametrize("threshold", [0, 1, 63, 64, 65, 127, 128, 129])
def test_pages_at_and_around_the_threshold(
    cpu_server: CpuServer, invoke: Invoke, tmp_path: Path, threshold: int
) -> None:
    """`hits` and the server agree to the token, whether or not the threshold is whole pages."""
    served = compare(cpu_server, invoke, tmp_path, threshold, PAGE_SIZE)
    assert served == [tokens * (tokens >= threshold) for tokens in range(0, 256, PAGE_SIZE)]


@pytest.mark.parametrize("threshold", [0, 3, 8, 9, 10, 11, 12])
def test_tokens_at_and_around_the_load_back_threshold(
    small_pages: CpuServer, invoke: Invoke, tmp_path: Path, threshold: int
) -> None:
    """A server fetches fewer than ten tokens, but computes them again."""
    served = compare(small_pages, invoke, tmp_path, threshold, SMALL_PAGE, most=6)
    least = max(threshold, 10)
    assert served == [tokens * (tokens >= least) for tokens in range(0, 14, SMALL_PAGE)]


def compare(
    server: CpuServer,
    invoke: Invoke,
    folder: Path,
    threshold: int,
    page_size: int,
    most: int = 3,
) -> list[int]:
    """Return the tokens that a server takes from a store that has 0, 1, …, most pages of prompts.

    Each prompt has two pages more. The rows of `hits` must tell the same tokens, and `simulate` and
    `prewarm` the same sum.
    """
    store = folder / "store"
    server.detach()
    server.attach("file", {"file_storage_path": str(store), "prefetch_threshold": threshold})
    random = np.random.default_rng(threshold)
    prompts = []
    for pages in range(most + 1):
        size = (pages + 2) * page_size + 1
        tokens = [int(token) for token in random.integers(3, VOCABULARY, size)]
        server.generate(tokens[: pages * page_size + 1], 1)
        names = page_hashes_hex(tokens, page_size)[:pages]
        files = [store / f"{name}_{MODEL}_0_1.bin" for name in names]
        wait_until(partial(_exist, files), "pages are not written")
        prompts.append(tokens)
    asked = folder / "asked.jsonl"
    asked.write_text("".join(f"{json.dumps(tokens)}\n" for tokens in prompts))
    words = ("hits", store, "--token-ids", asked, "--server", server.url)
    rows = invoke(*words, "--format", "jsonl").rows
    assert [row["usable_pages"] for row in rows] == list(range(most + 1))
    empty = folder / "empty"
    empty.mkdir()
    simulated = invoke.document("simulate", store, "--trace", asked, "--server", server.url)
    nothing = ("prewarm", store, "--from", empty, "--allow-empty", "--dry-run")
    warmed = invoke.document(*nothing, "--token-ids", asked, "--server", server.url)
    server.flush()
    found = []
    for tokens in prompts:
        answer = server.generate(tokens, 1)
        assert answer.device == answer.host == 0
        found.append(answer.storage)
    assert [row["served_tokens"] for row in rows] == found
    assert simulated["served_tokens"] == warmed["served_tokens"] == sum(found)
    return found


def _exist(paths: list[Path]) -> bool:
    return all(path.exists() for path in paths)
