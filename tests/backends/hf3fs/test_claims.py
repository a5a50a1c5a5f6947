"""The file that names the deployment of a 3FS store, when processes start together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hicachectl.backends.hf3fs.claims import claim_path, claimed_by
from hicachectl.formats.errors import StoreUnavailable

if TYPE_CHECKING:
    from pathlib import Path

TAG = "a" * 32


def test_a_file_that_is_being_written_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that finds the empty file of another one waits for its content."""
    prefix = str(tmp_path / "hicache")
    path = tmp_path / "hicache.hicachectl-deployment"
    assert claim_path(prefix) == str(path)
    path.touch()
    waits = []

    def waited(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            path.write_text(TAG)

    monkeypatch.setattr("time.sleep", waited)
    assert claimed_by(prefix, "b" * 32, writes=True) == TAG
    assert len(waits) == 2
    path.write_text("")
    waits = [0.0, 0.0]
    with pytest.raises(StoreUnavailable, match="is no deployment's tag"):
        claimed_by(prefix, TAG, writes=True)
