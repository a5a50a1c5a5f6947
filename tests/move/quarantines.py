"""The contents of quarantines, for tests."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hicachectl.backends.arena import Arena
from hicachectl.backends.base import open_store
from tests.stores import contents

if TYPE_CHECKING:
    from pathlib import Path

    from tests.stores import Contents


def runs_in(directory: Path) -> list[Path]:
    """Return the folders of a quarantine, oldest first."""
    return sorted(path for path in directory.glob("*Z-??????*"))


def quarantined(directory: Path) -> Contents:
    """Return names, bytes and times of a quarantine's objects; all runs have the same of each."""
    found: Contents = {}
    for run in runs_in(directory):
        if (run / "run.hcpack").exists():
            held = packed(run)
        else:
            folders = [run, *run.glob("[0-9a-f][0-9a-f]")]
            held = {n: v for folder in folders for n, v in contents(folder).items() if n[0] != "."}
        assert all(found.get(name, value) == value for name, value in held.items())
        found |= held
    return found


def packed(run: Path) -> Contents:
    """Return the objects of a run with a pack."""
    found: Contents = {}
    with open_store(str(run)) as store, Arena(1 << 20) as arena:
        store.attach(arena)
        for batch in store.scan(("nbytes", "mtime_ns", "locator")):
            for n, row in enumerate(batch.to_pylist()):
                sizes = batch.column("nbytes").to_numpy()[n : n + 1]
                assert store.read_into(batch.slice(n, 1), sizes * 0, sizes).all_ok
                found[row["key"].decode()] = (bytes(arena.view(0, row["nbytes"])), row["mtime_ns"])
    return found


def run_document(run: Path) -> dict[str, Any]:
    """Return what run.json states."""
    document: dict[str, Any] = json.loads((run / ".hicachectl" / "run.json").read_text())
    return document


def reasons_of(run: Path) -> list[dict[str, str | None]]:
    """Return the findings of a run."""
    lines = (run / ".hicachectl" / "findings.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
