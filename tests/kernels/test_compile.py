"""Kernels compile for the devices of servers, even without a device, with each Triton.

The interpreter accepts code that the compiler refuses, and a new compiler code that an old one
refuses, so tests with one of them do not prove that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.device.devices import torch  # noqa: F401 - skips where torch or triton is missing
from tests.skips import missing
from tests.speed import ALL

pytestmark = pytest.mark.slow

KERNELS = {
    "_compress_chunks", "_copy_units", "_correlate", "_flag", "_gather_rows", "_merge_nodes",
    "_plan_step", "_stream",
}  # fmt: skip
HOPPER = 90
ROOT = Path(__file__).parents[2]
OLDEST = ROOT / ".venv-triton"


@pytest.mark.parametrize("age", ["installed", "oldest"])
def test_every_kernel_compiles_without_a_stack(tmp_path: Path, age: str) -> None:
    """Two kinds of page objects reach each branch; HICACHECTL_TEST_ALL=1 compiles every kind."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    if age == "oldest":
        if not (OLDEST / "triton").is_dir():
            missing("the oldest Triton", "`make .venv-triton/.installed` installs it")
        environment["PYTHONPATH"] = os.pathsep.join([str(OLDEST), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_kernels", str(HOPPER),
         *([] if ALL else ["few"])],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    version, *forms = [json.loads(line) for line in done.stdout.splitlines()]
    assert age == "installed" or version["triton"] == oldest_allowed()
    assert {form["kernel"] for form in forms} == KERNELS
    assert [form for form in forms if form["stack"]] == []


def oldest_allowed() -> str:
    """Return the version that is tested as the oldest, which is the one that users may install."""
    name, _, version = (
        Path(__file__).with_name("requirements-oldest.txt").read_text().partition("==")
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (allowed,) = (p for p in project["optional-dependencies"]["gpu"] if p.startswith(name))
    assert version.strip().startswith(allowed.partition(">=")[2])
    return version.strip()
