"""The tests of Mooncake pass with the newest release, too."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mooncake_release import PACKAGES, ROOT, newest_release
from tests.speed import some

CLUSTER = re.compile(r"\b(mooncake_package|(mooncake|pinning)_cluster)\b")
PATIENCE_S = 800
# The first is about an image that has the release without CUDA.
OTHERS = ("test_kubernetes.py", Path(__file__).name)

pytestmark = pytest.mark.slow


def modules_with_clusters() -> list[str]:
    """Return the test modules that start Mooncake clusters, relative to the checkout."""
    modules = sorted((ROOT / "tests").rglob("test_*.py"))
    return [
        str(path.relative_to(ROOT))
        for path in modules
        if path.name not in OTHERS and CLUSTER.search(path.read_text())
    ]


@pytest.fixture
def newest(tmp_path: Path) -> dict[str, str]:
    """Return the environment of processes that use the newest release."""
    return {**os.environ, **newest_release(tmp_path)}


def test_the_newest_release_is_the_one_that_is_pinned(newest: dict[str, str]) -> None:
    pins = (ROOT / "tests/backends/mooncake/requirements-newest.txt").read_text()
    version = re.search(r"^mooncake-transfer-engine-cuda13==(\S+)$", pins, re.MULTILINE)
    assert version is not None
    master = subprocess.run(
        [PACKAGES / "mooncake/mooncake_master", "--version"],
        env=newest, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert f"version {version[1]} " in master.stdout
    client = subprocess.run(
        [sys.executable, "-c", "import mooncake.store; print(mooncake.store.__file__)"],
        env=newest, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert Path(client.stdout.strip()).is_relative_to(PACKAGES)


@pytest.mark.parametrize(
    "module",
    some(
        modules_with_clusters(),
        "tests/backends/mooncake/test_ports.py",
        "tests/backends/mooncake/test_store.py",
        "tests/cli/test_pin.py",
        "tests/prewarming/test_faults.py",
    ),
)
def test_the_tests_pass_with_the_newest_release(
    newest: dict[str, str], tmp_path: Path, module: str
) -> None:
    options = ["-q", "-m", "mooncake", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'run'}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, module],
        cwd=ROOT,
        # The run is one of its own, no worker of this one.
        env={n: v for n, v in newest.items() if not n.startswith("PYTEST_")},
        timeout=PATIENCE_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "pins of stored objects" not in done.stdout  # a skip with older releases
