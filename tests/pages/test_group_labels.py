"""Labels of groups, with and without a profile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from hicachectl.backends.file.store import FileStore
from hicachectl.formats.keys import grammar_of
from hicachectl.formats.keys.labels import group_label, label_text
from hicachectl.formats.objects import Names
from hicachectl.formats.profile import Profile, parse_profile, profile_from_mapping
from hicachectl.pages.deployments import assign_affixes
from hicachectl.pages.groups import PageGroups
from hicachectl.pages.scanning import take_inventory
from tests.stores import DSA, page, put_pages

if TYPE_CHECKING:
    from pathlib import Path

MLA = {"name": "kv", "kind": "opaque", "nbytes": 64, "replicated": True}
MAMBA = {"name": "mamba", "kind": "opaque", "nbytes": 64}


def profile_of(*pools: dict[str, object], **fields: object) -> Profile:
    return profile_from_mapping({"model": "m", "page_size": 4, "pools": list(pools), **fields})


def labels(directory: Path, profile: Profile | None = None) -> dict[str, list[str]]:
    """Return the labels of each page's groups."""
    with FileStore(directory) as store:
        groups = PageGroups(take_inventory(store, profile))
    found: dict[str, list[str]] = {}
    for name, label in zip(groups.pages.to_pylist(), groups.label_ids.tolist(), strict=True):
        found.setdefault(name, []).append(groups.labels[label])
    return {name: sorted(texts) for name, texts in found.items()}


def test_mamba_beside_a_rankless_anchor(tmp_path: Path) -> None:
    """Also if its anchor is missing, or no page of the store has one."""
    put_pages(tmp_path, range(3), ".mamba_m_0_2", ".mamba_m_1_2")
    put_pages(tmp_path, range(2), "_m")
    put_pages(tmp_path, range(1), ".indexer_m")  # not listed in the profile
    wanted = {page(0): ["m"], page(1): ["m"], page(2): ["m tp2"]}
    with_profile = profile_of(MLA, MAMBA, tp=2)
    assert labels(tmp_path) == labels(tmp_path, with_profile) == wanted
    for number in range(2):
        (tmp_path / f"{page(number)}_m.bin").unlink()
    wanted = {page(0): ["m"], page(1): ["m tp2"], page(2): ["m tp2"]}
    assert labels(tmp_path) == labels(tmp_path, with_profile) == wanted


@pytest.mark.parametrize("sizes", [{}, {"pp": 2}, {"cp": 2}])
def test_sizes_are_those_of_the_keys(tmp_path: Path, sizes: dict[str, int]) -> None:
    profile = profile_of(
        {"name": "kv", "kind": "opaque", "nbytes": 64, "replicated": False}, tp=4, **sizes
    )
    ends = {"pp": ["_2_0", "_2_1"], "cp": ["_cp0_2", "_cp1_2"]}.get(next(iter(sizes), ""), [""])
    put_pages(tmp_path, range(2), *(f"_m_{rank}_4{end}" for rank in range(4) for end in ends))
    text = " ".join(["m tp4", *(f"{axis}2" for axis in sizes)])
    assert labels(tmp_path) == labels(tmp_path, profile) == {page(n): [text] for n in range(2)}


def test_the_text_tells_every_two_deployments_apart(tmp_path: Path) -> None:
    """A name that ends like sizes, no name, and a name like the mark of ambiguous keys."""
    put_pages(tmp_path, range(1), "_m_0_2", "_m_1_2", "_m tp2", "_", "_-", "_?", "_a%20b", "_a b")
    put_pages(tmp_path, range(1), "_open_0_2")
    (found,) = labels(tmp_path).values()
    assert len(set(found)) == len(found) == 8
    assert {"m tp2", "?", "-"} <= set(found)


def test_mooncake_keys_show_no_tp_size_nor_where_a_tag_ends() -> None:
    codec = grammar_of("mooncake")
    profile = replace(
        profile_of({"name": "kv", "kind": "mha", "dtype": "bfloat16", "layers": 2, "kv_heads": 4,
                    "head_dim": 8}, tp=2),
        tag="team",
    )  # fmt: skip
    affixes = [("team_m_", f"_{rank}_{part}") for rank in range(4) for part in "kv"]
    for given in (profile, None):
        table = assign_affixes(affixes, codec, given)
        assert {deployment.label(codec) for deployment in table.deployments} == {"team_m"}


def test_dcp_sizes_and_page_are_in_the_text() -> None:
    codec = grammar_of("file")
    affixes = [("", f"_m_tp8_dcp{rank}_4_page256.bin") for rank in range(4)]
    affixes += [("", f".mamba_m_{rank}_8_tp8_dcp{rank % 4}_4_page256.bin") for rank in range(8)]
    (deployment,) = assign_affixes(affixes, codec, None).deployments
    assert deployment.label(codec) == "m tp8 dcp4 page256"
    assert group_label(codec, Names("m"), affixes[-1:]) == "m tp8 dcp4 page256"


def test_a_pool_that_no_profile_lists_changes_nothing(tmp_path: Path) -> None:
    put_pages(tmp_path, range(2), "_x-dsa", ".indexer_x-dsa", ".draft_x-dsa")
    wanted = {page(number): ["x-dsa"] for number in range(2)}
    assert labels(tmp_path) == labels(tmp_path, parse_profile(DSA)) == wanted


def test_people_read_labels_as_messages_write_sizes() -> None:
    texts = {"m tp2": "m tp 2", "a_b3 tp4 pp2 page64": "a_b3 tp 4 pp 2 page 64", "?": "?", "-": "-"}
    assert {label: label_text(label) for label in texts} == texts
