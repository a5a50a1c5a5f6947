"""The NIXL grammar: golden keys of SGLang 0.5.23; every key reads back as its coordinate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.formats.keys import grammar_of
from hicachectl.formats.keys.nixl import NixlGrammar, route
from hicachectl.formats.keys.resolve import resolve_affixes
from hicachectl.formats.kinds.pool import pool_name, pool_names
from hicachectl.formats.objects import Coordinate, Names, Shard

CODEC = NixlGrammar()
_RANK = Shard(tp_rank=1, tp_size=2)

# Keys that HiCacheNixl returned when run; see its _get_*_key methods.
GOLDEN = [
    ("_Qwen-Qwen3-32B_1_2", Coordinate(Names("Qwen-Qwen3-32B"), shard=_RANK)),
    ("_Qwen-Qwen3-32B_1_2_k", Coordinate(Names("Qwen-Qwen3-32B"), part="k", shard=_RANK)),
    ("_m_1_2_draft_v", Coordinate(Names("m"), "draft", "v", shard=_RANK)),
    ("_m_1_2_mamba", Coordinate(Names("m"), "mamba", shard=_RANK)),
    ("_m_1_2_mamba_temporal", Coordinate(Names("m"), "mamba", "temporal", shard=_RANK)),
    ("_m_1_2_mamba_conv_0", Coordinate(Names("m"), "mamba", "conv_0", shard=_RANK)),
    ("_deepseek-ai-DeepSeek-V3.2", Coordinate(Names("deepseek-ai-DeepSeek-V3.2"))),
    ("_deepseek-ai-DeepSeek-V3.2_k", Coordinate(Names("deepseek-ai-DeepSeek-V3.2"), part="k")),
    ("_m_draft_indexer", Coordinate(Names("m"), "draft_indexer")),
]


@pytest.mark.parametrize(("suffix", "coordinate"), GOLDEN)
def test_golden_keys_are_written_and_read(suffix: str, coordinate: Coordinate) -> None:
    assert CODEC.affix(coordinate) == ("", suffix)
    assert coordinate in CODEC.readings("", suffix)


@st.composite
def coordinates(draw: st.DrawFn) -> Coordinate:
    """Any coordinate that HiCacheNixl can write; model names may look like suffixes."""
    model = "".join(draw(st.lists(st.sampled_from(["m", "_", "0", "2", "-", "_k", "_draft", "é"]))))
    pool = draw(st.sampled_from([pool.name for pool in pool_names()]))
    parts = [None, "temporal", "conv_0"] if pool_name(pool).states else [None, "k", "v"]
    shard = Shard()
    if draw(st.booleans()):
        size = draw(st.integers(1, 64))
        shard = Shard(tp_rank=draw(st.integers(0, size - 1)), tp_size=size)
    return Coordinate(Names(model), pool, draw(st.sampled_from(parts)), shard=shard)


@given(coordinates())
def test_every_coordinate_is_among_the_readings_of_its_key(coordinate: Coordinate) -> None:
    assert coordinate in CODEC.readings(*CODEC.affix(coordinate))


@given(st.text(alphabet="_km0124vdraftmb-é\n", max_size=40))
def test_every_reading_is_written_back_to_the_same_key(suffix: str) -> None:
    for reading in CODEC.readings("", f"_{suffix}"):
        assert CODEC.affix(reading) == ("", f"_{suffix}")


@pytest.mark.parametrize("suffix", ["", "x", ".bin", "m_0_1"])
def test_names_of_others_have_no_reading(suffix: str) -> None:
    assert CODEC.readings("", suffix) == ()
    assert CODEC.readings("tag_", "_m") == ()


def test_keys_of_a_whole_store_have_one_meaning() -> None:
    """Proves that components are told from model names by the other keys of the store."""
    a = ["_a_0_2_k", "_a_0_2_v", "_a_1_2_k", "_a_1_2_v", "_a_0_2_draft_k"]
    suffixes = [*a, "_b", "_b_indexer", "_b_0_2_mamba", "_b_1_2_mamba", "_c_k"]
    found = resolve_affixes([("", suffix) for suffix in suffixes], CODEC)
    one = {affix[1]: resolved.coordinate for affix, resolved in found.items()}
    first = Shard(tp_rank=0, tp_size=2)
    assert one["_a_0_2_k"] == Coordinate(Names("a"), "kv", "k", shard=first)
    assert one["_a_0_2_draft_k"] == Coordinate(Names("a"), "draft", "k", shard=first)
    assert one["_b"] == Coordinate(Names("b"))
    assert one["_b_indexer"] == Coordinate(Names("b"), "indexer")
    assert one["_b_0_2_mamba"] == Coordinate(Names("b"), "mamba", shard=first)
    assert one["_c_k"] == Coordinate(Names("c"), part="k")
    alone = resolve_affixes([("", "_my_draft")], CODEC)[("", "_my_draft")]
    assert alone.ambiguous


@pytest.mark.parametrize("scheme", ["nixl", "nixl-buffered"])
def test_grammars_are_found_by_their_name(scheme: str) -> None:
    assert grammar_of(scheme).name == scheme


def test_places_are_sglangs() -> None:
    """Golden places, from nixl_routing.route_key."""
    keys = b"0" * 64 + b"_m_0_2_k", b"f" * 64 + b"_deepseek-ai-DeepSeek-V3.2"
    places = [route(key, directories) for key in keys for directories in (1, 3, 7)]
    assert places == [(0, b"ae"), (1, b"ae"), (2, b"ae"), (0, b"f3"), (1, b"f3"), (6, b"f3")]


def test_a_rank_is_below_its_size() -> None:
    """A model's name can end in numbers: 4_4 is no rank."""
    (reading,) = CODEC.readings("", "_m_4_4")
    assert (reading.names.model, reading.shard.tp_rank) == ("m_4_4", None)
