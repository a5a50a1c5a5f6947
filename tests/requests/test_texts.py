"""Requests that are texts: bodies of requests, batch files, AIPerf's records, ShareGPT."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.formats.errors import FormatError, UsageError
from hicachectl.requests.forms import Chat, Context, Prompt, Request
from hicachectl.requests.reading import Trace
from tests.requests.test_public_traces import BATCH, CHAT, SHAREGPT

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class Recorder:
    """A tokenizer that keeps the prompts; the tokens are the number of the prompt."""

    def __init__(self) -> None:
        self.given: list[Prompt] = []

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        first = len(self.given)
        self.given += prompts
        return [[number] for number in range(first, len(self.given))]


def written(folder: Path, *rows: object) -> str:
    path = folder / "trace"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def read(path: str) -> tuple[list[Request], list[Prompt]]:
    tokenizer = Recorder()
    with Trace([path], tokenizer=lambda: tokenizer) as trace:
        return list(trace.each()), tokenizer.given


def chat(*contents: str) -> Chat:
    roles = ("user", "assistant")
    return Chat(
        [{"role": roles[n % 2], "content": content} for n, content in enumerate(contents)], {}
    )


HELLO = chat("Hello")
TURNS = [HELLO, chat("Hello", "Hello. [1]", "Again")]


def test_prompts_of_a_completion_are_requests_of_their_own(tmp_path: Path) -> None:
    body = {"custom_id": "1", "body": {"model": "m", "prompt": ["a", "b"], "cache_salt": "s"}}
    path = written(tmp_path, BATCH, body, {"body": {"prompt": [[5, 6], "c", []]}})
    found, given = read(path)
    assert given == [HELLO, "a", "b", "c"]
    assert [r.token_ids for r in found] == [[0], [1], [2], [5, 6], [3], []]
    assert [r.cache_salt for r in found] == [None, "s", "s", None, None, None]
    assert [r.model for r in found] == ["m", "m", "m", None, None, None]
    ends = [len(line) + 1 for line in (tmp_path / "trace").read_text().splitlines()]
    second, third = ends[0], ends[0] + ends[1]
    assert [r.start for r in found] == [0, second, second + 1, third, third + 1, third + 2]


def test_a_prompt_within_a_line_is_read_again(tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": ["a" * 200_000, "b", "c"]}, "d", {"prompt": [7, 8]})
    tokenizer = Recorder()
    with Trace([path], tokenizer=lambda: tokenizer) as trace:
        starts = [request.start for request in trace.each()]
        tokenizer.given.clear()
        again = list(trace.again([starts[4], starts[2], starts[3], starts[1]]))
    assert tokenizer.given == ["c", "d", "b"]
    assert [r.token_ids for r in again] == [[7, 8], [0], [1], [2]]
    with Trace([path], tokenizer=lambda: tokenizer) as trace:
        list(trace.each())
        with pytest.raises(FormatError, match="changed since it was read"):
            list(trace.again([starts[2] + 1]))


def test_records_of_aiperf(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {"payload": {"messages": CHAT}, "timestamp": 1000, "output_length": 4, "session_id": "s"},
        {"text_input": "a", "timestamp": 2000, "session_id": "t", "type": "mooncake_trace"},
        {"messages": CHAT, "timestamp": 3000, "tools": [{"type": "function"}]},
    )
    found, given = read(path)
    assert given == [HELLO, "a", Chat(CHAT, {}, [{"type": "function"}])]
    assert [(r.time, r.output_tokens, r.session) for r in found] == [
        (1000, 4, "s"), (2000, -1, "t"), (3000, -1, None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"text_input": "b", "session_id": "s"}, "later turn of the session 's', so its prompt"),
        ({"body": {"prompt": "a"}, "payload": {"prompt": "a"}}, "needs exactly one prompt"),
        ({"body": {"prompt": "a"}, "text": "b"}, "needs exactly one prompt"),
        ({"custom_id": "1", "body": {"input": "a"}}, 'one of "text", "prompt" and "messages"'),
        ({"body": {"body": {"prompt": "a"}}}, 'one of "text", "prompt" and "messages"'),
        ({"prompt": [1, "a"]}, "prompt: 1 is neither a text nor a list of token ids"),
        ({"prompt": [[True]]}, r"prompt: \[True\] is neither"),
        ({"prompt": ["a"], "tools": [{}]}, "need messages"),
        ({"body": {"prompt": "a", "lora_path": "x"}}, "lora_path 'x': the pages of an adapter"),
        ({"body": {"prompt": "a", "extra_key": ["x", "y"]}}, r"\$.body.extra_key"),
        ({"body": {"messages": [{"content": "a"}]}}, r"messages\[0\]: has no role"),
    ],
)
def test_bad_bodies_are_refused_with_their_line(
    tmp_path: Path, line: dict[str, Any], message: str
) -> None:
    path = written(tmp_path, {"text_input": "a", "session_id": "s"}, line)
    with pytest.raises(FormatError, match=f"trace: line 2: .*{message}"):
        read(path)


def test_a_model_that_may_name_an_adapter_is_remarked(tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": [1, 2], "model": "base:lora"}, {"prompt": [3]})
    context = Context()
    with Trace([path]) as trace:
        assert [r.token_ids for r in trace.each(context)] == [[1, 2], [3]]
    assert context.remarks == (
        "With a model whose name has a colon, after which SGLang reads a LoRA adapter: 1 request; "
        "where adapters are served, give SGLang's request log, which has the lora_id",
    )


def test_texts_need_a_tokenizer(tmp_path: Path) -> None:
    for row in (BATCH, "a", SHAREGPT):
        path = written(tmp_path, row)
        with (
            Trace([path]) as trace,
            pytest.raises(UsageError, match=r"is text, .*give --tokenizer"),
        ):
            list(trace.each())


FILES = {
    "array": json.dumps([SHAREGPT, {**SHAREGPT, "id": 5}]),
    "pretty": json.dumps([SHAREGPT, {**SHAREGPT, "id": 5}], indent=2),
    "lines": f"{json.dumps(SHAREGPT)}\n\n{json.dumps({**SHAREGPT, 'id': 5})}\n",
    "byte order mark": "\ufeff" + json.dumps([SHAREGPT, {**SHAREGPT, "id": 5}]),
}


@pytest.mark.parametrize("text", FILES.values(), ids=FILES)
def test_each_turn_of_a_user_is_a_request_with_all_turns_before(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    found, given = read(str(path))
    assert given == TURNS * 2
    assert [r.session for r in found] == ["QWJhYvA_0", "QWJhYvA_0", "5", "5"]
    assert [r.where for r in found][1:3] == [f"{path}: conversation {n}" for n in (1, 2)]
    tokenizer = Recorder()
    with Trace([str(path)], tokenizer=lambda: tokenizer) as trace:
        starts = [request.start for request in trace.each()]
        tokenizer.given.clear()
        again = list(trace.again([starts[3], starts[0]]))
    assert [r.session for r in again] == ["5", "QWJhYvA_0"]
    assert tokenizer.given == [TURNS[0], TURNS[1]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps([SHAREGPT])[:-1], "trace: not JSON"),
        (json.dumps([SHAREGPT, {"conversations": [{"from": "tool", "value": ""}]}]),
         "conversation 2: from: 'tool' is no speaker of a chat; give one of human, user, gpt"),
        (json.dumps([SHAREGPT, {"conversations": [{"from": "gpt"}]}]), "conversation 2: .*value"),
        (json.dumps([SHAREGPT, 5]), "conversation 2: Expected `object`"),
        (json.dumps([SHAREGPT])[:-1] + "," + "[" * 100_000, "trace: not JSON"),
        (f"{json.dumps(SHAREGPT)}\n{{", "conversation 2: not JSON"),
    ],
)  # fmt: skip
def test_bad_conversations_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(FormatError, match=message):
        read(str(path))
