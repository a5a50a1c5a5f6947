"""The demo's store, and its profile in a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.move.migrations import demo_store, profile_file

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return demo_store(tmp_path / "store")


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    return profile_file(tmp_path / "profile.toml")
