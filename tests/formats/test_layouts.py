import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.formats.errors import ProfileError, UnsupportedByBackend
from hicachectl.formats.kinds.dsa_indexer import IndexerGeometry
from hicachectl.formats.kinds.mamba import StateGeometry
from hicachectl.formats.kinds.mha import MhaGeometry
from hicachectl.formats.kinds.mla import MlaGeometry
from hicachectl.formats.layouts import Geometry, TensorLayout, flat_page, part_objects

MHA = MhaGeometry(layers=3, tokens=4, heads=2, head_dim=16, v_head_dim=16, dtype="bfloat16")
ASYMMETRIC = MhaGeometry(layers=3, tokens=4, heads=2, head_dim=16, v_head_dim=8, dtype="bfloat16")
MLA = MlaGeometry(layers=3, tokens=4, channels=576, dtype="float8_e4m3fn")
INDEXER = IndexerGeometry(layers=3, tokens=64, index_head_dim=128)
STATES = StateGeometry(
    layers=3, states=(("temporal", (4, 2, 2), "float32"), ("conv_0", (6, 3), "bfloat16"))
)
PAGE_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")

sizes = st.integers(1, 9)
dtypes = st.sampled_from(["bfloat16", "float32", "float8_e5m2"])
geometries: st.SearchStrategy[Geometry] = st.one_of(
    st.builds(
        lambda layers, tokens, heads, dim, dtype: MhaGeometry(
            layers=layers, tokens=tokens, heads=heads, head_dim=dim, v_head_dim=dim, dtype=dtype
        ),
        sizes,
        sizes,
        sizes,
        sizes,
        dtypes,
    ),
    st.builds(MlaGeometry, layers=sizes, tokens=sizes, channels=sizes, dtype=dtypes),
    st.builds(IndexerGeometry, layers=sizes, tokens=sizes, index_head_dim=st.just(128)),
    st.builds(
        lambda layers, temporal, conv: StateGeometry(
            layers=layers,
            states=(("temporal", temporal, "float32"), ("conv_0", conv, "bfloat16")),
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
    assert flat_page(MHA, layout) == (
        TensorLayout("k", axes, shape, "bfloat16", 0),
        TensorLayout("v", axes, shape, "bfloat16", 768),
    )


def test_k_and_v_objects_each_start_at_zero() -> None:
    assert [tensor.offset for tensor in part_objects(MHA, "page_head")] == [0, 0]


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_k_and_v_of_different_width_are_objects_of_different_size(layout: str) -> None:
    k, v = part_objects(ASYMMETRIC, layout)
    assert (k.nbytes, v.nbytes) == (768, 384)


@pytest.mark.parametrize("layout", PAGE_LAYOUTS)
def test_k_and_v_of_different_width_have_no_flat_page(layout: str) -> None:
    with pytest.raises(UnsupportedByBackend, match="no flat page"):
        flat_page(ASYMMETRIC, layout)


@pytest.mark.parametrize("layout", ["layer_first", "page_head"])
def test_k_and_v_of_different_width_have_two_layouts_only(layout: str) -> None:
    with pytest.raises(ProfileError, match="different width"):
        part_objects(ASYMMETRIC, layout)


@pytest.mark.parametrize("geometry", [MHA, INDEXER])
def test_layer_first_pages_are_no_part_objects(geometry: Geometry) -> None:
    with pytest.raises(UnsupportedByBackend, match="scattered"):
        part_objects(geometry, "layer_first")


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
    assert flat_page(MLA, layout) == part_objects(MLA, layout) == expected


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_an_indexer_page_is_layer_major_blocks_in_every_layout(layout: str) -> None:
    expected = (TensorLayout("indexer", ("layer", "block"), (3, 64 * 132), "uint8"),)
    assert flat_page(INDEXER, layout) == expected


def test_an_indexer_block_has_one_scale_for_128_codes() -> None:
    assert IndexerGeometry(layers=1, tokens=64, index_head_dim=256).block_bytes == 64 * (256 + 8)


def test_mamba_states_follow_each_other_layer_by_layer() -> None:
    assert flat_page(STATES, "page_first") == (
        TensorLayout("temporal", ("layer", "state_0", "state_1", "state_2"), (3, 4, 2, 2),
                     "float32", 0),
        TensorLayout("conv_0", ("layer", "state_0", "state_1"), (3, 6, 3), "bfloat16", 192),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("geometry", "layout"),
    [(MLA, "page_head"), (INDEXER, "page_head"), (STATES, "page_head"), (STATES, "layer_first")],
)
def test_a_layout_that_a_pool_is_not_built_in_is_refused(geometry: Geometry, layout: str) -> None:
    with pytest.raises(ProfileError, match=f"in '{layout}', only in"):
        flat_page(geometry, layout)


@pytest.mark.parametrize("geometry", [MHA, MLA, INDEXER, STATES])
def test_page_unified_is_no_layout_of_a_store(geometry: Geometry) -> None:
    with pytest.raises(UnsupportedByBackend, match="page_unified"):
        flat_page(geometry, "page_unified")


@given(geometries, st.sampled_from(["page_first", "page_first_direct"]))
def test_a_flat_page_is_its_parts_without_gaps(geometry: Geometry, layout: str) -> None:
    end = 0
    for tensor, part in zip(
        flat_page(geometry, layout), part_objects(geometry, layout), strict=True
    ):
        assert tensor.offset == end
        assert (tensor.name, tensor.axes, tensor.shape) == (part.name, part.axes, part.shape)
        assert part.offset == 0
        end += tensor.nbytes


@given(geometries)
def test_every_layout_has_the_same_size(geometry: Geometry) -> None:
    first, second = (
        sum(tensor.nbytes for tensor in flat_page(geometry, layout))
        for layout in ("page_first", "page_first_direct")
    )
    assert first == second
