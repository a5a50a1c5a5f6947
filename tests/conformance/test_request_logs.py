"""The logs of a real server's requests go into commands as they are.

The server logs requests of every kind, and HiCacheFile stores their pages: the pages that are named
by a log must be those of the store. Then each request is repeated with empty pools, so that the log
tells which tokens the store has served.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
import re
import shutil
import socket
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.conformance import tiny_llama
from tests.conformance.cpu_server import DEVICE_TOKENS, MODEL, PAGE_SIZE, CpuServer, prompt
from tests.skips import need_module
from tests.tiny_tokenizers import make_tokenizer
from tests.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke

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
TEXTS = 2  # of REQUESTS
LEVELS = 2  # levels of the log without tokens: 0 and 1
ROWS = ("--format", "jsonl")
CUT = 16 << 10  # bytes of a line after which containers begin another
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
    parts = (
        io.StringIO(data[start:end].decode(), newline="\n").readlines() for start, end in spans
    )
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
    """Make requests that the server does not serve, or whose tokens are not in the log."""
    session = server.post("/open_session", {"capacity_of_str_len": 10000})
    first = server.post(*_generate(input_ids=prompt(9, 1), session_params={"id": session}))
    before = {"id": session, "rid": first["meta_info"]["id"]}
    server.post(*_generate(input_ids=prompt(10, 1), session_params=before))
    too_long = _generate(input_ids=prompt(11, DEVICE_TOKENS // PAGE_SIZE + 1))
    with pytest.raises(AssertionError, match="exceeds the maximum allowed length"):
        server.post(*too_long)
    for level in range(LEVELS):
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


def test_prewarm_of_another_store_copies_the_pages_that_the_server_wrote(
    served: Served, invoke: Invoke, tmp_path: Path
) -> None:
    """The log is rotated, and the rotated file compressed."""
    (rotated,) = (path for path in served.log.iterdir() if not path.name.endswith(".log"))
    log = tmp_path / "log"
    log.mkdir()
    half = len(served.cold) // 2
    with gzip.open(log / f"{rotated.name}.gz", "wt", encoding="utf-8") as file:
        file.writelines(served.cold[:half])
    (log / f"{rotated.name.partition('.log')[0]}.log").write_text("".join(served.cold[half:]))
    options = ("--from", served.store, "--trace", log, *_deployment(served))
    document = invoke.document("prewarm", tmp_path / "store", *options)
    assert document["missing_pages"] == 0
    copied, stored = _pages_in(tmp_path / "store"), _pages_in(served.store)
    assert copied < stored
    # No request reads the last page of a prompt without a rest.
    lengths = [record["out"]["meta_info"]["prompt_tokens"] for record in _finished(served.cold)]
    assert len(stored - copied) == sum(length % PAGE_SIZE == 0 for length in lengths)


def test_served_tokens_of_hits_are_those_that_the_server_got_from_the_store(
    served: Served, invoke: Invoke, tmp_path: Path
) -> None:
    log = tmp_path / "server.log"
    log.write_text("".join(served.warm))
    rows = invoke("hits", served.store, "--trace", log, *_deployment(served), *ROWS).rows
    answers = [record["out"]["meta_info"] for record in _finished(served.warm)]
    told = [answer["cached_tokens_details"]["storage"] for answer in answers]
    assert [row["served_tokens"] for row in rows] == told
    assert [row["tokens"] for row in rows] == [answer["prompt_tokens"] for answer in answers]


def test_a_log_is_the_same_in_the_lines_of_containers_and_in_metrics_files(
    served: Served, invoke: Invoke, tmp_path: Path
) -> None:
    stdout = served.stdout.read_bytes()
    forms = {"stdout": stdout, "cri": _cri(stdout), "docker": _docker(stdout)}
    for name, data in forms.items():
        (tmp_path / name).write_bytes(data)
    places = [served.log, *(tmp_path / name for name in forms), served.metrics]
    found = [
        invoke("hits", served.store, "--trace", place, *_deployment(served), *ROWS).rows
        for place in places
    ]
    logged, *others, measured = ([{**row, "chain": ""} for row in rows] for rows in found)
    assert len(logged) > 2 * len(REQUESTS)
    assert others == [logged] * len(forms)
    # The last requests are logged without tokens; the level of metrics files stays.
    assert measured[:-LEVELS] == logged


def test_a_cache_of_any_size_serves_what_the_server_got(
    served: Served, invoke: Invoke, tmp_path: Path
) -> None:
    log = tmp_path / "server.log"
    log.write_text("".join([*served.cold, *served.warm]))
    options = ("--trace", log, *_deployment(served), "--capacity", "1GiB", "--policy", "lru")
    (row,) = invoke("simulate", *options, *ROWS).rows
    answers = [record["out"]["meta_info"] for record in _finished(served.warm)]
    # Of the two samples of one request, one repeats the other.
    repeated = _finished(served.cold)[-1]["out"]["meta_info"]["cached_tokens_details"]["device"]
    hits = [answer["cached_tokens_details"]["storage"] for answer in answers]
    assert row["hit_tokens"] == sum(hits) + repeated


def test_what_a_log_cannot_tell_is_said_with_the_remedy(
    served: Served, invoke: Invoke, tmp_path: Path
) -> None:
    log = tmp_path / "server.log"
    log.write_text("".join(served.odd))
    outcome = invoke("hits", served.store, "--trace", log, *_deployment(served), *ROWS)
    assert len(outcome.rows) == 1  # the first of the session
    assert "--log-requests-level 3" in outcome.stderr
    assert "2 requests" in outcome.stderr
    assert "session_params" in outcome.stderr
    levels = [line for line in served.odd if '"input_ids": ' not in line]
    log.write_text("".join(levels))
    outcome = invoke("hits", served.store, "--trace", log, *_deployment(served), exit_code=2)
    assert "--log-requests-level 3" in outcome.stderr


def _deployment(served: Served) -> tuple[object, ...]:
    """Return the options that describe the server."""
    return (
        *("--model-config", served.model, "--served-model-name", MODEL),
        *("--page-size", PAGE_SIZE, "--prefetch-threshold", PAGE_SIZE),
    )


def _cri(lines: bytes) -> bytes:
    """Return lines as containerd logs them."""
    logged = []
    for line in lines.removesuffix(b"\n").split(b"\n"):
        parts = [line[at : at + CUT] for at in range(0, len(line) or 1, CUT)]
        for number, part in enumerate(parts, 1):
            tag = b"F" if number == len(parts) else b"P"
            logged.append(b"2026-11-28T16:26:18.655661123Z stdout %s %s\n" % (tag, part))
    return b"".join(logged)


def _docker(lines: bytes) -> bytes:
    """Return lines as Docker's json-file driver logs them."""
    logged = []
    for line in io.BytesIO(lines):
        for at in range(0, len(line), CUT):
            text = line[at : at + CUT].decode(errors="replace")
            record = {"log": text, "stream": "stdout", "time": "2026-11-28T16:26:18.655661123Z"}
            logged.append(json.dumps(record, ensure_ascii=False, separators=(",", ":")))
    return "".join(f"{record}\n" for record in logged).encode()
