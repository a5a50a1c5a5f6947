from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.formats.errors import ProfileError, UnsupportedByBackend
from hicachectl.formats.kinds.pool import Pool, StateTensor
from hicachectl.formats.layouts import TensorLayout
from hicachectl.formats.pools import PoolPiece, pool_piece
from hicachectl.formats.profile import Profile


def piece_of(page_size: int = 4, **fields: Any) -> PoolPiece:
    """Return the piece of a three-layer pool that a deployment's only rank stores."""
    pool = Pool(**{"name": "kv", "layers": 3, **fields})
    piece = pool_piece(Profile(model="m", page_size=page_size, pools=(pool,)), pool)
    assert piece is not None
    return piece


MHA_FIELDS: dict[str, Any] = {"kind": "mha", "dtype": "bfloat16", "kv_heads": 2, "head_dim": 16}
MHA = piece_of(**MHA_FIELDS)
ASYMMETRIC = piece_of(**MHA_FIELDS, v_head_dim=8)
MLA = piece_of(kind="mla", kv_lora_rank=512, qk_rope_head_dim=64, row="fp8")
INDEXER = piece_of(64, kind="dsa_indexer", index_head_dim=128)
STATES = piece_of(
    kind="mamba",
    temporal=StateTensor(shape=(4, 2, 2), dtype="float32"),
    conv=(StateTensor(shape=(6, 3), dtype="bfloat16"),),
)
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")

sizes = st.integers(1, 9)
dtypes = st.sampled_from(["bfloat16", "float32", "float8_e5m2"])
pieces: st.SearchStrategy[PoolPiece] = st.one_of(
    st.builds(
        piece_of,
        sizes,
        kind=st.just("mha"),
        layers=sizes,
        kv_heads=sizes,
        head_dim=sizes,
        dtype=dtypes,
    ),
    st.builds(
        piece_of,
        sizes,
        kind=st.just("mla"),
        layers=sizes,
        kv_lora_rank=sizes,
        qk_rope_head_dim=sizes,
        row=st.sampled_from(["bf16", "fp8"]),
    ),
    st.builds(
        piece_of, sizes, kind=st.just("dsa_indexer"), layers=sizes, index_head_dim=st.just(128)
    ),
    st.builds(
        lambda layers, temporal, conv: piece_of(
            kind="mamba",
            layers=layers,
            temporal=StateTensor(shape=temporal, dtype="float32"),
            conv=(StateTensor(shape=conv, dtype="bfloat16"),),
        ),
        sizes,
        st.tuples(sizes, sizes, sizes),
        st.tuples(sizes, sizes),
    ),
)


def test_a_tensor_counts_its_bytes() -> None:
    tensor = TensorLayout("k", ("layer", "channel"), (3, 5), "bfloat16", offset=7)
    assert (tensor.itemsize, tensor.nbytes) == (2, 30)


@pytest.mark.parametrize(
    ("layout", "axes", "shape"),
    [
        ("layer_first", ("layer", "token", "head", "channel"), (3, 4, 2, 16)),
        ("page_first", ("token", "layer", "head", "channel"), (4, 3, 2, 16)),
        ("page_first_direct", ("layer", "token", "head", "channel"), (3, 4, 2, 16)),
        ("page_head", ("head", "token", "layer", "channel"), (2, 4, 3, 16)),
    ],
)
def test_a_flat_mha_page_is_k_then_v(
    layout: str, axes: tuple[str, ...], shape: tuple[int, ...]
) -> None:
    assert MHA.flat(layout) == (
        TensorLayout("k", axes, shape, "bfloat16", 0),
        TensorLayout("v", axes, shape, "bfloat16", 768),
    )


def test_k_and_v_objects_each_start_at_zero() -> None:
    assert [tensor.offset for tensor in MHA.parts("page_head")] == [0, 0]


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_k_and_v_of_different_width_are_objects_of_different_size(layout: str) -> None:
    k, v = ASYMMETRIC.parts(layout)
    assert (k.nbytes, v.nbytes) == (768, 384)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_k_and_v_of_different_width_have_no_flat_page(layout: str) -> None:
    with pytest.raises(UnsupportedByBackend, match="cannot be stored as one object"):
        ASYMMETRIC.flat(layout)


@pytest.mark.parametrize("layout", ["layer_first", "page_head"])
def test_k_and_v_of_different_width_have_two_layouts_only(layout: str) -> None:
    with pytest.raises(ProfileError, match="different width"):
        ASYMMETRIC.parts(layout)


@pytest.mark.parametrize(
    ("layout", "axes", "shape"),
    [
        ("layer_first", ("layer", "token", "channel"), (3, 4, 576)),
        ("page_first", ("token", "layer", "channel"), (4, 3, 576)),
        ("page_first_direct", ("layer", "token", "channel"), (3, 4, 576)),
    ],
)
def test_an_mla_page_is_one_tensor_in_every_layout(
    layout: str, axes: tuple[str, ...], shape: tuple[int, ...]
) -> None:
    expected = (TensorLayout("kv", axes, shape, "float8_e4m3fn"),)
    assert MLA.flat(layout) == MLA.parts(layout) == expected


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_an_indexer_page_is_layer_major_blocks_in_every_layout(layout: str) -> None:
    expected = (TensorLayout("indexer", ("layer", "block"), (3, 64 * 132), "uint8"),)
    assert INDEXER.flat(layout) == expected


def test_an_indexer_block_has_one_scale_for_128_codes() -> None:
    (tensor,) = piece_of(64, kind="dsa_indexer", layers=1, index_head_dim=256).tensors
    assert tensor.nbytes == 64 * (256 + 8)


def test_mamba_states_follow_each_other_layer_by_layer() -> None:
    assert STATES.flat("page_first") == (
        TensorLayout("temporal", ("layer", "state_0", "state_1", "state_2"), (3, 4, 2, 2),
                     "float32", 0),
        TensorLayout("conv_0", ("layer", "state_0", "state_1"), (3, 6, 3), "bfloat16", 192),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("piece", "layout"),
    [(MLA, "page_head"), (INDEXER, "page_head"), (STATES, "page_head"), (STATES, "layer_first")],
)
def test_a_layout_that_a_pool_is_not_built_in_is_refused(piece: PoolPiece, layout: str) -> None:
    with pytest.raises(ProfileError, match=f"in '{layout}'; use one of "):
        piece.flat(layout)


@given(pieces, st.sampled_from(["page_first", "page_first_direct"]))
def test_a_flat_page_is_its_parts_without_gaps(piece: PoolPiece, layout: str) -> None:
    end = 0
    for tensor, part in zip(piece.flat(layout), piece.parts(layout), strict=True):
        assert tensor.offset == end
        assert (tensor.name, tensor.axes, tensor.shape) == (part.name, part.axes, part.shape)
        assert part.offset == 0
        end += tensor.nbytes


@given(pieces)
def test_every_layout_has_the_same_size(piece: PoolPiece) -> None:
    first, second = (
        sum(tensor.nbytes for tensor in piece.flat(layout))
        for layout in ("page_first", "page_first_direct")
    )
    assert first == second
