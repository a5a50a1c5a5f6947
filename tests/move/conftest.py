"""Fixtures of migrations and removals."""

from __future__ import annotations

import pytest

from hicachectl.io import forked_calls


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes work however few calls are made at once, and however few objects there are."""
    monkeypatch.setattr(forked_calls, "_CALLS", 0)
    monkeypatch.setattr(forked_calls, "_OBJECTS", 0)
