"""A million objects under 1.5 GB: listings of generated names; tests/soak has real files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from tests.attack.memory import LIMIT_BYTES, OBJECTS, SYNTHETIC, peak_of

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("command", ["summary", "parquet", "verify", "migrate"])
def test_commands_stay_below_the_limit(tmp_path: Path, command: str) -> None:
    store, out = tmp_path / "million", tmp_path / "out"
    store.mkdir()
    arguments: dict[str, list[object]] = {
        "summary": ["ls", store, "--summary", "--format", "json", "-o", out],
        "parquet": ["ls", store, "--objects", "--format", "parquet", "-o", out],
        "verify": ["verify", store, "--checks", "names,groups,sizes", "--format", "json",
                   "-o", out],
        "migrate": ["migrate", store, tmp_path / "new", "--dry-run", "--format", "json",
                    "-o", out],
    }  # fmt: skip
    used = peak_of(SYNTHETIC, *arguments[command])
    assert used.status == 0, used.stderr
    assert used.nbytes < LIMIT_BYTES
    if command == "parquet":
        assert pq.read_metadata(out).num_rows == OBJECTS
    elif command != "summary":
        document = json.loads(out.read_text())
        assert document["pages"] == OBJECTS
