"""Page groups: states, counts and missing keys."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest

from hicachectl.backends.base import open_store
from hicachectl.formats.keys import grammar_of
from hicachectl.formats.profile import Profile, parse_profile
from hicachectl.pages import group_table, groups
from hicachectl.pages.deployments import assign_affixes
from hicachectl.pages.groups import UNKNOWN_BYTES, PageGroups
from hicachectl.pages.listing import page_rows
from hicachectl.pages.scanning import take_inventory
from hicachectl.text.vocabulary import STATES
from tests.stores import DSA, page, put_pages

if TYPE_CHECKING:
    from pathlib import Path


def groups_of(directory: Path, profile: Profile | None = None) -> PageGroups:
    with open_store(str(directory)) as store:
        return PageGroups(take_inventory(store, profile))


def states(directory: Path, profile: Profile | None = None) -> dict[str, str]:
    rows = page_rows(groups_of(directory, profile)).to_pylist()
    return {row["page"]: row["state"] for row in rows}


def test_pages_with_every_rank_are_whole(tmp_path: Path) -> None:
    put_pages(tmp_path, range(3), "_m_0_2", "_m_1_2")
    assert set(states(tmp_path).values()) == {"whole"}


def test_a_page_without_a_rank_is_partial_and_names_the_key(tmp_path: Path) -> None:
    put_pages(tmp_path, range(3), "_m_0_2", "_m_1_2")
    (tmp_path / f"{page(1)}_m_1_2.bin").unlink()
    row = next(r for r in page_rows(groups_of(tmp_path)).to_pylist() if r["state"] != "whole")
    assert row["page"] == page(1)
    assert row["state"] == "partial"
    assert row["missing"] == [f"{page(1)}_m_1_2.bin"]
    assert row["pools"] == {"kv": {"present": 1, "expected": 2}}


def test_trailing_pools_are_on_all_ranks_or_none(tmp_path: Path) -> None:
    put_pages(tmp_path, range(4), "_m_0_2", "_m_1_2")
    put_pages(tmp_path, range(2), ".mamba_m_0_2", ".mamba_m_1_2")
    (tmp_path / f"{page(1)}.mamba_m_0_2.bin").unlink()
    found = states(tmp_path)
    assert [found[page(number)] for number in range(4)] == ["whole", "partial", "whole", "whole"]
    rows = {row["page"]: row for row in page_rows(groups_of(tmp_path)).to_pylist()}
    assert rows[page(2)]["pools"]["mamba"] == {"present": 0, "expected": 0}
    assert rows[page(1)]["missing"] == [f"{page(1)}.mamba_m_0_2.bin"]


def test_side_objects_without_kv_are_orphans(tmp_path: Path) -> None:
    put_pages(tmp_path, range(3), "_m", ".indexer_m")
    (tmp_path / f"{page(0)}_m.bin").unlink()
    assert states(tmp_path)[page(0)] == "orphan"


def test_a_pool_that_is_absent_everywhere_needs_a_profile_to_be_missed(tmp_path: Path) -> None:
    put_pages(tmp_path, range(3), "_x-dsa", nbytes=4 * 2 * 1152)
    assert set(states(tmp_path).values()) == {"whole"}
    found = page_rows(groups_of(tmp_path, parse_profile(DSA))).to_pylist()
    assert {row["state"] for row in found} == {"partial"}
    assert sorted(row["missing"][0] for row in found) == sorted(
        f"{page(n)}.indexer_x-dsa.bin" for n in range(3)
    )


def test_objects_that_the_profile_lacks_make_no_page_partial(tmp_path: Path) -> None:
    put_pages(tmp_path, range(3), "_x-dsa", nbytes=4 * 2 * 1152)
    put_pages(tmp_path, range(3), ".indexer_x-dsa", nbytes=4 * 2 * 132)
    put_pages(tmp_path, range(1), ".mamba_x-dsa_0_2")
    put_pages(tmp_path, range(1, 2), ".mamba_x-dsa_0_2", ".mamba_x-dsa_1_2")
    (deployment,) = groups_of(tmp_path, profile := parse_profile(DSA)).deployments
    assert [spec.pool for spec in deployment.specs if not spec.listed] == ["mamba"] * 2
    assert set(states(tmp_path, profile).values()) == {"whole"}


def test_bytes_are_unknown_where_a_size_is(tmp_path: Path) -> None:
    put_pages(tmp_path, range(3), "_m_0_2", "_m_1_2", nbytes=100)
    with open_store(str(tmp_path)) as store:
        inventory = take_inventory(store)
    keys = inventory.objects.column("key").to_pylist()
    sizes = [None if key == f"{page(1)}_m_1_2.bin".encode() else 100 for key in keys]
    at = inventory.objects.schema.get_field_index("nbytes")
    objects = inventory.objects.set_column(at, "nbytes", pa.array(sizes, pa.int64()))
    found = PageGroups(replace(inventory, objects=objects))
    nbytes = dict(zip(found.pages.to_pylist(), found.nbytes.tolist(), strict=True))
    assert nbytes == {page(0): 200, page(1): UNKNOWN_BYTES, page(2): 200}
    assert found.total_bytes(np.arange(3)) is None
    assert found.total_bytes(np.flatnonzero(found.nbytes >= 0)) == 400


def test_two_topologies_of_one_model_are_judged_apart(tmp_path: Path) -> None:
    put_pages(tmp_path, range(2), "_m_0_2", "_m_1_2")
    put_pages(tmp_path, range(2, 4), "_m_0_4", "_m_1_4", "_m_2_4", "_m_3_4")
    assert set(states(tmp_path).values()) == {"whole"}


def test_mamba_of_an_mla_model_joins_its_anchor(tmp_path: Path) -> None:
    put_pages(tmp_path, range(3), "_m")
    put_pages(tmp_path, range(2), ".mamba_m_0_2", ".mamba_m_1_2")
    assert len(groups_of(tmp_path)) == 3
    assert set(states(tmp_path).values()) == {"whole"}


def test_ambiguous_keys_make_groups_of_unknown_state(tmp_path: Path) -> None:
    put_pages(tmp_path, range(2), "_m_0_2")
    assert set(states(tmp_path).values()) == {"unknown"}


def test_keys_with_and_without_a_stage_come_in_one_order() -> None:
    """Stage 0 and no stage compare equal as ranks; a set's order would decide."""
    ends = [f"_{rank}_{part}" for rank in ("0_0", "0", "1_0", "1") for part in "kv"]
    (found,) = assign_affixes(
        [("m_", end) for end in ends], grammar_of("mooncake"), None
    ).deployments
    ordered = [f"_{rank}{stage}_{part}" for rank in "01" for part in "kv" for stage in ("_0", "")]
    assert [spec.affix for spec in found.specs] == [("m_", end) for end in ordered]


