"""Fixtures of the 3FS metadata server; tests/conftest.py imports them for every test."""

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
    """Return the interpreter that has SGLang; skip without one."""
    python = Path(os.environ.get("HICACHECTL_SGLANG_PYTHON") or ENVIRONMENT / "bin/python")
    if not python.exists():
        missing("the SGLang environment", REMEDY)
    return python


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    """Return the interpreter that has SGLang; skip without one."""
    return sglang_interpreter()


@pytest.fixture(scope="session")
def shared_metadata_server(sglang_python: Path) -> Iterator[MetadataServer]:
    """Start one server per worker process, since its start takes a second."""
    with MetadataServer(sglang_python) as server:
        yield server


@pytest.fixture
def metadata_server(shared_metadata_server: MetadataServer) -> MetadataServer:
    """Return the worker's server, without ranks. A test that kills a server starts its own."""
    shared_metadata_server.reset()
    return shared_metadata_server
