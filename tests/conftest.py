"""Fixtures for every test: a clean environment, and the command line in-process."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings

from hicachectl.__main__ import run
from tests.demo_fixtures import profile, source, target  # noqa: F401 - fixtures
from tests.hf3fs_fixtures import (  # noqa: F401 - fixtures
    metadata_server,
    sglang_python,
    shared_metadata_server,
)
from tests.mooncake_fixtures import (  # noqa: F401 - fixtures
    mooncake_cluster,
    mooncake_package,
    pinning_cluster,
    shared_mooncake_cluster,
)
from tests.places import places  # noqa: F401 - a fixture
from tests.ray_fixtures import (  # noqa: F401 - fixtures
    ray_cluster,
    ray_driver,
    shared_ray_cluster,
    shared_ray_driver,
)
from tests.skips import register as pytest_configure  # noqa: F401 - a hook of pytest
from tests.small_file_system import other_file_system  # noqa: F401 - a fixture
from tests.speed import ALL

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

# pyarrow imports dateutil for each Python value that it converts without a type. Python searches an
# absent package anew each time, in all of sys.path and with the finder of pytest.
if importlib.util.find_spec("dateutil") is None:
    sys.modules.update(dict.fromkeys(("dateutil", "dateutil.relativedelta")))  # type: ignore[arg-type]

# A shell starts a job in the background with SIGINT ignored, and children inherit that. Tests
# interrupt their children, so these start with the default again.
for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        _default = signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL
        signal.signal(_number, _default)

# Machines stall, so the duration of an example says nothing about the code.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("untimed"), max_examples=25)
settings.load_profile("untimed")

_FOREIGN_SETTINGS = (
    "HICACHECTL_",
    "SGLANG_",
    "MOONCAKE_",
    "NO_COLOR",
    "XDG_",
)


_LONGEST_ID = 200
_SERVERS = {"mooncake_package", "sglang_python"}
_SLOW_FOLDERS = {"attack", "conformance", "power"}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let garbage collections pass over the thousands of tests, which stay until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the folders of slow tests if slow tests are deselected."""
    unwanted = config.getoption("markexpr") == "not slow" and collection_path.name in _SLOW_FOLDERS
    return unwanted or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out weekly tests. Mark tests that need a server, and tests in slow folders."""
    if not ALL:
        weekly = [item for item in items if item.get_closest_marker("weekly")]
        config.hook.pytest_deselected(items=weekly)
        items[:] = [item for item in items if not item.get_closest_marker("weekly")]
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if "mooncake_package" in fixtures:
            item.add_marker(pytest.mark.mooncake)
        if _SERVERS.intersection(fixtures) or _SLOW_FOLDERS.intersection(item.path.parts):
            item.add_marker(pytest.mark.slow)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name a long text by its length, because each report has the whole id of its test."""
    if not isinstance(val, str | bytes) or len(val) <= _LONGEST_ID:
        return None
    return f"{argname}-{len(val)}"


class Outcome(NamedTuple):
    """Output of one run of the command line."""

    stdout: str
    stderr: str

    @property
    def document(self) -> dict[str, Any]:
        """The document of `--format json`."""
        document: dict[str, Any] = json.loads(self.stdout)
        return document

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of `--format jsonl`."""
        return [json.loads(line) for line in self.stdout.splitlines()]


class Invoke:
    """Runs a command and asserts its exit code; stdout and stderr are separate."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd

    def __call__(self, *arguments: object, exit_code: int = 0) -> Outcome:
        """Return the output of a command."""
        self._capfd.readouterr()
        status = run([str(argument) for argument in arguments])
        outcome = Outcome(*self._capfd.readouterr())
        assert status == exit_code, f"exit code {status}\n{outcome.stdout}\n{outcome.stderr}"
        return outcome

    def document(self, *arguments: object, exit_code: int = 0) -> dict[str, Any]:
        """Return the JSON document of a command."""
        return self(*arguments, "--format", "json", exit_code=exit_code).document


@pytest.fixture(autouse=True)
def _clean_environment(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    for name in list(os.environ):
        if name.startswith(_FOREIGN_SETTINGS) and not name.startswith("HICACHECTL_TEST_"):
            monkeypatch.delenv(name)
    # Making a folder for each of the thousands of tests that need none would take seconds. This
    # folder does not exist, but SGLang's processes can make it.
    needs_folder = "tmp_path" in request.fixturenames
    above = request.getfixturevalue("tmp_path") if needs_folder else tmp_path_factory.getbasetemp()
    monkeypatch.setenv("HOME", str(above / "home"))


@pytest.fixture
def invoke(capfd: pytest.CaptureFixture[str]) -> Invoke:
    """Run commands in this process."""
    return Invoke(capfd)
