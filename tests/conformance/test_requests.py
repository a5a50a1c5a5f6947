"""Prompts get SGLang's token ids, and bodies of /generate are read as in SGLang."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.prewarming.through_server import generate_body, prefix_of
from hicachectl.requests.chains import Hashing
from hicachectl.requests.forms import Chat, Request
from tests.skips import need_module
from tests.tiny_tokenizers import KINDS, make_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conformance.conftest import SglangSession

pytestmark = [pytest.mark.conformance, pytest.mark.xdist_group("sglang-mooncake")]

TEXTS = [
    "The cat sat", "", " leading and trailing ", "日本の cat\n\n\t", "<s>", "a<|im_end|>b",
]  # fmt: skip


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _call(arguments: str) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}


TOOLS: list[dict[str, Any]] = [
    # Members that a template prints: in the request's order, then those that the request lacks.
    {
        "type": "function",
        "function": {
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": ["string", "null"], "description": "The cat"}},
                "required": ["city"],
            },
            "name": "weather",
            "strict": False,
            "unknown": 1,
        },
    },
    {"function": {"name": "later", "strict": None}, "defer_loading": True, "unknown": 2},
    {"type": "function", "function": {"name": "bare", "description": "dog", "parameters": None}},
]

CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "The cat"}]},
    {"messages": [{"role": "system", "content": "tool"}, {"role": "user", "content": ""}]},
    {"messages": [{"role": "user", "content": _parts(" one ")}]},
    {"messages": [{"role": "user", "content": _parts(" one ", "two ")}]},
    {"messages": [{"role": "user", "content": []}]},
    {
        "messages": [
            {"role": "user", "content": "weather in Paris"},
            {"role": "assistant", "content": None, "tool_calls": [_call('{"city": "Paris"}')]},
            {"role": "tool", "content": _parts("dog", "cat"), "tool_call_id": "1"},
        ]
    },
    # A final assistant message, as a text and as parts.
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "The"}]},
    {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": _parts("The")},
        ]
    },
    {
        "messages": [{"role": "user", "content": "a"}],
        "chat_template_kwargs": {"enable_thinking": False},
    },
    {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS},
    {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS, "tool_choice": "required"},
    {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS, "tool_choice": "none"},
    {
        "messages": [{"role": "user", "content": "a"}],
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "later"}},
    },
]


def test_prompts_have_the_token_ids_that_sglang_gives_them(
    sglang_session: SglangSession, tmp_path: Path
) -> None:
    need_module("tokenizers")
    need_module("transformers")
    from hicachectl.requests.tokenizing import DirectoryTokenizer

    places = {kind: make_tokenizer(tmp_path / kind, kind) for kind in KINDS}
    question = [{"directory": str(p), "texts": TEXTS, "chats": CHATS} for p in places.values()]
    told = sglang_session.ask("tokenize_prompts", question)
    for (kind, place), answer in zip(places.items(), told, strict=True):
        tokenizer = DirectoryTokenizer(place)
        assert tokenizer.encode(TEXTS) == answer["texts"], kind
        chats = [
            Chat(
                chat["messages"],
                chat.get("chat_template_kwargs", {}),
                chat.get("tools", ()),
                chat.get("tool_choice", "auto"),
            )
            for chat in CHATS
        ]
        for chat, ids in zip(chats, answer["chats"], strict=True):
            assert tokenizer.encode([chat]) == [ids], (kind, chat)


def test_sglang_reads_our_requests_as_they_are_meant(
    sglang_session: SglangSession, tmp_path: Path
) -> None:
    request = Request("x", list(range(50)), "lora", "salt")
    bare = Request("y", list(range(50)))
    bodies = [
        generate_body(prefix_of(0, one, 3, Hashing(8, bigram)).request, rank)
        for one in (request, bare)
        for bigram in (False, True)
        for rank in (None, 3)
    ]
    for body, parsed in zip(bodies, sglang_session.ask("parse_generate", bodies), strict=True):
        assert parsed.pop("error") is None
        assert parsed.pop("single") is True
        assert {name: value for name, value in parsed.items() if value is not None} == body
    assert [len(body["input_ids"]) for body in bodies[:3]] == [25, 25, 26]
