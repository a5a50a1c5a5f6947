"""The 3FS grammar: RANK:NAMESPACE:KEY."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.formats.keys.hf3fs import Hf3fsGrammar
from hicachectl.formats.kinds.pool import pool_names
from hicachectl.formats.objects import Coordinate, Names, Shard

CODEC = Hf3fsGrammar()

GOLDEN = [
    (("3:kv:", ""), Coordinate(Names(), "kv", shard=Shard(tp_rank=3))),
    (("3:kv:", "-k"), Coordinate(Names(), "kv", "k", shard=Shard(tp_rank=3))),
    (("3:kv:", "-v"), Coordinate(Names(), "kv", "v", shard=Shard(tp_rank=3))),
    (("0:indexer:", "_indexer"), Coordinate(Names(), "indexer", shard=Shard(tp_rank=0))),
    (("1:mamba:", "_mamba"), Coordinate(Names(), "mamba", shard=Shard(tp_rank=1))),
    (("0:mamba:", "_mamba_3_8"), Coordinate(Names(), "mamba", shard=Shard(tp_rank=3, tp_size=8))),
]


@pytest.mark.parametrize(("affix", "coordinate"), GOLDEN)
def test_golden_keys_are_written_and_read(affix: tuple[str, str], coordinate: Coordinate) -> None:
    assert CODEC.affix(coordinate) == affix
    assert CODEC.readings(*affix) == (coordinate,)


@pytest.mark.parametrize(
    "affix",
    [
        ("", ""),
        ("kv:", ""),
        ("x:kv:", ""),
        ("0:kv:", "_indexer"),
        ("0:indexer:", ""),
        ("0:indexer:", "-k"),
        ("1:mamba:", "_mamba_3_8"),
        ("0:mamba:", "_mamba_8_8"),
        ("0:mamba:", "_mamba_3_4097"),  # one key would stand for any number of ranks
        ("0:new:", "_new"),
    ],
)
def test_keys_of_others_have_no_reading(affix: tuple[str, str]) -> None:
    assert CODEC.readings(*affix) == ()


@given(
    st.integers(0, 99),
    st.sampled_from([pool.name for pool in pool_names()]),
    st.sampled_from([None, "k", "v"]),
)
def test_every_coordinate_reads_back(rank: int, pool: str, part: str | None) -> None:
    coordinate = Coordinate(
        Names(), pool, part if pool == "kv" else None, shard=Shard(tp_rank=rank)
    )
    assert CODEC.readings(*CODEC.affix(coordinate)) == (coordinate,)
