"""SGLang's request log and metrics files: what they tell, lack, and are wrapped in."""

from __future__ import annotations

import gzip
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.formats.errors import FormatError, UsageError
from hicachectl.requests.chains import Hashing
from hicachectl.requests.forms import Request
from hicachectl.requests.reading import Trace

HASHING = Hashing(4)
STAMP = "[2026-11-28 16:00:00] "
OTHER_LINES = [
    STAMP + 'INFO:     127.0.0.1:50000 - "POST /generate HTTP/1.1" 200 OK',
    STAMP + "Decode batch, #running-req: 1, #token: 704, token usage: 0.09",
]
BY_LOAD = "442348c3ca424ab7b6f55a8110ff9684"  # a uuid4
BY_PATH = "442348c3ca4251f7b6f55a8110ff9684"  # a uuid5


def record(
    tokens: list[Any] | None, out: dict[str, Any] | None = None, /, **obj: Any
) -> dict[str, Any]:
    """Return a record of a finished request. out: members of meta_info, and output_ids."""
    out = dict(out or {})
    meta = {
        "prompt_tokens": len(tokens or ()),
        "completion_tokens": len(out.get("output_ids", ())),
        "cached_tokens": 0,
        "cached_tokens_details": None,
        "finish_reason": {"type": "length", "length": 6},
        "dp_rank": None,
        "e2e_latency": 2.0,
        "request_received_ts": 1_795_883_000.5,
    }
    outputs = out.pop("output_ids", [])
    found = {
        "rid": "r1", "text": "schön", "input_ids": tokens, "image_data": None, "extra_key": None,
        "cache_salt": None, "lora_path": None, "lora_id": None, "session_id": None,
        "session_params": None, "sampling_params": {"temperature": 0.0}, "stream": False,
    }  # fmt: skip
    return {
        "timestamp": "2026-11-28T16:00:00.123456",
        "event": "request.finished",
        "rid": "r1",
        "obj": {**found, **obj},
        "headers": {"x-smg-routing-key": "k"},
        "out": {"text": "", "output_ids": outputs, "meta_info": {**meta, **out}},
    }


def logged(record: dict[str, Any]) -> str:
    return STAMP + json.dumps(record, ensure_ascii=False)


def measured(record: dict[str, Any]) -> str:
    """Return a record as a line of a metrics file, which leaves out null members."""
    parameters = {name: value for name, value in record["obj"].items() if value is not None}
    return json.dumps({"request_parameters": json.dumps(parameters), **record["out"]["meta_info"]})


def read(path: Path, **options: Any) -> tuple[list[Request], tuple[str, ...]]:
    """Return the requests of a file, and the remarks."""
    with Trace([str(path)], **options) as trace:
        trace.requests(HASHING)
        return list(trace.each()), trace.remarks


def test_a_record_of_the_log_tells_all_of_a_request(tmp_path: Path) -> None:
    path = tmp_path / "host_0.log.2026-11-28_15"
    found = {"device": 1, "host": 2, "storage": 3, "storage_backend": "HiCacheFile"}
    lines = [
        *OTHER_LINES,
        logged({**record([1, 2]), "event": "request.received"}),
        logged(record([1] * 9, {"cached_tokens": 6, "cached_tokens_details": found,
                                "output_ids": [7] * 5, "dp_rank": 1},
                      extra_key="e", cache_salt="s", lora_path="law", lora_id=BY_PATH,
                      session_id="chat")),
        logged(record([1], rid="HEALTH_CHECK_1")),
        logged(record([5, 6])),
    ]  # fmt: skip
    path.write_text("\n".join(lines))
    (first, second), remarks = read(path)
    assert (first.token_ids, first.extra_key, first.cache_salt) == ([1] * 9, f"e{BY_PATH}", "s")
    assert (first.cached, first.output_ids, first.output_tokens) == ((1, 2, 3), [7] * 5, 5)
    assert (first.adapter, first.session, first.server) == ("law", "chat", "host_0/dp1")
    assert (first.time, first.input_tokens) == (1_795_883_000.5, 9)
    assert (second.cached, second.adapter, second.server) == ((0, 0, 0), None, "host_0")
    assert remarks == ()
    with Trace([str(path)]) as trace:
        columns = trace.requests(HASHING, outputs=True)
        assert columns.starts is not None
        assert list(trace.again([*columns.starts[::-1].tolist()])) == [
            _at(second, path, columns.starts[1]), _at(first, path, columns.starts[0]),
        ]  # fmt: skip
    # 9 tokens of the prompt and 4 of the answer: its last token was never computed.
    assert columns.offsets.tolist() == [0, 3, 3]
    assert columns.prompt_blocks.tolist() == [2, 0]
    assert columns.reach.tolist() == [2, 0]
    assert columns.seconds_per_unit == 1.0
    assert columns.cached is not None
    assert columns.cached.tolist() == [[1, 2, 3], [0, 0, 0]]
    texts = {kind: [names[n] for n in ids] for kind, (names, ids) in columns.labels.items()}
    assert texts == {
        "salt": ["s", None], "adapter": ["law", None], "session": ["chat", None],
        "server": ["host_0/dp1", "host_0"],
    }  # fmt: skip
    turned = columns.take(columns.starts[::-1].argsort())
    assert turned.labels["adapter"].ids.tolist() == columns.labels["adapter"].ids[::-1].tolist()


