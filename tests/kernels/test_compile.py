"""Kernels compile for the devices of servers, even without a device.

The interpreter accepts code that the compiler refuses, so its tests do not prove that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.device.devices import torch  # noqa: F401 - skips where torch or triton is missing

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

KERNELS = {
    "_compress_chunks", "_copy_units", "_correlate", "_gather_rows", "_merge_nodes", "_plan_step",
    "_flag", "_stream",
}  # fmt: skip
HOPPER = 90


def test_every_kernel_compiles_without_a_stack(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_kernels", str(HOPPER)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    forms = [json.loads(line) for line in done.stdout.splitlines()]
    assert {form["kernel"] for form in forms} == KERNELS
    assert [form for form in forms if form["stack"]] == []
