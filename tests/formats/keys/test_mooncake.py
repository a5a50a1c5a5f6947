"""The Mooncake grammar: golden keys of SGLang 0.5.23, and readings that other keys exclude."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.formats.keys.mooncake import MooncakeGrammar
from hicachectl.formats.keys.resolve import resolve_affixes
from hicachectl.formats.objects import Coordinate, Names, Shard

CODEC = MooncakeGrammar()
V32 = "deepseek-ai-DeepSeek-V3.2"
DCP = Shard(tp_size=8, dcp_size=4, dcp_page_size=256, pp_size=1, cp_size=1)

# Keys that MooncakeStore's key functions returned when run.
GOLDEN = [
    (
        ("Qwen-Qwen3-32B_", "_1_k"),
        Coordinate(Names("Qwen-Qwen3-32B"), "kv", "k", shard=Shard(tp_rank=1)),
    ),
    (
        ("Qwen-Qwen3-32B_", "_1_1_k"),
        Coordinate(Names("Qwen-Qwen3-32B"), "kv", "k", shard=Shard(tp_rank=1, pp_rank=1)),
    ),
    (("m_", "_1_temporal"), Coordinate(Names("m"), "mamba", "temporal", shard=Shard(tp_rank=1))),
    (("m_", "_1_conv_0"), Coordinate(Names("m"), "mamba", "conv_0", shard=Shard(tp_rank=1))),
    ((f"{V32}_", "__k"), Coordinate(Names(V32), "kv", "k")),
    ((f"{V32}_", "__indexer"), Coordinate(Names(V32), "indexer")),
    ((f"{V32}_", "_1_indexer"), Coordinate(Names(V32), "indexer", shard=Shard(pp_rank=1))),
    (("m_", "_5_draft_v"), Coordinate(Names("m"), "draft", "v", shard=Shard(tp_rank=5))),
    (("m_", "__draft_k"), Coordinate(Names("m"), "draft", "k")),
    (("m_", "__swa"), Coordinate(Names("m"), "swa")),
    (("m_", "_0_draft_swa_k"), Coordinate(Names("m"), "draft_swa", "k", shard=Shard(tp_rank=0))),
    (
        (f"{V32}_tp8_dcp4_page256_pp1_cp1_", "_dcp1_cp0_k"),
        Coordinate(
            Names(V32),
            "kv",
            "k",
            shard=Shard(
                tp_size=8,
                dcp_rank=1,
                dcp_size=4,
                dcp_page_size=256,
                pp_size=1,
                cp_rank=0,
                cp_size=1,
            ),
        ),
    ),
    (
        ("m_", "_['4', '5', '6', '7']_temporal"),
        Coordinate(Names("m"), "mamba", "temporal", shard=Shard(heads=(4, 8))),
    ),
]


@pytest.mark.parametrize(("affix", "coordinate"), GOLDEN)
def test_golden_keys_are_written_and_read(affix: tuple[str, str], coordinate: Coordinate) -> None:
    assert CODEC.affix(coordinate) == affix
    assert coordinate in CODEC.readings(*affix)


def test_a_tag_is_written_before_the_model() -> None:
    tagged = Coordinate(Names("m", "teamA"), "kv", "k", shard=Shard(tp_rank=1))
    assert CODEC.affix(tagged) == ("teamA_m_", "_1_k")


def test_a_slice_of_split_heads_takes_the_place_of_the_rank() -> None:
    sliced = Coordinate(Names("m"), "kv", "v", shard=Shard(heads=(5, 6)))
    assert CODEC.affix(sliced) == ("m_", "_5_v")


def test_slices_of_a_pipeline_stage_carry_it() -> None:
    staged = Shard(heads=(4, 6), pp_rank=1)
    mamba = Coordinate(Names("m"), "mamba", "temporal", shard=staged)
    assert CODEC.affix(mamba) == ("m_", "_['4_1', '5_1']_temporal")
    assert CODEC.readings("m_", "_['4_1', '5_1']_temporal") == (mamba,)
    sliced = Coordinate(Names("m"), "kv", "k", shard=Shard(heads=(4, 5), pp_rank=1))
    assert CODEC.affix(sliced) == ("m_", "_4_1_k")


def test_mla_keys_of_the_oldest_releases_have_no_empty_rank() -> None:
    oldest = Coordinate(Names(), "kv", "k", shard=Shard(ranked=False))
    assert CODEC.readings("", "_k") == (oldest,)
    assert CODEC.affix(oldest) == ("", "_k")
    assert CODEC.affix(Coordinate(Names(), "kv", "k")) == ("", "__k")


@given(st.text(alphabet="_mdcpk01vindexrtswa['], ", max_size=30))
def test_every_reading_is_written_back_to_the_same_key(rank: str) -> None:
    for component in ("k", "v", "temporal", "conv_1", "indexer", "swa", "draft_k", "draft_swa_v"):
        for reading in CODEC.readings("m_", f"_{rank}_{component}"):
            assert CODEC.affix(reading) == ("m_", f"_{rank}_{component}")


def test_k_with_a_number_is_a_tp_rank_where_v_exists() -> None:
    resolved = resolve_affixes([("m_", "_1_k"), ("m_", "_1_v")], CODEC)
    assert {r.coordinate.shard for r in resolved.values() if r.coordinate} == {Shard(tp_rank=1)}


def test_k_with_a_number_is_a_stage_where_no_v_exists() -> None:
    resolved = resolve_affixes([("m_", "_1_k"), ("m_", "_0_k")], CODEC)
    shards = {r.coordinate.shard for r in resolved.values() if r.coordinate}
    assert shards == {Shard(pp_rank=0), Shard(pp_rank=1)}


_DCP_PREFIX = "m_tp8_dcp4_page256_pp2_cp2_"


@pytest.mark.parametrize(
    "affix",
    [
        ("m", "_1_k"),
        ("m_", "_x_k"),
        ("m_", "_1_q"),
        ("m_", "1_k"),
        ("m_", ""),
        # Ranks have at most nine digits, and are below the sizes that a key states.
        ("m_", "_1000000000_k"),
        ("m_", "_0_1000000000_k"),
        ("m_", "_['1000000000']_temporal"),
        ("m_", "_0_conv_1000000000"),
        (_DCP_PREFIX, "_dcp4_cp0_1_k"),
        (_DCP_PREFIX, "_dcp0_cp2_1_k"),
        (_DCP_PREFIX, "_dcp0_cp0_2_k"),
        (_DCP_PREFIX, "_8_0_draft_v"),
        (_DCP_PREFIX, "_0_2_draft_v"),
    ],
)
def test_keys_of_others_have_no_reading(affix: tuple[str, str]) -> None:
    assert CODEC.readings(*affix) == ()


@pytest.mark.parametrize(
    "affix",
    [
        ("m_", "_999999999_k"),
        ("m_", "_999999998_999999999_v"),
        (_DCP_PREFIX, "_dcp3_cp1_1_k"),
        (_DCP_PREFIX, "_7_1_draft_v"),
    ],
)
def test_the_highest_ranks_have_a_reading(affix: tuple[str, str]) -> None:
    readings = CODEC.readings(*affix)
    assert readings
    assert {CODEC.affix(reading) for reading in readings} == {affix}


@pytest.mark.parametrize(
    "sizes",
    [
        "tp8_dcp1_page256_pp1_cp1",
        "tp8_dcp3_page256_pp1_cp1",
        "tp8_dcp4_page255_pp1_cp1",
        "tp4098_dcp2_page256_pp1_cp1",
        "tp8_dcp4_page256_pp4097_cp1",
        "tp8_dcp4_page256_pp1_cp4097",
    ],
)
def test_sizes_that_no_deployment_has_belong_to_the_model(sizes: str) -> None:
    (found,) = {reading.names.model for reading in CODEC.readings(f"m_{sizes}_", "_0_v")}
    assert found == f"m_{sizes}"
