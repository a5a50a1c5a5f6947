"""Transfers that are refused before any byte is moved, with their reasons."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from hicachectl.formats.errors import HicacheError
from hicachectl.formats.transfer import retargeted, transfer_plan
from tests.formats.small_models import (
    CP_TWO,
    DCP,
    MHA_TWO,
    OLD_KDA,
    WITH_DRAFT,
    gdn,
    indexer,
    mha,
    mla,
    opaque,
    profile,
)

if TYPE_CHECKING:
    from hicachectl.formats.profile import Profile


@pytest.mark.parametrize(
    ("release", "pools", "new", "reason"),
    [
        ("0.5.21", (mla(), indexer()), "0.5.23", "before 0.5.22 store the index keys of all lay"),
        ("0.5.23", (mla(layers=4), indexer(layers=(0, 3))), "0.5.21", "need the index keys of all"),
        ("0.5.23", (mla(layers=4), indexer(layers=4)), "0.5.21", ""),
        ("0.5.14", (mla(), indexer()), "0.5.21", ""),
        ("0.5.10", (mla(), indexer()), "0.5.11", "before 0.5.11 store no index keys"),
        ("0.5.17", (mha(), mha("draft")), "0.5.18", "store drafts in other objects"),
        ("0.5.18", (mha(packed_draft_layers=1),), "0.5.17", "store drafts in other objects"),
        ("0.5.18", (mha(packed_draft_layers=1),), "0.5.23", ""),
        ("0.5.6", (mha(), gdn()), "0.5.23", ""),
    ],
)
def test_a_release_with_other_objects_needs_a_profile(
    release: str, pools: tuple[Any, ...], new: str, reason: str
) -> None:
    old = profile(*pools, sglang=release)
    if not reason:
        assert retargeted(old, sglang=new) == replace(old, sglang=new)
        return
    with pytest.raises(HicacheError, match=rf"sglang {new}: .*{reason}.*--to-profile"):
        retargeted(old, sglang=new)
    assert retargeted(old, sglang=new, pools=old.pools).sglang == new


@pytest.mark.parametrize(
    ("source", "grammar", "change", "destination", "reason"),
    [
        (profile(mha(), mha("swa")), "file", {}, "hf3fs", "beside kv on 3FS; use a file store"),
        (MHA_TWO, "file", {"pp": 2}, "hf3fs", "do not name the pp rank, .*; use a file store"),
        (DCP, "file", {}, "hf3fs", "dcp 2: .*; use a file store"),
        (DCP, "file", {"tp": 4}, "file", "tp: cannot change from 2 to 4 under dcp 2; keep"),
        (DCP, "file", {"pp": 2}, "mooncake", "pp: cannot change from 1 to 2 under dcp 2; keep"),
        (MHA_TWO, "file", {"layout": "layer_first"}, "mooncake", "scattered .*; use page_first or"),
        (
            profile(mha(), gdn()),
            "file",
            {"layout": "layer_first"},
            "file",
            "a Mamba pool in 'layer_first'; use one of page",
        ),
        (profile(mha(v_head_dim=4)), "mooncake", {}, "file", r"width \(8, 4\) .*; use Mooncake"),
        (CP_TWO, "file", {}, "mooncake", "Mooncake keys do not name the cp .*; use a file"),
        (CP_TWO, "mooncake", {}, "file", "Mooncake keys do not name the cp .*; use a file"),
        (
            profile(mla(), mha("swa")),
            "file",
            {},
            "mooncake",
            "do not fit SGLang's Mooncake keys .*; use a file store",
        ),
        (WITH_DRAFT, "file", {}, "mooncake", "only the first of 2 shards; let servers write"),
        (WITH_DRAFT, "mooncake", {}, "file", "only the first of 2 shards; let servers write"),
        (
            OLD_KDA,
            "file",
            {"sglang": "0.5.23"},
            "file",
            "only the first of 2 shards; let servers write",
        ),
        (
            profile(mha(), gdn(), tp=2, linear_tp=4),
            "file",
            {"tp": 4},
            "file",
            "linear_tp: 4 .*; keep",
        ),
        (
            profile(mha(), gdn()),
            "file",
            {"tp": 16},
            "file",
            "is not a multiple of the linear TP size 16; if every rank holds group 0 whole, add",
        ),
        (
            profile(mha(kv_heads=6)),
            "file",
            {"tp": 4},
            "file",
            "6 heads over tp 4, .*; give another tp",
        ),
        (profile(mha()), "file", {}, "unified", "A profile cannot describe .*; use another store"),
        (
            profile(opaque("kv"), tp=2),
            "file",
            {"tp": 4},
            "file",
            "form of the bytes is unknown, .*; give a profile that",
        ),
        (
            profile(opaque("kv"), tp=2),
            "file",
            {"layout": "page_head"},
            "file",
            "axis order of the bytes is unknown, .* from page_first to page_head; keep it",
        ),
        (
            profile(opaque("kv"), tp=2),
            "file",
            {},
            "mooncake",
            "form of the bytes is unknown, .*; give a profile that",
        ),
        (
            profile(opaque("kv", replicated=True)),
            "file",
            {"pp": 2},
            "file",
            "form of the bytes is unknown, .*; give a profile that",
        ),
        (
            profile(mha(), inferred=True),
            "file",
            {"tp": 2},
            "file",
            "not one inferred .*; give --profile",
        ),
        (
            profile(mha(), pp=2, sglang="0.5.9"),
            "mooncake",
            {},
            "file",
            "before 0.5.10 .*; use SGLang 0.5.10",
        ),
    ],
)
def test_what_no_copy_can_make_is_refused(
    source: Profile,
    grammar: str,
    change: dict[str, Any],
    destination: str,
    reason: str,
) -> None:
    with pytest.raises(HicacheError, match=reason):
        transfer_plan(source, grammar, retargeted(source, **change), destination)


@pytest.mark.parametrize(
    ("source", "destination", "reason"),
    [
        (
            MHA_TWO,
            replace(MHA_TWO, page_size=6),
            "page_size: cannot change from 3 to 6, because page .*; give .* page_size 3",
        ),
        (
            MHA_TWO,
            replace(MHA_TWO, hash_unit="bigram"),
            "depend on the hash unit; give a destination with hash_unit",
        ),
        (
            profile(mla(), cp=2),
            profile(mla()),
            "cp: cannot change from 2 to 1, .*; give a destination with cp 2",
        ),
        (
            profile(mla(), tp=2, page_size=4),
            DCP,
            "dcp: cannot change from 1 to 2, .*; give a destination with dcp 1",
        ),
        (
            profile(mha()),
            profile(mha(dtype="float16")),
            r"pools\[kv\].dtype: cannot change from 'bfloat16' \(source\) to 'float16' .*; give",
        ),
        (
            profile(mha()),
            profile(mha(kv_heads=8)),
            r"kv_heads: cannot change from 4 \(source\) to 8 .*; give a destination",
        ),
        (
            profile(mla()),
            profile(mla(row="fp8")),
            "dtype: cannot change from 'bfloat16' .*; give a dest",
        ),
        (
            profile(mha()),
            profile(mha(), mha("draft")),
            r"pools\[draft\]: the source does not have .*; give profiles",
        ),
        (
            profile(mha(), mha("draft")),
            profile(mha()),
            r"pools\[draft\]: the destination does not have .*; give profiles",
        ),
        (
            profile(mha()),
            profile(mha(layers=5)),
            "the source does not store layer 4; give profiles",
        ),
        (
            profile(mha()),
            profile(mha(packed_draft_layers=1)),
            "does not store packed draft .*; give profiles",
        ),
    ],
)
def test_deployments_of_other_pages_are_refused(
    source: Profile, destination: Profile, reason: str
) -> None:
    with pytest.raises(HicacheError, match=reason):
        transfer_plan(source, "file", destination, "file")


@pytest.mark.parametrize(
    "model",
    [
        WITH_DRAFT,
        OLD_KDA,
        replace(CP_TWO, cp_layer_split=False),
        profile(opaque("kv"), tp=2, inferred=True),
        profile(mha(), gdn(), tp=2, linear_tp=4),
        profile(mha(kv_heads=6), tp=4),
    ],
)
def test_a_new_name_is_given_even_to_what_cannot_be_cut(model: Profile) -> None:
    plan = transfer_plan(model, "file", retargeted(model, model="new"), "file")
    assert all(unit.identity for unit in plan.units)
