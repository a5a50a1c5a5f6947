"""The process of a stage leaves nothing behind."""

from __future__ import annotations

import fcntl
import os
import pickle
import tempfile
from functools import partial
from typing import TYPE_CHECKING

from hicachectl.parts.child import in_child
from hicachectl.parts.messages import Order, Outcome, frame, parse_answer
from tests.parts.runs import ToyRun, names_in, toy_run  # noqa: F401 - a fixture
from tests.parts.toy import opened

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_folders_of_killed_processes_are_removed(
    toy_run: ToyRun,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A folder that another process locks stays, and a new one, which it may be about to lock."""
    places = tmp_path / "temporary"
    monkeypatch.setattr(tempfile, "tempdir", str(places))
    for name in ("abandoned", "locked", "new"):
        folder = places / f"hicachectl-part-{name}"
        folder.mkdir(parents=True)
        (folder / "journal-0.jsonl").touch()
        if name != "new":
            os.utime(folder, (1.6e9, 1.6e9))
    locked = os.open(places / "hicachectl-part-locked", os.O_RDONLY)
    fcntl.flock(locked, fcntl.LOCK_EX)
    job = pickle.dumps(partial(opened, toy_run.store, toy_run.destination))
    answers = [parse_answer(answer) for answer in in_child(frame(Order(stage="open", job=job)))]
    os.close(locked)
    assert [type(answer) for answer in answers] == [Outcome]
    assert names_in(places) == ["hicachectl-part-locked", "hicachectl-part-new"]
