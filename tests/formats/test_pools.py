import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hicachectl.formats.errors import ProfileError
from hicachectl.formats.kinds.mamba import local_state_shape
from hicachectl.formats.kinds.mha import local_kv_heads
from hicachectl.formats.kinds.mla import mla_row
from hicachectl.formats.kinds.pool import Pool, StateTensor
from hicachectl.formats.layouts import TensorLayout
from hicachectl.formats.pools import (
    layer_shard_range,
    model_layer_count,
    pool_piece,
    pp_ranges,
    stage_ranges,
)
from hicachectl.formats.profile import Profile

MHA = Pool(name="kv", kind="mha", dtype="bfloat16", layers=6, kv_heads=8, head_dim=128)
MLA = Pool(name="kv", kind="mla", layers=5, kv_lora_rank=512, qk_rope_head_dim=64, row="bf16")
INDEXER = Pool(name="indexer", kind="dsa_indexer", layers=(0, 2, 3, 4), index_head_dim=128)
DRAFT = Pool(name="draft", kind="mha", dtype="bfloat16", layers=2, kv_heads=4, head_dim=64)
TEMPORAL = StateTensor(shape=(32, 128, 128), dtype="float32")
CONV = StateTensor(shape=(8192, 3), dtype="bfloat16", groups=(2048, 2048, 4096))
MAMBA = Pool(name="mamba", kind="mamba", layers=6, temporal=TEMPORAL, conv=(CONV,))


def layers_of(profile: Profile, pool: Pool) -> list[tuple[int, ...]]:
    pieces = [pool_piece(profile, pool, pp_rank=rank) for rank in range(profile.pp)]
    return [piece.layers if piece else () for piece in pieces]


@pytest.mark.parametrize(
    ("num_layers", "pp", "ranges"),
    [
        (61, 1, ((0, 61),)),
        (4, 2, ((0, 2), (2, 4))),
        (61, 4, ((0, 15), (15, 30), (30, 45), (45, 61))),
        (7, 3, ((0, 2), (2, 4), (4, 7))),
        (8, 3, ((0, 2), (2, 5), (5, 8))),
    ],
)
def test_the_last_stages_take_the_remainder(
    num_layers: int, pp: int, ranges: tuple[tuple[int, int], ...]
) -> None:
    assert pp_ranges(num_layers, pp) == ranges


def test_a_partition_overrides_the_even_split() -> None:
    assert pp_ranges(10, 2, (3, 7)) == ((0, 3), (3, 10))
    assert pp_ranges(10, 1, (9,)) == ((0, 10),)


def test_stages_that_do_not_fit_the_layers_are_refused() -> None:
    with pytest.raises(ProfileError, match="cannot fill 3 stages"):
        pp_ranges(2, 3)
    with pytest.raises(ProfileError, match="does not split 10 layers"):
        pp_ranges(10, 2, (3, 6))


@given(st.integers(1, 200), st.integers(1, 12))
def test_stages_are_a_partition_of_the_layers(num_layers: int, pp: int) -> None:
    if pp > num_layers:
        return
    ranges = pp_ranges(num_layers, pp)
    assert [n for start, end in ranges for n in range(start, end)] == list(range(num_layers))
    lengths = [end - start for start, end in ranges]
    assert lengths == sorted(lengths)
    assert lengths[-1] - lengths[0] <= 1


@given(st.integers(0, 200), st.integers(1, 12))
def test_cp_shards_are_a_partition_with_the_larger_ones_first(num_layers: int, cp: int) -> None:
    ranges = [layer_shard_range(rank, cp, num_layers) for rank in range(cp)]
    assert [n for start, end in ranges for n in range(start, end)] == list(range(num_layers))
    lengths = [end - start for start, end in ranges]
    assert lengths == sorted(lengths, reverse=True)


def test_the_largest_layer_number_tells_the_model_layers() -> None:
    mamba = replace(MAMBA, layers=(0, 1, 7))
    assert model_layer_count(Profile(model="m", pools=(MHA, mamba))) == 8


def test_a_draft_pool_does_not_count_as_model_layers() -> None:
    draft = replace(DRAFT, layers=9)
    assert model_layer_count(Profile(model="m", pools=(MHA, draft))) == 6


