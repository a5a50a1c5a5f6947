"""Specs of objects. Golden sizes: real models at page size 64, computed by hand from configs."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from hicachectl.formats.errors import ProfileError, UnsupportedByBackend, UsageError
from hicachectl.formats.keys import grammar_of
from hicachectl.formats.kinds.pool import Pool, StateTensor
from hicachectl.formats.objects import Coordinate, Names, Shard
from hicachectl.formats.profile import Profile
from hicachectl.formats.spec import ObjectSpec, object_specs

SCHEMES = ("file", "mooncake", "hf3fs")


def mha(name: str = "kv", **fields: Any) -> Pool:
    values = {"dtype": "bfloat16", "layers": 4, "kv_heads": 8, "head_dim": 128, **fields}
    return Pool(name=name, kind="mha", **values)


def mla(name: str = "kv", **fields: Any) -> Pool:
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "row": "bf16", "layers": 61}
    return Pool(name=name, kind="mla", **{**sizes, **fields})


def indexer(name: str = "indexer", **fields: Any) -> Pool:
    return Pool(name=name, kind="dsa_indexer", **{"layers": 61, "index_head_dim": 128, **fields})


def gdn(layers: int) -> Pool:
    return Pool(
        name="mamba",
        kind="mamba",
        layers=layers,
        temporal=StateTensor(shape=(32, 128, 128), dtype="float32"),
        conv=(StateTensor(shape=(8192, 3), dtype="bfloat16", groups=(2048, 2048, 4096)),),
    )


def opaque(name: str, **fields: Any) -> Pool:
    return Pool(name=name, kind="opaque", **{"nbytes": 1000, **fields})


def profile(*pools: Pool, **fields: Any) -> Profile:
    return Profile(**{"model": "a/b", "page_size": 64, "pools": pools, **fields})


LOGICAL = Pool(name="kv", kind="logical")
MHA_TARGET = profile(mha(), mha("swa"), gdn(4), tp=2)
MLA_TARGET = profile(mla(), indexer(), gdn(61), tp=2)


def shards(profile: Profile, scheme: str, pool: str = "kv", part: str | None = None) -> list[Shard]:
    return [
        found.coordinate.shard
        for found in object_specs(profile, scheme)
        if found.coordinate.pool == pool and part in (None, found.coordinate.part)
    ]


def parts(profile: Profile, scheme: str, pool: str = "kv") -> list[str | None]:
    return [
        found.coordinate.part
        for found in object_specs(profile, scheme)
        if found.coordinate.pool == pool
    ]


def nbytes(profile: Profile, scheme: str, pool: str = "kv", part: str | None = None) -> set[int]:
    return {
        found.nbytes
        for found in object_specs(profile, scheme)
        if (found.coordinate.pool, found.coordinate.part) == (pool, part)
    }


# --- sizes ---


@pytest.mark.parametrize(
    ("pool", "tp", "k_bytes"),
    [
        (mha(layers=32), 1, 4_194_304),  # Llama-3.1-8B
        (mha(layers=32), 8, 524_288),
        (mha(layers=64), 1, 8_388_608),  # Qwen3-32B
        (mha(layers=64), 8, 1_048_576),
        (mha(layers=12, kv_heads=2, head_dim=256), 1, 786_432),  # Qwen3-Next-80B-A3B
        (mha(layers=12, kv_heads=2, head_dim=256), 2, 393_216),
        (mha(layers=8, kv_heads=4, head_dim=256), 1, 1_048_576),  # Qwen3.5-9B
        (mha(layers=8, kv_heads=4, head_dim=256), 4, 262_144),
    ],
)
def test_k_v_and_file_objects_of_real_models(pool: Pool, tp: int, k_bytes: int) -> None:
    model = profile(pool, tp=tp)
    assert nbytes(model, "mooncake", part="k") == {k_bytes}
    assert nbytes(model, "mooncake", part="v") == {k_bytes}
    assert nbytes(model, "hf3fs", part="k") == {k_bytes}
    assert nbytes(model, "file") == {2 * k_bytes}


@pytest.mark.parametrize(
    ("row", "packed", "kv_bytes", "indexer_bytes"),
    [
        ("bf16", 0, 4_497_408, 515_328),
        ("fp8_scaled", 0, 2_561_024, 515_328),
        ("fp8", 0, 2_248_704, 515_328),
        ("bf16", 1, 4_571_136, 523_776),
        ("fp8_scaled", 1, 2_603_008, 523_776),
    ],
)
def test_objects_of_deepseek_v32(row: str, packed: int, kv_bytes: int, indexer_bytes: int) -> None:
    kv = mla(row=row, packed_draft_layers=packed)
    model = profile(kv, indexer(packed_draft_layers=packed), tp=8)
    for scheme, part in (("file", None), ("mooncake", "k"), ("hf3fs", None)):
        assert nbytes(model, scheme, part=part) == {kv_bytes}
        assert nbytes(model, scheme, "indexer") == {indexer_bytes}


@pytest.mark.parametrize(
    ("layers", "tp", "temporal", "conv"),
    [
        (36, 1, 75_497_472, 1_769_472),  # Qwen3-Next-80B-A3B
        (36, 2, 37_748_736, 884_736),
        (36, 4, 18_874_368, 442_368),
        (24, 1, 50_331_648, 1_179_648),  # Qwen3.5-9B
        (24, 4, 12_582_912, 294_912),
    ],
)
def test_mamba_states_of_real_models(layers: int, tp: int, temporal: int, conv: int) -> None:
    model = profile(mha(), gdn(layers), tp=tp)
    assert nbytes(model, "mooncake", "mamba", "temporal") == {temporal}
    assert nbytes(model, "mooncake", "mamba", "conv_0") == {conv}
    assert nbytes(model, "file", "mamba") == nbytes(model, "hf3fs", "mamba") == {temporal + conv}


# --- file ---


def test_files_of_an_mha_target_name_the_tp_rank_in_every_pool() -> None:
    for pool in ("kv", "swa", "mamba"):
        assert shards(MHA_TARGET, "file", pool) == [
            Shard(tp_rank=0, tp_size=2),
            Shard(tp_rank=1, tp_size=2),
        ]


def test_files_of_an_mla_target_name_it_for_mamba_alone() -> None:
    assert shards(MLA_TARGET, "file", "kv") == shards(MLA_TARGET, "file", "indexer") == [Shard()]
    assert shards(MLA_TARGET, "file", "mamba") == [
        Shard(tp_rank=0, tp_size=2),
        Shard(tp_rank=1, tp_size=2),
    ]


@pytest.mark.parametrize("version", ["0.5.18", "0.5.10.post1", "v0.5.22rc1", "0.5"])
def test_older_files_of_an_mla_target_do_not(version: str) -> None:
    older = structs.replace(MLA_TARGET, sglang=version)
    assert shards(older, "file", "mamba") == [Shard()]
    assert shards(older, "hf3fs", "mamba") == [Shard(tp_rank=0)]


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23.post1", "0.6", "v0.5.24.dev1+g123"])
def test_newer_files_of_an_mla_target_do(version: str) -> None:
    assert len(shards(structs.replace(MLA_TARGET, sglang=version), "file", "mamba")) == 2


def test_a_version_that_is_none_is_refused() -> None:
    with pytest.raises(ProfileError, match="sglang: 'main' is not a version"):
        object_specs(structs.replace(MLA_TARGET, sglang="main"), "file")


def test_files_name_stage_and_cp_rank_where_there_are_several() -> None:
    assert shards(profile(mla(), pp=2, cp=2), "file") == [
        Shard(pp_rank=pp, pp_size=2, cp_rank=cp, cp_size=2) for pp in (0, 1) for cp in (0, 1)
    ]


def test_files_under_dcp_name_the_topology() -> None:
    model = profile(mla(layers=2), gdn(2), tp=4, dcp=2)
    dcp = Shard(tp_size=4, dcp_size=2, dcp_page_size=64)
    assert shards(model, "file") == [replace(dcp, dcp_rank=0), replace(dcp, dcp_rank=1)]
    assert shards(model, "file", "mamba") == [
        replace(dcp, tp_rank=rank, dcp_rank=rank % 2) for rank in range(4)
    ]
    assert nbytes(model, "file") == {2 * 32 * 576 * 2}


def test_an_mha_draft_beside_an_mla_target_is_one_file_of_one_shard() -> None:
    model = profile(mla(), mha("draft", layers=1), tp=2)
    assert shards(model, "file", "draft") == [Shard()]
    assert nbytes(model, "file", "draft") == {2 * 64 * 4 * 128 * 2}


def test_a_logical_anchor_is_an_empty_file() -> None:
    model = profile(LOGICAL, opaque("swa"), opaque("deepseek_v4_c4"), tp=2)
    first, *others = object_specs(model, "file")
    assert first == ObjectSpec(
        affix=("", "_a-b.bin"), coordinate=Coordinate(Names("a-b")), nbytes=0, anchor=True
    )
    assert [(found.coordinate.pool, found.nbytes, found.anchor) for found in others] == [
        ("swa", 1000, False),
        ("deepseek_v4_c4", 1000, False),
    ]


@pytest.mark.parametrize("scheme", ["file", "hf3fs"])
def test_k_and_v_of_different_width_lie_on_mooncake_only(scheme: str) -> None:
    model = profile(mha(v_head_dim=64))
    assert nbytes(model, "mooncake", part="k") == {2 * nbytes(model, "mooncake", part="v").pop()}
    with pytest.raises(UnsupportedByBackend, match=r"width \(128, 64\) .*; use Mooncake"):
        object_specs(model, scheme)


# --- mooncake ---


def test_mooncake_has_k_and_v_of_each_rank() -> None:
    model = structs.replace(MHA_TARGET, tag="t")
    assert [found.coordinate for found in object_specs(model, "mooncake")][:4] == [
        Coordinate(Names("a-b", "t"), "kv", part, Shard(tp_rank=rank, tp_size=2))
        for rank in (0, 1)
        for part in ("k", "v")
    ]


def test_only_mooncake_keys_have_a_tag() -> None:
    found = object_specs(structs.replace(MHA_TARGET, tag="t"), "file")
    assert {item.coordinate.names.tag for item in found} == {""}


@pytest.mark.parametrize(
    ("model", "pool", "expected"),
    [
        (MLA_TARGET, "kv", ["k"]),
        (MLA_TARGET, "indexer", [None]),
        (MLA_TARGET, "mamba", ["temporal", "conv_0"] * 2),
        (MHA_TARGET, "swa", ["k", "v"] * 2),
        (profile(mla(), mla("swa"), tp=2), "swa", [None]),
        (profile(mla(), mla("draft"), tp=2), "draft", ["k"]),
        (profile(mla(), mla("draft_swa"), tp=2), "draft_swa", [None]),
        (profile(mla(), mha("draft"), tp=2), "draft", ["k", "v"] * 2),
        (profile(mla(), mha("draft_swa"), tp=2), "draft_swa", ["k", "v"] * 2),
        (profile(mha(), mla("draft"), indexer("draft_indexer"), tp=2), "draft", ["k"]),
        (profile(mha(), opaque("indexer"), tp=2), "indexer", [None]),
        (profile(mha(), opaque("draft"), tp=2), "draft", ["k", "v"] * 2),
        (profile(mha(), opaque("draft", replicated=True), tp=2), "draft", ["k"]),
        (profile(opaque("kv"), opaque("swa"), tp=2), "swa", ["k", "v"] * 2),
        (profile(opaque("kv", replicated=True), tp=2), "kv", ["k"]),
        (profile(LOGICAL, opaque("swa"), opaque("deepseek_v4_c4"), tp=2), "swa", [None]),
    ],
)
def test_mooncake_parts(model: Profile, pool: str, expected: list[str | None]) -> None:
    assert parts(model, "mooncake", pool) == expected


@pytest.mark.parametrize(
    "model",
    [MLA_TARGET, profile(mha(), opaque("indexer"), tp=2), profile(mha(), indexer(), tp=2)],
)
def test_an_indexer_on_mooncake_has_no_tp_rank(model: Profile) -> None:
    assert shards(model, "mooncake", "indexer") == [Shard()]


def test_mooncake_stages_follow_the_rank() -> None:
    model = structs.replace(MHA_TARGET, pp=2)
    assert shards(model, "mooncake", part="k") == [
        Shard(tp_rank=tp, tp_size=2, pp_rank=pp, pp_size=2) for pp in (0, 1) for tp in (0, 1)
    ]


def test_split_heads_make_an_object_of_each_slice() -> None:
    model = profile(mha(), mha("swa"), tp=2, tp_lcm_size=8, layout="page_head")
    assert shards(model, "mooncake", part="k") == [
        Shard(tp_size=2, heads=(r, r + 1)) for r in range(8)
    ]
    assert nbytes(model, "mooncake", part="k") == {4 * 64 * 128 * 2}
    k = object_specs(model, "mooncake")[0].tensors[0]
    assert (k.axes, k.shape) == (("head", "token", "layer", "channel"), (1, 64, 4, 128))


def test_sidecars_of_split_heads_keep_a_rank_together() -> None:
    model = profile(mha(), mha("swa"), tp=2, tp_lcm_size=8, layout="page_head")
    assert shards(model, "mooncake", "swa", "k") == [
        Shard(tp_size=2, heads=(0, 4)),
        Shard(tp_size=2, heads=(4, 8)),
    ]
    assert nbytes(model, "mooncake", "swa", "k") == {4 * 4 * 64 * 128 * 2}


@pytest.mark.parametrize("change", [{"layout": "page_first"}, {"tp_lcm_size": 2}])
def test_heads_are_split_in_page_head_and_for_more_slices_only(change: dict[str, Any]) -> None:
    model = structs.replace(profile(mha(), tp=2, tp_lcm_size=8, layout="page_head"), **change)
    assert [shard.tp_rank for shard in shards(model, "mooncake", part="k")] == [0, 1]


def test_heads_that_do_not_split_are_refused() -> None:
    model = profile(mha(), tp=2, tp_lcm_size=16, layout="page_head")
    with pytest.raises(ProfileError, match="4 KV heads cannot be split into 8 equal slices"):
        object_specs(model, "mooncake")


def test_mooncake_keys_under_dcp_name_the_topology() -> None:
    model = profile(mla(layers=2), gdn(2), tp=4, dcp=2)
    sizes = Shard(tp_size=4, pp_size=1, cp_size=1, dcp_size=2, dcp_page_size=64)
    assert shards(model, "mooncake") == [
        replace(sizes, dcp_rank=rank, cp_rank=0) for rank in (0, 1)
    ]
    assert shards(model, "mooncake", "mamba", "conv_0") == [
        replace(sizes, tp_rank=rank) for rank in range(4)
    ]


@pytest.mark.parametrize("scheme", ["mooncake", "hf3fs"])
def test_keys_without_cp_rank_hold_rank_0(scheme: str) -> None:
    model = profile(mla(layers=3), indexer(layers=3), cp=2, cp_layer_split=True)
    found = object_specs(model, scheme)
    assert [item.layers for item in found] == [(0, 1), (0, 1)]
    assert {item.coordinate.shard.cp_rank for item in found} == {None}


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (profile(mha(), layout="layer_first"), r"pools\[kv\]: .* scattered"),
        (profile(mla(), indexer(), layout="layer_first"), r"pools\[indexer\]: .* scattered"),
        (
            profile(mha(), mha("auxiliary_swa")),
            r"pools\[auxiliary_swa\]: SGLang does not store this pool",
        ),
        (profile(mla(), mha("swa")), "do not fit SGLang's Mooncake keys"),
        (profile(mha(), mla("swa")), "do not fit SGLang's Mooncake keys .*; use a file store"),
        (profile(mha(replicated=True)), "do not fit SGLang's Mooncake keys"),
        (profile(mha(), opaque("mamba")), "which kind opaque cannot name, .*; use kind mamba"),
        (profile(mha(), tp=2, dcp=2), "dcp 2: .*MLA models only; give dcp 1"),
        (
            profile(mla(), indexer(), tp=2, dcp=2),
            "dcp 2: .*does not store indexer pools under DCP; give dcp 1",
        ),
        (
            profile(mla(), tp=2, dcp=2, layout="page_head"),
            "does not store DCP pages in layout page_head; use one of",
        ),
    ],
)
def test_what_mooncake_cannot_hold_is_refused(model: Profile, reason: str) -> None:
    with pytest.raises(UnsupportedByBackend, match=reason):
        object_specs(model, "mooncake")


def test_mooncake_takes_mla_in_layer_first() -> None:
    (found,) = object_specs(profile(mla(), layout="layer_first"), "mooncake")
    assert found.tensors[0].axes == ("layer", "token", "channel")


# --- 3FS ---


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("page_first", ["k", "v"]),
        ("page_first_direct", ["k", "v"]),
        ("layer_first", [None]),
    ],
)
def test_3fs_has_k_and_v_apart_in_zero_copy_layouts(
    layout: str, expected: list[str | None]
) -> None:
    assert parts(profile(mha(), layout=layout), "hf3fs") == expected


def test_3fs_objects_name_the_rank_of_the_data_file_alone() -> None:
    model = profile(mha(), gdn(4), tp=2)
    assert shards(model, "hf3fs", "mamba") == [Shard(tp_rank=0), Shard(tp_rank=1)]
    assert {found.coordinate.names.model for found in object_specs(model, "hf3fs")} == {""}


def test_3fs_mamba_states_beside_mla_have_the_rank_in_the_key() -> None:
    assert shards(MLA_TARGET, "hf3fs") == shards(MLA_TARGET, "hf3fs", "indexer") == [
        Shard(tp_rank=0)
    ]  # fmt: skip
    assert shards(MLA_TARGET, "hf3fs", "mamba") == [
        Shard(tp_rank=0, tp_size=2),
        Shard(tp_rank=1, tp_size=2),
    ]


def test_opaque_kv_on_3fs_follows_zero_copy() -> None:
    assert parts(profile(opaque("kv")), "hf3fs") == ["k", "v"]
    assert parts(profile(opaque("kv", replicated=True)), "hf3fs") == [None]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (profile(mla(), mha("draft")), "beside kv"),
        (profile(mha(), mha("swa")), "beside kv"),
        (profile(mha(), pp=2), "do not name the pp rank"),
        (profile(mla(), tp=2, dcp=2), "dcp 2: .* file and Mooncake stores only; use a file store"),
        (
            profile(mha(), layout="page_head"),
            "layout page_head: SGLang's 3FS backend .*; use one of page_first",
        ),
    ],
)
def test_what_3fs_cannot_hold_is_refused(model: Profile, reason: str) -> None:
    with pytest.raises(UnsupportedByBackend, match=reason):
        object_specs(model, "hf3fs")


# --- older releases ---


def keys(model: Profile, scheme: str) -> set[str]:
    return {
        "H".join(grammar_of(scheme).affix(found.coordinate))
        for found in object_specs(model, scheme)
    }


@pytest.mark.parametrize(
    ("sglang", "model", "expected"),
    [
        ("0.5.17", profile(mla(), indexer(), tag="t"), {"t_a-b_H__k", "t_a-b_H__indexer"}),
        ("0.5.16", profile(mla(), indexer(), tag="t"), {"t_H__k", "t_H__indexer"}),
        ("0.5.16", profile(mha()), {"H_0_k", "H_0_v"}),
        ("0.5.8", profile(mla(), pp=2), {"H_0_k", "H_1_k"}),
        ("0.5.7", profile(mla(), tag="t"), {"t_H_k"}),
        ("0.5.6.post2", profile(mha()), {"H_0_k", "H_0_v"}),
    ],
)
def test_mooncake_keys_of_older_releases(sglang: str, model: Profile, expected: set[str]) -> None:
    assert keys(structs.replace(model, sglang=sglang), "mooncake") == expected


@pytest.mark.parametrize(
    ("sglang", "scheme", "change"),
    [
        ("0.5.9", "file", {"pp": 2}),
        ("0.5.13", "file", {"cp": 2}),
        ("0.5.7", "mooncake", {"pp": 2}),
    ],
)
def test_ranks_that_an_older_release_does_not_tell_apart_are_refused(
    sglang: str, scheme: str, change: dict[str, Any]
) -> None:
    model = structs.replace(profile(mla()), sglang=sglang, **change)
    with pytest.raises(UnsupportedByBackend, match=r"overwrite each other.*; use SGLang"):
        object_specs(model, scheme)
    major, minor, patch = sglang.split(".")
    assert object_specs(structs.replace(model, sglang=f"{major}.{minor}.{int(patch) + 1}"), scheme)


# --- all ---


def nixl_suffixes(model: Profile, scheme: str = "nixl") -> set[str]:
    """Return the suffixes of rank 0's keys, without the model."""
    suffixes = (found.affix[1].removeprefix("_a-b") for found in object_specs(model, scheme))
    return {suffix for suffix in suffixes if not suffix.startswith("_1_2")}


