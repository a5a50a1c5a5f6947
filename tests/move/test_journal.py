"""Journals that are not what the run wrote are refused: the file, the line and what to do."""

from __future__ import annotations

import json
import os
import tempfile
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from hicachectl.formats.errors import HicacheError
from hicachectl.move.journal import Journal, JournalFiles, journal_path, read_journals
from tests.stores import page

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OURS = {"source": "a", "destination": "b"}
HUGE = 64 << 20


def opened(path: Path) -> Journal:
    return Journal(JournalFiles(path), OURS, earlier=None, fresh=True, durable=False)


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Return the journal of an interrupted run, with one batch."""
    path = tmp_path / "journal.jsonl"
    written = opened(path)
    written.copied("kv", pa.array([page(0), page(1)]), verified=False)
    written.close()
    return path


def call_copied_removed(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"copied"', b'"removed"'))


def name_another_source(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"source": "a"', b'"source": "c"'))


def cut_a_page(path: Path) -> None:
    """Write the form of earlier releases, whose lines have no digest."""
    head = {"migration": 1, "identity": OURS, "owner": "0" * 16}
    batch = {"route": "kv", "what": "copied", "pages": page(0)[:-1]}
    path.write_text(f"{json.dumps(head)}\n{json.dumps(batch)}\n")


def add(text: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.write_text(f"{path.read_text()}{text}\n")

    return damage


def link(path: Path) -> None:
    path.unlink()
    path.symlink_to("elsewhere")


def put_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (call_copied_removed, "line 2 was altered; move the file away and run again"),
        (name_another_source, "not the journal of this migration; move the file away"),
        (cut_a_page, "line 2: `pages` is not a list of page hashes; move the file away"),
        (add("{"), "line 3: not JSON; move the file away"),
        (add("[]"), "line 3: not a JSON object; move the file away"),
        (lambda path: path.write_bytes(b" " * HUGE), "not a journal; move the file away"),
        (link, "cannot read the journal: Too many levels of symbolic links; check its owner"),
        (put_a_directory, "cannot read the journal: not a regular file; check its owner"),
    ],
)
def test_what_no_run_wrote_is_refused(
    journal: Path, damage: Callable[[Path], None], said: str
) -> None:
    damage(journal)
    with pytest.raises(HicacheError) as refusal:
        read_journals([journal], OURS)
    assert str(refusal.value).startswith(f"{journal}: {said}")


def test_a_journal_that_cannot_be_written_names_the_variable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "journal.jsonl"
    with pytest.raises(HicacheError) as refusal:
        opened(path)
    assert str(refusal.value) == (
        f"{path}: cannot write the journal: Not a directory; set XDG_STATE_HOME to a writable "
        "directory"
    )


def test_without_a_home_and_a_temporary_directory_the_variable_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(HicacheError) as refusal:
        journal_path(OURS, {"HOME": "not absolute"})
    assert str(refusal.value) == (
        f"{tmp_path}/file/hicachectl-{os.geteuid()}: cannot use the directory: Not a directory; "
        "set XDG_STATE_HOME to a writable directory"
    )