def _at(request: Request, path: Path, place: int) -> Request:
    values = {name: getattr(request, name) for name in _MEMBERS}
    return Request(**{**values, "where": f"{path}: byte {place}"})


_MEMBERS = Request.__match_args__


@pytest.mark.parametrize("write", [logged, measured])
@pytest.mark.parametrize(
    ("lacking", "said"),
    [
        (record([1] * 3, image_data=["x"]), "With images, video, audio or embeddings"),
        (record([1] * 3, {"prompt_tokens": 9}), "With only a part of the prompt"),
        (record([1] * 3, sampling_params={"n": 2}), "Made by SGLang before it generates n samples"),
        (record([1, "...", 2]), "With a prompt that the log has cut at level 2: 1 request; set "
                                "--log-requests-level 3"),
        (record(None, text="x" * 1024 + "..." + "y" * 1024), "that the log has cut at level 2"),
        (record(None, text=None), "Without tokens, since the log has level 0 or 1"),
        (record(None), "Sent as text: 1 request; give --tokenizer DIR"),
    ],
)  # fmt: skip
def test_what_a_record_lacks_is_said_once(
    tmp_path: Path, write: Any, lacking: dict[str, Any], said: str
) -> None:
    path = tmp_path / "x.log"
    path.write_text("\n".join([write(record([1])), write(lacking)]))
    requests, remarks = read(path)
    assert [request.token_ids for request in requests] == [[1]]
    assert len(remarks) == 1
    assert said in remarks[0]
    path.write_text(f"{write(lacking)}\n" * 2)
    with pytest.raises(UsageError, match=r"x\.log: has no requests; .*2 requests; "):
        read(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (STAMP + "Finish: obj=GenerateReqInput(rid='1')", "json"),
        (logged({**record([1]), "event": "request.received"}), "none about a finished request"),
        (logged(record([1]))[:200], "On damaged lines: 1 request; log to a directory"),
        ("\n".join(OTHER_LINES), "is no request in a known form; give one of SGLang's request log"),
        (logged(record([1], {"prompt_tokens": None})), "has no requests"),
        (logged(record([1], {"finish_reason": {"type": "abort", "status_code": 400}})), "has no"),
    ],
)  # fmt: skip
def test_a_log_without_requests_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "x.log"
    path.write_text(text)
    with pytest.raises(UsageError) as refusal:
        read(path)
    assert said in str(refusal.value)


@pytest.mark.parametrize("write", [logged, measured])
def test_a_request_comes_when_the_server_says(tmp_path: Path, write: Any) -> None:
    path = tmp_path / "x.log"
    sent = {"request_received_ts": None, "response_sent_to_client_ts": 1_795_883_007.0}
    path.write_text(
        "\n".join(write(record([1], sent, stream=streamed)) for streamed in (False, True))
    )
    requests, remarks = read(path)
    assert [request.time for request in requests] == [1_795_883_005.0, 1_795_883_007.0]
    assert remarks == ()


