"""Public traces: what each form tells, how it is recognised, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.cli import manpages
from hicachectl.formats.errors import FormatError, HicacheError, UsageError
from hicachectl.requests.public_traces import PrefixIds
from hicachectl.requests.reading import FORMS, Trace
from tests.skips import need_module

if TYPE_CHECKING:
    from hicachectl.requests.chains import Requests
    from hicachectl.requests.forms import Request

TEXTS = Path(manpages.__file__).parent / "texts"

# Records as the tools write or document them.
MOONCAKE = {"timestamp": 27482, "input_length": 1300, "output_length": 52, "hash_ids": [46, 47, 9]}
SIMULATOR = {"hash_ids": [4, 5], "input_length": 20, "block_size": 16, "block_tokens": [16, 4]}
BAILIAN = {
    "chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 47,
    "output_length": 132, "type": "text", "turn": 1, "hash_ids": [1089, 1090, 1091],
}  # fmt: skip
LMCACHE = {
    "timestamp": 1764350000.25, "request_id": "r1", "model_name": "m", "chunk_size": 256,
    "seq_len": 700, "dtypes": ["bfloat16"], "shapes": [[2, 32, 256, 1024]],
    "chunk_hashes": ["0x00ab00ab00ab00ab", "0x12cd12cd12cd12cd"],
}  # fmt: skip
CHAT = [{"role": "user", "content": "Hello"}]
SHAREGPT = {
    "id": "QWJhYvA_0",
    "conversations": [
        {"from": "human", "value": "Hello"},
        {"from": "gpt", "value": "Hello. [1]"},
        {"from": "human", "value": "Again"},
    ],
}
BATCH = {
    "custom_id": "request-1", "method": "POST", "url": "/v1/chat/completions",
    "body": {"model": "m", "messages": CHAT, "max_tokens": 5},
}  # fmt: skip

EXAMPLES: list[tuple[str, object]] = [
    ("hicachectl", MOONCAKE),
    ("hicachectl", {**MOONCAKE, "block_size": 512}),
    ("hicachectl", {"type": "mooncake_trace", **MOONCAKE, "session_id": "a", "delay": 3}),
    ("hicachectl", {"timestamp": 1, "token_ids": [1, 2]}),
    ("hicachectl", {"input_ids": [1, 2], "sampling_params": {}}),
    ("hicachectl", {"timestamp": 1, "pages": ["0" * 64], "input_length": 9}),
    ("token-ids", [1, 2]),
    ("token-ids", []),
    ("kvcache-simulator", SIMULATOR),
    ("kvcache-simulator", {"hash_ids": ["9f", "07"], "input_length": 20, "block_size": 16}),
    ("bailian", BAILIAN),
    ("lmcache", LMCACHE),
    ("lmcache", {"timestamp": 1764350000.2, "lookup_id": "x", "chunk_hashes": ["0x7f"]}),
    ("sharegpt", SHAREGPT),
    ("sharegpt", {"conversations": SHAREGPT["conversations"]}),
    ("openai", BATCH),
    ("openai", {"custom_id": "1", "body": {"model": "m", "prompt": "Hello"}}),
    ("prompts", "Hello"),
    ("prompts", CHAT),
    ("prompts", {"messages": CHAT, "timestamp": 5, "output_length": 4}),
    ("prompts", {"prompt": [1, 2, 3], "max_tokens": 5}),
    ("prompts", {"text": "Hello", "sampling_params": {"max_new_tokens": 5}}),
    ("prompts", {"text_input": "Hello", "output_length": 4, "session_id": "s"}),
    ("prompts", {"payload": {"prompt": "Hello", "max_tokens": 50}, "timestamp": 1000}),
    ("lengths", {"timestamp": 5, "input_length": 472, "output_length": 18}),
]
CSV = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,x",
    "Timestamp,Request tokens,Response tokens",
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44",
)
# The beginnings of files that are not read.
OTHERS = (
    b'{"id": "t", "models": ["m"], "block_size": 64, "requests": [{"t": 0, "hash_ids": [1]}]}',
    b'{\n  "id": "t",\n  "requests": []\n}',
    b"PAR1\x15\x04\x15",
    b"\x00\x00\x00\x52\x87\xa5magic\xa4LMCT",
    b'{"resourceSpans": [{"scopeSpans": []}]}',
    b'{"captureData": {"endpointInput": {}}}',
    b"[{}]",
    b"7",
)


def written(folder: Path, *rows: object) -> str:
    path = folder / "trace"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def read(path: str, **options: Any) -> list[Request]:
    with Trace([path], **options) as trace:
        return list(trace.each())


def columns(path: str, **options: Any) -> Requests:
    with Trace([path], **options) as trace:
        return trace.requests(None)


@pytest.mark.parametrize(("name", "record"), EXAMPLES)
@pytest.mark.parametrize("indent", [None, 2])
def test_a_form_is_recognised_among_all_others(
    name: str, record: object, indent: int | None
) -> None:
    line = json.dumps(record, indent=indent).encode()
    assert next(form.name for form in FORMS if form.recognises(line)) == name


@pytest.mark.parametrize("text", CSV)
def test_csv_files_have_lengths_only(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{text}\n")
    with pytest.raises(
        UsageError, match=r"trace.jsonl: has only lengths and no prefixes, so nothing"
    ):
        read(str(path))


def test_records_without_prefixes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="only lengths and no prefixes"):
        read(written(tmp_path, {"input_length": 10, "output_length": 4, "timestamp": 3}))


@pytest.mark.parametrize("data", OTHERS)
def test_other_formats_are_not_known(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "trace"
    path.write_bytes(data)
    with pytest.raises(UsageError, match="is no request in a known form; give one of") as refusal:
        read(str(path))
    assert "Bailian's traces, traces for kvcache-simulator, LMCache's lookup logs" in str(
        refusal.value
    )


def test_the_manual_has_each_form() -> None:
    text = (TEXTS / "hicachectl-prewarm.txt").read_text()
    text = text.split("# TRACES\n")[1].split("\n# ")[0]
    names = [
        name for line in re.findall(r"^- (.*)$", text, re.MULTILINE) for name in line.split(", ")
    ]
    assert sorted([*names, "lengths"]) == sorted(form.name for form in FORMS)


def test_chains_of_kvcache_simulator(tmp_path: Path) -> None:
    found = columns(
        written(
            tmp_path,
            SIMULATOR,
            {"hash_ids": ["4", "5", "4"], "input_length": 48, "block_size": 16},
            {"hash_ids": [5], "input_length": 16, "block_size": None, "block_tokens": [16]},
        )
    )
    assert found.blocks.tolist() == [0, 1, 0, 1, 2, 3]
    assert (found.tokens.tolist(), found.block_tokens, found.times) == ([20, 48, 16], 16, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_tokens": [16]}, "block_tokens: has 1 numbers, but hash_ids has 2"),
        ({"block_tokens": [4, 16]}, "other blocks than those of 16 tokens; only the last block"),
        ({"block_tokens": [16, 17]}, "other blocks than those of 16 tokens"),
        ({"block_tokens": [16, 0]}, r"\$.block_tokens\[1\]"),
        ({"block_size": 0}, r"\$.block_size"),
        ({"hash_ids": [True]}, r"\$.hash_ids\[0\]"),
        ({"input_length": None}, r"\$.input_length"),
        ({"block_size": 8, "block_tokens": [8, 8]}, "but earlier lines have blocks of 16"),
    ],
)
def test_bad_records_for_kvcache_simulator(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(FormatError, match=f"line 2: .*{message}"):
        columns(written(tmp_path, SIMULATOR, {**SIMULATOR, **change}))


def test_blocks_that_do_not_fit_the_tokens_are_refused_or_said(tmp_path: Path) -> None:
    path = written(tmp_path, MOONCAKE, {**MOONCAKE, "hash_ids": [46]})
    with pytest.raises(
        FormatError, match=r"request 1 has 3 blocks .*, but its 1300 tokens fill fewer"
    ):
        columns(path, block_size=1024)
    with Trace([path], block_size=512) as trace:
        assert trace.requests(None).block_tokens == 512
        assert trace.remarks == (
            "With more tokens than their blocks have: 1 request; the other tokens count as never "
            "repeated; check --block-size",
        )


def test_ids_of_bailian_count_together_with_their_parents(tmp_path: Path) -> None:
    turns = [
        (1, -1, [7, 8]), (2, 1, [7, 8, 9]), (3, -1, [8, 9]), (4, 2, [7, 9]), (5, 99, [7]),
    ]  # fmt: skip
    rows = [
        {**BAILIAN, "chat_id": chat, "parent_chat_id": parent, "hash_ids": ids, "timestamp": chat}
        for chat, parent, ids in turns
    ]
    found = columns(written(tmp_path, *rows))
    assert found.blocks.tolist() == [0, 1, 0, 1, 2, 3, 4, 0, 5, 0]
    assert found.block_tokens == 16
    assert found.seconds_per_unit == 1
    sessions = found.labels["session"]
    assert [sessions.names[number] for number in sessions.ids] == ["1", "1", "3", "1", "99"]


def test_lookups_of_lmcache(tmp_path: Path) -> None:
    other = {**LMCACHE, "model_name": "other", "seq_len": 520}
    found = columns(written(tmp_path, LMCACHE, other, {**LMCACHE, "chunk_hashes": []}))
    assert found.blocks.tolist() == [0, 1, 2, 3]
    assert (found.block_tokens, found.seconds_per_unit) == (256, 1)
    assert found.tokens.tolist() == [700, 520, 700]
    assert found.labels["model"].names == ("m", "other")


def test_a_log_of_chunks_without_their_size_says_so(tmp_path: Path) -> None:
    path = written(tmp_path, {"timestamp": 1764350000.2, "lookup_id": "x", "chunk_hashes": ["0x"]})
    with Trace([path]) as trace:
        assert trace.requests(None).block_tokens == 0
        (remark,) = trace.remarks
    assert remark == ("Without chunk_size: 1 request; give --block-size with LMCache's chunk_size")
    assert columns(path, block_size=256).block_tokens == 256


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=12))
def test_numbers_of_prefixes_are_equal_where_the_prefixes_are(chains: list[list[int]]) -> None:
    prefixes = PrefixIds()
    numbers = [prefixes.of(chain) for chain in chains]
    assert [len(chain) for chain in numbers] == [len(chain) for chain in chains]
    known: dict[int, tuple[int, ...]] = {}
    for chain, found in zip(chains, numbers, strict=True):
        for depth, number in enumerate(found, 1):
            assert known.setdefault(number, tuple(chain[:depth])) == tuple(chain[:depth])
    assert len(set(known.values())) == len(known)


def test_own_traces_are_read_by_kvcache_simulator() -> None:
    """Own records with hash_ids have a block_size, and times in ms."""
    rows = [
        {"timestamp": 0, "hash_ids": [0, 1], "block_size": 16, "input_length": 20},
        {"timestamp": 1500, "hash_ids": [0, 2, 3], "block_size": 16, "input_length": 48,
         "output_length": 5, "session_id": "a", "cache_salt": "t", "hit_tokens": 16},
    ]  # fmt: skip
    found = need_module("kvcache_sim.trace").parse_trace_lines(map(json.dumps, rows))
    assert (found.ids, found.tokens) == ([0, 1, 0, 2, 3], [16, 4, 16, 16, 16])
    assert (found.block_size, found.parse_errors, found.skipped_records) == (16, 0, 0)


@pytest.mark.parametrize("name", ["kvcache-simulator", "bailian", "lmcache", "lengths"])
@pytest.mark.parametrize("data", [b"[" * 100_000, b"{" * 9, b'{"hash_ids": [1e400]}', b"\xff"])
def test_hostile_lines_are_refused(tmp_path: Path, name: str, data: bytes) -> None:
    path = tmp_path / "trace"
    path.write_bytes(data)
    with pytest.raises(HicacheError, match="trace"):
        read(str(path), form=name)