_SMALL: dict[str, Any] = {
    "layers": 1,
    "kv_heads": 1,
    "head_dim": 32,
}  # K or V of 64 tokens: 4096 bytes


@pytest.mark.parametrize(
    ("model", "direct", "buffered"),
    [
        (profile(mha(**_SMALL)), {"_0_1_k", "_0_1_v"}, {"_0_1_k", "_0_1_v"}),
        (profile(mha(**_SMALL), page_size=32), {"_0_1"}, {"_0_1_k", "_0_1_v"}),
        (profile(mha(), layout="layer_first"), {"_0_1"}, {"_0_1"}),
        (
            profile(mha(), mha("draft"), layout="page_head"),
            {"_0_1", "_0_1_draft_k", "_0_1_draft_v"},
            {"_0_1", "_0_1_draft_k", "_0_1_draft_v"},
        ),
        (
            profile(mla(layers=1), indexer(layers=16), mla("draft", layers=1), page_size=32, tp=2),
            {"_k", "_indexer", "_draft"},
            {"_k", "_indexer", "_draft"},
        ),
        (
            profile(mla(row="fp8"), gdn(1), page_size=8, tp=2),
            {"", "_0_2_mamba_temporal", "_0_2_mamba_conv_0"},
            {"_k", "_0_2_mamba_temporal", "_0_2_mamba_conv_0"},
        ),
    ],
)
def test_nixl_divides_pages_by_their_place_in_memory(
    model: Profile, direct: set[str], buffered: set[str]
) -> None:
    assert nixl_suffixes(model) == direct
    assert nixl_suffixes(model, "nixl-buffered") == buffered