def test_foreign_files_are_in_no_group(tmp_path: Path) -> None:
    (tmp_path / "README").write_text("mine")
    put_pages(tmp_path, range(1), "_m_0_1")
    groups = groups_of(tmp_path)
    assert len(groups) == 1
    assert sorted(groups.of_object.tolist()) == [-1, 0]


def test_group_sums_and_times(tmp_path: Path) -> None:
    put_pages(tmp_path, range(2), "_m_0_2", nbytes=10, mtime=1_000_000_000)
    put_pages(tmp_path, range(2), "_m_1_2", nbytes=30, mtime=1_000_000_005)
    groups = groups_of(tmp_path)
    assert groups.nbytes.tolist() == [40, 40]
    assert groups.newest_ns.tolist() == [1_000_000_005 * 10**9] * 2


def test_an_empty_store_has_no_groups(tmp_path: Path) -> None:
    groups = groups_of(tmp_path)
    assert len(groups) == 0
    assert page_rows(groups).num_rows == 0


@pytest.mark.parametrize("present", range(1, 16))
def test_states_and_missing_agree_with_counting_by_hand(tmp_path: Path, present: int) -> None:
    """Every subset of a page with two kv ranks and two mamba ranks."""
    stems = ["_m_0_2", "_m_1_2", ".mamba_m_0_2", ".mamba_m_1_2"]
    put_pages(tmp_path, range(1, 3), *stems)
    chosen = [stem for bit, stem in enumerate(stems) if present >> bit & 1]
    put_pages(tmp_path, range(1), *chosen)
    kv = [stem for stem in chosen if "mamba" not in stem]
    mamba = [stem for stem in chosen if "mamba" in stem]
    whole = len(kv) == 2 and len(mamba) != 1
    state = "whole" if whole else "partial" if kv else "orphan"
    row = next(r for r in page_rows(groups_of(tmp_path)).to_pylist() if r["page"] == page(0))
    wanted = stems if mamba else stems[:2]
    assert row["state"] == state
    assert row["state"] in STATES
    assert sorted(row["missing"]) == sorted(f"{page(0)}{s}.bin" for s in wanted if s not in chosen)


def test_groups_are_the_same_whichever_way_they_are_numbered_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for model in ("a", "b"):
        put_pages(tmp_path, range(5), f"_{model}_0_2", f"_{model}_1_2")
    (tmp_path / f"{page(3)}_a_1_2.bin").unlink()
    (tmp_path / f"{page(9)}_.bin").write_bytes(b"of no model")
    (tmp_path / "README").touch()
    usual = groups_of(tmp_path)
    rows = page_rows(usual).to_pylist()
    names = [(row["model"], row["page"]) for row in rows]
    assert names == sorted(names, key=lambda name: (name[0] is not None, name))
    monkeypatch.setattr(groups, "_MOST_UNUSED", 0)  # by a sort
    monkeypatch.setattr(group_table, "_SPARSE", 0)
    monkeypatch.setattr(group_table, "_MANY_SETS", 0)
    other = groups_of(tmp_path)
    assert page_rows(other).to_pylist() == rows
    assert (other.of_object == usual.of_object).all()
    assert (other.page_ids == usual.page_ids).all()
