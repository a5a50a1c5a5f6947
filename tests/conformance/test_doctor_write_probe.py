"""`doctor --write-probe` with a real SGLang server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hicachectl.profiles.server import API_KEY_VARIABLE
from tests.conformance.cpu_server import PAGE_SIZE
from tests.doctor.replies import checks_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conformance.cpu_server import CpuServer
    from tests.conftest import Invoke

pytestmark = [pytest.mark.conformance, pytest.mark.xdist_group("sglang-server")]


def test_the_pages_of_a_prompt_appear(
    cpu_server: CpuServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, invoke: Invoke
) -> None:
    """The server writes whole pages of one prompt, longer than its prefetch threshold."""
    monkeypatch.setenv(API_KEY_VARIABLE, "tests")
    store = tmp_path / "store"
    store.mkdir()
    cpu_server.attach("file", {"file_storage_path": str(store), "prefetch_threshold": 100})
    asked = ("--server", cpu_server.url, "--watch", "0s", "--write-probe")
    checks = checks_of(invoke, store, *asked)
    assert checks["same-store/write-probe"]["status"] == "ok"
    tokens = 2 * PAGE_SIZE + 1 + 3 * PAGE_SIZE
    assert f"a random prompt of {tokens} tokens" in checks["same-store/write-probe"]["evidence"]
    assert "fail" not in {check["status"] for check in checks.values()}