def test_a_partition_tells_the_model_layers() -> None:
    kv = replace(MHA, layers=(0, 1, 2))
    profile = Profile(model="m", pp=2, pp_partition=(4, 5), pools=(kv,))
    assert stage_ranges(profile) == ((0, 4), (4, 9))


@pytest.mark.parametrize(("tp", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_a_rank_holds_its_share_of_the_heads_and_at_least_one(tp: int, heads: int) -> None:
    assert local_kv_heads(8, tp) == heads
    piece = pool_piece(Profile(model="m", page_size=64, tp=tp, pools=(MHA,)), MHA)
    assert piece is not None
    axes = ("layer", "token", "head", "channel")
    assert piece.tensors == tuple(
        TensorLayout(name, axes, (6, 64, heads, 128), "bfloat16") for name in "kv"
    )


def test_a_replicated_pool_keeps_all_its_heads() -> None:
    draft = replace(DRAFT, replicated=True)
    piece = pool_piece(Profile(model="m", tp=4, pools=(MLA, draft)), draft)
    assert piece is not None
    assert [tensor.shape for tensor in piece.tensors] == [(2, 1, 4, 64)] * 2


@pytest.mark.parametrize(
    ("row", "dtype", "expected"),
    [
        ("bf16", "", (576, "bfloat16")),
        ("bf16", "float16", (576, "float16")),
        ("fp8", "", (576, "float8_e4m3fn")),
        ("fp8", "float8_e5m2", (576, "float8_e5m2")),
        ("fp8_scaled", "", (656, "uint8")),
    ],
)
def test_an_mla_row_has_the_width_of_its_form(
    row: str, dtype: str, expected: tuple[int, str]
) -> None:
    assert mla_row(replace(MLA, row=row, dtype=dtype)) == expected


@pytest.mark.parametrize(("row", "dtype"), [("bf16", "float8_e4m3fn"), ("fp8", "bfloat16")])
def test_a_row_that_contradicts_the_dtype_is_refused(row: str, dtype: str) -> None:
    with pytest.raises(ProfileError, match="contradicts row"):
        mla_row(replace(MLA, row=row, dtype=dtype))


def test_a_scaled_row_needs_whole_blocks() -> None:
    with pytest.raises(ProfileError, match="multiple of 128"):
        mla_row(replace(MLA, row="fp8_scaled", kv_lora_rank=500))


def test_states_are_divided_along_their_axis() -> None:
    window_first = StateTensor(
        shape=(3, 96), dtype="bfloat16", shard_axis=1, groups=(32, 32, 32)
    )  # KDA
    assert local_state_shape("state", TEMPORAL, 4) == (8, 128, 128)
    assert local_state_shape("state", CONV, 4) == (2048, 3)
    assert local_state_shape("state", window_first, 4) == (3, 24)


def test_every_rank_holds_whole_groups_and_whole_states() -> None:
    repeated = StateTensor(shape=(38, 3), dtype="bfloat16", groups=(32, 3, 3), whole=(1, 2))
    undivided = StateTensor(shape=(7, 3), dtype="bfloat16", whole=(0,))
    assert local_state_shape("state", repeated, 4) == (14, 3)
    assert local_state_shape("state", undivided, 4) == (7, 3)


def test_more_ranks_than_heads_share_a_state() -> None:
    heads = StateTensor(shape=(3, 256), dtype="bfloat16", shard_axis=1, least=128)
    shapes = [local_state_shape("state", heads, tp) for tp in (1, 2, 4, 8)]
    assert shapes == [(3, 256), (3, 128), (3, 128), (3, 128)]
    with pytest.raises(ProfileError, match="256 along axis 1"):
        local_state_shape("state", heads, 3)


def test_each_group_of_a_state_must_divide() -> None:
    state = StateTensor(shape=(12, 3), dtype="bfloat16", groups=(6, 6))
    mamba = replace(MAMBA, conv=(CONV, state))
    with pytest.raises(
        ProfileError,
        match=r"^pools\[mamba\], state conv_1: 6 along axis 0 of \[12, 3\] is not a multiple of "
        "the linear TP size 4;",
    ):
        pool_piece(Profile(model="m", tp=4, pools=(MHA, mamba)), mamba)


def test_mamba_states_take_the_linear_tp_size() -> None:
    piece = pool_piece(Profile(model="m", tp=1, linear_tp=4, pools=(MHA, MAMBA)), MAMBA)
    assert piece is not None
    assert [(tensor.name, tensor.shape, tensor.dtype) for tensor in piece.tensors] == [
        ("temporal", (6, 8, 128, 128), "float32"),
        ("conv_0", (6, 2048, 3), "bfloat16"),
    ]


def test_a_model_without_ssm_state_has_conv_states_alone() -> None:
    mamba = replace(MAMBA, temporal=None)
    piece = pool_piece(Profile(model="m", pools=(MHA, mamba)), mamba)
    assert piece is not None
    assert [tensor.name for tensor in piece.tensors] == ["conv_0"]


def test_a_stage_holds_its_layers_of_each_pool() -> None:
    kv = replace(MHA, layers=(3, 7, 11))
    mamba = replace(MAMBA, layers=(0, 1, 2, 4, 5, 6, 8, 9, 10))
    profile = Profile(model="m", pp=3, pp_partition=(3, 5, 4), pools=(kv, mamba))
    assert layers_of(profile, kv) == [(), (3, 7), (11,)]
    assert layers_of(profile, mamba) == [(0, 1, 2), (4, 5, 6), (8, 9, 10)]


def test_a_count_of_some_layers_cannot_be_placed_on_stages() -> None:
    mamba = replace(MAMBA, layers=36)
    kv = replace(MHA, layers=12)
    with pytest.raises(ProfileError, match=r"pools\[kv\].layers: the count 12 does not show"):
        pool_piece(Profile(model="m", pp=2, pools=(kv, mamba)), kv)


def test_layers_beyond_the_partition_are_refused() -> None:
    kv = replace(MHA, layers=(0, 9))
    with pytest.raises(ProfileError, match="there is no layer 9; give layers below 8"):
        pool_piece(Profile(model="m", pp=2, pp_partition=(4, 4), pools=(kv,)), kv)


@pytest.mark.parametrize("partition", [(3, 3), ()])
def test_layers_above_those_of_the_stages_are_refused(partition: tuple[int, ...]) -> None:
    """Layers count from 0, so a layer number equal to the number of layers is too large."""
    fits = Pool(name="indexer", kind="dsa_indexer", layers=(0, 5), index_head_dim=128)
    profile = Profile(model="m", page_size=4, pp=2, pp_partition=partition, pools=(MHA, fits))
    assert layers_of(profile, fits) == [(0,), (5,)]
    if partition:  # else the largest layer number determines the number of layers
        beyond = replace(fits, layers=(0, 6))
        with pytest.raises(ProfileError, match="there is no layer 6; give layers below 6"):
            layers_of(replace(profile, pools=(MHA, beyond)), beyond)


def test_packed_draft_layers_end_the_last_stage() -> None:
    kv = replace(MLA, packed_draft_layers=2)
    indexer = replace(INDEXER, packed_draft_layers=2)
    profile = Profile(model="m", pp=2, pools=(kv, indexer))
    assert layers_of(profile, kv) == [(0, 1), (2, 3, 4, 5, 6)]
    assert layers_of(profile, indexer) == [(0,), (2, 3, 4, 5, 6)]


def test_a_draft_pool_lies_on_the_last_stage_whole() -> None:
    draft = replace(DRAFT, packed_draft_layers=1)
    assert layers_of(Profile(model="m", pp=2, pools=(MHA, draft)), draft) == [(), (0, 1, 2)]


def test_heads_of_a_draft_under_attention_cp_are_not_known() -> None:
    with pytest.raises(ProfileError, match="draft heads"):
        pool_piece(Profile(model="m", cp=2, pools=(MLA, DRAFT)), DRAFT)


def test_layer_split_pads_kv_to_one_size() -> None:
    kv = replace(MLA, packed_draft_layers=1)
    profile = Profile(model="m", page_size=64, cp=3, cp_layer_split=True, pools=(kv, INDEXER))
    pieces = [pool_piece(profile, kv, cp_rank=rank) for rank in range(3)]
    assert [(piece.layers, piece.padding_layers) for piece in pieces if piece] == [
        ((0, 1, 5), 0),
        ((2, 3, 5), 0),
        ((4, 5), 1),
    ]
    tensor = TensorLayout("kv", ("layer", "token", "channel"), (3, 64, 576), "bfloat16")
    assert {piece.tensors for piece in pieces if piece} == {(tensor,)}


def test_layer_split_does_not_pad_the_indexer() -> None:
    profile = Profile(model="m", page_size=64, cp=3, cp_layer_split=True, pools=(MLA, INDEXER))
    pieces = [pool_piece(profile, INDEXER, cp_rank=rank) for rank in range(3)]
    assert [piece.layers for piece in pieces if piece] == [(0,), (2, 3), (4,)]
    assert not any(piece.padding_layers for piece in pieces if piece)


def test_a_cp_rank_that_owns_no_layer_has_no_indexer() -> None:
    indexer = replace(INDEXER, layers=(0,))
    profile = Profile(model="m", cp=3, cp_layer_split=True, pools=(MLA, indexer))
    assert pool_piece(profile, indexer, cp_rank=1) is None


def test_layer_split_is_refused_for_mha() -> None:
    with pytest.raises(ProfileError, match="cp_layer_split"):
        pool_piece(Profile(model="m", cp=2, cp_layer_split=True, pools=(MHA,)), MHA)


def test_cp_without_layer_split_keeps_all_layers() -> None:
    piece = pool_piece(Profile(model="m", cp=2, pools=(MLA,)), MLA, cp_rank=1)
    assert piece is not None
    assert piece.layers == (0, 1, 2, 3, 4)


def test_a_dcp_rank_holds_its_share_of_the_tokens_but_a_draft_all() -> None:
    draft = replace(MLA, name="draft", layers=1)
    profile = Profile(model="m", page_size=256, tp=4, dcp=4, pools=(MLA, draft))
    pieces = [pool_piece(profile, pool) for pool in profile.pools]
    assert [piece.tensors[0].shape for piece in pieces if piece] == [(5, 64, 576), (1, 256, 576)]


def test_an_indexer_holds_its_own_layers() -> None:
    piece = pool_piece(Profile(model="m", page_size=64, tp=8, pools=(MLA, INDEXER)), INDEXER)
    assert piece is not None
    assert [tensor.shape for tensor in piece.tensors] == [(4, 64 * (128 + 4))]


def test_opaque_and_logical_pools_have_bytes_without_form() -> None:
    logical = Pool(name="kv", kind="logical")
    opaque = Pool(name="deepseek_v4_c4", kind="opaque", nbytes=1234)
    profile = Profile(model="m", pp=2, pools=(logical, opaque))
    for rank in range(2):
        first, second = (pool_piece(profile, pool, pp_rank=rank) for pool in profile.pools)
        assert first is not None
        assert second is not None
        assert (first.nbytes, second.nbytes) == (0, 1234)
        assert first.tensors == second.tensors == ()


def test_an_opaque_draft_lies_on_the_last_stage() -> None:
    draft = Pool(name="draft", kind="opaque", nbytes=10)
    profile = Profile(model="m", pp=2, pools=(MHA, draft))
    assert pool_piece(profile, draft, pp_rank=0) is None
    assert pool_piece(profile, draft, pp_rank=1) is not None


@given(
    st.integers(1, 4).flatmap(
        lambda log: st.tuples(st.just(2**log), st.integers(1, 8).map(lambda n: n * 2**log))
    ),
    st.integers(1, 70),
)
def test_the_ranks_k_add_up_to_the_unsharded_k(tp_heads: tuple[int, int], layers: int) -> None:
    tp, heads = tp_heads
    kv = replace(MHA, kv_heads=heads, layers=layers)

    def k_bytes(tp: int) -> int:
        piece = pool_piece(Profile(model="m", page_size=4, tp=tp, pools=(kv,)), kv)
        assert piece is not None
        return piece.flat("page_first")[0].nbytes

    assert k_bytes(tp) * tp == k_bytes(1)


@given(st.data())
def test_the_stages_hold_each_layer_of_a_pool_once(data: st.DataObject) -> None:
    pp = data.draw(st.integers(1, 6))
    total = data.draw(st.integers(pp, 40))
    own = data.draw(st.sets(st.integers(0, total - 1), min_size=1))
    kv = replace(MHA, layers=tuple(sorted(own)))
    mamba = replace(MAMBA, layers=tuple(range(total)))
    profile = Profile(model="m", pp=pp, pools=(kv, mamba))
    assert sum(layers_of(profile, kv), ()) == kv.layers
