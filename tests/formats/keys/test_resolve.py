"""Ambiguous names are resolved by the set of all names, or stay ambiguous."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicachectl.formats.keys.file import FileGrammar
from hicachectl.formats.keys.resolve import Resolved, resolve_affixes
from hicachectl.formats.objects import Coordinate, Names, Shard

if TYPE_CHECKING:
    from hicachectl.formats.keys.base import Affix


def resolve(*stems: str, known: dict[Affix, Coordinate] | None = None) -> dict[str, Resolved]:
    affixes = [("", f"{stem}.bin") for stem in stems]
    resolved = resolve_affixes(affixes, FileGrammar(), known)
    return {stem: resolved["", f"{stem}.bin"] for stem in stems}


def test_tp_ranks_seen_together_are_ranks() -> None:
    found = resolve("_m_0_2", "_m_1_2")
    assert found["_m_0_2"].coordinate == Coordinate(Names("m"), shard=Shard(tp_rank=0, tp_size=2))
    assert found["_m_1_2"].coordinate == Coordinate(Names("m"), shard=Shard(tp_rank=1, tp_size=2))


def test_a_rank_without_its_fellows_stays_open() -> None:
    lone = resolve("_m_0_2")["_m_0_2"]
    assert lone.ambiguous
    assert {reading.names.model for reading in lone.readings} == {"m", "m_0_2"}


def test_the_profile_settles_what_the_set_leaves_open() -> None:
    literal = Coordinate(Names("m_0_2"))
    assert resolve("_m_0_2", known={("", "_m_0_2.bin"): literal})["_m_0_2"].coordinate == literal


def test_a_model_name_that_ends_like_a_suffix_is_kept_where_its_ranks_say_so() -> None:
    found = resolve("_m_2_1_0_2", "_m_2_1_1_2")
    assert {r.coordinate.names.model for r in found.values() if r.coordinate} == {"m_2_1"}


def test_pipeline_stages_write_size_first() -> None:
    found = resolve("_m_2_0", "_m_2_1")
    assert [r.coordinate and r.coordinate.shard for r in found.values()] == [
        Shard(pp_rank=0, pp_size=2),
        Shard(pp_rank=1, pp_size=2),
    ]


def test_a_full_grid_of_two_pairs_beats_four_models_with_one() -> None:
    stems = [f"_m_{tp}_4_2_{pp}" for tp in range(4) for pp in range(2)]
    assert {r.coordinate.names.model for r in resolve(*stems).values() if r.coordinate} == {"m"}


def test_tp_1_is_a_complete_set() -> None:
    found = resolve("_m_0_1")["_m_0_1"]
    assert found.coordinate == Coordinate(Names("m"), shard=Shard(tp_rank=0, tp_size=1))


def test_an_mla_model_beside_an_mha_model() -> None:
    found = resolve("_x", "_y_0_2", "_y_1_2", ".indexer_x")
    assert [r.coordinate and r.coordinate.names.model for r in found.values()] == [
        "x",
        "y",
        "y",
        "x",
    ]


def test_mamba_keeps_its_tp_pair_beside_an_mla_anchor() -> None:
    found = resolve("_m", ".mamba_m_0_2", ".mamba_m_1_2")
    assert found[".mamba_m_1_2"].coordinate == Coordinate(
        Names("m"), "mamba", shard=Shard(tp_rank=1, tp_size=2)
    )


def test_a_lone_mamba_rank_follows_its_anchor() -> None:
    found = resolve("_m", ".mamba_m_1_2")
    assert found[".mamba_m_1_2"].coordinate == Coordinate(
        Names("m"), "mamba", shard=Shard(tp_rank=1, tp_size=2)
    )


def test_a_pool_name_that_starts_another_follows_the_anchor() -> None:
    assert resolve("_m", ".draft_indexer_m")[".draft_indexer_m"].coordinate == Coordinate(
        Names("m"), "draft_indexer"
    )
    assert resolve("_indexer_m", ".draft_indexer_m")[".draft_indexer_m"].coordinate == Coordinate(
        Names("indexer_m"), "draft"
    )


def test_both_anchors_leave_the_pool_open() -> None:
    assert resolve("_m", "_indexer_m", ".draft_indexer_m")[".draft_indexer_m"].ambiguous


def test_foreign_names_have_no_readings() -> None:
    foreign = resolve("nonsense")["nonsense"]
    assert foreign == Resolved(None, ())
    assert not foreign.ambiguous
