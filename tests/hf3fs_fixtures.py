"""The 3FS metadata server as fixtures; tests/conftest.py brings them to every test."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.hf3fs_server import MetadataServer
from tests.skips import missing

if TYPE_CHECKING:
    from collections.abc import Iterator

REMEDY = "`make .venv-sglang/.installed` builds it (CPython 3.11, x86-64)"
ENVIRONMENT = Path(__file__).parents[1] / ".venv-sglang"


def sglang_interpreter() -> Path:
    """Find the interpreter that has SGLang; skip without one."""
    python = Path(os.environ.get("HICACHECTL_SGLANG_PYTHON") or ENVIRONMENT / "bin/python")
    if not python.exists():
        missing("the SGLang environment", REMEDY)
    return python


@pytest.fixture(scope="session")
def metadata_server_python() -> Path:
    """The interpreter that has SGLang; skips without one."""
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
