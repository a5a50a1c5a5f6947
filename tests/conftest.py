"""Fixtures for every test: a clean environment, and the command line run in-process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import pytest
from hypothesis import HealthCheck, settings

from hicachectl.__main__ import run
from tests.hf3fs_fixtures import (  # noqa: F401 - fixtures
    metadata_server,
    metadata_server_python,
    shared_metadata_server,
)
from tests.mooncake_fixtures import (  # noqa: F401 - fixtures
    mooncake_cluster,
    mooncake_package,
    shared_mooncake_cluster,
)

if TYPE_CHECKING:
    from pathlib import Path

# Machines stall: how long an example took says nothing about the code.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

_FOREIGN_SETTINGS = (
    "HICACHECTL_CONFIG",
    "HICACHECTL_API_KEY",
    "SGLANG_",
    "MOONCAKE_",
    "NO_COLOR",
    "XDG_",
)


class Outcome(NamedTuple):
    """What one call of the command line printed."""

    stdout: str
    stderr: str


Invoke = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(_FOREIGN_SETTINGS):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def invoke(capfd: pytest.CaptureFixture[str]) -> Invoke:
    """Run a command and assert its exit code; stdout and stderr come apart."""

    def call(*arguments: object, exit_code: int = 0) -> Outcome:
        capfd.readouterr()
        status = run([str(argument) for argument in arguments])
        outcome = Outcome(*capfd.readouterr())
        assert status == exit_code, f"exit code {status}\n{outcome.stdout}\n{outcome.stderr}"
        return outcome

    return call
