"""A file is removed only if it is the one that was looked at."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from hicachectl.backends.disk.durable import move_noreplace
from hicachectl.backends.file.folders import ObjectDirectory
from hicachectl.backends.object_files import tree
from hicachectl.backends.object_files.tree import Temporaries
from hicachectl.io.forking import Callees
from tests.stores import OLD, page, put

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NAME = f"{page(0)}_m.bin"


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[ObjectDirectory]:
    with ObjectDirectory.open(str(tmp_path)) as opened:
        yield opened


def removed(directory: ObjectDirectory, seen: os.stat_result, *, even_if_read: bool = True) -> bool:
    temporaries = Temporaries(directory, b"0" * 16)
    return temporaries.remove_unchanged(NAME.encode(), seen, even_if_read=even_if_read)


def replace(path: Path) -> None:
    """Put another file of the same size and time in its place."""
    put(path.parent, "new").rename(path)


def lengthen(path: Path) -> None:
    facts = path.stat()
    os.truncate(path, facts.st_size + 1)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def write_again(path: Path) -> None:
    """Write the file itself, as a server does, with as many bytes."""
    path.write_bytes(path.read_bytes())


def link(path: Path) -> None:
    """Leave a link in its place to the file, which went elsewhere."""
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.parametrize("change", [replace, lengthen, write_again, link])
def test_what_changed_since_stays(
    directory: ObjectDirectory, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    path = put(tmp_path, NAME)
    seen = path.stat()
    change(path)
    before = path.read_bytes(), path.lstat().st_ino
    assert not removed(directory, seen)
    assert (path.read_bytes(), path.lstat().st_ino) == before
    assert not list(tmp_path.glob(".hicachectl-*"))


@pytest.mark.parametrize("even_if_read", [True, False])
def test_a_file_that_was_read_since_stays_unless_it_is_stale(
    directory: ObjectDirectory, tmp_path: Path, even_if_read: bool
) -> None:
    path = put(tmp_path, NAME)
    seen = path.stat()
    os.utime(path, (OLD + 1, OLD))
    assert removed(directory, seen, even_if_read=even_if_read) == even_if_read
    assert path.exists() != even_if_read


def test_an_unchanged_file_goes_once(directory: ObjectDirectory, tmp_path: Path) -> None:
    seen = put(tmp_path, NAME).stat()
    assert removed(directory, seen, even_if_read=False)
    assert not removed(directory, seen, even_if_read=False)
    assert list(tmp_path.iterdir()) == []


def test_the_newest_of_two_replacements_stays(
    directory: ObjectDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer replaces the file, and once more while it is away."""
    path = put(tmp_path, NAME)
    seen = path.stat()
    replace(path)

    def late(*names: object) -> None:
        path.write_bytes(b"newest")
        move_noreplace(*names)  # type: ignore[arg-type]

    monkeypatch.setattr(tree, "move_noreplace", late)
    assert not removed(directory, seen)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"newest"]


def test_a_forked_process_has_names_of_its_own(directory: ObjectDirectory) -> None:
    temporaries = Temporaries(directory, b"0" * 16)
    key = NAME.encode()
    with Callees(2, lambda: temporaries) as processes:
        names = [temporaries.name(key), *(processes.call("name", key) for _ in range(4))]
    tokens = {name.removeprefix(b".hicachectl-")[:24] for name in names}
    assert len(tokens) == 3
    assert {token[:16] for token in tokens} == {b"0" * 16}
    assert len(set(names)) == len(names)
