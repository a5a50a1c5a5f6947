"""The logs of a real server's requests go into commands as they are.

The server logs requests of every kind, and HiCacheFile stores their pages: the pages that are named
by a log must be those of the store. Then each request is repeated with empty pools, so that the log
tells which tokens the store has served.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import socket
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from hicachectl.requests.chains import Hashing, requests_of
from hicachectl.requests.forms import Request
from hicachectl.requests.tokenizing import DirectoryTokenizer
from tests.conformance import tiny_llama
from tests.conformance.cpu_server import DEVICE_TOKENS, MODEL, PAGE_SIZE, CpuServer, prompt
from tests.skips import need_module
from tests.tiny_tokenizers import make_tokenizer
from tests.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.conformance, pytest.mark.xdist_group("sglang-server")]

ADAPTER = "support"
SAMPLING = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
TEXT = "The cat sat on the mat, and the dog looked at the cat. " * 12
CHAT = [{"role": "system", "content": TEXT}, {"role": "user", "content": "weather in Paris"}]
LOGPROBS = {"return_logprob": True, "top_logprobs_num": 150}  # a line of more than 16 KiB


def _generate(**members: Any) -> tuple[str, dict[str, Any]]:
    return "/generate", {"sampling_params": SAMPLING, **members}


def _openai(path: str, model: str = MODEL, **members: Any) -> tuple[str, dict[str, Any]]:
    return f"/v1/{path}", {"model": model, "max_tokens": 6, "temperature": 0, **members}


# Each has tokens of its own, a salt or an adapter, so that none finds pages of another.
REQUESTS = [
    _generate(input_ids=prompt(1, 3)),
    _generate(input_ids=prompt(1, 3), cache_salt="tenant"),
    _generate(input_ids=prompt(1, 3), extra_key="key", cache_salt="tenant"),
    _generate(input_ids=prompt(1, 3), lora_path=ADAPTER),
    _generate(input_ids=prompt(1, 3), lora_path=ADAPTER, extra_key="key", cache_salt="tenant"),
    _generate(input_ids=prompt(2, 2)[: 2 * PAGE_SIZE]),  # the last page is computed again
    _generate(input_ids=prompt(3, 20), **LOGPROBS),
    _generate(input_ids=prompt(4, 2), session_id="one"),
    _generate(text=TEXT, cache_salt="text"),
    _openai("chat/completions", messages=CHAT),
    _openai("chat/completions", f"{MODEL}:{ADAPTER}", messages=CHAT, cache_salt="tenant"),
    _openai("completions", prompt=TEXT, extra_key="completion"),
    _openai("completions", prompt=prompt(5, 2)),
]
TEXTS = 2
# One request is several in the log.
SEVERAL = [
    _generate(input_ids=[prompt(6, 2), prompt(7, 2)], lora_path=[ADAPTER, None], cache_salt="many"),
    _generate(input_ids=prompt(8, 2), lora_path=ADAPTER, sampling_params={**SAMPLING, "n": 2}),
]


class Served(NamedTuple):
    """What the server leaves.

    model: its directory, with the tokenizer. store: directory of HiCacheFile after each request
    was made once. log, metrics: folders of the request log and of the metrics files. stdout: what
    the server printed. cold, warm, odd: lines of the log that were written while each request was
    made once, while REQUESTS were made again with empty pools, and after that.
    """

    model: Path
    store: Path
    log: Path
    metrics: Path
    stdout: Path
    cold: list[str]
    warm: list[str]
    odd: list[str]


@pytest.fixture(scope="module")
def served(sglang_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    need_module("tokenizers")
    place = tmp_path_factory.mktemp("logged")
    model, adapter, store = place / "model", place / "adapter", place / "store"
    tiny_llama.write_model(model, seed=7)
    make_tokenizer(model, "qwen")
    tiny_llama.write_adapter(adapter, seed=1)
    log, metrics, stdout = place / "log", place / "metrics", place / "server.log"
    log.mkdir()
    newest = log / f"{socket.gethostname()}_0.log"
    newest.touch()
    hours_ago = time.time() - 2 * 3600
    os.utime(newest, (hours_ago, hours_ago))  # the server rotates it before its first line
    options = [
        *("--log-requests", "--log-requests-level", "3", "--log-requests-format", "json"),
        *("--log-requests-target", "stdout", str(log)),
        *("--export-metrics-to-file", "--export-metrics-to-file-dir", str(metrics)),
        *("--lora-paths", f"{ADAPTER}={adapter}", "--lora-backend", "torch_native"),
    ]
    ends = [0]
    with CpuServer(sglang_python, model, stdout, *options, tokenizes=True) as server:
        server.attach("file", {"file_storage_path": str(store)})
        for request in (*REQUESTS, *SEVERAL):
            server.post(*request)
        _await_quiet(store)
        ends.append(newest.stat().st_size)
        stored = place / "stored"
        shutil.copytree(store, stored)
        for request in REQUESTS:
            server.flush()
            server.post(*request)
        ends.append(newest.stat().st_size)
        _make_odd_requests(server)
        ends.append(newest.stat().st_size)
    data = newest.read_bytes()
    spans = itertools.pairwise(ends)
    parts = (data[start:end].decode().splitlines(keepends=True) for start, end in spans)
    return Served(model, stored, log, metrics, stdout, *parts)


def _await_quiet(store: Path) -> None:
    """Wait until no page has been written for a second."""
    since, count = time.monotonic(), 0

    def quiet() -> bool:
        nonlocal since, count
        if (now := sum(1 for _ in store.iterdir())) != count:
            since, count = time.monotonic(), now
        return time.monotonic() - since > 1

    wait_until(quiet)


def _make_odd_requests(server: CpuServer) -> None:
    """Make requests of which the log does not tell the tokens, or that are not served."""
    session = server.post("/open_session", {"capacity_of_str_len": 10000})
    first = server.post(*_generate(input_ids=prompt(9, 1), session_params={"id": session}))
    before = {"id": session, "rid": first["meta_info"]["id"]}
    server.post(*_generate(input_ids=prompt(10, 1), session_params=before))
    too_long = _generate(input_ids=prompt(11, DEVICE_TOKENS // PAGE_SIZE + 1))
    with pytest.raises(AssertionError, match="exceeds the maximum allowed length"):
        server.post(*too_long)
    for level in (1, 0):
        server.configure_logging(level)
        server.post(*REQUESTS[3])


def _finished(lines: list[str]) -> list[dict[str, Any]]:
    """Return the records of requests that were answered, of any kind but health checks."""
    records = [json.loads(line.partition("] ")[2]) for line in lines]
    return [
        record
        for record in records
        if record["event"] == "request.finished" and "HEALTH_CHECK" not in record["rid"]
    ]


def _pages_in(store: Path) -> set[str]:
    return {path.name.partition("_")[0] for path in store.iterdir()}


def test_the_log_tells_what_its_reader_relies_on(served: Served) -> None:
    """Facts of SGLang's log that its documents do not state."""
    (rotated,) = (path for path in served.log.iterdir() if not path.name.endswith(".log"))
    assert re.fullmatch(r".+_0\.log\.\d{4}-\d\d-\d\d_\d\d", rotated.name)
    cold = _finished(served.cold)
    assert all(re.match(r"\[[-\d]+ [:\d]+\] \{\"timestamp\": ", line) for line in served.cold)
    # A batch is a line for each prompt, but n > 1 has one more, without the adapter.
    several = cold[len(REQUESTS) :]
    adapters = [record["obj"]["lora_path"] for record in several]
    assert adapters == [ADAPTER, None, None, ADAPTER, ADAPTER]
    outputs = [len(record["out"]["output_ids"]) for record in several]
    assert outputs == [6, 6, 0, 6, 6]
    texts = [record for record in cold if record["obj"]["input_ids"] is None]
    assert [record["obj"]["text"] for record in texts] == [TEXT] * TEXTS
    for record in _finished(served.warm):
        details = record["out"]["meta_info"]["cached_tokens_details"]
        assert (details["device"], details["host"]) == (0, 0)
        assert details["storage"] > 0
    _, continued, refused, *levels = _finished(served.odd)
    assert len(continued["obj"]["input_ids"]) < continued["out"]["meta_info"]["prompt_tokens"]
    assert refused["out"]["meta_info"]["prompt_tokens"] == 1
    for record in levels:
        assert "input_ids" not in record["obj"]
        assert record["obj"]["lora_id"]
        assert record["out"]["meta_info"]["cached_tokens"] > 0


def test_pages_named_by_the_log_are_those_of_the_store(served: Served) -> None:
    tokenizer = DirectoryTokenizer(served.model)
    requests = []
    for record in _finished(served.cold):
        told = record["obj"]
        if (tokens := told["input_ids"]) is None:
            (tokens,) = tokenizer.encode([told["text"]])
        if not record["out"]["output_ids"]:  # the first of n > 1
            continue
        key = (told["extra_key"] or "") + (told["lora_id"] or "")
        requests.append(Request("", tokens, key or None, told["cache_salt"]))
    named = requests_of(requests, Hashing(PAGE_SIZE)).page_names.to_pylist()
    assert set(named) == _pages_in(served.store)
