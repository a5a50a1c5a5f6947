"""Value checks: exact findings for planted damage, none for healthy pages."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hicachectl.checks.registry import ValueIssue
from hicachectl.checks.values import ValueChecker
from hicachectl.formats.kinds.pool import Pool
from hicachectl.formats.profile import Profile
from hicachectl.formats.spec import object_specs
from hicachectl.kernels.values import to_float32
from tests.checks.value_cases import (
    DEEPSEEK,
    GDN,
    INDEXER,
    LLAMA_8B,
    QWEN3_32B,
    QWEN3_NEXT,
    expected_of,
    profile_of,
    tiny,
)
from tests.conformance import page_values
from tests.kvgen import KvGenerator, uniform_noise
from tests.speed import examples, seed_of_run, slow

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from hicachectl.formats.spec import ObjectSpec

    Bytes = NDArray[np.uint8]

MHA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA_LAYOUTS = ("layer_first", "page_first", "page_first_direct")
NAN = {
    "bfloat16": 0x7FC0,
    "float16": 0xFE00,
    "float32": 0x7FC00001,
    "float8_e4m3fn": 0xFF,
    "float8_e4m3fnuz": 0x80,
    "float8_e5m2": 0xFE,
}
INF = {"bfloat16": 0xFF80, "float16": 0x7C00, "float32": 0x7F800000, "float8_e5m2": 0x7C}
PLAIN = (*NAN, "latent", "fp8")


def prepared(kind: str, layout: str, count: int = 3) -> tuple[ValueChecker, ObjectSpec, Bytes]:
    profile, pool = tiny(kind, layout)
    expected = expected_of(profile, pool)
    objects = KvGenerator(expected, profile, seed_of_run()).objects(range(count))
    return ValueChecker(expected, profile), expected, objects


def logical(objects: Bytes, expected: ObjectSpec, name: str) -> NDArray[Any]:
    """Return a view of a tensor as [objects, layer, token, head, channel] items, in any layout."""
    tensor = next(t for t in expected.tensors if t.name == name)
    part = objects[:, tensor.offset : tensor.offset + tensor.nbytes]
    items = part.view(f"u{tensor.itemsize}").reshape(len(objects), *tensor.shape)
    axes = list(tensor.axes)
    if "head" not in axes:
        items, axes = items[..., None, :], [*axes[:-1], "head", "channel"]
    order = [1 + axes.index(axis) for axis in ("layer", "token", "head", "channel")]
    return items.transpose(0, *order)


def codes_of(issues: list[ValueIssue]) -> list[tuple[int, str]]:
    return [(issue.index, issue.code) for issue in issues]


# --- damage in numbers ---


@pytest.mark.slow
@given(data=st.data(), kind=st.sampled_from(PLAIN))
@examples(40)
def test_planted_numbers_are_counted_and_the_first_is_named(data: st.DataObject, kind: str) -> None:
    layout = data.draw(st.sampled_from(MLA_LAYOUTS if kind in ("latent", "fp8") else MHA_LAYOUTS))
    checker, expected, objects = prepared(kind, layout)
    dtype = expected.tensors[0].dtype
    code, table = data.draw(st.sampled_from([("nan", NAN), ("inf", INF)]))
    if dtype not in table:
        return
    tensor = data.draw(st.sampled_from(expected.tensors))
    index = data.draw(st.integers(0, 2))
    items = logical(objects, expected, tensor.name)[index]
    place = st.tuples(*(st.integers(0, length - 1) for length in items.shape))
    places = data.draw(st.sets(place, min_size=1, max_size=5))
    for where in places:
        items[where] = table[dtype]
    stored_first = min(places, key=lambda where: stored_position(tensor, where))
    layers = sorted({where[0] for where in places})
    (issue,) = checker.check(objects)
    assert (issue.index, issue.code) == (index, code)
    layer, token, head, channel = stored_first
    assert issue.detail.startswith(
        f"{tensor.name}: {len(places)} {'NaN' if code == 'nan' else 'Inf'} in layer"
    )
    head_text = f", head {head}" if len(tensor.axes) == 4 else ""
    assert issue.detail.endswith(
        f"the first at layer {layer}, token {token}{head_text}, channel {channel}"
    )
    plural = "layer" if len(layers) == 1 else "layers"
    assert f"in {plural} {', '.join(map(str, layers))}, token" in issue.detail


def stored_position(tensor: Any, where: tuple[int, ...]) -> int:
    found = dict(zip(("layer", "token", "head", "channel"), where, strict=True))
    return int(np.ravel_multi_index([found[axis] for axis in tensor.axes], tensor.shape))


def test_one_issue_sums_up_k_and_v() -> None:
    checker, expected, objects = prepared("bfloat16", "page_head")
    logical(objects, expected, "k")[1, 2, 3, 1, 5] = NAN["bfloat16"]
    logical(objects, expected, "v")[1, 0, :2, 0, 7] = NAN["bfloat16"]
    (issue,) = checker.check(objects)
    assert issue == ValueIssue(
        1,
        "nan",
        "k: 1 NaN in layer 2, token 3, the first at layer 2, token 3, head 1, channel 5; "
        "v: 2 NaN in layer 0, tokens 0, 1, the first at layer 0, token 0, head 0, channel 7",
    )


def test_layers_carry_their_number_in_the_model() -> None:
    profile = profile_of(QWEN3_NEXT, layout="page_first", page_size=4)
    expected = expected_of(profile)
    objects = KvGenerator(expected, profile, 1).objects([0])
    logical(objects, expected, "k")[0, 2, 1, 0, 0] = NAN["bfloat16"]
    (issue,) = ValueChecker(expected, profile).check(objects)
    assert "layer 11, token 1" in issue.detail


# --- rows and blocks of special forms ---


def scaled_rows(objects: Bytes, expected: ObjectSpec) -> Bytes:
    """Return the rows [objects, layer, token, bytes] of scaled MLA objects."""
    (tensor,) = expected.tensors
    rows = objects.reshape(len(objects), *tensor.shape)
    return rows if tensor.axes[0] == "layer" else rows.transpose(0, 2, 1, 3)


def put(dtype: str, start: int, stop: int, item: int, value: float) -> Any:
    """Write one item of a part of a row."""

    def write(row: Bytes) -> None:
        row[start:stop].view(dtype)[item] = value

    return write


PLACE = "in layer 1, token 2, the first at layer 1, token 2"
SCALED_DAMAGE = [
    (put("u1", 0, 256, 130, 0x7F), "nan", f"kv: 1 NaN {PLACE}, channel 130 of codes"),
    (
        put("<f4", 256, 264, 1, -1),
        "bad-scale",
        f"kv: 1 bad scale {PLACE}, tile 1 of scales, value -1",
    ),
    (
        put("<f4", 256, 264, 0, np.nan),
        "bad-scale",
        f"kv: 1 bad scale {PLACE}, tile 0 of scales, value nan",
    ),
    (
        put("<f4", 256, 264, 0, np.inf),
        "bad-scale",
        f"kv: 1 bad scale {PLACE}, tile 0 of scales, value inf",
    ),
    (put("<u2", 264, 296, 3, 0x7F80), "inf", f"kv: 1 Inf {PLACE}, channel 3 of rope"),
    (lambda row: row.fill(0), "all-zero", f"kv: 1 token row of zero bytes {PLACE}"),
]


@pytest.mark.parametrize("layout", MLA_LAYOUTS)
@pytest.mark.parametrize(("write", "code", "detail"), SCALED_DAMAGE)
def test_damage_in_a_scaled_row(layout: str, write: Any, code: str, detail: str) -> None:
    checker, expected, objects = prepared("fp8_scaled", layout)
    write(scaled_rows(objects, expected)[1, 1, 2])
    assert checker.check(objects) == [ValueIssue(1, code, detail)]


def test_a_tile_with_scale_zero_may_hold_any_codes() -> None:
    checker, expected, objects = prepared("fp8_scaled", "page_first")
    row = scaled_rows(objects, expected)[0, 0, 0]
    row[256:264].view("<f4")[1] = 0.0
    row[128:256] = 0x7F
    assert not checker.check(objects)
    row[127] = 0x7F  # under the other scale
    (issue,) = checker.check(objects)
    assert issue.detail.startswith("kv: 1 NaN")


@pytest.mark.parametrize(
    ("scale", "bad"),
    [
        (1e-4 / 448, False),
        (float(np.nextafter(np.float32(1e-4 / 448), np.float32(0))), False),
        (2.2e-7, True),
        (0.0, True),
        (-1.0, True),
        (1e-40, True),
        (float("inf"), True),
        (float("nan"), True),
    ],
)
def test_scales_of_the_indexer(scale: float, *, bad: bool) -> None:
    checker, _, objects = prepared("indexer", "page_first")
    block = objects.reshape(3, 3, -1)[2, 1]  # 4 keys of 128, then 4 scales
    block[512:].view("<f4")[3] = scale
    issues = checker.check(objects)
    assert codes_of(issues) == ([(2, "bad-scale")] if bad else [])
    if bad:
        where = "in layer 1, the first at layer 1, token 3, tile 0 of scales"
        told = f"indexer: 1 bad scale {where}, value"
        assert issues[0].detail.startswith(told)


def test_a_nan_key_of_the_indexer() -> None:
    checker, _, objects = prepared("indexer", "page_first")
    objects.reshape(3, 3, -1)[0, 2, 128 + 7] = 0xFF
    (issue,) = checker.check(objects)
    assert issue.detail == (
        "indexer: 1 NaN in layer 2, the first at layer 2, token 1, channel 7 of keys"
    )


@pytest.mark.parametrize(
    ("name", "code", "place"),
    [
        ("temporal", "nan", "state 0 3, state 1 7, state 2 15"),
        ("conv_0", "inf", "state 0 23, state 1 2"),
    ],
)
def test_damage_in_recurrent_states(name: str, code: str, place: str) -> None:
    checker, expected, objects = prepared("mamba", "page_first")
    tensor = next(t for t in expected.tensors if t.name == name)
    part = objects[1, tensor.offset : tensor.offset + tensor.nbytes].view(f"u{tensor.itemsize}")
    table = NAN if code == "nan" else INF
    part.reshape(tensor.shape[0], -1)[2, -1] = table[tensor.dtype]
    (issue,) = checker.check(objects)
    label = "NaN" if code == "nan" else "Inf"
    assert issue == ValueIssue(
        1, code, f"{name}: 1 {label} in layer 2, the first at layer 2, {place}"
    )


# --- zeros ---


@pytest.mark.parametrize(
    "kind", ["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "fp8_scaled", "mamba"]
)
def test_an_object_of_zeros_is_one_issue(kind: str) -> None:
    checker, _, objects = prepared(kind, "page_first")
    objects[1] = 0
    assert checker.check(objects) == [ValueIssue(1, "all-zero", "every byte of the object is zero")]


def test_zero_layers_and_zero_tokens_are_told_apart() -> None:
    checker, expected, objects = prepared("bfloat16", "page_head")
    k, v = (logical(objects, expected, name) for name in "kv")
    k[0, 1] = 0
    v[0, 2, [0, 3]] = 0
    v[0, 0, 1, 0] = 0  # one head is not the whole token
    assert checker.check(objects) == [
        ValueIssue(
            0,
            "all-zero",
            "k: every byte of layer 1 is zero; "
            "v: 2 token rows of zero bytes in layer 2, tokens 0, 3, the first at layer 2, token 0",
        )
    ]


def test_a_zero_token_of_every_layer() -> None:
    checker, expected, objects = prepared("latent", "page_first")
    logical(objects, expected, "kv")[2, :, 1] = 0
    (issue,) = checker.check(objects)
    assert issue.detail == (
        "kv: 3 token rows of zero bytes in layers 0, 1, 2, token 1, the first at layer 0, token 1"
    )


def test_a_zero_state_layer_is_found_in_rows_cut_small() -> None:
    profile = profile_of(LLAMA_8B, GDN | {"layers": 2}, layout="page_first", tp=2)
    expected = expected_of(profile, "mamba")
    objects = KvGenerator(expected, profile, 1).objects([0])
    assert not ValueChecker(expected, profile).check(objects)
    layer = expected.tensors[0].nbytes // 2
    objects[0, layer : 2 * layer] = 0
    (issue,) = ValueChecker(expected, profile).check(objects)
    assert (issue.code, issue.detail) == ("all-zero", "temporal: every byte of layer 1 is zero")


def test_underflow_is_no_hole() -> None:
    checker, expected, objects = prepared("float8_e4m3fn", "page_first")
    k = logical(objects, expected, "k")
    k[0, 1] &= 0x80  # signs stay
    fnuz, its_expected, codes = prepared("float8_e4m3fnuz", "page_first")
    logical(codes, its_expected, "k")[0, 1] = 0
    assert not checker.check(objects)
    assert not fnuz.check(codes)


def test_a_zero_block_of_the_indexer_also_has_bad_scales() -> None:
    checker, _, objects = prepared("indexer", "page_first")
    objects.reshape(3, 3, -1)[1, 1] = 0
    assert codes_of(checker.check(objects)) == [(1, "bad-scale"), (1, "all-zero")]


# --- padding, other forms, arguments ---


def cp_profile(**fields: Any) -> Profile:
    mla = {"kind": "mla", "layers": 3, "kv_lora_rank": 256, "qk_rope_head_dim": 16, "row": "bf16"}
    return profile_of(mla, page_size=4, cp=2, cp_layer_split=True, **fields)


@pytest.mark.parametrize("layout", MLA_LAYOUTS)
@pytest.mark.parametrize("row", ["bf16", "fp8_scaled"])
def test_padding_layers_may_hold_anything(layout: str, row: str) -> None:
    base = cp_profile(layout=layout)
    profile = replace(base, pools=(replace(base.pools[0], row=row, packed_draft_layers=1),))
    expected = object_specs(profile, "file")[-1]
    assert (expected.layers, expected.padding_layers) == ((2, 3), 1)
    objects = KvGenerator(expected, profile, seed_of_run()).objects(range(2))
    (tensor,) = expected.tensors
    rows = objects.reshape(2, *tensor.shape[:2], -1)
    rows = rows if tensor.axes[0] == "layer" else rows.swapaxes(1, 2)
    rows[0, 1] = 0xFF
    rows[1, 1] = 0
    checker = ValueChecker(expected, profile)
    assert not checker.check(objects)
    assert {s.layer for s in checker.stats(objects[0])} == {2, 3}
    rows[0, 2] = 0  # the packed draft, after the padding
    rows[1, 0] = 0
    details = [issue.detail for issue in checker.check(objects)]
    assert details == ["kv: every byte of layer 3 is zero", "kv: every byte of layer 2 is zero"]


def test_opaque_pools_are_not_looked_at() -> None:
    profile = Profile(model="m", pools=(Pool(name="kv", kind="opaque", nbytes=64),))
    checker = ValueChecker(expected_of(profile), profile)
    assert not checker.prepared
    assert not checker.check(np.zeros((2, 64), np.uint8))
    assert not checker.stats(np.zeros(64, np.uint8))


def test_objects_of_a_slab_need_not_touch() -> None:
    checker, expected, objects = prepared("bfloat16", "page_first", count=5)
    slab = np.full((5, -(-expected.nbytes // 4096) * 4096), 0xFF, np.uint8)
    apart = slab[:, : expected.nbytes]
    apart[:] = objects
    assert not checker.check(apart)
    logical(apart, expected, "v")[3, 0, 0, 0, 0] = NAN["bfloat16"]
    assert codes_of(checker.check(apart)) == [(3, "nan")]


def test_threads_may_share_a_checker() -> None:
    checker, expected, objects = prepared("bfloat16", "page_first", count=4)
    logical(objects, expected, "k")[2, 1, 1] = 0
    wanted = checker.check(objects)
    with ThreadPoolExecutor(4) as pool:
        assert all(found == wanted for found in pool.map(checker.check, [objects] * 32))


def test_no_objects_have_no_issues() -> None:
    checker, expected, _ = prepared("bfloat16", "page_first")
    assert not checker.check(np.zeros((0, expected.nbytes), np.uint8))


def test_another_size_is_refused() -> None:
    checker, expected, _ = prepared("bfloat16", "page_first")
    with pytest.raises(ValueError, match=f"expected \\[n, {expected.nbytes}\\]"):
        checker.check(np.zeros((1, expected.nbytes - 1), np.uint8))


# --- statistics ---


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float8_e5m2"])
@pytest.mark.parametrize("layout", MHA_LAYOUTS)
def test_statistics_of_a_layer(kind: str, layout: str) -> None:
    checker, expected, objects = prepared(kind, layout, count=1)
    k = logical(objects, expected, "k")[0]
    k[1, 0, 0, :3] = NAN[kind]
    k[1, 1, 0, 0] = INF[kind]
    k[1, 2, 1, :4] = 0
    stats = checker.stats(objects[0])
    assert [(s.tensor, s.layer) for s in stats] == list(product("kv", range(3)))
    values = to_float32(np.ascontiguousarray(k[1]), kind)
    finite = values[np.isfinite(values)].astype(np.float64)
    found = stats[1]
    assert (found.values, found.nan, found.inf) == (values.size, 3, 1)
    assert (found.minimum, found.maximum) == (finite.min(), finite.max())
    assert found.zero == (finite == 0).sum() >= 4
    assert found.mean_magnitude == pytest.approx(np.abs(finite).mean())


def test_statistics_of_scaled_rows_are_of_the_values_they_stand_for() -> None:
    checker, expected, objects = prepared("fp8_scaled", "page_first", count=1)
    row = scaled_rows(objects, expected)[0, 2, 1]
    row[256:264].view("<f4")[:] = [0.0, 2.0]
    row[:128] = 0x7F  # undefined under a scale of 0
    row[128:256] = 0x7E  # 448
    stats = {(s.tensor, s.layer): s for s in checker.stats(objects[0])}
    assert {tensor for tensor, _ in stats} == {"kv", "kv.scales", "kv.rope"}
    found = stats["kv", 2]
    assert (found.maximum, found.nan, found.zero >= 128) == (896.0, 0, True)
    assert stats["kv.scales", 2].minimum == 0.0


def test_statistics_without_a_finite_value() -> None:
    checker, expected, objects = prepared("bfloat16", "page_first", count=1)
    logical(objects, expected, "k")[0, 0] = NAN["bfloat16"]
    found = checker.stats(objects[0])[0]
    assert (found.minimum, found.maximum, found.mean_magnitude) == (None, None, None)
    assert found.nan == found.values


# --- healthy pages, and pages of another layout ---


def healthy_cases() -> Iterator[tuple[str, Profile, str, int]]:
    """Name, profile, pool, pages."""
    for dtype in NAN:
        llama = LLAMA_8B | {"dtype": dtype, "layers": 16}
        yield f"{dtype} tp8", profile_of(llama, tp=8, layout="page_first_direct"), "kv", 4
    yield "llama tp1", profile_of(LLAMA_8B, layout="page_head"), "kv", 2
    yield "page size 1", profile_of(LLAMA_8B, layout="page_first", page_size=1), "kv", 32
    yield "page size 16", profile_of(QWEN3_NEXT, layout="page_first", page_size=16, tp=2), "kv", 12
    for row in ("bf16", "fp8", "fp8_scaled"):
        mla = profile_of(DEEPSEEK | {"row": row}, INDEXER, layout="page_first")
        yield f"mla {row}", mla, "kv", 2
    yield "indexer", mla, "indexer", 5
    small = profile_of(DEEPSEEK | {"layers": 2, "row": "fp8_scaled"}, layout="layer_first")
    yield "two layers", small, "kv", 32
    yield "gdn", profile_of(QWEN3_NEXT, GDN, layout="page_first", tp=4), "mamba", 2


HEALTHY = list(healthy_cases())
LARGE = {"llama tp1", "llama fp8", "qwen3-32b tp8", "mla fp8", "mla fp8_scaled", "indexer"}
LARGE |= {"deepseek page size 16"}


def without_large(cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Return parameters; `make test-fast` leaves out large pages, which others resemble."""
    return [slow(*case) if case[0] in LARGE else case for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "profile", "pool", "pages"), without_large(HEALTHY), ids=[c[0] for c in HEALTHY]
)
def test_healthy_pages_have_no_issues(name: str, profile: Profile, pool: str, pages: int) -> None:
    expected = expected_of(profile, pool)
    seed = seed_of_run()
    checker = ValueChecker(expected, profile)
    assert checker.prepared
    assert not checker.check(KvGenerator(expected, profile, seed).objects(range(pages)))
    assert not checker.check(uniform_noise(expected, profile, pages, seed))


