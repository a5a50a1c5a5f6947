"""What a cache is worth to requests, in `hicachectl report`."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from hicachectl.backends.base import open_store
from hicachectl.formats.profile import parse_profile
from hicachectl.report.worth import Worth
from hicachectl.requests.chains import Hashing, requests_of
from hicachectl.requests.forms import Request
from hicachectl.requests.measuring import HitsRequest
from hicachectl.simulation.simulate import SimulateRequest, simulate
from tests.report.page_texts import picture_of, text_of
from tests.stores import DSA, OLD, put

if TYPE_CHECKING:
    from pathlib import Path

    from hicachectl.requests.chains import Requests
    from tests.conftest import Invoke

# Prompts of four pages and a token that no server looks up. The last two are not in order.
PROMPTS = [[number] * 12 + [0, 0, 0, 0, 9] for number in (1, 2, 1, 3, 4, 2, 1, 1, 5)]
TIMES = [OLD + 3600 * hour for hour in (0, 1, 2, 3, 4, 5, 6, 8, 7)]
HASHING = Hashing(4)


def asked() -> list[Request]:
    pairs = zip(PROMPTS, TIMES, strict=True)
    return [Request(where="", token_ids=prompt, time=float(time)) for prompt, time in pairs]


def requests() -> Requests:
    return requests_of(asked(), HASHING)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a store of the prompts of 1, 3 and 5; the last page of 1 lacks its indexer."""
    store = tmp_path / "store"
    for request, time in zip(asked(), TIMES, strict=True):
        number = request.token_ids[0]
        for place, page in enumerate(HASHING.hashes(request)):
            if number in (1, 3, 5):
                name = page.tobytes().hex()
                put(store, f"{name}_x-dsa.bin", 9216, time)
                if (number, place) != (1, 3):
                    put(store, f"{name}.indexer_x-dsa.bin", 1056, time)
    return store


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": r.time, "token_ids": r.token_ids} for r in asked()]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "dsa.toml").write_text(DSA)
    return trace


def test_the_numbers_are_those_of_simulate_on_the_store(store: Path) -> None:
    profile = parse_profile(DSA)
    picture = picture_of(store, profile, hits=HitsRequest(requests=requests(), profile=profile))
    with open_store(str(store)) as source:
        result = simulate(SimulateRequest(requests=requests(), profile=profile), source)
    worth = picture.requested.worth
    assert isinstance(worth, Worth)
    assert worth.rows == result.rows.to_pylist()
    changing = {"store": None, "free_bytes": None}  # others use the same disk
    assert {**worth.document, **changing} == {**result.document, **changing}
    verdict = ". ".join(worth.verdicts)
    assert "The store as it is serves 52.3% of 153 prompt tokens; " in verdict
    room = [text for text in result.remarks if text.startswith("Today's size, ")]
    assert [text.split(" may not be the limit")[0] in verdict for text in room] == [True]
    assert worth.tokens == 9 * 17
    served = worth.document["served_tokens"]
    losses = {one["cause"]: one["tokens"] for one in worth.document["losses"]}
    assert served == 4 * 12 + 16 + 16  # the prompts of 1 without their last pages, those of 3 and 5
    assert losses == {
        "first use": 32,  # of the prompts of 2 and 4
        "incomplete or damaged": 16,  # the last pages of the prompts of 1
        "evicted": 16,  # the second prompt of 2: its first is older than the store
        "not looked up": 9,
    }
    assert served + sum(losses.values()) == worth.tokens


def test_pages_that_no_request_uses_are_counted(store: Path, trace: Path, invoke: Invoke) -> None:
    profile = parse_profile(DSA)

    def unused() -> tuple[int, int | None, int, int | None] | None:
        asked = HitsRequest(requests=requests(), profile=profile)
        return picture_of(store, profile, hits=asked).requested.unused

    held = sum(path.stat().st_size for path in store.iterdir())
    assert unused() == (0, 0, 12, held)
    for number in range(3):
        put(store, f"{number:064x}_x-dsa.bin", 9216, OLD)
    put(store, f"{7:064x}_y-other.bin", 9216, OLD)  # of a deployment that was not measured
    assert unused() == (3, 3 * 9216, 15, held + 3 * 9216)
    made = store.parent / "page.html"
    words = ("--trace", trace, "--profile", store.parent / "dsa.toml", "--fail-on", "never")
    invoke("report", store, *words, "-o", made)
    text = text_of(made)
    assert "Used by no request 3 of 15 pages, 27.0 KiB of " in text
    assert "rm --free 27648B --trace FILE" in text
    asked = ("--free", "27648B", *words[:4], "--dry-run", "--format", "jsonl")
    rows = invoke("rm", store, *asked).rows
    assert {row["page"] for row in rows} == {f"{number:064x}" for number in range(3)}


@pytest.mark.slow
def test_the_page_has_the_curve_and_the_losses_with_their_denominators(
    store: Path, trace: Path, tmp_path: Path, invoke: Invoke
) -> None:
    made, profile = tmp_path / "page.html", tmp_path / "dsa.toml"
    arguments = ("--trace", trace, "--profile", profile, "--fail-on", "never", "-o", made)
    invoke("report", store, *arguments)
    text = text_of(made)
    assert "What is it worth? hicachefile: " in text
    sections = re.findall('<section id="([a-z]+)"', made.read_text("utf-8"))
    assert (sections[:3], sections[-1]) == (["verdict", "worth", "findings"], "page")
    assert "The caches begin with the pages of the store" in text
    assert "Shares are of 153 prompt tokens of 9 requests" in text
    assert "capacity pages hicachefile optimal 16.0 KiB 1 " in text
    assert "prompt tokens tokens share of 153 served from the store 80 52.3 % " in text
    assert "incomplete or damaged 16 10.5 %" in text
    invoke("report", store, *arguments, "--since", "2023-11-15")
    text = text_of(made)
    assert "The caches begin empty, and keep the pages that the requests write." in text
    assert "where today's hits are lost if the requests have page hashes, and a profile" in text


@pytest.mark.slow
def test_block_ids_make_a_curve_of_pages_only(store: Path, tmp_path: Path, invoke: Invoke) -> None:
    blocks, made = tmp_path / "blocks.jsonl", tmp_path / "page.html"
    lines = [{"timestamp": n, "hash_ids": [1, 2, n], "input_length": 1536} for n in range(9)]
    blocks.write_text("".join(json.dumps(line) + "\n" for line in lines))
    invoke("report", store, "--trace", blocks, "--fail-on", "never", "-o", made)
    text = text_of(made)
    assert "its block ids do not give the keys of pages" in text
    assert "Shares are of 13824 prompt tokens of 9 requests" in text
    assert "pages hicachefile optimal 1 " in text
    assert "Without a profile, the bytes of a page are unknown." in text
    assert "Where today's hits are lost" not in text
    listed = tmp_path / "pages.jsonl"
    listed.write_text(json.dumps(["0" * 64]))
    invoke("report", store, "--pages", listed, "--fail-on", "never", "-o", made)
    assert (
        f"Caches could not be simulated. {listed}: does not tell the tokens of a block"
        in text_of(made)
    )
