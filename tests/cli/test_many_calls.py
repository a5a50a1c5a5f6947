"""Commands on a directory whose calls wait have many of them in flight, without any option."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from tests.delayed_calls import delayed
from tests.speed import slow
from tests.stores import put_pages

if TYPE_CHECKING:
    from pathlib import Path

OBJECTS = 300
DELAY_MS = 5.0
MANY = 8  # a busy machine may not get further; one call after the other is 1


def command(name: str, source: Path, target: Path, local: Path) -> list[object]:
    """Return the words of a command."""
    words: dict[str, list[object]] = {
        "ls": ["ls", source, "--objects"],
        "structure": ["verify", source, "--checks", "names,groups,sizes"],
        "digests": ["verify", source, "--checks", "digests", "--catalog", local / "catalog",
                    "--update-catalog"],
        "migrate": ["migrate", source, target],
        "rm": ["rm", source, "--yes", "--before", "1d"],
    }  # fmt: skip
    return [sys.executable, "-m", "hicachectl", "-q", *words[name]]


@pytest.mark.parametrize(
    "name", ["ls", slow("structure"), slow("digests"), slow("migrate"), slow("rm")]
)
def test_many_calls_are_in_flight(name: str, tmp_path: Path) -> None:
    source, target = tmp_path / "waits" / "source", tmp_path / "waits" / "target"
    source.parent.mkdir()
    put_pages(source, range(OBJECTS), "_m_0_1")
    words = command(name, source, target, tmp_path)
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    done = delayed(source.parent, DELAY_MS, words, tmp_path, environment)
    assert (done.status, done.stderr) == (0, "")
    assert sum(done.calls.values()) > OBJECTS
    assert done.at_once >= MANY