DECIDABLE = [
    ("llama tp1", profile_of(LLAMA_8B)),
    ("llama tp8", profile_of(LLAMA_8B, tp=8)),
    ("llama fp8", profile_of(LLAMA_8B | {"dtype": "float8_e4m3fn"}, tp=4)),
    ("llama page size 16", profile_of(LLAMA_8B, page_size=16, tp=8)),
    ("qwen3-next tp2", profile_of(QWEN3_NEXT, tp=2)),
    ("qwen3-32b tp8", profile_of(QWEN3_32B, tp=8)),
    ("deepseek bf16", profile_of(DEEPSEEK)),
    ("deepseek fp8", profile_of(DEEPSEEK | {"row": "fp8"})),
    ("deepseek 656", profile_of(DEEPSEEK | {"row": "fp8_scaled"})),
    ("deepseek page size 16", profile_of(DEEPSEEK, page_size=16)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "profile"), without_large(DECIDABLE), ids=[case[0] for case in DECIDABLE]
)
def test_pages_of_another_layout_are_found_unless_the_bytes_are_the_same(
    name: str, profile: Profile
) -> None:
    layouts = MHA_LAYOUTS if profile.pools[0].kind == "mha" else MLA_LAYOUTS
    expected = {layout: expected_of(replace(profile, layout=layout)) for layout in layouts}
    checkers = {
        layout: ValueChecker(expected[layout], replace(profile, layout=layout))
        for layout in layouts
    }
    seed = seed_of_run()
    for stored in layouts:
        generator = KvGenerator(expected[stored], profile, seed)
        objects = generator.objects([0])
        for said, checker in checkers.items():
            issues = checker.check(objects)
            if same_order(expected[stored], expected[said]):
                assert not issues, (stored, said)
            else:
                assert codes_of(issues) == [(0, "layout-mismatch")]
                assert all(stored in issue.detail.split("not of")[0] for issue in issues)
                assert all(f"not of {said}:" in issue.detail for issue in issues)


