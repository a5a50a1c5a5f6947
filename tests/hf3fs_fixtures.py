"""The 3FS metadata server as fixtures; tests/conftest.py brings them to every test."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.hf3fs_server import MetadataServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import NoReturn

ENVIRONMENT = Path(__file__).parents[1] / ".venv-sglang"


def sglang_interpreter() -> Path:
    """Find the interpreter that has SGLang; skip without one, or fail where it is required."""
    python = Path(os.environ.get("HICACHECTL_SGLANG_PYTHON") or ENVIRONMENT / "bin/python")
    if not python.exists():
        unavailable(f"no SGLang environment at {python}: `make .venv-sglang` builds it")
    return python


def unavailable(reason: str) -> NoReturn:
    """Skip what needs SGLang, or fail it where SGLang is required."""
    if os.environ.get("HICACHECTL_REQUIRE_SGLANG") == "1":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def metadata_server_python() -> Path:
    """The interpreter that has SGLang; skips without one, or fails where it is required."""
    return sglang_interpreter()


@pytest.fixture(scope="session")
def shared_metadata_server(metadata_server_python: Path) -> Iterator[MetadataServer]:
    """One server for each worker process, since it takes a second to start."""
    with MetadataServer(metadata_server_python) as server:
        yield server


@pytest.fixture
def metadata_server(shared_metadata_server: MetadataServer) -> MetadataServer:
    """The worker's server without any rank; a test that kills one starts one of its own."""
    shared_metadata_server.reset()
    return shared_metadata_server
