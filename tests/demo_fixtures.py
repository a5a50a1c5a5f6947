"""The demo's store for migrations: a source, a target and the source's profile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.move.migrations import demo_store, profile_file

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return demo_store(tmp_path / "source")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "target"


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    return profile_file(tmp_path / "profile.toml")