def test_a_time_without_a_zone_is_said(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text(logged(record([1], {"request_received_ts": None})))
    assert "With a time that has no zone: 1 request; " in read(path)[1][0]


def test_adapters_that_a_load_names_anew_are_said(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    ids = (BY_LOAD, BY_PATH, None)
    path.write_text("\n".join(logged(record([1], lora_id=one, lora_path="a")) for one in ids))
    (remark,) = read(path)[1]
    assert "Of adapters loaded at run time: 1 request; " in remark


class Letters:
    """A tokenizer with a token for each letter."""

    def encode(self, prompts: Any) -> list[list[int]]:
        return [list(map(ord, prompt)) for prompt in prompts]


def test_texts_are_encoded_and_counted_as_the_server_did(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    lines = [record(None, {"prompt_tokens": 2}, text=text) for text in ("ab", "abc")]
    path.write_text("\n".join(map(logged, lines)))
    requests, remarks = read(path, tokenizer=Letters)
    assert [request.token_ids for request in requests] == [[97, 98]]
    assert "Encoded to another number of tokens than the server counted: 1 request" in remarks[0]


@pytest.mark.parametrize(
    ("name", "server"),
    [
        ("host_0.log", "host_0"),
        ("pods/ns_pod_uid/sglang/0.log", "ns_pod_uid"),
        ("node7/sglang-request-metrics-20261128_16.log", "node7"),
    ],
)
def test_a_file_names_its_server(tmp_path: Path, name: str, server: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text((measured if "metrics" in name else logged)(record([1])))
    assert read(path)[0][0].server == server


@pytest.mark.parametrize("turned", [False, True])
def test_kinds_are_not_mixed(tmp_path: Path, *, turned: bool) -> None:
    kinds = [
        ("JSON lines with", '{"token_ids": [1]}'),
        ("SGLang's request log", logged(record([1]))),
        ("SGLang's metrics files", measured(record([1]))),
    ]
    first, *others = reversed(kinds) if turned else kinds
    (tmp_path / "a").write_text(first[1])
    for title, text in others:
        (tmp_path / "b").write_text(text)
        with pytest.raises(FormatError, match=f"b: line 1: looks like {title}.*, but earlier"):
            read(tmp_path)


def _docker(line: str, cut: int) -> list[str]:
    pieces = [line[start : start + cut] for start in range(0, len(line), cut)]
    pieces[-1] += "\n"
    return [json.dumps({"log": piece, "stream": "stdout", "time": "2026"}) for piece in pieces]


def _kubernetes(line: str, cut: int) -> list[str]:
    pieces = [line[start : start + cut] for start in range(0, len(line), cut)]
    ends = ["P"] * (len(pieces) - 1) + ["F"]
    return [
        f"2026-11-28T16:00:00.123456789Z stdout {end} {piece}"
        for end, piece in zip(ends, pieces, strict=True)
    ]


WRAPPINGS: dict[str, tuple[Any, str]] = {
    "none": (lambda line, _: [line], "an error"),
    "compose": (lambda line, _: [f"sglang-1  | {line}"], "router-1 | {}"),
    "docker": (_docker, json.dumps({"log": "an error\n", "stream": "stderr", "time": "2026"})),
    "kubernetes": (_kubernetes, "2026-11-28T16:00:00.123456789Z stderr F an error"),
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_lines_are_found_in_those_of_containers(wrapping: str, data: Any, seed: int) -> None:
    """Lines of the other stream stand between the parts of a line."""
    wrap, error = WRAPPINGS[wrapping]
    rng = random.Random(seed)
    prompts = data.draw(st.lists(st.lists(st.integers(0, 99), min_size=1), min_size=1, max_size=5))
    texts = data.draw(st.lists(st.sampled_from(["", "ü\u2028\u0085", '"', "\\"]), min_size=1))
    lines: list[str] = []
    for number, prompt in enumerate(prompts):
        for line in (*OTHER_LINES, logged(record(prompt, text=texts[number % len(texts)]))):
            for part in wrap(line, rng.randrange(1, 400)):
                lines += [part, error] if rng.random() < 0.3 else [part]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x")
        text = "\n".join(lines).encode()
        path.write_bytes(gzip.compress(text) if rng.random() < 0.5 else text)
        with Trace([str(path)], keeps=True) as trace:
            requests = trace.requests(HASHING)
            assert requests.starts is not None
            places = requests.starts.tolist()
            order = rng.sample(range(len(places)), len(places))
            again = list(trace.again([places[n] for n in order]))
            assert [one.token_ids for one in trace.each()] == prompts
    assert [one.token_ids for one in again] == [prompts[n] for n in order]
