"""The file that names the deployment of a 3FS store, when processes start together."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from hicachectl.backends.hf3fs.creating import claim_path, claimed_by
from hicachectl.formats.errors import StoreUnavailable

if TYPE_CHECKING:
    from pathlib import Path

OURS, THEIRS = "a" * 32, "b" * 32


def test_processes_that_claim_at_once_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim that has no content yet is not found; the one that is whole first is everyone's."""
    prefix = str(tmp_path / "hicache")
    sync, found = os.fsync, []

    def stalled(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        found.append(claimed_by(prefix, THEIRS, writes=False))
        found.append(claimed_by(prefix, THEIRS, writes=True))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", stalled)
    assert claimed_by(prefix, OURS, writes=True) == THEIRS
    assert found == [None, THEIRS]
    assert [str(path) for path in tmp_path.iterdir()] == [claim_path(prefix)]


def test_what_is_no_claim_is_named(tmp_path: Path) -> None:
    prefix = str(tmp_path / "hicache")
    (tmp_path / "hicache.hicachectl-deployment").touch()
    with pytest.raises(StoreUnavailable, match="hicachectl-deployment: does not hold the tag"):
        claimed_by(prefix, OURS, writes=True)
