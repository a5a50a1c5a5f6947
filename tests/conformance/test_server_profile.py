"""The profile of a real server names the weights that it loaded."""

from __future__ import annotations

import json
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


def test_an_unknown_architecture_is_told_with_the_next_command(
    cpu_server: CpuServer, tiny_model: Path, tmp_path: Path, invoke: Invoke
) -> None:
    """No profile is printed that writers could use: what the server tells, and what is missing."""
    config = json.loads((tiny_model / "config.json").read_text())
    renamed = tmp_path / "config.json"
    renamed.write_text(json.dumps({**config, "architectures": ["FutureForCausalLM"]}))
    outcome = invoke("profile", "--server", cpu_server.url, "--model-config", renamed, exit_code=2)
    assert outcome.stdout == ""
    assert "'FutureForCausalLM' is not an architecture" in outcome.stderr
    assert "the server tells model 'tiny'" in outcome.stderr
    assert "page_size 64, layout 'page_first'" in outcome.stderr
    assert "hicachectl profile --print-probe > probe.py" in outcome.stderr
