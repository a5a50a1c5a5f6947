"""The file grammar: golden names of SGLang 0.5.23; every name reads back as its coordinate."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.formats.keys.file import FileGrammar
from hicachectl.formats.kinds.pool import pool_names
from hicachectl.formats.objects import Coordinate, Names, Shard

CODEC = FileGrammar()

# Names that HiCacheFile returned when run; see HiCacheFile._get_suffixed_key.
GOLDEN = [
    ("_Qwen-Qwen3-32B_1_8", Coordinate(Names("Qwen-Qwen3-32B"), shard=Shard(tp_rank=1, tp_size=8))),
    (
        "_Qwen-Qwen3-32B_1_4_2_1",
        Coordinate(
            Names("Qwen-Qwen3-32B"), shard=Shard(tp_rank=1, tp_size=4, pp_rank=1, pp_size=2)
        ),
    ),
    (
        "_Qwen-Qwen3-32B_1_4_cp1_2",
        Coordinate(
            Names("Qwen-Qwen3-32B"), shard=Shard(tp_rank=1, tp_size=4, cp_rank=1, cp_size=2)
        ),
    ),
    (".mamba_m_1_8", Coordinate(Names("m"), "mamba", shard=Shard(tp_rank=1, tp_size=8))),
    ("_deepseek-ai-DeepSeek-V3.2", Coordinate(Names("deepseek-ai-DeepSeek-V3.2"))),
    (".draft_indexer_m", Coordinate(Names("m"), "draft_indexer")),
    (".deepseek_v4_c4_m", Coordinate(Names("m"), "deepseek_v4_c4")),
    ("_m_2_1", Coordinate(Names("m"), shard=Shard(pp_rank=1, pp_size=2))),
    (
        "_m_2_1_cp2_8",
        Coordinate(Names("m"), shard=Shard(pp_rank=1, pp_size=2, cp_rank=2, cp_size=8)),
    ),
    (
        "_m_tp8_dcp1_4_page256",
        Coordinate(Names("m"), shard=Shard(tp_size=8, dcp_rank=1, dcp_size=4, dcp_page_size=256)),
    ),
    (
        ".mamba_m_5_8_tp8_dcp1_4_page256",
        Coordinate(
            Names("m"),
            "mamba",
            shard=Shard(tp_rank=5, tp_size=8, dcp_rank=1, dcp_size=4, dcp_page_size=256),
        ),
    ),
]


@pytest.mark.parametrize(("stem", "coordinate"), GOLDEN)
def test_golden_names_are_written_and_read(stem: str, coordinate: Coordinate) -> None:
    assert CODEC.affix(coordinate) == ("", f"{stem}.bin")
    assert coordinate in CODEC.readings("", f"{stem}.bin")


def ranks(size: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[int, int]]:
    return size.flatmap(lambda n: st.tuples(st.integers(0, n - 1), st.just(n)))


@st.composite
def coordinates(draw: st.DrawFn) -> Coordinate:
    """Any coordinate that HiCacheFile can write; model names may look like suffixes."""
    model = "".join(draw(st.lists(st.sampled_from(["m", "_", "0", "2", "-", ".", "cp", "é"]))))
    pool = draw(st.sampled_from([pool.name for pool in pool_names()]))
    values: dict[str, Any] = {}
    if draw(st.booleans()):
        values["tp_rank"], values["tp_size"] = draw(ranks(st.integers(1, 64)))
    if draw(st.booleans()):
        values["pp_rank"], values["pp_size"] = draw(ranks(st.integers(2, 16)))
    if draw(st.booleans()):
        values["cp_rank"], values["cp_size"] = draw(ranks(st.integers(2, 16)))
    if draw(st.booleans()):
        rank, size = draw(ranks(st.integers(2, 8)))
        values |= {
            "dcp_rank": rank,
            "dcp_size": size,
            "dcp_page_size": 64 * size,
            "tp_size": 2 * size,
        }
        values.pop("tp_rank", None)
        if pool == "mamba":
            values["tp_rank"] = draw(st.integers(0, 2 * size - 1))
    return Coordinate(Names(model), pool, shard=Shard(**values))


@given(coordinates())
def test_every_coordinate_is_among_the_readings_of_its_name(coordinate: Coordinate) -> None:
    assert coordinate in CODEC.readings(*CODEC.affix(coordinate))


@given(st.text(alphabet="_.m01248cptdagebin-é\n", max_size=40))
def test_every_reading_is_written_back_to_the_same_name(suffix: str) -> None:
    for reading in CODEC.readings("", f"_{suffix}.bin"):
        assert CODEC.affix(reading) == ("", f"_{suffix}.bin")


def test_unified_keys_are_read_as_such_alone() -> None:
    held = Coordinate(Names("ukv1-8d19308ec7f4a608"), shard=Shard(layers=(0, 16), heads=(3, 4)))
    assert CODEC.readings("", "_ukv1-8d19308ec7f4a608_L0-16_H3.bin") == (held,)
    assert CODEC.affix(held) == ("", "_ukv1-8d19308ec7f4a608_L0-16_H3.bin")


@pytest.mark.parametrize("suffix", ["", ".bin", "_m", "_m.bin.bak", ".unknown_m.bin", "x_m.bin"])
def test_names_of_others_have_no_reading(suffix: str) -> None:
    assert CODEC.readings("", suffix) == ()


@pytest.mark.parametrize(
    "stem",
    [
        "_m_01_2",
        "_m_2_02",
        "_m_1_1",
        "_m_cp2_2",
        "_m_cp0_1",
        "_m_4095_4097",
        "_m_tp8_dcp0_1_page256",  # HiCacheFile does not name a DCP size of 1
        "_m_tp8_dcp4_4_page256",
        "_m_tp4097_dcp0_4097_page4097",
    ],
)
def test_numbers_that_sglang_never_writes_belong_to_the_model(stem: str) -> None:
    assert [reading.names.model for reading in CODEC.readings("", f"{stem}.bin")] == [stem[1:]]
