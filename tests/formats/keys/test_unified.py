from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.formats.errors import UnsupportedByBackend
from hicachectl.formats.keys.unified import UnifiedGrammar
from hicachectl.formats.objects import Coordinate, Names, Shard

DIGEST = "ukv1-8d19308ec7f4a608"

digests = st.from_regex(r"ukv1-[0-9a-f]{16}", fullmatch=True)
numbers = st.integers(0, 10**9 - 1)
layer_ranges = st.tuples(numbers, numbers).filter(lambda pair: pair[0] < pair[1])
head_groups = st.none() | numbers.map(lambda group: (group, group + 1))
coordinates = st.builds(
    Coordinate,
    names=digests.map(Names),
    shard=st.builds(Shard, layers=layer_ranges, heads=head_groups),
)


def coordinate(**shard: Any) -> Coordinate:
    return Coordinate(Names(DIGEST), shard=Shard(**shard))


@pytest.mark.parametrize(
    ("suffix", "expected"),
    [
        (f"_{DIGEST}_L0-16_H3", coordinate(layers=(0, 16), heads=(3, 4))),
        (f"_{DIGEST}_L16-61", coordinate(layers=(16, 61))),
    ],
)
def test_a_key_names_a_rectangle_of_layers_and_heads(suffix: str, expected: Coordinate) -> None:
    codec = UnifiedGrammar()
    assert codec.readings("", suffix) == (expected,)
    assert codec.affix(expected) == ("", suffix)


@pytest.mark.slow
@given(coordinates)
def test_readings_undo_affix(coordinate: Coordinate) -> None:
    codec = UnifiedGrammar()
    assert codec.readings(*codec.affix(coordinate)) == (coordinate,)


@given(st.text(max_size=3), st.text() | st.from_regex(r"_ukv1-[0-9a-f]{16}_L\d+-\d+(_H\d+)?\n?"))
def test_affix_undoes_whatever_is_read(prefix: str, suffix: str) -> None:
    codec = UnifiedGrammar()
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
    assert UnifiedGrammar().readings(prefix, suffix) == ()


@pytest.mark.parametrize(
    "unnamed",
    [
        coordinate(),
        coordinate(heads=(0, 1)),
        coordinate(layers=(4, 4)),
        coordinate(layers=(0, 16), heads=(0, 2)),
        coordinate(layers=(0, 16), tp_rank=0, tp_size=2),
        Coordinate(Names("Qwen-Qwen3-32B"), shard=Shard(layers=(0, 16))),
        Coordinate(Names(DIGEST), "indexer", shard=Shard(layers=(0, 16))),
        Coordinate(Names(DIGEST), part="k", shard=Shard(layers=(0, 16))),
        Coordinate(Names(DIGEST, "a"), shard=Shard(layers=(0, 16))),
    ],
)
def test_what_the_scheme_cannot_name_is_refused(unnamed: Coordinate) -> None:
    with pytest.raises(UnsupportedByBackend, match="The unified key scheme has no key for"):
        UnifiedGrammar().affix(unnamed)
