"""The first look at a page's order: the kernel against `OrderTest.unseen` on the host."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.device.devices import DEVICES, torch

from hicachectl.checks.layouts import layout_check  # isort: skip
from hicachectl.kernels.layout import _is_hinted, is_hinted, is_unseen  # isort: skip
from hicachectl.kernels.layout_triton import MARGIN  # isort: skip
from hicachectl.device.runs import DeviceRun, ObjectForm  # isort: skip
from hicachectl.device.lanes import allocate_lanes, lane_bytes  # isort: skip
from hicachectl.device.check_kernels import OrderKernel  # isort: skip
from tests.checks.value_cases import expected_of, profile_of  # isort: skip
from tests.kvgen import KvGenerator, uniform_noise  # isort: skip
from tests.speed import slow  # isort: skip

MHA: dict[str, Any] = {"kind": "mha", "layers": 8, "kv_heads": 2, "head_dim": 48}
MLA: dict[str, Any] = {"kind": "mla", "layers": 9, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
POOLS = {
    "bfloat16": MHA | {"dtype": "bfloat16"},
    "float8_e4m3fn": MHA | {"dtype": "float8_e4m3fn"},
    "float32": MHA | {"dtype": "float32"},
    "mla": MLA | {"row": "bf16"},
    "656": MLA | {"row": "fp8_scaled"},
}


@pytest.mark.parametrize(
    "name", ["bfloat16", "656", slow("float8_e4m3fn"), slow("float32"), slow("mla")]
)
@DEVICES
def test_the_kernel_sees_the_order_where_the_host_does(device: str, name: str) -> None:
    layout = "page_head" if POOLS[name]["kind"] == "mha" else "page_first"
    profile = profile_of(POOLS[name], page_size=16, layout=layout)
    wrong = replace(profile, layout="page_first_direct")
    expected = expected_of(profile)
    objects = np.concatenate(
        [
            KvGenerator(expected, profile, seed=5).objects(range(2)),
            KvGenerator(expected_of(wrong), wrong, seed=5).objects(range(2)),
            uniform_noise(expected, profile, 1, seed=5),
            np.zeros((1, expected.nbytes), np.uint8),
        ]
    )
    check = layout_check(expected, profile)
    assert check is not None
    step = -(-expected.nbytes // 4096) * 4096
    slab = len(objects) * step
    lane = allocate_lanes([torch.device(device)], lane_bytes(slab), slab, slab)[0]
    form = ObjectForm(expected, None, step)
    run = DeviceRun(form, lane)
    kernel = OrderKernel(expected, profile, run)
    slabs = np.zeros((len(objects), step), np.uint8)
    slabs[:, : expected.nbytes] = objects
    lane.staging.copy_(torch.from_numpy(slabs.reshape(-1)))
    run.scatter(len(objects))
    first, *others = (
        (own.cpu().numpy(), usable.cpu().numpy()) for own, usable in kernel.correlate(len(objects))
    )
    unseen = is_unseen(*first)
    read, pages = partial(check._read, objects), np.arange(len(objects))
    assert unseen.tolist() == check.test.unseen(read, pages).tolist()
    assert not unseen[0]
    assert unseen[2:].all()
    assert (is_unseen(*first, MARGIN) >= unseen).all()
    hinted = np.logical_or.reduce([is_hinted(*look) for look in others])
    rivals = check.test._sets.values()
    on_host = np.logical_or.reduce([_is_hinted(sets, read, pages) for sets in rivals])
    assert hinted.tolist() == on_host.tolist()
    assert hinted[2]