def same_order(one: ObjectSpec, two: ObjectSpec) -> bool:
    def visible(expected: ObjectSpec) -> list[str]:
        tensor = expected.tensors[0]
        return [a for a, n in zip(tensor.axes, tensor.shape, strict=True) if n > 1]

    return visible(one) == visible(two)


@pytest.mark.parametrize("part", ["k", "v"])
def test_parts_stored_alone_are_told_apart_too(part: str) -> None:
    profile = profile_of(LLAMA_8B, layout="page_first", tp=2)
    other = replace(profile, layout="page_head")
    wrong = expected_of(other, part=part, scheme="mooncake")
    objects = KvGenerator(wrong, other, seed_of_run()).objects(range(3))
    assert not ValueChecker(wrong, other).check(objects)
    right = expected_of(profile, part=part, scheme="mooncake")
    issues = ValueChecker(right, profile).check(objects)
    assert codes_of(issues) == [(i, "layout-mismatch") for i in range(3)]


def test_damaged_pages_of_another_layout_have_both_findings() -> None:
    profile = profile_of(LLAMA_8B, layout="page_first", tp=8)
    other = replace(profile, layout="layer_first")
    objects = KvGenerator(expected_of(other), other, seed_of_run()).objects(range(2))
    objects[1, 1:4096:2] = 0x7F
    objects[1, 0:4096:2] = 0xC0
    issues = ValueChecker(expected_of(profile), profile).check(objects)
    assert codes_of(issues) == [(0, "layout-mismatch"), (1, "nan"), (1, "layout-mismatch")]


@pytest.mark.parametrize("layout", MHA_LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_pages_of_a_counting_pattern_have_no_issues(layout: str, page_size: int) -> None:
    """Stores in tests/conformance have such pages, without the statistics of a model."""
    table = {"name": "kv", "kind": "mha", "layers": 4, "kv_heads": 4, "head_dim": 32}
    table |= {"dtype": "bfloat16"}
    profile = profile_of(table, layout=layout, page_size=page_size)
    expected = expected_of(profile)
    pages = [
        page_values.logical_page(table, page_size, salt)["page"]
        for salt in np.random.default_rng(seed_of_run()).integers(2**31, size=32).tolist()
    ]
    tensor = expected.tensors[0]
    order = [1 + ("layer", "token", "head", "channel").index(axis) for axis in tensor.axes]
    objects = np.stack([np.ascontiguousarray(page.transpose(0, *order)) for page in pages])
    assert not ValueChecker(expected, profile).check(objects.reshape(32, -1).view(np.uint8))
