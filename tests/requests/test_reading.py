"""Requests in files: the forms of lines, and refusals that name the line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.formats.errors import FormatError, UsageError
from hicachectl.formats.hashing import page_hashes, page_hashes_hex
from hicachectl.requests import inputs
from hicachectl.requests.chains import hex_pages
from hicachectl.requests.forms import Chat, Prompt, Request
from hicachectl.requests.reading import Trace, read_page_chains, read_page_list
from tests.stores import page

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class Lengths:
    """A tokenizer that records its prompts and refuses one word."""

    def __init__(self) -> None:
        self.given: list[Prompt] = []

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        if "bad" in prompts:
            raise FormatError("not this one")
        self.given += prompts
        return [[len(self.given)] for _ in prompts]


def read_requests(path: Path, tokenizer: Lengths | None = None) -> list[Request]:
    form = "token-ids" if tokenizer is None else "prompts"
    with Trace(
        [str(path)], form=form, tokenizer=None if tokenizer is None else lambda: tokenizer
    ) as trace:
        return list(trace.each())


def file_of(folder: Path, *lines: object) -> Path:
    path = folder / "requests.jsonl"
    path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    return path


def test_token_ids_come_as_lists_and_as_objects(tmp_path: Path) -> None:
    path = file_of(
        tmp_path,
        [1, 2],
        "",
        {"token_ids": [3], "extra_key": "lora", "cache_salt": ""},
        {"input_ids": [4, 2**63 - 1], "rid": "x", "sampling_params": {"n": [1]}, "stream": True},
        {"token_ids": [], "timestamp": 3, "output_length": 4, "lora_path": None, "lora_id": None},
        {"hash_ids": [7, 8], "input_length": 1000, "image_data": None, "unknown": {"a": 1}},
    )
    found = list(read_requests(path))
    assert [(r.token_ids, r.extra_key, r.cache_salt) for r in found] == [
        ([1, 2], None, None), ([3], "lora", None), ([4, 2**63 - 1], None, None), ([], None, None),
        ([], None, None),
    ]  # fmt: skip
    assert [r.where for r in found] == [f"{path}: line {n}" for n in (1, 3, 4, 5, 6)]
    assert [r.input_tokens for r in found] == [2, 1, 2, 0, 1000]
    assert [(r.time, r.output_tokens) for r in found[-2:]] == [(3, 4), (None, -1)]
    assert [r.block_ids for r in found[-2:]] == [None, [7, 8]]
    text = path.read_bytes()
    assert [text[r.start : r.start + 3] for r in found] == [
        b"[1,", b'{"t', b'{"i', b'{"t', b'{"h',
    ]  # fmt: skip


@pytest.mark.parametrize(
    "line",
    ["{", "7", "[[1]]", "[1.5]", "[true]", '{"token_ids": "x"}', "{}", '"text"', "[1] [2]",
     '{"token_ids": [1], "input_ids": [1]}', '{"token_ids": [1], "image_data": "x"}',
     '{"token_ids": [1], "lora_path": "x"}', '{"token_ids": [1], "extra_key": 5}', "[" * 100_000,
     '{"token_ids": [1], "cache_salt": "\\ud800"}', "\xff"],
)  # fmt: skip
def test_bad_token_ids_are_refused_with_their_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"[1]\n" + line.encode("latin-1"))
    with pytest.raises(FormatError, match="x: line 2: "):
        list(read_requests(path))


CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "a"}]},
    {"role": "assistant", "content": None, "tool_calls": []},
]


def test_prompts_come_as_texts_and_as_chats(tmp_path: Path) -> None:
    tokenizer = Lengths()
    path = file_of(
        tmp_path,
        '"plain"',
        {"text": "a", "cache_salt": "s"},
        {"prompt": "b", "model": "m", "max_tokens": 5, "temperature": 0.5},
        CHAT,
        {"messages": CHAT, "extra_key": "k", "chat_template_kwargs": {"enable_thinking": False}},
    )
    found = list(read_requests(path, tokenizer))
    assert tokenizer.given == [
        "plain", "a", "b", Chat(CHAT, {}), Chat(CHAT, {"enable_thinking": False}),
    ]  # fmt: skip
    assert [(r.extra_key, r.cache_salt) for r in found] == [
        (None, None), (None, "s"), (None, None), (None, None), ("k", None),
    ]  # fmt: skip


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("plain text", "not JSON"),
        ({"text": "a", "prompt": "b"}, 'one of "text", "prompt" and "messages"'),
        ({}, 'one of "text", "prompt" and "messages"'),
        ([1, 2], "Expected `object`"),
        ([{"content": "a"}], "messages[0]: has no role; give one"),
        (
            [{"role": "user", "content": [IMAGE]}],
            "content: has a part of type 'image_url', but only",
        ),
        ([{"role": "user", "content": 5}], "content: 5 is no text or list of parts; give one"),
        (
            [{"role": "user", "content": ["x"]}],
            "can be hashed; give --token-ids with the ids",
        ),
        ({"messages": [], "tools": [1]}, "Expected `object`"),
        ({"text": "a", "lora_path": "x"}, "line 2: lora_path 'x': the pages of an adapter"),
        ({"text": "a", "lora_id": 5}, "lora_id: 5 is no text; give one adapter"),
        ({"messages": CHAT, "reasoning_effort": "low"}, "reasoning_effort: changes the pages"),
        ({"text": "a", "audio_data": ["x"]}, "the ids that were served, without audio_data"),
        ({"text": "a", "tools": [{}]}, "need messages"),
        ({"text": "a", "chat_template_kwargs": {"x": 1}}, "need messages"),
    ],
)
def test_bad_prompts_are_refused_with_their_line(tmp_path: Path, line: object, reason: str) -> None:
    with pytest.raises(FormatError, match="line 2: ") as refusal:
        list(read_requests(file_of(tmp_path, '"x"', line), Lengths()))
    assert reason in str(refusal.value)


def test_the_line_that_the_tokenizer_refuses_is_named(tmp_path: Path) -> None:
    lines = [json.dumps(text) for text in ("a", "b", "bad", "c")]
    with pytest.raises(FormatError, match="line 3: not this one"):
        list(read_requests(file_of(tmp_path, *lines), Lengths()))


def test_more_prompts_than_a_batch_keep_their_order(tmp_path: Path) -> None:
    tokenizer = Lengths()
    lines = [json.dumps(str(number)) for number in range(200)]
    found = list(read_requests(file_of(tmp_path, *lines), tokenizer))
    assert tokenizer.given == [str(number) for number in range(200)]
    assert [r.where.rpartition(" ")[2] for r in found] == [str(n + 1) for n in range(200)]


def test_pages_come_bare_as_rows_and_as_chains(tmp_path: Path) -> None:
    path = file_of(tmp_path, page(0), {"page": page(1), "state": "whole"}, [page(2), page(0)], [])
    assert list(read_page_chains(path)) == [[page(0)], [page(1)], [page(2), page(0)], []]
    listed = read_page_list(path)
    assert listed.pages == [page(0), page(1), page(2), page(0)]
    assert list(listed.chains()) == list(read_page_chains(path))
    assert listed.is_chained


def test_rows_name_the_group_that_they_are_of(tmp_path: Path) -> None:
    row = {"page": page(1), "group": "m tp4", "model": "m"}
    listed = read_page_list(file_of(tmp_path, page(0), row, {"page": page(2), "group": None}))
    assert listed.groups == [None, "m tp4", None]
    assert not listed.is_chained


@pytest.mark.parametrize(
    "line",
    [
        page(0)[:63],
        page(0).upper(),
        '{"page": null}',
        "{}",
        f'{{"page": "{page(1)}", "group": 1}}',
        "[1]",
        '["x"]',
        "{",
        "\xff",
    ],
)
def test_what_is_no_page_hash_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "pages"
    path.write_bytes(f"{page(0)}\n".encode() + line.encode("latin-1"))
    with pytest.raises(FormatError, match="pages: line 2: "):
        list(read_page_chains(path))


def test_a_file_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    for read in (read_requests, read_page_chains):
        with pytest.raises(UsageError, match=r"cannot read|has no file"):
            list(read(tmp_path))


def test_a_line_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MAX_LINE_BYTES", 100)
    path = file_of(tmp_path, list(range(20)), list(range(100)))
    with pytest.raises(FormatError, match="line 2: longer than 100 bytes"):
        list(read_requests(path))


@given(st.lists(st.integers(0, 2**40), max_size=40))
def test_hashes_are_spelled_as_keys_spell_them(tokens: list[int]) -> None:
    assert hex_pages(page_hashes(tokens, 3)).to_pylist() == page_hashes_hex(tokens, 3)