@pytest.mark.parametrize(
    ("scheme", "nbytes"),
    [("file", [0]), ("mooncake", []), ("nixl", [4096]), ("nixl-buffered", [1])],
)
def test_some_stores_have_an_object_for_an_anchor_without_bytes(
    scheme: str, nbytes: list[int]
) -> None:
    """Without it, HiCacheNixl and HiCacheFile find no page."""
    model = profile(LOGICAL, opaque("deepseek_v4_c4", nbytes=1024))
    markers = [spec for spec in object_specs(model, scheme) if spec.pool == "kv"]
    assert [spec.nbytes for spec in markers] == nbytes
    assert all(spec.anchor for spec in markers)


NIXL_SCHEMES = ("nixl", "nixl-buffered")
CONVOLUTIONS = Pool(
    name="mamba",
    kind="mamba",
    layers=4,
    conv=(StateTensor(shape=(2048, 3), dtype="bfloat16"),),
)
NO_TEMPORAL = (
    r"^pools\[mamba\]: SGLang's NIXL backend never finds states without a temporal one again, .*; "
    "use a file store$"
)


@pytest.mark.parametrize(
    ("model", "scheme", "reason"),
    [
        (
            profile(mha(), pp=2),
            "nixl",
            "pp 2: NIXL keys do not name the pp rank, .*; use a file store",
        ),
        (
            profile(mha(), cp=2),
            "nixl-buffered",
            "cp 2: NIXL keys do not name the cp rank, .*; use a file store",
        ),
        (
            profile(LOGICAL, opaque("deepseek_v4_c4")),
            "hf3fs",
            "models without KV .*; use a file store or Mooncake",
        ),
        (profile(mla(), indexer(layers=61)), "nixl", "add direct_io=off to the URL"),
        (
            profile(mha(), mha("draft"), layout="layer_first"),
            "nixl-buffered",
            "does not store this pool whole; use page_first",
        ),
        *((profile(mha(), CONVOLUTIONS), scheme, NO_TEMPORAL) for scheme in NIXL_SCHEMES),
    ],
)
def test_what_nixl_cannot_hold_is_refused(model: Profile, scheme: str, reason: str) -> None:
    with pytest.raises(UnsupportedByBackend, match=reason):
        object_specs(model, scheme)


