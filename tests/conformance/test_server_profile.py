"""The profile of a real server names the weights that it loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hicachectl.backends.disk.weights import read_checkpoint
from hicachectl.formats.profile import parse_profile

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conformance.cpu_server import CpuServer
    from tests.conftest import Invoke

pytestmark = [pytest.mark.conformance, pytest.mark.xdist_group("sglang-server")]


def test_a_server_with_default_settings_loads_what_the_fingerprint_names(
    cpu_server: CpuServer, tiny_model: Path, invoke: Invoke
) -> None:
    outcome = invoke("profile", "--server", cpu_server.url)
    profile = parse_profile(outcome.stdout)
    assert (profile.weights, profile.draft_weights) == (read_checkpoint(tiny_model).fingerprint, "")
    assert "weights" not in outcome.stderr
    assert invoke("profile", "--server", cpu_server.url, "--weights", tiny_model) == outcome
