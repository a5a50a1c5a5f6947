"""Names and kinds of a directory's entries, in blocks, against those that Python sees."""

from __future__ import annotations

import os
import shutil
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicachectl.backends.disk import entries
from hicachectl.backends.disk.entries import DIRECTORY, REGULAR, UNKNOWN, entries_in
from hicachectl.backends.disk.io import OPEN_DIRECTORY, closing_descriptor
from tests.processes import descriptors as open_descriptors

if TYPE_CHECKING:
    from pathlib import Path

LINK, FIFO = 10, 1  # d_type of dirent.h
NAMES = st.binary(min_size=1, max_size=255).filter(
    lambda name: b"/" not in name and b"\0" not in name and name not in {b".", b".."}
)
KINDS = st.sampled_from([DIRECTORY, REGULAR, LINK, FIFO])


def _make(directory: int, name: bytes, kind: int) -> None:
    if kind == DIRECTORY:
        os.mkdir(name, dir_fd=directory)
    elif kind == REGULAR:
        os.close(os.open(name, os.O_CREAT | os.O_WRONLY, dir_fd=directory))
    elif kind == LINK:
        os.symlink("nowhere", name, dir_fd=directory)
    else:
        os.mkfifo(name, dir_fd=directory)


def _found(directory: Path) -> dict[str, int]:
    with closing_descriptor(os.open(directory, OPEN_DIRECTORY)) as descriptor:
        found = [
            pair
            for names, kinds in entries_in(descriptor)
            for pair in zip(names, kinds.tolist(), strict=True)
        ]
    assert len(found) == len(dict(found))
    return dict(found)


@settings(max_examples=30)
@given(made=st.dictionaries(NAMES, KINDS, max_size=40), call_bytes=st.sampled_from([288, 1 << 20]))
def test_all_names_and_kinds_come_out(
    tmp_path_factory: pytest.TempPathFactory, made: dict[bytes, int], call_bytes: int
) -> None:
    """Of any bytes and lengths, however many entries a call returns."""
    directory = tmp_path_factory.mktemp("entries")
    with closing_descriptor(os.open(directory, OPEN_DIRECTORY)) as descriptor:
        for name, kind in made.items():
            _make(descriptor, name, kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entries, "_CALL_BYTES", call_bytes)
        assert _found(directory) == {os.fsdecode(name): kind for name, kind in made.items()}


def test_short_names_are_not_taken_for_the_directory_itself(tmp_path: Path) -> None:
    names = ["a", "..a", "...", ".a", "a.", "aa", "aaa", "aaaa", "aaaaa", "aaaaaa"]
    for name in names:
        (tmp_path / name).touch()
    assert _found(tmp_path) == dict.fromkeys(names, REGULAR)


def test_a_system_without_the_call_tells_no_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").touch()
    (tmp_path / "b").mkdir()
    monkeypatch.setattr(entries, "LIBC", SimpleNamespace())
    assert _found(tmp_path) == {"a": UNKNOWN, "b": UNKNOWN}


def test_an_error_of_the_call_is_raised_and_nothing_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").touch()
    monkeypatch.setattr(entries, "_CALL_BYTES", 8)  # too little for an entry
    before = open_descriptors()
    with pytest.raises(OSError, match="Invalid argument"):
        _found(tmp_path)
    assert open_descriptors() == before


def test_a_directory_that_is_removed_meanwhile_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries, "_CALL_BYTES", 288)
    (tmp_path / "a").mkdir()
    for number in range(40):
        (tmp_path / "a" / f"{number}").touch()
    with closing_descriptor(os.open(tmp_path / "a", OPEN_DIRECTORY)) as descriptor:
        found = entries_in(descriptor)
        assert next(found).names
        shutil.rmtree(tmp_path / "a")
        assert list(found) == []
