"""Scatter objects into layer-first pools and gather them: each provider, against single items."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checks.value_cases import expected_of, profile_of, tiny
from tests.device.devices import DEVICES, torch

from hicachectl.formats.copyplan import Axis, CopyPlan  # isort: skip
from hicachectl.formats.kinds.pool import Pool  # isort: skip
from hicachectl.formats.layouts import TensorLayout  # isort: skip
from hicachectl.formats.pools import pool_piece  # isort: skip
from hicachectl.formats.profile import Profile  # isort: skip
from hicachectl.formats.transfer import retargeted, transfer_plan  # isort: skip
from hicachectl.kernels.copy_triton import strided_copy  # isort: skip
from hicachectl.kernels.relayout import relayout  # isort: skip
from hicachectl.device.plans import pool_form  # isort: skip
from tests.device.providers import (  # isort: skip
    TorchProvider,
    TritonProvider,
)
from tests.device.sgl_provider import SglKernelProvider  # isort: skip
from tests.skips import missing

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hicachectl.device.plans import PoolForm
    from tests.device.providers import Provider

    Bytes = NDArray[np.uint8]

MHA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
KINDS = (
    *(("bfloat16", layout) for layout in MHA_LAYOUTS),
    ("float8_e4m3fn", "page_head"),
    ("fp8_scaled", "page_first"),
    ("fp8_scaled", "page_first_direct"),
    ("latent", "page_first"),
    ("indexer", "page_first"),
    ("mamba", "page_first"),
)
SLOTS = 5


def tensors_of(kind: str, layout: str) -> tuple[TensorLayout, ...]:
    profile, pool = tiny(kind, layout)
    return expected_of(profile, pool).tensors


def placed(form: PoolForm, content: Bytes, slot: int, pools: Bytes) -> None:
    """Put one object into pools item by item, by the names of its axes."""
    for tensor in form.tensors:
        part = content[tensor.offset : tensor.offset + tensor.nbytes]
        items = part.reshape(*tensor.shape, tensor.itemsize)
        for place in np.ndindex(*tensor.shape):
            where = dict(zip(tensor.axes, place, strict=True))
            piece = next(piece for piece in form.pieces if piece.name == tensor.name)
            row = (where["layer"] * SLOTS + slot) * piece.tokens + where.get("token", 0)
            inner = 0
            for axis, length in zip(tensor.axes, tensor.shape, strict=True):
                if axis not in ("layer", "token"):
                    inner = inner * length + where[axis]
            if "head" in where and tensor.axes.index("head") < tensor.axes.index("layer"):
                inner = where["head"] * tensor.shape[-1] + where["channel"]
            at = SLOTS * piece.offset + row * piece.row_bytes + inner * tensor.itemsize
            pools[at : at + tensor.itemsize] = items[place]


def scattered(
    provider: Provider, form: PoolForm, objects: Bytes, slots: list[int], device: str
) -> Bytes:
    """Scatter objects [n, stride] into poisoned pools."""
    pools = torch.full((SLOTS * form.page_bytes,), 0xA5, dtype=torch.uint8, device=device)
    places = torch.arange(len(objects), device=device) * (objects.shape[1] // 16)
    source = torch.from_numpy(objects.reshape(-1).copy()).to(device)
    for plan in form.plans(SLOTS):
        provider.copy(plan, source, places, pools, torch.tensor(slots, device=device))
    made: Bytes = pools.cpu().numpy()
    return made


def gathered(
    provider: Provider, form: PoolForm, pools: Bytes, slots: list[int], stride: int, device: str
) -> Bytes:
    """Gather objects into poisoned memory: [n, stride]."""
    made = torch.full((len(slots) * stride,), 0x5A, dtype=torch.uint8, device=device)
    places = torch.arange(len(slots), device=device) * (stride // 16)
    source = torch.from_numpy(pools).to(device)
    for plan in form.plans(SLOTS):
        back = plan.reversed()
        provider.copy(back, source, torch.tensor(slots, device=device), made, places)
    objects: Bytes = made.cpu().numpy().reshape(len(slots), stride)
    return objects


def random_objects(form: PoolForm, count: int, seed: int = 1) -> Bytes:
    stride = -(-form.page_bytes // 4096) * 4096
    return np.random.default_rng(seed).integers(0, 256, (count, stride), dtype=np.uint8)


@pytest.mark.parametrize(("kind", "layout"), KINDS)
@pytest.mark.parametrize("name", ["torch", "triton", "sgl_kernel"])
@DEVICES
def test_every_item_arrives_in_its_layer_slot_and_head_and_comes_back(
    device: str, name: str, kind: str, layout: str
) -> None:
    form = pool_form(tensors_of(kind, layout))
    objects, slots = random_objects(form, 2), [3, 0]
    provider = provider_named(name, device)
    if isinstance(provider, SglKernelProvider) and not all(
        provider.supports(plan) for plan in form.plans(SLOTS)
    ):
        # sgl_kernel copies words of 8 bytes; our other providers copy rows of any size.
        assert name == "sgl_kernel"
        assert any(plan.unit % 8 for plan in form.plans(SLOTS))
        return
    expected = np.full(SLOTS * form.page_bytes, 0xA5, np.uint8)
    for content, slot in zip(objects, slots, strict=True):
        placed(form, content, slot, expected)
    pools = scattered(provider, form, objects, slots, device)
    assert (pools == expected).all()
    back = gathered(provider, form, pools, slots, objects.shape[1], device)
    assert (back[:, : form.page_bytes] == objects[:, : form.page_bytes]).all()
    assert (back[:, form.page_bytes :] == 0x5A).all()


@st.composite
def random_forms(draw: st.DrawFn) -> PoolForm:
    if draw(st.booleans()):
        pool = Pool(
            name="kv",
            kind="mha",
            layers=draw(st.integers(1, 4)),
            kv_heads=draw(st.integers(1, 3)),
            head_dim=draw(st.integers(1, 24)),
            dtype=draw(st.sampled_from(("bfloat16", "float8_e4m3fn", "float32"))),
        )
        page_size = draw(st.integers(1, 5))
        piece = pool_piece(Profile(model="m", page_size=page_size, pools=(pool,)), pool)
        assert piece is not None
        return pool_form(piece.flat(draw(st.sampled_from(MHA_LAYOUTS))))
    axes = draw(st.sampled_from((("layer", "token", "channel"), ("token", "layer", "channel"))))
    shape = tuple(draw(st.integers(1, 5)) for _ in range(2))
    return pool_form((TensorLayout("kv", axes, (*shape, draw(st.integers(1, 80))), "uint8"),))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torch", "triton"])
@DEVICES
@settings(max_examples=25)
@given(form=random_forms(), slots=st.lists(st.integers(0, SLOTS - 1), max_size=3, unique=True))
def test_pages_of_any_shape_and_layout_arrive_and_come_back(
    device: str, name: str, form: PoolForm, slots: list[int]
) -> None:
    objects = random_objects(form, len(slots))
    expected = np.full(SLOTS * form.page_bytes, 0xA5, np.uint8)
    for content, slot in zip(objects, slots, strict=True):
        placed(form, content, slot, expected)
    provider = provider_named(name, device)
    pools = scattered(provider, form, objects, slots, device)
    assert (pools == expected).all()
    back = gathered(provider, form, pools, slots, objects.shape[1], device)
    assert (back[:, : form.page_bytes] == objects[:, : form.page_bytes]).all()


def provider_named(name: str, device: str) -> Provider:
    if name == "torch":
        return TorchProvider()
    if name == "triton":
        return TritonProvider()
    try:
        return SglKernelProvider()
    except ImportError:
        if device == "cuda":
            missing("sgl_kernel", "install the CUDA build of sgl-kernel")
        return SglKernelProvider(address_arithmetic())


def address_arithmetic() -> SimpleNamespace:
    """Compute on host memory what sgl_kernel.kvcacheio computes (csrc/kvcacheio/transfer.cu)."""

    def move(src: int, dst: int, nbytes: int) -> None:
        ctypes.memmove(dst, src, nbytes)

    def load(
        src: Any, dst: Any, src_indices: Any, dst_indices: Any, layer_id: int, item_size: int,
        src_layout_dim: int, block_quota: int = 2,
    ) -> None:  # fmt: skip
        assert item_size % 8 == 0
        assert len(src_indices), "the launcher divides by it"
        for i, j in zip(src_indices.tolist(), dst_indices.tolist(), strict=True):
            at = src.data_ptr() + i * src_layout_dim + layer_id * item_size
            move(at, dst.data_ptr() + j * item_size, item_size)

    def load_kv(
        src_k: Any, dst_k: Any, src_v: Any, dst_v: Any, src_indices: Any, dst_indices: Any,
        layer_id: int, item_size: int, src_layout_dim: int, block_quota: int = 2,
    ) -> None:  # fmt: skip
        load(src_k, dst_k, src_indices, dst_indices, layer_id, item_size, src_layout_dim)
        load(src_v, dst_v, src_indices, dst_indices, layer_id, item_size, src_layout_dim)

    def back_up(
        src_layers: Any, dst: Any, src_indices: Any, dst_indices: Any, item_size: int,
        dst_layout_dim: int, num_layers: int, block_quota: int = 2,
    ) -> None:  # fmt: skip
        assert num_layers == len(src_layers)
        assert len(src_indices), "the launcher divides by it"
        for layer, base in enumerate(src_layers.view(torch.int64).tolist()):
            for i, j in zip(src_indices.tolist(), dst_indices.tolist(), strict=True):
                at = dst.data_ptr() + j * dst_layout_dim + layer * item_size
                move(base + i * item_size, at, item_size)

    return SimpleNamespace(
        transfer_kv_per_layer_mla_pf_lf=load,
        transfer_kv_per_layer_pf_lf=load_kv,
        transfer_kv_all_layer_mla_lf_pf=back_up,
    )


@DEVICES
def test_layer_by_layer_is_the_same_as_all_layers_at_once(device: str) -> None:
    form = pool_form(tensors_of("bfloat16", "page_first"))
    objects = random_objects(form, 1)
    source = torch.from_numpy(objects.reshape(-1)).to(device)
    at_once, by_layer = (
        torch.zeros(SLOTS * form.page_bytes, dtype=torch.uint8, device=device) for _ in range(2)
    )
    zero, slot = torch.tensor([0], device=device), torch.tensor([2], device=device)
    for plan in form.plans(SLOTS):
        strided_copy(plan, source, zero, at_once, slot)
        place = [axis.name for axis in plan.axes].index("layer")
        for layer in reversed(range(form.pieces[0].layers)):
            strided_copy(plan.at(place, layer), source, zero, by_layer, slot)
    assert torch.equal(at_once, by_layer)


def test_k_and_v_of_one_shape_are_one_plan_and_one_launch() -> None:
    assert len(pool_form(tensors_of("bfloat16", "page_first")).plans(SLOTS)) == 1
    assert len(pool_form(tensors_of("mamba", "page_first")).plans(SLOTS)) == 2


def test_rows_that_lie_together_are_copied_together() -> None:
    plan = pool_form(tensors_of("bfloat16", "page_first_direct")).plans(SLOTS)[0]
    assert [axis.name for axis in plan.axes] == ["kv", "layer"]
    assert plan.run == 4 * 2 * 16 * 2
    assert plan.unit == 16


@pytest.mark.parametrize("width", [1, 2, 3, 4, 8, 12, 16, 24])
@DEVICES
def test_rows_of_any_width_are_moved(device: str, width: int) -> None:
    tensors = (TensorLayout("kv", ("token", "layer", "channel"), (3, 2, width), "uint8"),)
    form = pool_form(tensors)
    objects = random_objects(form, 2)
    expected = np.full(SLOTS * form.page_bytes, 0xA5, np.uint8)
    for content, slot in zip(objects, (1, 4), strict=True):
        placed(form, content, slot, expected)
    pools = scattered(TritonProvider(), form, objects, [1, 4], device)
    assert (pools == expected).all()


@pytest.mark.parametrize("name", ["torch", "triton", "sgl_kernel"])
@DEVICES
def test_nothing_to_copy_is_no_launch(device: str, name: str) -> None:
    form = pool_form(tensors_of("latent", "page_first"))
    provider = provider_named(name, device)
    pools = scattered(provider, form, np.zeros((0, 4096), np.uint8), [], device)
    assert (pools == 0xA5).all()
    assert gathered(provider, form, pools, [], 4096, device).size == 0


def test_real_models_move_in_the_widest_words() -> None:
    llama = {"kind": "mha", "dtype": "bfloat16", "layers": 32, "kv_heads": 8, "head_dim": 128}
    scaled = {
        "kind": "mla", "layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "row": "fp8_scaled",
    }  # fmt: skip
    for pool in (llama, scaled):
        for layout in ("page_first", "page_first_direct"):
            plans = plans_of(profile_of(pool, layout=layout))
            assert {plan.unit for plan in plans} == {16}


def plans_of(profile: Any) -> tuple[CopyPlan, ...]:
    return pool_form(expected_of(profile).tensors).plans(SLOTS)


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("kind", ["bfloat16", "latent", "mamba"])
@DEVICES
def test_a_plan_of_another_deployment_is_the_same_on_a_device(
    device: str, kind: str, name: str
) -> None:
    """A device carries out numpy's reshard and relayout plans with the same result."""
    profile, _ = tiny(kind, "page_first")
    layout = "page_head" if kind == "bfloat16" else "page_first_direct"
    plan = transfer_plan(profile, "file", retargeted(profile, tp=2, layout=layout), "file")
    provider = provider_named(name, device)
    rng = np.random.default_rng(3)
    moved = 0
    for unit in plan.units:
        objects = [
            rng.integers(0, 256, (3, plan.sources[at].nbytes), np.uint8) for at in unit.sources
        ]
        made = [
            np.full((3, plan.destinations[at].nbytes), 0x5A, np.uint8) for at in unit.destinations
        ]
        relayout(unit, objects, made)
        on_device = [
            torch.full((one.size,), 0x5A, dtype=torch.uint8, device=device) for one in made
        ]
        pages = torch.arange(3, device=device)
        for copy in unit.copies:
            source, destination = objects[copy.source], on_device[copy.destination]
            stepped = replace(
                copy,
                source_step=source.shape[1],
                destination_step=made[copy.destination].shape[1],
            )
            memory = torch.from_numpy(source.reshape(-1)).to(device)
            provider.copy(stepped, memory, pages, destination, pages)
            moved += not unit.identity
        for expected, seen in zip(made, on_device, strict=True):
            assert np.array_equal(seen.cpu().numpy().reshape(expected.shape), expected)
    assert moved


@DEVICES
def test_a_plan_of_many_axes_is_copied(device: str) -> None:
    """Every second byte along six axes: more axes than the kernel has, and none can be joined."""
    shape = (2, 3, 2, 2, 3, 2)
    memory = np.arange(3**6, dtype=np.int64).astype(np.uint8)
    steps = [3**n for n in reversed(range(6))]
    back = [
        2 * step for step in TensorLayout("a", tuple("abcdef"), shape, "uint8").strides.values()
    ][::-1]
    plan = CopyPlan(tuple(Axis("", *axis) for axis in zip(shape, steps, back, strict=True)), 1)
    made = torch.zeros(300, dtype=torch.uint8, device=device)
    place = torch.zeros(1, dtype=torch.int64, device=device)
    strided_copy(plan, torch.from_numpy(memory).to(device), place, made, place)
    expected = memory.reshape((3,) * 6)[:2, :3, :2, :2, :3, :2].reshape(-1)
    assert np.array_equal(made.cpu().numpy()[: 2 * expected.size : 2], expected)
