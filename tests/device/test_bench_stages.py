"""`bench --device`: every step runs over objects of a store, on a device or its stand-in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.device.devices import DEVICES, torch

from hicachectl.backends.file.store import FileStore  # isort: skip
from hicachectl.bench.device import timed_stages  # isort: skip
from hicachectl.bench.sample import choose  # isort: skip
from hicachectl.formats.spec import object_specs  # isort: skip
from hicachectl.pages.scanning import take_inventory  # isort: skip
from tests.checks.value_cases import profile_of  # isort: skip
from tests.kvgen import KvGenerator  # isort: skip
from tests.stores import page  # isort: skip

if TYPE_CHECKING:
    from pathlib import Path

STEPS = ["to device", "scatter", "values", "digests", "sparse rows"]
ROWS = {"kind": "mla", "layers": 1, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "row": "bf16"}


@pytest.mark.slow
@DEVICES
def test_every_step_is_timed(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicachectl.bench.device._ROUNDS", 1)  # the interpreter is slow
    profile = profile_of(ROWS, page_size=1)
    (spec,) = object_specs(profile, "file")
    for number, content in enumerate(KvGenerator(spec, profile, seed=1).objects(range(2))):
        before, after = spec.affix
        (tmp_path / f"{before}{page(number)}{after}").write_bytes(content.tobytes())
    with FileStore(tmp_path) as store:
        inventory = take_inventory(store, profile)
        sample = choose(inventory, most_bytes=1 << 20, ranks=None, short_pages=None)
        for where, expected in ((torch.device(device), STEPS), (None, ["values", "digests"])):
            stages = list(timed_stages(store, inventory.objects, sample, profile, where))
            assert [stage.name for stage in stages] == expected
            assert {stage.pool for stage in stages} == {"kv"}
            assert all(stage.seconds > 0 for stage in stages)
