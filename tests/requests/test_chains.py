"""Requests in columns: chains of pages and blocks, their forest, and requests read again."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from hicachectl.formats.errors import FormatError, UsageError
from hicachectl.formats.hashing import namespace_seed, page_hashes
from hicachectl.formats.profile import parse_profile
from hicachectl.requests import chains
from hicachectl.requests.chains import Columns, Hashing, requests_of_pages
from hicachectl.requests.forms import Request
from hicachectl.requests.reading import Trace
from tests import stores
from tests.prewarming.traces import read_file, trace_of
from tests.speed import examples

if TYPE_CHECKING:
    from pathlib import Path

PROFILE = parse_profile(stores.DSA)
PAGE = PROFILE.page_size


def written(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "trace.jsonl"
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("\n".join(texts) + "\n")
    return path


def test_block_ids_become_a_forest() -> None:
    trace = trace_of(
        [
            {"timestamp": 0, "hash_ids": [7, 8, 9]},
            {"timestamp": 5, "hash_ids": [7, 8, 2]},
            {"timestamp": 9, "hash_ids": []},
        ]
    )
    assert trace.names.tolist() == [7, 8, 9, 2]
    assert trace.forest.parents.tolist() == [-1, 0, 1, 1]
    assert trace.forest.depths.tolist() == [0, 1, 2, 2]
    assert trace.offsets.tolist() == [0, 3, 6, 6]
    assert trace.blocks.tolist() == [0, 1, 2, 0, 1, 3]


def test_ids_need_not_be_small_or_positive() -> None:
    trace = trace_of([{"hash_ids": [2**62, -5]}, {"hash_ids": [2**62, 11]}])
    assert trace.names.tolist() == [2**62, -5, 11]
    assert trace.forest.parents.tolist() == [-1, 0, 0]


@examples(40)
@given(
    chains=st.lists(st.lists(st.integers(0, 40), unique=True), min_size=1),
    least=st.sampled_from([-(2**63), -20, 0, 2**40]),
    step=st.sampled_from([1, 2**50]),
)
def test_blocks_are_numbered_by_their_first_use(
    chains: list[list[int]], least: int, step: int
) -> None:
    ids = [[least + step * number for number in chain] for chain in chains]
    columns = Columns(None)
    for chain in ids:
        columns.add(Request("", [], block_ids=chain))
    requests = columns.finished("")
    every = [block for chain in ids for block in chain]
    first = list(dict.fromkeys(every))
    assert requests.names.tolist() == first
    assert requests.blocks.tolist() == [first.index(block) for block in every]


def test_requests_are_put_in_order_of_time() -> None:
    rows = [(9, [1, 2]), (3, [1]), (9, [1, 3]), (1, [4])]
    trace = trace_of([{"timestamp": t, "hash_ids": ids, "output_length": t} for t, ids in rows])
    assert trace.times is not None
    assert trace.times.tolist() == [1, 3, 9, 9]
    assert trace.output_tokens.tolist() == [1, 3, 9, 9]
    assert trace.names[trace.blocks].tolist() == [4, 1, 1, 2, 1, 3]


def test_times_may_be_iso_8601() -> None:
    stamps = ("2026-03-01T10:00:00Z", "2026-03-01T10:00:01.500+00:00")
    trace = trace_of([{"timestamp": stamp, "hash_ids": [1]} for stamp in stamps])
    assert trace.times is not None
    assert np.diff(trace.times).tolist() == [1.5]


@pytest.mark.parametrize("member", ["token_ids", "input_ids"])
def test_token_ids_become_the_servers_page_hashes(member: str) -> None:
    tokens = np.random.default_rng(3).integers(0, 150_000, 4 * PAGE - 1).tolist()
    shared = tokens[: 2 * PAGE] + [1] * PAGE
    trace = trace_of([{member: tokens}, {member: shared}], PROFILE)
    expected = page_hashes(tokens, PAGE)
    found = trace.names[trace.blocks]
    assert trace.hashed
    assert np.array_equal(found[:3], expected)
    assert np.array_equal(found[3:5], expected[:2])
    assert not np.array_equal(found[5], expected[2])
    assert trace.tokens.tolist() == [len(tokens), len(shared)]
    assert trace.name_of(trace.blocks[0]) == expected[0].tobytes().hex()


def test_namespaces_are_hashed_in_and_empty_ones_are_none() -> None:
    tokens = list(range(PAGE))
    trace = trace_of(
        [
            {"token_ids": tokens, "extra_key": "a", "cache_salt": "b"},
            {"token_ids": tokens, "extra_key": "", "cache_salt": None},
        ],
        PROFILE,
    )
    salted = page_hashes(tokens, PAGE, prior=namespace_seed("a", "b"))
    expected = np.concatenate((salted, page_hashes(tokens, PAGE)))
    assert np.array_equal(trace.names[trace.blocks], expected)


def test_a_trace_of_token_ids_needs_a_profile(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--profile"):
        read_file(written(tmp_path, {"token_ids": [1, 2]}))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "Input data was truncated"),
        ("[1, 2]", 'has "token_ids", but earlier lines have "hash_ids"'),
        ({"timestamp": 1}, 'exactly one of the members "token_ids", "input_ids"'),
        ({"timestamp": 1, "hash_ids": [1], "token_ids": [1]}, "exactly one"),
        ({"timestamp": 1, "hash_ids": [1], "lora_path": "x"}, "lora_path 'x': the pages of an"),
        ({"timestamp": 1, "hash_ids": [1], "lora_id": ["x"]}, "lora_id: ['x'] is no text"),
        ({"timestamp": 1, "hash_ids": [1], "hit_tokens": -1}, "hit_tokens: -1 is not in 0"),
        ({"timestamp": 1, "hash_ids": [1], "hit_tokens": {"host": -(2**70)}}, "hit_tokens: -118"),
        ({"timestamp": 1, "hash_ids": [1.5]}, "hash_ids"),
        ({"timestamp": 1, "hash_ids": [3, 2**63]}, "$.hash_ids[1]"),
        ({"timestamp": 1, "hash_ids": "x"}, "hash_ids"),
        ({"timestamp": "noon", "hash_ids": [1]}, "not ISO 8601"),
        ({"timestamp": 1e300, "hash_ids": [1]}, "timestamp: 1e+300 is not in -1e18..1e18"),
        ({"timestamp": 1, "hash_ids": [1], "input_length": -1}, "input_length: -1 is not"),
        ({"timestamp": 1, "hash_ids": [1], "output_length": 2**40}, "output_length"),
        (
            {"hash_ids": [1]},
            "has no timestamp, but earlier lines have a timestamp; write all lines alike",
        ),
        (
            {"timestamp": 1, "token_ids": [1]},
            'has "token_ids", but earlier lines have "hash_ids"; write all lines alike',
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: Any, reason: str) -> None:
    path = written(tmp_path, {"timestamp": 0, "hash_ids": [1]}, "", line)
    with pytest.raises(FormatError, match=r"trace.jsonl: line 3: ") as refusal:
        read_file(path, PROFILE)
    assert reason in str(refusal.value)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'{"hash_ids": [1], "extra_key": "\xff"}\n')
    with pytest.raises(FormatError, match="line 1"):
        read_file(path)


def test_a_trace_too_large_for_its_indices_is_to_be_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, {"hash_ids": [1, 2]}, {"hash_ids": [1, 3]})
    monkeypatch.setattr(chains, "MAX_REFERENCES", 3)
    said = f"^{path}: has 4 block references, but at most 2.31-1 are allowed; split the file$"
    with pytest.raises(FormatError, match=said):
        read_file(path)


def test_pages_that_share_64_bits_are_different_pages() -> None:
    """A list of pages may name any hashes."""
    one, other = ("07" * 31 + last for last in ("01", "02"))
    found = requests_of_pages([[one], [other, "08" * 32], [one]], None)
    assert found.page_names.to_pylist() == [one, other, "08" * 32]
    assert found.blocks.tolist() == [0, 1, 2, 0]


def test_a_cut_keeps_the_prefixes_and_only_names_that_are_left() -> None:
    trace = trace_of([{"hash_ids": ids} for ids in ([1, 2, 3], [1, 4], [5, 6, 7])])
    cut = trace.cut(np.array([1, 2, 2]))
    assert cut.names[cut.blocks].tolist() == [1, 1, 4, 5, 6]
    assert cut.names.tolist() == [1, 4, 5, 6]
    assert cut.forest.parents.tolist() == [-1, 0, -1, 2]
    assert cut.forest.depths.tolist() == [0, 1, 0, 1]
    assert cut.reach.tolist() == [1, 2, 2]
    assert trace.cut(np.diff(trace.offsets)) is trace


def test_some_requests_are_taken_in_an_order() -> None:
    rows = [{"timestamp": at, "hash_ids": [1, at], "output_length": at} for at in (3, 4, 5)]
    taken = trace_of(rows).take(np.array([2, 0]))
    assert taken.names[taken.blocks].tolist() == [1, 5, 1, 3]
    assert taken.forest.parents.tolist() == [-1, 0, 0]
    assert taken.times is not None
    assert (taken.times.tolist(), taken.output_tokens.tolist()) == ([5, 3], [5, 3])


@pytest.mark.parametrize(
    "paths",
    [[[1, 2, 3], [4, 2]], [[1, 2], [2]], [[1, 2, 1]], [[1, 1]]],
    ids=["two parents", "also a first block", "its own ancestor", "its own parent"],
)
def test_ids_that_name_contents_instead_of_prefixes_are_refused(paths: list[list[int]]) -> None:
    with pytest.raises(FormatError, match="equal ids must mean equal prefixes"):
        len(trace_of([{"hash_ids": path} for path in paths]).forest)


@pytest.mark.parametrize(
    ("rows", "tokens"),
    [
        ([(6758, 14), (7322, 15)], 512),
        ([(502, 32), (17, 2)], 16),
        ([(100, 10), (91, 10)], 10),
        ([(5, 1)], 8),
        ([(100, 2), (100, 10)], 0),
        ([(6758, 14), (None, 3)], 0),
    ],
    ids=["mooncake", "16", "no power of two", "one block", "contradictory", "unknown"],
)
def test_tokens_of_a_block_follow_from_the_lengths(
    rows: list[tuple[int | None, int]], tokens: int
) -> None:
    lines = []
    for row, (length, blocks) in enumerate(rows):
        ids = list(range(100 * row, 100 * row + blocks))
        lines.append({"input_length": length, "hash_ids": ids})
    assert trace_of(lines).block_tokens == tokens


def test_values_close_over_prefixes() -> None:
    trace = trace_of([{"hash_ids": [0, 1, 2]}, {"hash_ids": [0, 3]}, {"hash_ids": [4, 5]}])
    closed = trace.forest.closed(np.array([1, 2, 9, 3, 5, 4], np.float64))
    assert closed.tolist() == [9, 9, 9, 3, 5, 4]


@pytest.mark.parametrize(("release", "seeded"), [("0.5.19", False), ("0.5.20", True)])
def test_namespaces_seed_hashes_where_the_release_does(
    tmp_path: Path, release: str, seeded: bool
) -> None:
    """storage_namespace_seed exists from SGLang 0.5.20 on."""
    tokens = list(range(PAGE))
    path = written(tmp_path, {"token_ids": tokens, "extra_key": "lora", "cache_salt": "t"})
    trace = read_file(path, structs.replace(PROFILE, sglang=release))
    seed = namespace_seed("lora", "t") if seeded else None
    assert trace.names.tolist() == page_hashes(tokens, PAGE, prior=seed).tolist()


def test_requests_are_read_again_from_where_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 9, "token_ids": [1] * 70},
        {"timestamp": 3, "input_ids": [2] * 80, "extra_key": "lora", "cache_salt": ""},
        {"timestamp": 5, "token_ids": []},
    ]
    path.write_text("\n".join(["", *map(json.dumps, rows)]))
    read = Trace([str(path)])
    trace = read.requests(Hashing.of(PROFILE)).in_time_order()
    assert trace.starts is not None
    starts = trace.starts.tolist()
    found = list(read.again(starts))
    assert [(r.token_ids, r.extra_key, r.cache_salt) for r in found] == [
        ([2] * 80, "lora", None),
        ([], None, None),
        ([1] * 70, None, None),
    ]
    path.write_text("other lines")
    with pytest.raises(FormatError, match="changed since it was read"):
        next(read.again(starts))
    path.unlink()
    with pytest.raises(UsageError, match=r"trace\.jsonl: cannot read the requests again"):
        next(read.again(starts))


@pytest.mark.parametrize("spread", [1, 7, 2**40, -(2**40)])
def test_block_ids_are_numbered_in_the_order_of_their_first_use(
    spread: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small ids are looked up in a table, others in a sorted array; some are first small."""
    for name, value in (("_IDS_AT_ONCE", 16), ("_REFERENCES_AT_ONCE", 8)):
        monkeypatch.setattr(chains, name, value)
    rng = random.Random(spread)
    ids = [rng.randrange(40) for _ in range(60)]
    ids += [rng.randrange(400) * spread for _ in range(400)]
    given = [
        Request(str(start), [], block_ids=ids[start : start + 9]) for start in range(0, 460, 9)
    ]
    found = chains.requests_of(given, None)
    assert found.names.tolist() == list(dict.fromkeys(ids))
    assert found.names[found.blocks].tolist() == ids


def test_own_lines_tell_pages_hits_and_names(tmp_path: Path) -> None:
    page, other = (f"{number:064x}" for number in (1, 2))
    path = written(
        tmp_path,
        {"pages": [page, other], "hit_tokens": 70, "model": "m", "session_id": "a"},
        {"pages": [page], "hit_tokens": {"host": 64}, "lora_id": "00", "input_length": PAGE},
        {"token_ids": [1] * PAGE, "cache_salt": "s"},
    )
    found = read_file(path, PROFILE)
    assert found.tokens.tolist() == [2 * PAGE, PAGE, PAGE]
    assert found.reach.tolist() == [2, 0, 0]  # the last token of a prompt is always computed
    assert found.page_names.to_pylist()[:2] == [page, other]
    assert found.cached is not None
    assert found.cached.tolist() == [[70, -1, -1], [0, 64, 0], [-1, -1, -1]]
    texts = {kind: [names[n] for n in ids] for kind, (names, ids) in found.labels.items()}
    assert texts == {
        "model": ["m", None, None], "session": ["a", None, None], "adapter": [None, "00", None],
        "salt": [None, None, "s"],
    }  # fmt: skip