def test_the_unified_scheme_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedByBackend, match="the unified key scheme"):
        object_specs(MHA_TARGET, "unified")


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(UsageError, match="Key scheme: 'redis' is not one of "):
        object_specs(MHA_TARGET, "redis")


def test_a_broken_profile_is_refused_with_its_problems() -> None:
    with pytest.raises(ProfileError, match="page_size: must be at least 1"):
        object_specs(structs.replace(MHA_TARGET, page_size=0), "file")


def test_rows_of_several_tokens_must_fill_a_page() -> None:
    model = profile(mla(), indexer(compress_ratio=4), page_size=6)
    with pytest.raises(ProfileError) as refusal:
        object_specs(model, "file")
    assert str(refusal.value) == (
        "pools[indexer].compress_ratio: 4 tokens of a row do not divide a page of 6 tokens; give "
        "another page_size"
    )


def test_without_a_kv_object_the_first_pool_of_all_pages_is_the_anchor() -> None:
    model = profile(LOGICAL, opaque("swa"), opaque("deepseek_v4_c4"), opaque("deepseek_v4_c128"))
    found = object_specs(model, "mooncake")
    assert [(item.coordinate.pool, item.anchor) for item in found] == [
        ("deepseek_v4_c4", True),
        ("swa", False),
        ("deepseek_v4_c128", False),
    ]


