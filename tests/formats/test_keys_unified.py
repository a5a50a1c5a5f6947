from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.formats.errors import FormatError, UnsupportedByBackend
from hicachectl.formats.keys.unified import UnifiedCodec, pack_msgpack_map, unified_namespace
from hicachectl.formats.objects import Coordinate, Shard

DIGEST = "ukv1-8d19308ec7f4a608"
GRID: dict[str, Any] = {
    "model_id": "Qwen/Qwen3-32B",
    "dtype": "bfloat16",
    "page_size": 64,
    "rank_replicated": False,
    "total_kv_heads": 8,
    "head_group": 1,
    "layer_partition": 16,
}

digests = st.from_regex(r"ukv1-[0-9a-f]{16}", fullmatch=True)
numbers = st.integers(0, 10**9 - 1)
layer_ranges = st.tuples(numbers, numbers).filter(lambda pair: pair[0] < pair[1])
head_groups = st.none() | numbers.map(lambda group: (group, group + 1))
coordinates = st.builds(
    Coordinate, model=digests, shard=st.builds(Shard, layers=layer_ranges, heads=head_groups)
)


def coordinate(**shard: Any) -> Coordinate:
    return Coordinate(DIGEST, shard=Shard(**shard))


@pytest.mark.parametrize(
    ("suffix", "expected"),
    [
        (f"_{DIGEST}_L0-16_H3", coordinate(layers=(0, 16), heads=(3, 4))),
        (f"_{DIGEST}_L16-61", coordinate(layers=(16, 61))),
    ],
)
def test_a_key_names_a_rectangle_of_layers_and_heads(suffix: str, expected: Coordinate) -> None:
    codec = UnifiedCodec()
    assert codec.readings("", suffix) == (expected,)
    assert codec.affix(expected) == ("", suffix)


@given(coordinates)
def test_readings_undo_affix(coordinate: Coordinate) -> None:
    codec = UnifiedCodec()
    assert codec.readings(*codec.affix(coordinate)) == (coordinate,)


@given(st.text(max_size=3), st.text() | st.from_regex(r"_ukv1-[0-9a-f]{16}_L\d+-\d+(_H\d+)?\n?"))
def test_affix_undoes_whatever_is_read(prefix: str, suffix: str) -> None:
    codec = UnifiedCodec()
    for reading in codec.readings(prefix, suffix):
        assert codec.affix(reading) == (prefix, suffix)


@pytest.mark.parametrize(
    ("prefix", "suffix"),
    [
        ("", ""),
        ("model_", f"_{DIGEST}_L0-16"),
        ("", f"_{DIGEST}"),
        ("", f"_{DIGEST}_H3"),
        ("", f"_{DIGEST}_L16-16"),
        ("", f"_{DIGEST}_L16-0_H1"),
        ("", f"_{DIGEST}_L00-16"),
        ("", f"_{DIGEST}_L0-16_H03"),
        ("", f"_{DIGEST}_L0-16_H3.bin"),
        ("", f"_{DIGEST}_L0-16_H3\n"),
        ("", f"_{DIGEST}_L0-1٦"),
        ("", f"_{DIGEST.upper()}_L0-16"),
        ("", "_ukv2-8d19308ec7f4a608_L0-16"),
        ("", "_ukv1-8d19308ec7f4a60_L0-16"),
        ("", "_Qwen-Qwen3-32B_0_8"),
    ],
)
def test_other_text_around_a_hash_is_foreign(prefix: str, suffix: str) -> None:
    assert UnifiedCodec().readings(prefix, suffix) == ()


@pytest.mark.parametrize(
    "unnamed",
    [
        coordinate(),
        coordinate(heads=(0, 1)),
        coordinate(layers=(4, 4)),
        coordinate(layers=(0, 16), heads=(0, 2)),
        coordinate(layers=(0, 16), tp_rank=0, tp_size=2),
        Coordinate("Qwen-Qwen3-32B", shard=Shard(layers=(0, 16))),
        Coordinate(DIGEST, "indexer", shard=Shard(layers=(0, 16))),
        Coordinate(DIGEST, part="k", shard=Shard(layers=(0, 16))),
        Coordinate(DIGEST, tag="a", shard=Shard(layers=(0, 16))),
    ],
)
def test_what_the_scheme_cannot_name_is_refused(unnamed: Coordinate) -> None:
    with pytest.raises(UnsupportedByBackend, match="the unified key scheme has no name for"):
        UnifiedCodec().affix(unnamed)


# Made by sglang 0.5.23's namespace_digest.
def test_a_namespace_has_the_digest_that_sglang_gives_it() -> None:
    assert unified_namespace(**GRID) == DIGEST


def test_a_replicated_namespace_has_no_heads() -> None:
    replicated = {**GRID, "model_id": "deepseek-ai/DeepSeek-V3.2", "rank_replicated": True}
    assert unified_namespace(**replicated | {"layer_partition": 0}) == "ukv1-3ffc38a9d568abb3"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_id": ""}, "model_id: empty"),
        ({"model_id": "\ud800"}, "not valid Unicode"),
        ({"page_size": 0}, "page_size: must be at least 1, is 0"),
        ({"layer_partition": -1}, "layer_partition: must not be negative, is -1"),
        ({"head_group": 0}, "head_group 0 and total_kv_heads 8 must be at least 1"),
        ({"total_kv_heads": 0}, "head_group 1 and total_kv_heads 0 must be at least 1"),
        ({"head_group": 3}, "head_group: 3 does not divide total_kv_heads 8"),
        ({"page_size": 2**64}, "msgpack: 18446744073709551616 is out of range"),
    ],
)
def test_a_grid_that_sglang_refuses_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        unified_namespace(**GRID | change)


@pytest.mark.parametrize(
    ("value", "packed"),
    [
        (False, "c2"),
        (True, "c3"),
        (0, "00"),
        (127, "7f"),
        (128, "cc80"),
        (255, "ccff"),
        (256, "cd0100"),
        (65536, "ce00010000"),
        (2**32, "cf0000000100000000"),
        ("", "a0"),
        ("é", "a2c3a9"),
        ("x" * 31, "bf" + "78" * 31),
        ("x" * 32, "d920" + "78" * 32),
        ("x" * 256, "da0100" + "78" * 256),
        ("x" * 65536, "db00010000" + "78" * 65536),
    ],
)
def test_values_are_packed_as_msgpack_specifies(value: str | int | bool, packed: str) -> None:
    assert pack_msgpack_map({"n": value}).hex() == "81a16e" + packed