def test_kv_is_the_anchor_and_comes_first() -> None:
    found = object_specs(MLA_TARGET, "mooncake")
    assert [(item.coordinate.pool, item.anchor) for item in found[:2]] == [
        ("kv", True),
        ("indexer", False),
    ]


def test_trailing_pools_say_how_many_pages_carry_them() -> None:
    model = profile(mha(), mha("swa", trailing_pages=3))
    kv, swa = object_specs(model, "file")
    assert (kv.trailing, kv.trailing_pages) == (False, 0)
    assert (swa.trailing, swa.trailing_pages) == (True, 3)


def test_a_stage_without_layers_of_a_pool_has_no_object_of_it() -> None:
    model = profile(mha(layers=(0, 1, 2, 3)), structs.replace(gdn(0), layers=(0,)), pp=2)
    assert [shard.pp_rank for shard in shards(model, "file", "mamba")] == [0]


def test_drafts_lie_on_the_last_stage_alone() -> None:
    model = profile(mla(layers=4), mla("draft", layers=1), indexer("draft_indexer", layers=1), pp=2)
    for scheme in ("file", "mooncake"):
        for pool in ("draft", "draft_indexer"):
            assert [shard.pp_rank for shard in shards(model, scheme, pool)] == [1]


pools_beside = st.lists(
    st.sampled_from(
        [mha("swa"), gdn(61), indexer(), mla("draft"), mha("draft"), indexer("draft_indexer"),
         opaque("deepseek_v4_c4")]
    ),
    max_size=4,
    unique_by=lambda pool: pool.name,
)  # fmt: skip
profiles = st.builds(
    lambda anchor, beside, **fields: profile(anchor, *beside, **fields),
    st.sampled_from([mha(layers=61), mla(), LOGICAL, opaque("kv")]),
    pools_beside,
    tp=st.sampled_from([1, 2, 4]),
    pp=st.integers(1, 3),
    cp=st.integers(1, 2),
    dcp=st.sampled_from([1, 2]),
    tp_lcm_size=st.sampled_from([0, 8]),
    layout=st.sampled_from(["layer_first", "page_first", "page_first_direct", "page_head"]),
    sglang=st.sampled_from(["0.5.18", "0.5.23"]),
)


@given(profiles, st.sampled_from(SCHEMES))
def test_every_object_is_filled_and_has_a_coordinate_of_its_own(
    model: Profile, scheme: str
) -> None:
    try:
        found = object_specs(model, scheme)
    except (ProfileError, UnsupportedByBackend):
        return
    assert len({item.coordinate for item in found}) == len(found)
    for item in found:
        end = 0
        for tensor in item.tensors:
            assert tensor.offset == end
            end += tensor.nbytes
        assert not item.tensors or end == item.nbytes


@given(st.sampled_from(["file", "mooncake"]), st.integers(1, 5), st.integers(0, 2))
def test_the_stages_of_kv_hold_every_layer_and_every_packed_draft(
    scheme: str, pp: int, packed: int
) -> None:
    model = profile(mla(packed_draft_layers=packed), pp=pp)
    stored = [layer for item in object_specs(model, scheme) for layer in item.layers]
    assert stored == list(range(61 + packed))
